package outbound

import (
	"maps"
	"slices"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// Clone returns an independent copy. It shares only what never changes:
// strings, the configuration, messages that were sent and are kept.
func (c *Core) Clone() *Core {
	d := *c
	m := cloner{d: &d, peers: map[*peer]*peer{}, reqs: map[*request]*request{}, commits: map[*commit]*commit{},
		links: map[*dataLink]*dataLink{}, conns: map[*legacyConn]*legacyConn{}, waits: map[*stageWait]*stageWait{}}
	d.out, d.spareReqs, d.spareCommit, d.seen = nil, nil, nil, nil
	d.touchedReqs, d.touchedPeers = nil, nil
	d.heldSlots, d.heldRaise, d.heldIDs, d.heldItems, d.heldSums = nil, nil, nil, nil, nil

	// First every object, then what they say of each other.
	d.peers, d.byID = map[Peer]*peer{}, map[uint32]*peer{}
	for _, p := range c.byID {
		m.peer(p)
	}
	d.links = map[LinkID]*dataLink{}
	for id, l := range c.links {
		d.links[id] = m.link(l)
	}
	d.legacy = map[kv.ConnID]*legacyConn{}
	for id, lc := range c.legacy {
		d.legacy[id] = m.conn(lc)
	}
	for _, p := range c.byID {
		m.wirePeer(p)
	}
	d.reqs = map[string]*request{}
	for id, r := range c.reqs {
		d.reqs[id] = m.reqs[r]
	}
	d.callers = map[kv.CallID]*request{}
	for call, r := range c.callers {
		d.callers[call] = m.reqs[r]
	}
	d.writes = map[uint64]writeRef{}
	for id, ref := range c.writes {
		d.writes[id] = writeRef{m.commits[ref.k], ref.i}
	}
	d.sums = map[uint64]*commit{}
	for id, k := range c.sums {
		d.sums[id] = m.commits[k]
	}
	d.waits = nil
	for _, w := range c.waits {
		v := *w
		v.req = m.reqs[w.req]
		v.timer.wait = &v
		m.waits[w] = &v
		d.waits = append(d.waits, &v)
	}
	d.engines = map[kv.ConnID]*engineConn{}
	for id, e := range c.engines {
		v := *e
		d.engines[id] = &v
	}
	d.pool.slots, d.pool.free = slices.Clone(c.pool.slots), slices.Clone(c.pool.free)
	for i := range d.pool.slots {
		if s := &d.pool.slots[i]; s.peer != nil {
			s.peer = m.peers[s.peer]
		}
	}
	d.endings.byID, d.endings.order = maps.Clone(c.endings.byID), slices.Clone(c.endings.order)
	d.timers = make(timers, len(c.timers))
	for i, t := range c.timers {
		d.timers[i] = m.timer(t)
	}
	return &d
}

// cloner leads from each object to its copy.
type cloner struct {
	d       *Core
	peers   map[*peer]*peer
	reqs    map[*request]*request
	commits map[*commit]*commit
	links   map[*dataLink]*dataLink
	conns   map[*legacyConn]*legacyConn
	waits   map[*stageWait]*stageWait
}

func (m *cloner) peer(p *peer) {
	q := *p
	m.peers[p] = &q
	q.timer.peer = &q
	m.d.peers[q.addr], m.d.byID[q.id] = &q, &q
	for r := p.reqs.first; r != nil; r = r.next {
		m.request(r)
	}
}

func (m *cloner) request(r *request) {
	q := *r
	m.reqs[r] = &q
	q.peer = m.peers[r.peer]
	q.timer.req = &q
	q.slots, q.chunks, q.repeats, q.callers = slices.Clone(r.slots), slices.Clone(r.chunks), slices.Clone(r.repeats), slices.Clone(r.callers)
	q.legacy.keys = slices.Clone(r.legacy.keys)
	q.commits = nil
	for _, k := range r.commits {
		j := *k
		m.commits[k] = &j
		j.req = &q
		j.items, j.msg.Chunks = slices.Clone(k.items), slices.Clone(k.msg.Chunks)
		if len(j.msg.Chunks) > 0 && j.msg.Chunks[0].Src != nil {
			j.nameSources()
		}
		q.commits = append(q.commits, &j)
	}
}

func (m *cloner) link(l *dataLink) *dataLink {
	k := *l
	k.p = m.peers[l.p]
	k.timer.link = &k
	m.links[l] = &k
	return &k
}

func (m *cloner) conn(lc *legacyConn) *legacyConn {
	k := *lc
	k.p, k.req = m.peers[lc.p], m.reqs[lc.req]
	m.conns[lc] = &k
	return &k
}

// wirePeer sets everything in a peer's copy that leads to other copies.
func (m *cloner) wirePeer(p *peer) {
	q := m.peers[p]
	q.reqs, q.queue, q.window = reqList{}, reqQueue{}, commitQueue{}
	for r := p.reqs.first; r != nil; r = r.next {
		s := m.reqs[r]
		q.reqs.add(s)
		if r.link != nil && m.links[r.link] == nil {
			m.link(r.link) // it is down; the request still knows its name
		}
		s.link, s.legacy.conn, s.legacy.commit = m.links[r.link], m.conns[r.legacy.conn], m.commits[r.legacy.commit]
	}
	for r := p.queue.first; r != nil; r = r.qnext {
		q.queue.add(m.reqs[r])
	}
	for k := p.window.first; k != nil; k = k.next {
		q.window.add(m.commits[k])
	}
	q.byBegin = map[uint64]*request{}
	for n, r := range p.byBegin {
		q.byBegin[n] = m.reqs[r]
	}
	q.tries = slices.Clone(p.tries)
	q.link, q.legacy.link, q.legacy.cancel = m.links[p.link], m.links[p.legacy.link], m.conns[p.legacy.cancel]
	q.legacy.idle = nil
	for _, lc := range p.legacy.idle {
		q.legacy.idle = append(q.legacy.idle, m.conns[lc])
	}
	q.legacy.cancels = nil
	for _, x := range p.legacy.cancels {
		x.req = m.reqs[x.req]
		q.legacy.cancels = append(q.legacy.cancels, x)
	}
	q.sess = p.sess.Clone(func(of call, old msg.Message) (call, msg.Message) {
		of.req, of.commit = m.reqs[of.req], m.commits[of.commit]
		switch of.kind {
		case callBegin:
			return of, &of.req.beginMsg
		case callCommit:
			return of, &of.commit.msg
		case callCancel:
			return of, &of.req.cancelMsg
		}
		return of, old
	})
}

func (m *cloner) timer(t *timer) *timer {
	switch t.kind {
	case timePeer:
		return &m.peers[t.peer].timer
	case timeRequest:
		return &m.reqs[t.req].timer
	case timeLink:
		return &m.links[t.link].timer
	}
	return &m.waits[t.wait].timer
}
