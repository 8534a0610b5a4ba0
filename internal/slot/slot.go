// Package slot keeps the states of a pool's slots: who may write or read each
// of them, and when it may be used again. It is pure and knows neither requests
// nor time; package intake drives it.
//
//	         Reserve        Grant          Commit            Claim         Release
//	free ───────────► reserved ──► granted ──────► committed ──────► claimed ──────► free
//	                                  │ Revoke        │ Revoke          │ Revoke
//	                                  └───────────────┴────────┬────────┘
//	                                                           ▼  hands off
//	                                                      quarantined ─────► free
//
// Reserved slots are promised, not chosen: a count. A slot is chosen when it is
// granted, the lowest free one first, because pages are touched in that order.
// That its bytes have landed is an attribute of a granted slot.
//
// A hand lies on a slot while somebody may still touch it: the writer's from
// Grant until its fence, the reader's from Claim until Release or its fence.
package slot

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
)

// State of one slot. Reserved slots are Free ones that have been promised.
type State uint8

const (
	Free State = iota
	Granted
	Committed
	Claimed
	Quarantined
	states
)

var stateNames = [states]string{"free", "granted", "committed", "claimed", "quarantined"}

func (s State) String() string { return stateNames[s] }

// Hand says who may still touch a slot.
type Hand uint8

const (
	Writer Hand = 1 << iota
	Reader
)

// Slot is one slot of a pool. Its invariants, which Check verifies:
//
//  1. A free slot has no hand on it and nothing else set.
//  2. A granted slot has the writer's hand on it, not the reader's.
//  3. A committed slot has landed and has no reader's hand on it.
//  4. A claimed slot has landed and has the reader's hand on it.
//  5. A quarantined slot has a hand on it. (R6: it is free when the last one
//     is off, and never before.)
//  6. A slot that is not free has a generation.
type Slot struct {
	Generation kv.Generation
	Chunk      uint32 // which chunk of the request that owns the generation
	State      State
	Hands      Hand
	Landed     bool
}

// Counts is the number of slots by state; R1: the terms sum to the capacity.
type Counts struct {
	Free, Reserved, Granted, Committed, Claimed, Quarantined int
}

// Pool is the slots of one agent in one role. The zero value has none.
type Pool struct {
	slots    []Slot
	free     bitmap // slots in state Free
	count    [states]int
	reserved int // of the free ones
}

// New returns a pool of free slots.
func New(capacity int) *Pool {
	p := &Pool{slots: make([]Slot, capacity), free: newBitmap(capacity)}
	for i := range p.slots {
		p.free.set(uint32(i))
	}
	p.count[Free] = capacity
	return p
}

// Capacity is the number of slots.
func (p *Pool) Capacity() int { return len(p.slots) }

// Counts returns the slots by state.
func (p *Pool) Counts() Counts {
	return Counts{
		Free:        p.count[Free] - p.reserved,
		Reserved:    p.reserved,
		Granted:     p.count[Granted],
		Committed:   p.count[Committed],
		Claimed:     p.count[Claimed],
		Quarantined: p.count[Quarantined],
	}
}

// Slot returns slot s as it is, the zero value for one outside the pool.
func (p *Pool) Slot(s kv.SlotID) Slot {
	if int64(s) >= int64(len(p.slots)) {
		return Slot{}
	}
	return p.slots[s]
}

// Reserve promises n free slots. Unreserve takes the promise of n back.
func (p *Pool) Reserve(n int) error {
	if n < 0 || n > p.count[Free]-p.reserved {
		return fault.New(fault.Internal, "%d slots reserved of %d free", n, p.count[Free]-p.reserved)
	}
	p.reserved += n
	return nil
}

// Unreserve frees n reserved slots.
func (p *Pool) Unreserve(n int) error {
	if n < 0 || n > p.reserved {
		return fault.New(fault.Internal, "%d slots given back of %d reserved", n, p.reserved)
	}
	p.reserved -= n
	return nil
}

// Grant hands out a reserved slot to be written, the lowest one.
func (p *Pool) Grant(gen kv.Generation, chunk uint32) (kv.SlotID, error) {
	if p.reserved == 0 || gen == 0 {
		return 0, fault.New(fault.Internal, "a grant under generation %d with %d slots reserved", gen, p.reserved)
	}
	s := p.free.first()
	p.free.clear(s)
	p.reserved--
	p.slots[s] = Slot{Generation: gen, Chunk: chunk, Hands: Writer}
	p.count[Free]--
	p.count[Granted]++
	p.slots[s].State = Granted
	return kv.SlotID(s), nil
}

// Land notes that a granted slot's bytes are there and visible.
func (p *Pool) Land(s kv.SlotID, gen kv.Generation) error {
	e, err := p.at(s, gen)
	if err != nil {
		return err
	}
	if e.State != Granted || e.Landed {
		return illegal("land", s, e)
	}
	e.Landed = true
	return nil
}

// Commit makes a granted slot that has landed readable.
func (p *Pool) Commit(s kv.SlotID, gen kv.Generation) error {
	e, err := p.at(s, gen)
	if err != nil {
		return err
	}
	if e.State != Granted || !e.Landed { // R7
		return illegal("commit", s, e)
	}
	p.move(e, Committed)
	return nil
}

// Claim hands out a committed slot to be read.
func (p *Pool) Claim(s kv.SlotID, gen kv.Generation) error {
	e, err := p.at(s, gen)
	if err != nil {
		return err
	}
	if e.State != Committed {
		return illegal("claim", s, e)
	}
	e.Hands |= Reader
	p.move(e, Claimed)
	return nil
}

// Release takes a claimed slot back from its reader, who is done with it. It is
// free, or quarantined while the writer's hand is still on it.
func (p *Pool) Release(s kv.SlotID, gen kv.Generation) error {
	e, err := p.at(s, gen)
	if err != nil {
		return err
	}
	if e.State != Claimed {
		return illegal("release", s, e)
	}
	e.Hands &^= Reader
	p.retire(s, e)
	return nil
}

// Revoke takes a slot away from whoever has it. It is quarantined while a hand
// is on it, else free.
func (p *Pool) Revoke(s kv.SlotID, gen kv.Generation) error {
	e, err := p.at(s, gen)
	if err != nil {
		return err
	}
	if e.State != Granted && e.State != Committed && e.State != Claimed {
		return illegal("revoke", s, e)
	}
	p.retire(s, e)
	return nil
}

// LetGo notes that a hand is off the slot: its fence. A quarantined slot with
// no hand on it is free. The writer's fence may come early, while the slot is
// committed or claimed; that of a granted slot needs a Revoke first, and so
// does a reader's.
func (p *Pool) LetGo(s kv.SlotID, gen kv.Generation, h Hand) error {
	e, err := p.at(s, gen)
	if err != nil {
		return err
	}
	early := h == Writer && (e.State == Committed || e.State == Claimed)
	if e.Hands&h == 0 || e.State != Quarantined && !early {
		return illegal("let go", s, e)
	}
	e.Hands &^= h
	if e.State == Quarantined {
		p.retire(s, e)
	}
	return nil
}

// retire moves a slot that nobody shall use further to quarantined or, once no
// hand is on it, to free.
func (p *Pool) retire(s kv.SlotID, e *Slot) {
	if e.Hands != 0 { // R6
		p.move(e, Quarantined)
		return
	}
	p.move(e, Free)
	*e = Slot{}
	p.free.set(uint32(s))
}

// move changes a slot's state and, with it, the counts: R1.
func (p *Pool) move(e *Slot, to State) {
	p.count[e.State]--
	p.count[to]++
	e.State = to
}

func (p *Pool) at(s kv.SlotID, gen kv.Generation) (*Slot, error) {
	if int64(s) >= int64(len(p.slots)) {
		return nil, fault.New(fault.BadRequest, "slot %d of a pool of %d", s, len(p.slots))
	}
	e := &p.slots[s]
	if e.Generation != gen {
		return nil, fault.New(fault.StaleGeneration, "slot %d is under generation %d, not %d", s, e.Generation, gen)
	}
	return e, nil
}

func illegal(op string, s kv.SlotID, e *Slot) error {
	return fault.New(fault.Internal, "cannot %s slot %d: it is %s, hands %d, landed %t", op, s, e.State, e.Hands, e.Landed)
}

// Clone returns an independent copy.
func (p *Pool) Clone() *Pool {
	q := *p
	q.slots = slices.Clone(p.slots)
	q.free = p.free.clone()
	return &q
}

// Encode appends a canonical encoding: equal pools encode equally.
func (p *Pool) Encode(b []byte) []byte {
	b = binary.AppendUvarint(b, uint64(len(p.slots)))
	b = binary.AppendUvarint(b, uint64(p.reserved))
	for i, e := range p.slots {
		if e.State == Free {
			continue
		}
		b = binary.AppendUvarint(b, uint64(i))
		b = binary.AppendUvarint(b, uint64(e.Generation))
		b = binary.AppendUvarint(b, uint64(e.Chunk))
		attr := byte(e.State) | byte(e.Hands)<<4
		if e.Landed {
			attr |= 1 << 7
		}
		b = append(b, attr)
	}
	return binary.AppendUvarint(b, uint64(len(p.slots))) // no slot has that number: the end
}

// Check verifies R1 and the invariants of Slot.
func (p *Pool) Check() error {
	var count [states]int
	for i, e := range p.slots {
		if e.State >= states {
			return fmt.Errorf("slot %d: state %d", i, e.State)
		}
		count[e.State]++
		if rule := e.broken(); rule != 0 {
			return fmt.Errorf("slot %d breaks invariant %d: %+v", i, rule, e)
		}
		if p.free.has(uint32(i)) != (e.State == Free) {
			return fmt.Errorf("slot %d is %s; in the free list: %t", i, e.State, p.free.has(uint32(i)))
		}
	}
	if count != p.count {
		return fmt.Errorf("R1: %v slots by state, counted as %v", count, p.count)
	}
	if p.reserved < 0 || p.reserved > p.count[Free] {
		return fmt.Errorf("R1: %d reserved of %d", p.reserved, p.count[Free])
	}
	return nil
}

// broken returns the number of the first invariant that does not hold, or 0.
func (e *Slot) broken() int {
	switch e.State {
	case Free:
		if *e != (Slot{}) {
			return 1
		}
	case Granted:
		if e.Hands != Writer {
			return 2
		}
	case Committed:
		if !e.Landed || e.Hands&Reader != 0 {
			return 3
		}
	case Claimed:
		if !e.Landed || e.Hands&Reader == 0 {
			return 4
		}
	case Quarantined:
		if e.Hands == 0 {
			return 5
		}
	}
	if e.State != Free && e.Generation == 0 {
		return 6
	}
	return 0
}
