package outbound

import (
	"cmp"
	"encoding/binary"
	"slices"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/session"
)

// Encode appends the state in a canonical form: two cores that will answer
// every event alike give equal bytes. Times are relative to now; what is only
// kept to be reused, and since when something is there, are left out: the ages
// that are reported have no part in what is decided.
func (c *Core) Encode(b []byte, now kv.Instant) []byte {
	e := encoder{now: now, b: b}
	e.ints(int(c.lastPeer), int(c.floor), int(c.lastReq), int(c.lastLink), int(c.lastWrite), int(c.lastSum), int(c.lastConn))
	e.flags(c.draining)
	e.text(c.tokensKey)
	e.times(max(c.heldTill, now), c.wakeAt, c.stepped)
	e.pool(&c.pool)
	for _, id := range sortedKeys(c.engines) {
		e.ints(int(id))
		e.text(c.engines[id].id)
	}
	e.ints(-1)
	for _, w := range c.waits {
		e.ints(int(w.engine), int(w.call), int(w.req.n), w.n)
		e.timer(&w.timer)
	}
	for _, p := range c.sortedPeers() {
		e.peer(p)
		unused := 0 // who was used before it goes before it
		for _, q := range c.byID {
			if q.usedAt < p.usedAt {
				unused++
			}
		}
		e.ints(unused)
	}
	for _, id := range sortedKeys(c.links) {
		e.link(c.links[id])
	}
	for _, id := range sortedKeys(c.legacy) {
		e.legacyConn(c.legacy[id])
	}
	e.endings(&c.endings)
	return e.b
}

type encoder struct {
	now kv.Instant
	b   []byte
}

func (e *encoder) ints(vs ...int) {
	for _, v := range vs {
		e.b = binary.AppendVarint(e.b, int64(v))
	}
}

func (e *encoder) flags(vs ...bool) {
	for _, v := range vs {
		if v {
			e.b = append(e.b, 1)
		} else {
			e.b = append(e.b, 0)
		}
	}
}

func (e *encoder) times(ats ...kv.Instant) {
	for _, at := range ats {
		e.b = session.AppendTime(e.b, e.now, at)
	}
}

func (e *encoder) text(ss ...string) {
	for _, s := range ss {
		e.b = session.AppendString(e.b, s)
	}
}

func (e *encoder) timer(t *timer) {
	if t.pos == 0 {
		e.times(kv.Never)
		return
	}
	e.times(t.at)
}

func (e *encoder) pool(p *pool) {
	for i := range p.slots {
		s := &p.slots[i]
		e.ints(int(s.state), int(s.gen), int(s.engine))
		e.text(s.req)
		if s.peer != nil {
			e.ints(int(s.peer.id))
		}
	}
	for _, id := range p.free {
		e.ints(int(id))
	}
}

func (e *encoder) peer(p *peer) {
	e.ints(int(p.id), p.addr.AllocPort, p.addr.InitPort, int(p.dialect), int(p.lastBegin))
	e.text(p.addr.Host)
	e.times(p.linkless)
	e.b = p.sess.Encode(e.b, e.now, func(b []byte, of call) []byte {
		b = append(b, byte(of.kind))
		if of.req != nil {
			b = binary.AppendUvarint(b, of.req.n)
		}
		if of.commit != nil {
			b = binary.AppendVarint(b, int64(slices.Index(of.req.commits, of.commit)))
		}
		return b
	})
	for _, t := range p.tries {
		e.text(t.def.Name, t.addr, t.err)
		e.times(max(t.at, e.now))
		e.ints(int(t.backoff))
	}
	e.ints(linkNumber(p.link), linkNumber(p.legacy.link), int(p.unanswered))
	for r := p.queue.first; r != nil; r = r.qnext {
		e.ints(int(r.n))
	}
	e.ints(-1)
	for k := p.window.first; k != nil; k = k.next {
		e.ints(int(k.req.n), slices.Index(k.req.commits, k))
	}
	e.ints(-1)
	e.times(max(p.legacy.dialAt, e.now), p.legacy.since)
	e.ints(p.legacy.conns, p.legacy.dialing, int(p.legacy.backoff))
	e.text(p.legacy.err)
	for _, lc := range p.legacy.idle {
		e.ints(int(lc.id))
	}
	e.ints(-1)
	for _, x := range p.legacy.cancels {
		e.ints(int(x.req.n), x.tries)
		e.text(x.keys...)
		e.text(x.doubt)
	}
	for r := p.reqs.first; r != nil; r = r.next {
		e.request(r)
	}
}

func linkNumber(l *dataLink) int {
	if l == nil {
		return 0
	}
	return int(l.id)
}

func (e *encoder) request(r *request) {
	e.ints(-2, int(r.n), int(r.state), int(r.engine), int(r.total), r.wanted, int(r.begin), linkNumber(r.link), int(r.gen), int(r.end), r.calls, int(r.drain))
	e.text(r.id, r.engineID, r.tokensKey)
	e.flags(r.berthProxy, r.hasEnd, r.endSaid, r.ready, r.overdue, r.unwanted)
	e.times(r.deadline, r.retryAt) // when it was begun changes nothing but reports
	e.timer(&r.timer)
	for _, s := range r.slots {
		e.ints(int(s))
	}
	for i := range r.chunks {
		k := &r.chunks[i]
		e.ints(int(k.state), int(k.tokens), int(k.slot))
		e.text(k.key)
	}
	for _, x := range r.repeats {
		e.ints(int(x.index), int(x.slot))
	}
	e.ints(-1)
	for _, k := range r.commits {
		e.commit(k)
	}
	for _, call := range r.callers {
		e.ints(int(call))
	}
	e.text(string(r.ending.Ending), string(r.ending.Reason), r.ending.Text, string(r.cancelMsg.Reason), r.cancelMsg.Text)
	l := &r.legacy
	e.flags(l.on, l.out, l.last, l.lastOK, l.asked)
	e.ints(int(l.next), l.cancels)
	if l.conn != nil {
		e.ints(int(l.conn.id))
	}
	if l.commit != nil {
		e.ints(slices.Index(r.commits, l.commit))
	}
	e.text(l.keys...)
	e.text(l.doubt)
}

func (e *encoder) commit(k *commit) {
	e.ints(int(k.phase), int(k.bytes), int(k.sum))
	e.flags(k.owed, k.msg.HasEnd)
	for i := range k.items {
		it, in := &k.items[i], &k.msg.Chunks[i]
		e.ints(int(in.Index), int(it.src), int(it.srcGen), int(it.dst), int(it.write), int(it.tries), int(in.Checksum))
		e.flags(it.sent, it.lost, it.freed, it.there, in.HasChecksum)
	}
}

func (e *encoder) link(l *dataLink) {
	e.ints(int(l.id), int(l.p.id), int(l.state), l.commits, l.unsent)
	e.text(l.def.Name)
	e.timer(&l.timer)
}

func (e *encoder) legacyConn(lc *legacyConn) {
	e.ints(int(lc.id), int(lc.p.id))
	e.flags(lc.open, lc.out, lc == lc.p.legacy.cancel)
	if lc.req != nil {
		e.ints(int(lc.req.n))
	}
}

func (e *encoder) endings(s *endings) {
	for i := s.head; i < len(s.order); i++ {
		k := &s.order[i]
		e.text(k.ReqID, string(k.Ending.Ending), string(k.Reason), k.Text, k.peer.Host)
		e.ints(k.peer.AllocPort, k.peer.InitPort, int(k.total), int(k.begin))
		e.flags(s.byID[k.ReqID] == s.base+uint64(i))
		e.times(k.until)
	}
}

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K {
	ks := make([]K, 0, len(m))
	for k := range m {
		ks = append(ks, k)
	}
	slices.Sort(ks)
	return ks
}
