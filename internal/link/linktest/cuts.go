package linktest

import (
	"bytes"
	"fmt"
	"runtime"
	"time"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
)

func countSender(e *log) string { return fmt.Sprint(len(e.sent), e.lost, len(e.down)) }

// stalled starts a chunk that stops in the middle of its slot, and returns when
// its first bytes are there. After a cut the sender may still choose a connection
// that is broken already; what is lost that way is started again.
func (r *rig) stalled(gen kv.Generation, dst kv.SlotID, n int64) *chunk {
	r.t.Helper()
	first := &r.slot(dst)[0]
	*first = 0
	c := r.stage(n)
	c.data[0] |= 1 // not what the slot holds
	copy(poolOf(r.spool).Slot(c.src), c.data)
	r.between.Stall(n / 16)
	r.start(gen, dst, c)
	told := time.Now()
	for deadline := told.Add(patience); *first == 0; runtime.Gosched() {
		if r.h.Pump != nil {
			r.h.Pump()
		}
		if time.Now().After(deadline) {
			r.t.Fatalf("nothing of the chunk came within %v", patience)
		}
		// What is left of an earlier frame may have used up what the relay lets
		// through: then let a little more through, never near a whole frame.
		if time.Since(told) > 100*time.Millisecond {
			told = time.Now()
			r.between.Stall(n / 16)
		}
		lost := false
		r.look(func(e *log) { lost = e.lost[c.id] == 1 })
		if lost && *first == 0 {
			r.nextID++
			c.id = r.nextID
			r.start(gen, dst, c)
		}
	}
	return c
}

// The sender stands still in the middle of a frame: the slot is fenced all the
// same, is used anew, and what comes later of the frame harms nobody.
func revokeMidFrame(r *rig) {
	for range 20 {
		gen := r.open(0)
		c := r.stalled(gen, 0, r.opts.slotBytes)
		r.recv.Revoke(gen, []kv.SlotID{0})
		r.fenced(gen, 0)
		clear(r.slot(0))
		next := r.open(0)
		r.between.Resume()
		d := r.move(next, 0, 100) // over whichever connection is free
		r.arrive(d)
		r.await("the stalled write", func(e *log) bool { return e.sent[c.id] == 1 })
		// A frame after the rest of the stalled one, over every connection.
		for range 8 {
			g := r.open(1)
			r.arrive(r.move(g, 1, 100))
			r.revoke(g, 1)
		}
		if !bytes.Equal(r.slot(0)[100:], make([]byte, r.opts.slotBytes-100)) {
			r.t.Fatal("a fenced slot was written")
		}
		r.settle(c)
		r.revoke(next, 0)
	}
}

// The receiver has answered for a chunk whose frame the sender is still
// writing: the staging slot is free when Settle returns, and the connection
// goes on.
func settleMidFrame(r *rig) {
	gen := r.open(0)
	c := r.stalled(gen, 0, r.opts.slotBytes)
	r.recv.Revoke(gen, []kv.SlotID{0})
	r.fenced(gen, 0)
	settled := make(chan struct{})
	go func() {
		defer close(settled)
		r.settle(c)
	}()
	select {
	case <-settled:
	case <-time.After(patience):
		r.t.Fatal("Settle waits for a writer that stands still")
	}
	clear(poolOf(r.spool).Slot(c.src))
	r.between.Resume()
	for i := range 8 { // over the connection that the frame went over
		s := kv.SlotID(i)
		g := r.open(s)
		r.arrive(r.move(g, s, 1000))
	}
	r.look(func(e *log) {
		if e.lost[c.id] != 0 || len(e.down) > 0 {
			r.t.Errorf("after Settle: lost %v, down %v", e.lost, e.down)
		}
	})
}

// What is aborted in the middle of a frame is lost only when its writer has
// let go, and the frame is whole.
func abortMidFrame(r *rig) {
	gen := r.open(0)
	c := r.stalled(gen, 0, r.opts.slotBytes)
	r.conn.Abort([]link.WriteID{c.id})
	r.between.Resume()
	r.await("the write to be lost", func(e *log) bool { return e.lost[c.id] == 1 })
	r.arrive(c)
	g := r.open(1)
	r.arrive(r.move(g, 1, 1000))
}

// The data connections are cut, the control connection is not: what was not
// answered is lost, is written again, and lands; nobody is given up. Connections
// that are idle when they break (r84) are made again as well.
func dataCut(r *rig) {
	r.between.Cut()
	idle := r.open(2)
	c := r.move(idle, 2, 50)
	r.repeat(c)
	r.arrive(c)
	gen := r.open(0, 1)
	a := r.move(gen, 0, 100)
	r.await("the chunk to land", func(e *log) bool { return len(e.landed[at{0, gen}]) == 1 })
	// The Commit is unanswered when the cut comes, as when only the control
	// connection, or both, had been cut before.
	r.between.Cut()
	r.await("the unanswered write to be lost", func(e *log) bool { return e.lost[a.id] == 1 })
	for late := false; !late; { // until one gets through
		r.nextID++
		a.id = r.nextID
		r.start(gen, 0, a)
		r.await("the repeat to be discarded or lost", func(e *log) bool {
			late = e.late[at{0, gen}] > 0
			return late || e.lost[a.id] == 1
		})
	}
	r.arrive(a)
	b := r.move(gen, 1, 200)
	r.repeat(b)
	r.arrive(b)
	r.look(func(e *log) {
		if len(e.down) > 0 || len(e.ownerLost) > 0 {
			r.t.Errorf("down %v, owner lost %v", e.down, e.ownerLost)
		}
	})
}

func dataCutMidFrame(r *rig) {
	for range 10 {
		gen := r.open(0)
		c := r.stalled(gen, 0, r.opts.slotBytes)
		r.between.Cut()
		r.between.Resume()
		r.repeat(c)
		r.arrive(c)
		r.revoke(gen, 0)
	}
}

// repeat starts a chunk again each time that it is lost, until it has landed:
// the connections of one cut do not all break at the same moment.
func (r *rig) repeat(c *chunk) {
	r.t.Helper()
	for {
		lost := false
		r.await("the write to be lost or to land", func(e *log) bool {
			lost = e.lost[c.id] == 1
			return lost || len(e.landed[at{c.dst, c.gen}]) > 0
		})
		if !lost {
			return
		}
		r.nextID++
		c.id = r.nextID
		r.start(c.gen, c.dst, c)
	}
}

func dataCutForGood(r *rig) {
	gen := r.open(0, 1)
	a := r.move(gen, 0, 100)
	r.await("the chunk to land", func(e *log) bool { return len(e.landed[at{0, gen}]) == 1 })
	r.between.Shut()
	b := r.move(gen, 1, 100)
	r.await("the link to be down", func(e *log) bool { return len(e.down) == 1 })
	r.look(func(e *log) {
		if e.lost[a.id] != 1 || e.lost[b.id] != 1 {
			r.t.Errorf("down, but not every write was lost before: %v", e.lost)
		}
	})
	r.await("the owner to be lost", func(e *log) bool { return e.ownerLost[r.peer.Self] != nil })
	r.revoke(gen, 0, 1)
}
