package outbound

import (
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
)

// stageWait is a blocked stage.
type stageWait struct {
	engine kv.ConnID
	call   kv.CallID
	req    *request
	n      int
	timer  timer
}

// mayTake is the fair share: requests for one receiver may take n slots if they
// then hold at most 3 x the slots left free, or hold none and ask for one.
func (c *Core) mayTake(p *peer, n int) bool {
	free := len(c.pool.free)
	if n > free {
		return false
	}
	return p.held+n <= 3*(free-n) || (p.held == 0 && n == 1)
}

func (c *Core) stage(now kv.Instant, ev Stage) {
	e := c.engines[ev.Engine]
	r := c.reqs[ev.ReqID]
	var err *fault.Error
	switch {
	case e == nil:
		err = notAttached()
	case ev.N < 1:
		err = fault.New(fault.BadRequest, "n is %d", ev.N)
	case ev.N > int64(c.cfg.MaxStage):
		err = fault.New(fault.TooLarge, "n is %d; max_stage is %d", ev.N, c.cfg.MaxStage)
	case r == nil:
		err = c.goneError(now, ev.ReqID, fault.NotGranted)
	case r.state != granted:
		err = r.notNow(fault.NotGranted)
	case !ev.NonBlocking && c.staged(e.id) > 0:
		err = fault.New(fault.Holding, "%d slots are staged; submit or unstage them before a blocking stage", c.staged(e.id))
	}
	if err != nil {
		c.answer(ev.Call, err)
		return
	}
	n := int(ev.N)
	if c.mayTake(r.peer, n) {
		c.emit(Answer{Call: ev.Call, Slots: c.handOut(ev.Engine, r, n)})
		return
	}
	if ev.NonBlocking {
		c.answer(ev.Call, &fault.Error{Code: fault.Busy, Text: fault.New(fault.Busy, "%d slots asked for; %d free, %d held for %s",
			n, len(c.pool.free), r.peer.held, r.peer.name).Text, Retry: busyRetry})
		return
	}
	if len(c.waits) >= maxStageWaits {
		c.answer(ev.Call, fault.New(fault.Busy, "%d stages wait; the limit is %d", len(c.waits), maxStageWaits))
		return
	}
	w := &stageWait{engine: ev.Engine, call: ev.Call, req: r, n: n}
	w.timer = timer{kind: timeStage, id: uint64(ev.Call), wait: w}
	c.waits = append(c.waits, w)
	c.arm(&w.timer, now.Add(min(ev.Deadline, c.cfg.AllocationTimeout)))
}

// handOut stages n slots for a request; the generation words are raised first.
func (c *Core) handOut(engine kv.ConnID, r *request, n int) []kv.SlotID {
	raise, slots := carve(&c.heldRaise, n), carve(&c.heldSlots, n)
	for i := range raise {
		raise[i] = c.pool.take(engine, r.id, r.peer)
		slots[i] = raise[i].Slot
	}
	c.engines[engine].staged += n
	c.emit(Raise{Slots: raise})
	return slots
}

// wakeStages serves the stages that wait, the longest waiter that may go first.
func (c *Core) wakeStages() {
	if !c.pool.given {
		return
	}
	c.pool.given = false
	for i := 0; i < len(c.waits) && len(c.pool.free) > 0; {
		w := c.waits[i]
		if !c.mayTake(w.req.peer, w.n) {
			i++
			continue
		}
		c.unwait(i)
		c.emit(Answer{Call: w.call, Slots: c.handOut(w.engine, w.req, w.n)})
	}
}

func (c *Core) unwait(i int) {
	c.arm(&c.waits[i].timer, kv.Never)
	c.waits = append(c.waits[:i], c.waits[i+1:]...)
}

// dropWaits removes the waits that match, answering with err unless it is nil.
func (c *Core) dropWaits(match func(*stageWait) bool, err *fault.Error) {
	for i := 0; i < len(c.waits); {
		if w := c.waits[i]; match(w) {
			c.unwait(i)
			if err != nil {
				c.answer(w.call, err)
			}
			continue
		}
		i++
	}
}

func (c *Core) stageDue(w *stageWait) {
	c.dropWaits(func(x *stageWait) bool { return x == w },
		fault.New(fault.Deadline, "%d slots asked for; %d of %d free", w.n, len(c.pool.free), len(c.pool.slots)))
}

// freed makes a slot free; the end of the Step wakes the stages.
func (c *Core) freed(id kv.SlotID) { c.pool.put(id, slotWriting) }

func (c *Core) unstage(ev Unstage) {
	if err := c.checkStaged(ev.Engine, ev.ReqID, len(ev.Slots), func(i int) kv.SlotID { return ev.Slots[i] }); err != nil {
		c.answer(ev.Call, err)
		return
	}
	for _, id := range ev.Slots {
		c.engines[c.pool.slots[id].engine].staged--
		c.pool.put(id, slotStaged)
	}
	c.answer(ev.Call, nil)
}

// checkStaged verifies that each of n slots is staged for the request by the
// engine of that connection, and named once.
func (c *Core) checkStaged(engine kv.ConnID, req string, n int, slot func(int) kv.SlotID) *fault.Error {
	e := c.engines[engine]
	if e == nil {
		return notAttached()
	}
	for i := range n {
		id := slot(i)
		by, ok := c.pool.staged(id, req)
		if !ok {
			c.unmark(i, slot)
			return fault.New(fault.BadRequest, "slot %d of %d is not staged for %q", id, len(c.pool.slots), req)
		}
		if c.engines[by].id != e.id {
			c.unmark(i, slot)
			return fault.New(fault.NotOwner, "slot %d was staged by engine %q, not %q", id, c.engines[by].id, e.id)
		}
		if !c.mark(id) {
			c.unmark(i, slot)
			return fault.New(fault.BadRequest, "slot %d is named twice", id)
		}
	}
	c.unmark(n, slot)
	return nil
}

// mark notes a slot in the scratch bitmap; false if it was there.
func (c *Core) mark(id kv.SlotID) bool {
	w, bit := int(id)/64, uint64(1)<<(id%64)
	for len(c.seen) <= w {
		c.seen = append(c.seen, 0)
	}
	if c.seen[w]&bit != 0 {
		return false
	}
	c.seen[w] |= bit
	return true
}

// unmark clears what n marks have set.
func (c *Core) unmark(n int, slot func(int) kv.SlotID) {
	for i := range n {
		id := slot(i)
		c.seen[id/64] &^= 1 << (id % 64)
	}
}
