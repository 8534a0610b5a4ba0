package watch

import (
	"container/list"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/session"
)

// Clone returns an independent copy. It shares only what never changes.
func (c *Core) Clone() *Core {
	d := *c
	d.out = nil
	d.peers, d.byID = map[Peer]*peer{}, map[uint32]*peer{}
	d.watches, d.byName = map[kv.CallID]*watched{}, map[string]*watched{}
	peers, ranks := map[*peer]*peer{}, map[*rank]*rank{}
	for _, p := range c.byID {
		q := *p
		q.fresh, q.settled, q.cancels = list.List{}, list.List{}, slices.Clone(p.cancels)
		peers[p] = &q
		d.peers[q.addr], d.byID[q.id] = &q, &q
	}
	copyWatch := func(w *watched) *watched {
		v := *w
		v.ranks, v.words = nil, slices.Clone(w.words)
		for _, r := range w.ranks {
			q := *r
			q.w, q.p, q.list, q.at = &v, peers[r.p], nil, nil
			ranks[r] = &q
			v.ranks = append(v.ranks, &q)
		}
		return &v
	}
	for call, w := range c.watches {
		v := copyWatch(w)
		d.watches[call], d.byName[v.reqID] = v, v
	}
	d.due, d.alarms = make(queue[*watched], len(c.due)), make(queue[*peer], len(c.alarms))
	for i, p := range c.alarms {
		d.alarms[i] = peers[p]
	}
	for i, w := range c.due {
		d.due[i] = d.watches[w.call]
	}
	for _, p := range c.byID {
		q := peers[p]
		for r := range each(&p.fresh) {
			ranks[r].moveTo(&q.fresh)
		}
		for r := range each(&p.settled) {
			ranks[r].moveTo(&q.settled)
		}
		q.sess = p.sess.Clone(func(of call, m msg.Message) (call, msg.Message) {
			if of.rank != nil && ranks[of.rank] == nil {
				copyWatch(of.rank.w) // forgotten, and its answer is still owed
			}
			return call{ranks[of.rank]}, m
		})
	}
	d.early.byName, d.early.order = map[string]*earlyWord{}, nil
	for _, e := range c.early.order {
		v := *e
		v.conns = slices.Clone(e.conns)
		d.early.order = append(d.early.order, &v)
		if c.early.byName[e.name] == e {
			d.early.byName[e.name] = &v
		}
	}
	return &d
}

// Encode appends the state in a canonical form: two cores that will answer
// every event alike give equal bytes. Times are relative to now.
func (c *Core) Encode(b []byte, now kv.Instant) []byte {
	ints := func(vs ...uint64) {
		for _, v := range vs {
			b = binary.AppendUvarint(b, v)
		}
	}
	times := func(ats ...kv.Instant) {
		for _, at := range ats {
			b = session.AppendTime(b, now, at)
		}
	}
	flag := func(v bool) uint64 {
		if v {
			return 1
		}
		return 0
	}
	ints(uint64(c.lastPeer), c.floor, c.lastWatch)
	times(max(c.heldTill, now), c.wakeAt, c.stepped)
	for _, p := range c.sortedPeers() {
		ints(uint64(p.id), uint64(p.addr.AllocPort), p.proof, uint64(len(p.cancels)))
		b = session.AppendString(session.AppendString(b, p.addr.Host), p.down)
		for _, m := range p.cancels {
			b = session.AppendString(session.AppendString(b, m.ReqID), string(m.Reason))
		}
		for r := range p.ranks() {
			ints(r.w.n, uint64(r.n))
		}
		b = p.sess.Encode(b, now, func(b []byte, of call) []byte {
			if of.rank == nil || of.rank.w.told {
				return append(b, 0) // its answer means nothing any more
			}
			return binary.AppendUvarint(binary.AppendUvarint(append(b, 1), of.rank.w.n), uint64(of.rank.n))
		})
	}
	for _, w := range c.sortedWatches() {
		ints(uint64(w.call), w.n, flag(w.accepted), flag(w.told), flag(w.bad), flag(w.asked))
		b = session.AppendString(b, w.reqID)
		times(w.deadline)
		for _, r := range w.ranks {
			ints(uint64(r.p.id), uint64(r.state), r.proof)
		}
		for _, conn := range slices.Sorted(slices.Values(w.words)) {
			ints(uint64(conn))
		}
	}
	for _, e := range c.early.order {
		b = session.AppendString(b, e.name)
		ints(flag(c.early.byName[e.name] == e), flag(e.notice != nil), uint64(len(e.conns)))
		for _, conn := range slices.Sorted(slices.Values(e.conns)) {
			ints(uint64(conn))
		}
		times(e.until)
	}
	return b
}

// Check verifies the invariants that are predicates of a state; nil when all
// hold:
//  1. watches by call and by name are the same, and within the limit.
//  2. a receiver's ranks are those of the watches that are kept; what it may not
//     have yet is among the fresh ones.
//  3. no rank waits for a session that is up.
//  4. what waits is bounded.
//  5. R10: what has no result has its deadline in due, and every receiver its
//     session's next time in alarms; both are in order.
func (c *Core) Check() error {
	if len(c.watches) != len(c.byName) || len(c.watches) > c.cfg.MaxWatches {
		return fmt.Errorf("watch: %d by call, %d by name; the limit is %d", len(c.watches), len(c.byName), c.cfg.MaxWatches)
	}
	n, open := 0, 0
	for _, w := range c.watches {
		if !w.told {
			open++
			if !c.due.has(w) {
				return fmt.Errorf("watch: %q has no result, and no deadline", w.reqID)
			}
		}
		if c.byName[w.reqID] != w {
			return fmt.Errorf("watch: %q is not found by its name", w.reqID)
		}
		if len(w.words) > len(w.ranks) {
			return fmt.Errorf("watch: %q has %d words of %d ranks", w.reqID, len(w.words), len(w.ranks))
		}
		for _, r := range w.ranks {
			n++
			if r.at == nil || r.at.Value != r || r.list != &r.p.fresh && r.list != &r.p.settled {
				return fmt.Errorf("watch: rank %d of %q is not at its receiver", r.n, w.reqID)
			}
			if r.list == &r.p.settled && r.state < rankWatching && !w.told {
				return fmt.Errorf("watch: rank %d of %q is settled, and its receiver may not have it", r.n, w.reqID)
			}
			if r.state == rankQueued && r.p.sess.Up() && !w.told {
				return fmt.Errorf("watch: rank %d of %q waits, and the session is up", r.n, w.reqID)
			}
		}
	}
	if open != len(c.due) {
		return fmt.Errorf("watch: %d watches have no result, %d a deadline", open, len(c.due))
	}
	for _, p := range c.byID {
		n -= p.watched()
		if !c.alarms.has(p) || p.at != p.sess.Next() || len(c.alarms) != len(c.byID) {
			return fmt.Errorf("watch: %s is due at %d and noted for %d; %d of %d are noted", p.addr, p.sess.Next(), p.at, len(c.alarms), len(c.byID))
		}
		if err := p.sess.Check(); err != nil {
			return err
		}
		if len(p.cancels) > maxCancels {
			return fmt.Errorf("watch: %d cancels wait; the limit is %d", len(p.cancels), maxCancels)
		}
	}
	if n != 0 {
		return fmt.Errorf("watch: %d ranks more than the receivers have", n)
	}
	if len(c.peers) > c.cfg.MaxPeers || len(c.early.order) > c.cfg.MaxEarly {
		return fmt.Errorf("watch: %d receivers, %d early names", len(c.peers), len(c.early.order))
	}
	return nil
}
