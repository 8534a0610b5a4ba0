package intake

import (
	"maps"
	"slices"
)

// Clone returns an independent copy: each object once, and every list, index and
// timer led over to the copies. Messages and keys are shared; nobody changes
// them.
func (c *Core) Clone() *Core {
	k := cloner{
		peers: map[*peer]*peer{}, names: map[*name]*name{}, requests: map[*request]*request{},
		conns: map[*conn]*conn{}, engines: map[*engine]*engine{}, readers: map[*reader]*reader{}, timers: map[*timer]*timer{},
	}
	d := New(c.cfg, c.now)
	d.draining, d.unsettled, d.generation, d.serial, d.tokensKey = c.draining, c.unsettled, c.generation, c.serial, c.tokensKey
	d.pool, d.ledger = c.pool.Clone(), c.ledger.Clone()
	d.handshakes = handshakes{at: maps.Clone(c.handshakes.at), last: c.handshakes.last}
	d.leases, d.lockStep, d.lasting, d.blocked, d.watches, d.parked = c.leases, c.lockStep, c.lasting, c.blocked, c.watches, c.parked
	d.hold, d.woken = c.hold, c.woken
	k.core = d

	for i, p := range c.sessions {
		d.sessions[i] = k.peer(p)
	}
	for id, p := range c.identities {
		d.identities[id] = k.peer(p)
	}
	for id, cn := range c.conns {
		d.conns[id] = k.conn(cn)
	}
	for id, n := range c.names {
		d.names[id] = k.name(n)
	}
	for id, g := range c.engines {
		d.engines[id] = k.engine(g)
	}
	for id, rd := range c.readers {
		d.readers[id] = k.reader(rd)
	}
	for r := range c.requests.all {
		k.request(r)
	}
	for e := range c.endings.all {
		k.ending(e)
	}
	for p, q := range k.peers { // the two kinds of lists that the above has not filled
		for w := range p.watches.all {
			k.watch(w, q)
		}
	}
	for n, m := range k.names {
		for w := range n.watches.all {
			m.watches.push(k.watchOf(w))
		}
		for w := range n.waits.all {
			k.wait(w, m)
		}
	}
	for g, h := range k.engines {
		for by, r := range g.found {
			h.found[by] = k.requests[r]
		}
	}
	for rd, sd := range k.readers {
		for r := range rd.claims.all {
			sd.claims.push(k.requests[r])
		}
		for r := range rd.lost.all {
			sd.lost.push(k.requests[r])
		}
	}
	for key, l := range c.findable {
		m := newFindable()
		for r := range l.all {
			m.push(k.requests[r])
		}
		d.findable[key] = m
	}
	for i, t := range c.timers.heap {
		if i == 0 {
			d.timers.heap = append(d.timers.heap, nil)
			continue
		}
		u := k.timers[t]
		u.at, u.pos = t.at, t.pos
		d.timers.heap = append(d.timers.heap, u)
	}
	return d
}

// cloner maps each object to its copy.
type cloner struct {
	core     *Core
	peers    map[*peer]*peer
	names    map[*name]*name
	requests map[*request]*request
	conns    map[*conn]*conn
	engines  map[*engine]*engine
	readers  map[*reader]*reader
	timers   map[*timer]*timer
}

// alarm gives a copy its own timer; it is armed at the end.
func (k *cloner) alarm(old, copied *timer, a alarm) {
	*copied = timer{order: old.order, alarm: a}
	k.timers[old] = copied
}

func (k *cloner) peer(p *peer) *peer {
	if p == nil {
		return nil
	}
	if q := k.peers[p]; q != nil {
		return q
	}
	q := blankPeer()
	requests, watches, live, ended := q.requests, q.watches, q.live, q.ended
	*q = *p
	q.requests, q.watches, q.live, q.ended = requests, watches, live, ended
	if p.told != nil {
		q.told = map[uint64]*ending{}
	}
	k.alarm(&p.timer, &q.timer, q)
	k.peers[p] = q
	return q
}

func (k *cloner) conn(cn *conn) *conn {
	if d := k.conns[cn]; d != nil {
		return d
	}
	d := &conn{id: cn.id, identity: cn.identity, remote: cn.remote, session: k.peer(cn.session), owner: k.peer(cn.owner), superseded: cn.superseded}
	for _, r := range cn.replies {
		d.replies = append(d.replies, &reply{conn: d, m: r.m, grant: r.grant, fresh: r.fresh})
	}
	k.conns[cn] = d
	return d
}

func (k *cloner) name(n *name) *name {
	if n == nil {
		return nil
	}
	if m := k.names[n]; m != nil {
		return m
	}
	m := new(name)
	m.reset(n.id)
	m.readies, m.marks = n.readies, n.marks
	k.names[n] = m
	return m
}

func (k *cloner) engine(g *engine) *engine {
	if g == nil {
		return nil
	}
	if h := k.engines[g]; h != nil {
		return h
	}
	h := &engine{id: g.id, conns: g.conns, found: map[string]*request{}}
	k.engines[g] = h
	return h
}

func (k *cloner) reader(rd *reader) *reader {
	if rd == nil {
		return nil
	}
	if sd := k.readers[rd]; sd != nil {
		return sd
	}
	sd := newReader(k.engine(rd.engine))
	sd.gone = rd.gone
	k.readers[rd] = sd
	return sd
}

func (k *cloner) request(r *request) {
	q := new(request)
	*q = *r
	q.name, q.owner, q.engine, q.reader = k.name(r.name), k.peer(r.owner), k.engine(r.engine), k.reader(r.reader)
	q.slots, q.chunks, q.shape = slices.Clone(r.slots), slices.Clone(r.chunks), slices.Clone(r.shape)
	k.alarm(&r.timer, &q.timer, q)
	q.byArrival, q.byOwner, q.byName, q.byEngine, q.byKey = links[request]{}, links[request]{}, links[request]{}, links[request]{}, links[request]{}
	copies := map[*commit]*commit{nil: nil}
	q.commits = nil
	for _, w := range r.commits {
		x := *w
		x.chunks = slices.Clone(w.chunks)
		copies[w] = &x
		q.commits = append(q.commits, &x)
	}
	for _, x := range q.commits {
		x.next = copies[x.next]
	}
	for i := range q.chunks {
		q.chunks[i].parked = copies[q.chunks[i].parked]
	}
	if l := r.legacy; l != nil {
		m := *l
		m.index = maps.Clone(l.index)
		m.batches = nil
		for _, b := range l.batches {
			cn := k.conn(b.reply.conn)
			i := slices.Index(b.reply.conn.replies, b.reply)
			m.batches = append(m.batches, batch{b.m, cn.replies[i]})
		}
		q.legacy = &m
	}
	k.requests[r] = q
	k.core.requests.push(q)
	q.owner.requests.push(q)
	if q.name != nil {
		q.name.requests.push(q)
		q.owner.live[q.key] = q
	}
	if q.gen != 0 {
		k.core.granted[q.gen] = q
	}
	if q.state == waiting {
		k.core.waiting[q.serial] = q
	}
}

func (k *cloner) ending(e *ending) {
	f := *e
	f.name, f.owner = k.name(e.name), k.peer(e.owner)
	f.byAge, f.byName = links[ending]{}, links[ending]{}
	k.core.endings.push(&f)
	if f.name != nil {
		f.name.endings.push(&f)
	}
	if f.owner != nil {
		f.owner.ended[f.key] = &f
		if f.seq != 0 {
			f.owner.told[f.seq] = &f
		}
	}
}

// watch copies a watch into its peer's list; watchOf finds the copy.
func (k *cloner) watch(w *watch, p *peer) {
	x := &watch{peer: p, name: k.name(w.name), asks: slices.Clone(w.asks), vouched: w.vouched}
	k.alarm(&w.timer, &x.timer, x)
	p.watches.push(x)
}

func (k *cloner) watchOf(w *watch) *watch { return k.timers[&w.timer].alarm.(*watch) }

func (k *cloner) wait(w *wait, n *name) {
	x := &wait{call: w.call, engine: w.engine, name: n}
	k.alarm(&w.timer, &x.timer, x)
	k.core.waits[x.call] = x
	n.waits.push(x)
}
