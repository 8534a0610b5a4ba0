package linktest

import (
	"bytes"
	"math/rand/v2"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
)

// modelSlot is what the model knows of a receive slot.
type modelSlot struct {
	gen    kv.Generation // 0: closed
	coming *chunk        // on its way
	full   bool
	want   []byte // the slot's memory, when nobody may be writing it
}

// random does ten thousand random operations and compares the whole pool,
// byte by byte, with a model each time that nothing can be on its way.
func random(r *rig) {
	const operations = 10_000
	rng := rand.New(rand.NewPCG(7, 11))
	model := make([]modelSlot, r.opts.slots)
	for i := range model {
		model[i].want = make([]byte, r.opts.slotBytes)
	}
	unsettled := map[link.WriteID]*chunk{}
	busy := map[kv.SlotID]bool{} // staging slots

	finish := func(i int) { // wait until a chunk on its way is there
		m := &model[i]
		c := m.coming
		r.await("a landing", func(e *log) bool { return len(e.landed[at{c.dst, c.gen}]) == 1 })
		copy(m.want, c.data)
		m.coming, m.full = nil, true
		r.settle(c)
		delete(unsettled, c.id)
		delete(busy, c.src)
	}
	revoke := func(i int) {
		m := &model[i]
		r.revoke(m.gen, kv.SlotID(i))
		if c := m.coming; c != nil {
			copy(m.want, r.slot(kv.SlotID(i))) // whatever of it came; from now on nothing
			r.settle(c)
			delete(unsettled, c.id)
			delete(busy, c.src)
		}
		m.gen, m.coming, m.full = 0, nil, false
	}
	start := func(i int, gen kv.Generation, n int64) *chunk {
		for busy[r.nextSrc] {
			r.nextSrc = (r.nextSrc + 1) % kv.SlotID(r.opts.slots)
		}
		c := r.move(gen, kv.SlotID(i), n)
		unsettled[c.id] = c
		busy[c.src] = true
		return c
	}

	for op := range operations {
		i := rng.IntN(len(model))
		m := &model[i]
		n := 1 + rng.Int64N(r.opts.slotBytes)
		switch k := rng.IntN(100); {
		case k < 30:
			if m.gen == 0 {
				m.gen = r.open(kv.SlotID(i))
			}
		case k < 70:
			if m.gen != 0 && m.coming == nil && !m.full && len(busy) < r.opts.slots {
				m.coming = start(i, m.gen, n)
			}
		case k < 75: // of another time
			if m.coming == nil && len(busy) < r.opts.slots {
				c := start(i, r.nextGen+1+kv.Generation(op), n)
				if r.h.Caps.Mode != link.Pull && rng.IntN(2) == 0 {
					r.conn.Abort([]link.WriteID{c.id})
					r.await("an abort", func(e *log) bool { return e.lost[c.id] == 1 })
				}
				r.await("a refusal", func(e *log) bool {
					return e.late[at{c.dst, c.gen}] == 1 || e.failed[at{c.dst, c.gen}] != "" || e.lost[c.id] == 1
				})
				r.settle(c)
				delete(unsettled, c.id)
				delete(busy, c.src)
			}
		case k < 85:
			if m.gen != 0 {
				revoke(i)
			}
		case k < 98:
			if m.coming != nil {
				finish(i)
			}
		default:
			for j := range model {
				if model[j].coming != nil {
					finish(j)
				}
			}
			for j := range model {
				if !bytes.Equal(model[j].want, r.slot(kv.SlotID(j))) {
					r.t.Fatalf("operation %d: slot %d is not what the model says", op, j)
				}
			}
			if len(unsettled) != 0 {
				r.t.Fatalf("operation %d: %d writes are unsettled with nothing on its way", op, len(unsettled))
			}
		}
	}
	for j := range model {
		if model[j].gen != 0 {
			revoke(j)
		}
	}
	r.look(func(e *log) {
		for k, n := range e.fenced {
			if n != 1 {
				r.t.Errorf("slot %d was fenced %d times under generation %d", k.slot, n, k.gen)
			}
		}
	})
}
