package intake

import (
	"cmp"
	"encoding/binary"
	"maps"
	"slices"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/reserve"
)

// Encode appends a canonical encoding of the state: cores that will answer every
// sequence of events alike encode alike, whatever their history. Times count
// from now, and numbers that only order things are replaced by their rank. The
// configuration is not part of it; generations, begins and seqs, which peers
// have seen, are.
func (c *Core) Encode(b []byte) []byte { return c.EncodeWithin(b, kv.Forever) }

// EncodeWithin is Encode for a search in which less time passes than far: what
// is due later is written as due later, whenever that is.
func (c *Core) EncodeWithin(b []byte, far kv.Duration) []byte {
	e := encoder{b: b, now: c.now, far: c.now.Add(far), rank: c.ranks()}
	e.bools(c.draining, c.unsettled)
	e.str(c.tokensKey)
	e.num(uint64(c.generation))
	e.time(max(c.hold, c.now))
	e.time(max(c.woken, c.now))
	e.b = c.pool.Encode(e.b)
	e.b = c.ledger.Encode(e.b, e.ranked, func(s reserve.Sender) uint64 { return e.ranked(uint64(s)) })
	e.peers(c)
	e.conns(c)
	e.num(uint64(c.requests.n))
	for r := range c.requests.all {
		e.request(r)
	}
	e.num(uint64(c.endings.n))
	for x := range c.endings.all {
		e.ending(c, x)
	}
	e.readers(c)
	e.num(uint64(len(c.handshakes.at)))
	for _, id := range slices.SortedFunc(maps.Keys(c.handshakes.at), func(x, y string) int {
		return cmp.Compare(c.handshakes.at[x], c.handshakes.at[y])
	}) {
		e.str(id)
	}
	return e.b
}

// allPeers returns every peer that something speaks of, by age.
func (c *Core) allPeers() []*peer {
	seen := map[*peer]bool{}
	for _, p := range c.sessions {
		seen[p] = true
	}
	for _, p := range c.identities {
		seen[p] = true
	}
	for r := range c.requests.all {
		seen[r.owner] = true
	}
	for _, cn := range c.conns {
		if cn.session != nil {
			seen[cn.session] = true
		}
	}
	return slices.SortedFunc(maps.Keys(seen), func(x, y *peer) int { return cmp.Compare(x.serial, y.serial) })
}

func (c *Core) allWaits() []*wait {
	return slices.SortedFunc(maps.Values(c.waits), func(x, y *wait) int { return cmp.Compare(x.timer.order, y.timer.order) })
}

// ranks numbers everything that has a serial from 1, in order.
func (c *Core) ranks() map[uint64]uint64 {
	var all []uint64
	for _, p := range c.allPeers() {
		all = append(all, p.serial)
		for w := range p.watches.all {
			all = append(all, w.timer.order)
		}
	}
	for r := range c.requests.all {
		all = append(all, r.serial)
	}
	for _, w := range c.allWaits() {
		all = append(all, w.timer.order)
	}
	slices.Sort(all)
	rank := make(map[uint64]uint64, len(all))
	for i, s := range all {
		rank[s] = uint64(i + 1)
	}
	return rank
}

// encoder appends fields in an order that each function fixes.
type encoder struct {
	b    []byte
	now  kv.Instant
	far  kv.Instant // what is due later is Never
	rank map[uint64]uint64
}

func (e *encoder) num(n uint64)           { e.b = binary.AppendUvarint(e.b, n) }
func (e *encoder) int(n int64)            { e.b = binary.AppendVarint(e.b, n) }
func (e *encoder) ranked(n uint64) uint64 { return e.rank[n] }

func (e *encoder) str(s string) {
	e.num(uint64(len(s)))
	e.b = append(e.b, s...)
}

func (e *encoder) bools(v ...bool) {
	for _, x := range v {
		if x {
			e.b = append(e.b, 1)
		} else {
			e.b = append(e.b, 0)
		}
	}
}

// time writes a time as the distance from now; Never, and what is far, as
// itself.
func (e *encoder) time(t kv.Instant) {
	if t == kv.Never || t > e.far {
		e.bools(true)
		return
	}
	e.bools(false)
	e.int(int64(t - e.now))
}

// ref writes which request is meant, 0 for none.
func (e *encoder) ref(r *request) {
	if r == nil {
		e.num(0)
		return
	}
	e.num(e.rank[r.serial])
}

func (e *encoder) peers(c *Core) {
	all := c.allPeers()
	e.num(uint64(len(all)))
	for _, p := range all {
		e.num(e.rank[p.serial])
		e.str(string(p.role))
		e.str(p.label)
		e.str(p.identity)
		e.bools(p.over)
		e.b = append(append(e.b, p.incarnation[:]...), p.secret[:]...)
		e.num(uint64(p.conn))
		e.num(p.hello)
		e.num(p.opener)
		e.num(p.highest)
		e.num(p.seq)
		e.num(p.anonymous)
		if !p.over {
			e.time(p.lease)
		}
		if p.timer.pos != 0 { // it may ring before the lease ends: see renew
			e.time(p.timer.at)
		}
		e.num(uint64(p.watches.n))
		for w := range p.watches.all {
			e.watch(w)
		}
	}
	e.num(uint64(len(c.waits)))
	for _, w := range c.allWaits() {
		e.num(uint64(w.call))
		e.num(uint64(w.engine))
		e.str(w.name.id)
		e.time(w.timer.at)
	}
}

func (e *encoder) watch(w *watch) {
	e.num(e.rank[w.timer.order])
	e.str(w.name.id)
	e.bools(w.vouched)
	e.num(uint64(len(w.asks)))
	for _, a := range w.asks {
		e.num(a.seq)
		e.num(uint64(a.conn))
		e.time(a.until)
	}
}

func (e *encoder) conns(c *Core) {
	e.num(uint64(len(c.conns)))
	for _, id := range slices.Sorted(maps.Keys(c.conns)) {
		cn := c.conns[id]
		e.num(uint64(id))
		e.str(cn.identity)
		e.bools(cn.superseded)
		for _, p := range []*peer{cn.session, cn.owner} {
			if p == nil {
				e.num(0)
			} else {
				e.num(e.rank[p.serial])
			}
		}
		e.num(uint64(len(cn.replies)))
		for _, r := range cn.replies {
			e.bools(r.m != nil)
			if r.m != nil {
				e.ints(r.m.RemoteIndexes)
				e.ints(r.m.AlreadySent)
				e.num(uint64(r.grant))
				e.bools(r.fresh)
			}
		}
	}
}

func (e *encoder) ints(v []int64) {
	e.num(uint64(len(v)))
	for _, n := range v {
		e.int(n)
	}
}

func (e *encoder) strs(v []string) {
	e.num(uint64(len(v)))
	for _, s := range v {
		e.str(s)
	}
}

func (e *encoder) request(r *request) {
	e.ref(r)
	e.str(r.id)
	e.num(e.rank[r.owner.serial])
	e.num(r.key.begin)
	e.str(r.key.name)
	e.num(uint64(r.gen))
	e.b = append(e.b, byte(r.state))
	e.ints([]int64{int64(r.link), r.total, r.end, r.top, r.committed, r.held, r.unread, r.bytes, r.full, int64(r.format)})
	e.bools(r.revoked, r.offered)
	e.str(string(r.dtype))
	e.ints(r.shape)
	// When it arrived and was admitted is told in notes, and changes nothing.
	for _, t := range []kv.Instant{r.deadline, r.admitBy, r.goneAt} {
		e.time(t)
	}
	e.num(uint64(len(r.slots)))
	for i, s := range r.slots {
		ch := &r.chunks[i]
		e.num(uint64(s))
		e.str(ch.key)
		e.int(ch.bytes)
		e.int(ch.tokens)
		e.num(uint64(ch.sum))
		e.bools(ch.hasSum, ch.named, ch.released)
		for w := ch.parked; w != nil; w = w.next {
			e.num(w.seq)
		}
		e.num(0)
	}
	e.num(uint64(r.beginConn))
	e.num(r.beginSeq)
	e.num(uint64(len(r.commits)))
	for _, w := range r.commits {
		e.num(w.seq)
		e.num(uint64(w.conn))
		e.num(uint64(w.at))
		e.num(uint64(len(w.chunks)))
		for _, i := range w.chunks {
			e.num(uint64(i))
		}
	}
	e.str(r.by)
	e.bools(r.engine != nil)
	e.legacy(r.legacy)
}

func (e *encoder) legacy(l *legacy) {
	e.bools(l != nil)
	if l == nil {
		return
	}
	e.bools(l.first, l.single, l.complete, l.watched)
	e.int(l.reserved)
	e.int(l.counted)
	e.num(uint64(l.unsaid))
	e.time(l.graceAt)
	e.num(uint64(len(l.batches)))
	for _, b := range l.batches {
		e.num(uint64(b.reply.conn.id))
		e.num(uint64(slices.Index(b.reply.conn.replies, b.reply)))
		e.strs(b.m.Keys)
		e.ints(append([]int64{int64(b.m.Fmt), b.m.LastChunkToks, b.m.TotalChunks}, b.m.Shape...))
		e.str(string(b.m.DType))
		e.bools(b.m.IsLastBatch)
	}
}

func (e *encoder) ending(c *Core, x *ending) {
	e.str(string(x.ending))
	e.str(string(x.reason))
	e.str(x.text)
	e.time(x.at.Add(c.cfg.EndingTTL))
	e.time(max(x.at.Add(kv.ShortTTL), e.now-1)) // it may be evicted
	e.bools(x.name != nil, x.owner != nil, x.empty, x.mark)
	if x.name != nil {
		e.str(x.name.id)
	}
	if x.owner != nil {
		e.num(e.rank[x.owner.serial])
	}
	e.num(x.key.begin)
	e.str(x.key.name)
	e.num(uint64(x.gen))
	e.int(x.total)
	e.num(x.seq)
}

// readers writes the engines' side: who is attached, what was found and claimed,
// and in which order find looks.
func (e *encoder) readers(c *Core) {
	e.num(uint64(len(c.engines)))
	for _, id := range slices.Sorted(maps.Keys(c.engines)) {
		g := c.engines[id]
		e.str(id)
		e.num(uint64(g.conns))
		e.num(uint64(len(g.found)))
		for _, by := range slices.Sorted(maps.Keys(g.found)) {
			e.str(by)
			e.ref(g.found[by])
		}
	}
	e.num(uint64(len(c.readers)))
	for _, id := range slices.Sorted(maps.Keys(c.readers)) {
		rd := c.readers[id]
		e.num(uint64(id))
		e.str(rd.engine.id)
		e.bools(rd.gone)
		for _, l := range []*list[request]{&rd.claims, &rd.lost} {
			e.num(uint64(l.n))
			for r := range l.all {
				e.ref(r)
			}
		}
	}
	e.num(uint64(len(c.findable)))
	for _, key := range slices.Sorted(maps.Keys(c.findable)) {
		e.str(key)
		for r := range c.findable[key].all {
			e.ref(r)
		}
	}
}
