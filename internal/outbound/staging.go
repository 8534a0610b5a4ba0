package outbound

import (
	"fmt"

	"github.com/berthkv/berth/internal/kv"
)

// slotState is where a staging slot is.
//
//	free ──► staged ──► writing ──► free
//	  ▲        │ └ unstage ─► free
//	  └────────┴ engine lost ─► quarantined ─► free, when it is fenced
type slotState uint8

const (
	slotFree        slotState = iota
	slotStaged                // the engine may write it
	slotWriting               // submitted: ours, or a link's, to read
	slotQuarantined           // an engine that is lost may still write it
	slotStates
)

// stagingSlot is one slot and who has it.
type stagingSlot struct {
	state  slotState
	gen    kv.Generation // of the last hand-out
	engine kv.ConnID     // staged, quarantined: the connection that staged it
	req    string        // staged: the request it was staged for
	peer   *peer         // staged, writing: the receiver whose share it counts in
}

// pool is the staging pool. Invariants, verified by Check:
//  1. n counts the slots by state and sums to the capacity.
//  2. free lists exactly the free slots, each once.
//  3. a slot's generation grows with each hand-out and never else.
type pool struct {
	slots []stagingSlot
	free  []kv.SlotID // a stack: what was used last is handed out first
	n     [slotStates]int
	given bool // a share has shrunk: a stage that waits may go
}

func newPool(capacity int) pool {
	p := pool{slots: make([]stagingSlot, capacity), free: make([]kv.SlotID, capacity)}
	for i := range p.free {
		p.free[i] = kv.SlotID(capacity - 1 - i) // lowest on top: touched first
	}
	p.n[slotFree] = capacity
	return p
}

// take hands out a free slot under a new generation. There must be one.
func (p *pool) take(engine kv.ConnID, req string, of *peer) StagedSlot {
	last := len(p.free) - 1
	id := p.free[last]
	p.free = p.free[:last]
	s := &p.slots[id]
	*s = stagingSlot{state: slotStaged, gen: s.gen + 1, engine: engine, req: req, peer: of}
	p.n[slotFree]--
	p.n[slotStaged]++
	of.held++
	return StagedSlot{Slot: id, Generation: s.gen}
}

// submitted takes a slot over from the engine.
func (p *pool) submitted(id kv.SlotID) kv.Generation {
	s := p.must(id, slotStaged)
	p.n[slotStaged]--
	p.n[slotWriting]++
	s.state, s.engine, s.req = slotWriting, 0, ""
	return s.gen
}

// quarantine takes a slot away from an engine that is lost.
func (p *pool) quarantine(id kv.SlotID) {
	s := p.must(id, slotStaged)
	s.peer.held--
	p.given = true
	p.n[slotStaged]--
	p.n[slotQuarantined]++
	s.state, s.req, s.peer = slotQuarantined, "", nil
}

// put makes a slot free again: nobody reads or writes it any more.
func (p *pool) put(id kv.SlotID, from slotState) {
	s := p.must(id, from)
	if s.peer != nil {
		s.peer.held--
	}
	p.given = true
	p.n[from]--
	p.n[slotFree]++
	*s = stagingSlot{gen: s.gen}
	p.free = append(p.free, id)
}

func (p *pool) must(id kv.SlotID, want slotState) *stagingSlot {
	s := &p.slots[id]
	if s.state != want {
		panic(fmt.Sprintf("outbound: staging slot %d is %d, not %d", id, s.state, want))
	}
	return s
}

// staged reports whether a slot is staged for that request by an engine.
func (p *pool) staged(id kv.SlotID, req string) (engine kv.ConnID, ok bool) {
	if int(id) >= len(p.slots) {
		return 0, false
	}
	s := &p.slots[id]
	return s.engine, s.state == slotStaged && s.req == req
}

func (p *pool) status() StagingStatus {
	return StagingStatus{Capacity: len(p.slots), Free: p.n[slotFree], Staged: p.n[slotStaged],
		Writing: p.n[slotWriting], Quarantined: p.n[slotQuarantined]}
}
