package intake

import (
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/slot"
)

// A slot comes free when no hand is on it (package slot, R6). The writer's hand
// is off
//   - over a link with an exact fence: when the link says Fenced after Revoke;
//   - else, of a ready request: at once, its Commit (or the proxy's word for a
//     legacy one) said that the write was done;
//   - else when the sender answers Ended with Drained, its process is gone, or
//     quarantine_sec have passed since the revoke: then it is trusted (noted);
//   - of a legacy request with legacy_data: none, at once: nothing moves.
//
// The reader's hand is off at Release, or when the engine is fenced.

// must panics on a move that the pool refuses: the core has lost count.
func must(err error) {
	if err != nil {
		panic("intake: " + err.Error())
	}
}

// grant hands out a reserved slot for the next chunk of a request. R2: inside a
// reservation there always is one.
func (c *Core) grant(r *request) kv.SlotID {
	s, err := c.pool.Grant(r.gen, uint32(len(r.slots)))
	must(err)
	r.slots = append(r.slots, s)
	r.chunks = append(r.chunks, chunk{})
	r.held++
	return s
}

// holds says whether slot s is still this request's.
func (c *Core) holds(r *request, s kv.SlotID) bool { return c.pool.Slot(s).Generation == r.gen }

// letGo takes a hand off a slot.
func (c *Core) letGo(r *request, s kv.SlotID, h slot.Hand) {
	must(c.pool.LetGo(s, r.gen, h))
	c.came(r, s)
}

// came counts a slot that has come free.
func (c *Core) came(r *request, s kv.SlotID) {
	if !c.holds(r, s) {
		r.held--
	}
}

// revoke takes every slot away from whoever has it, and the reservation back.
func (c *Core) revoke(r *request) {
	if l := r.legacy; l != nil {
		c.unreserve(r)
	}
	link := c.linkOf(r)
	if len(r.slots) > 0 && r.end != 0 && !r.revoked && r.link != noLink {
		c.act(Revoke{Link: link.Name, Generation: r.gen, Slots: r.slots[:r.goal()]})
		r.revoked = true
	}
	for _, s := range r.slots {
		if c.holds(r, s) && c.pool.Slot(s).State != slot.Quarantined {
			must(c.pool.Revoke(s, r.gen))
			c.came(r, s)
		}
	}
	r.goneAt = kv.Never
	if r.held == 0 || !r.unfinished() { // or the link, or the engine, will say
		return
	}
	switch {
	case r.link == noLink && !c.cfg.LegacyData: // nothing writes them
		for _, s := range r.slots {
			if c.holds(r, s) && c.pool.Slot(s).Hands&slot.Writer != 0 {
				c.letGo(r, s, slot.Writer)
			}
		}
		return
	case !link.ExactFence:
		r.goneAt = c.now.Add(c.cfg.Quarantine)
		c.lasting += r.held
	}
	c.note(r, Note{Kind: NoteQuarantined, Count: r.held})
}

// surplus gives back the slots from the final number of chunks on. That the
// sender gave that number is its word that it writes none of them.
func (c *Core) surplus(r *request) {
	if r.end == r.total {
		return
	}
	rest := r.slots[r.end:]
	c.act(Revoke{Link: c.linkOf(r).Name, Generation: r.gen, Slots: rest})
	for _, s := range rest {
		must(c.pool.Revoke(s, r.gen))
		if !c.linkOf(r).ExactFence {
			c.letGo(r, s, slot.Writer)
		}
	}
}

// written closes the slots of a request that is ready: nobody writes them any
// more. Asking for the fence now takes it off the way of their release.
func (c *Core) written(r *request) {
	if r.link != noLink && r.end > 0 {
		c.act(Revoke{Link: c.linkOf(r).Name, Generation: r.gen, Slots: r.slots[:r.end]})
		r.revoked = true
	}
	if !c.linkOf(r).ExactFence {
		for _, s := range r.slots[:r.end] {
			c.letGo(r, s, slot.Writer)
		}
	}
}

// fenced: the link says that nobody writes these slots any more.
func (c *Core) fenced(e Fenced) {
	r := c.granted[e.Generation]
	if r == nil || !c.linkOf(r).ExactFence {
		return
	}
	for _, s := range e.Slots {
		if c.pool.LetGo(s, e.Generation, slot.Writer) == nil {
			c.came(r, s)
		}
	}
	c.over(r)
}

// writerGone: nothing that the sender wrote can touch a draining request's
// slots any more.
func (c *Core) writerGone(r *request) {
	for _, s := range r.slots {
		if c.holds(r, s) && c.pool.Slot(s).Hands&slot.Writer != 0 {
			c.letGo(r, s, slot.Writer)
			c.lasting--
		}
	}
	c.over(r)
}

// trust ends a quarantine by time: the one exception of R6.
func (c *Core) trust(r *request) {
	c.note(r, Note{Kind: NoteTrusted, Count: r.held, Reason: fault.PeerLost, Wait: c.cfg.Quarantine,
		Text: "its writer is trusted to be gone after quarantine_sec"})
	c.writerGone(r)
}

// over discards a draining request whose last slot has come free: R12.
func (c *Core) over(r *request) {
	if r.state == draining && r.held == 0 {
		c.discard(r)
	}
}
