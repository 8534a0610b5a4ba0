// Package gate keeps what every receiving link must know about the slots of
// its pool: which are open, for whom and under which generation, who is
// filling one, and when nobody can write it any more. It moves no bytes.
//
//	closed ──Open──► open ──Enter──► filling ──Leave(full)──► landed
//	   ▲              │ ▲               │                       │
//	   │            Revoke └──Leave──────┤ Revoke              Revoke
//	   │              ▼                 ▼                       ▼
//	   └────────────fenced            revoked ──Leave──► fenced, closed
//
// Invariants:
//  1. A slot has a grant in every state but closed.
//  2. A slot has a filler in the states filling and revoked, and only then.
package gate

import (
	"fmt"
	"sync"

	"github.com/berthkv/berth/internal/kv"
)

// Filler is what fills a slot: a connection's reader, a copying worker.
type Filler interface {
	// Interrupt makes the filler leave its slot soon, full or not. It is called
	// with the gate locked, at any time between the filler's Enter and Leave,
	// perhaps more than once; it must not block or call the gate.
	Interrupt()
}

// Verdict is the answer to Enter.
type Verdict uint8

const (
	Entered Verdict = iota // the slot is the caller's to fill, until Leave
	Closed                 // not open to that owner under that generation
	Landed                 // it is full already
	Busy                   // another filler is in it
)

// Outcome is how a filler left its slot.
type Outcome uint8

const (
	Full   Outcome = iota // the chunk has landed
	Empty                 // the slot is open as before
	Fenced                // the slot was revoked and is closed now: report it
)

type state uint8

const (
	closed state = iota
	open
	filling
	landed
	revoked
)

func (s state) String() string {
	return [...]string{"closed", "open", "filling", "landed", "revoked"}[s]
}

// grant is what one Open said, shared by its slots.
type grant struct {
	owner kv.Incarnation
	gen   kv.Generation
}

type slot struct {
	grant *grant
	state state
}

type fill struct {
	by   Filler
	left chan struct{} // closed by Leave; nil while nobody waits
}

// Gate is the table of a pool. Its methods are safe for concurrent use and do
// not block.
type Gate struct {
	mu    sync.Mutex
	slots []slot
	fills map[kv.SlotID]fill // of the slots that have a filler
}

// New returns the gate of a pool of that many slots, all closed.
func New(slots int) *Gate {
	return &Gate{slots: make([]slot, slots), fills: make(map[kv.SlotID]fill)}
}

// Slots returns the capacity.
func (g *Gate) Slots() int { return len(g.slots) }

// Open opens closed slots. It panics on one that is not: somebody could still
// be writing it.
func (g *Gate) Open(owner kv.Incarnation, gen kv.Generation, slots []kv.SlotID) {
	gr := &grant{owner, gen}
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, i := range slots {
		if s := &g.slots[i]; s.state != closed {
			panic(fmt.Sprintf("gate: slot %d opened under generation %d while %v under %d", i, gen, s.state, s.grant.gen))
		} else {
			*s = slot{gr, open}
		}
	}
}

// Enter makes f the filler of slot i, if the answer is Entered.
func (g *Gate) Enter(owner kv.Incarnation, gen kv.Generation, i kv.SlotID, f Filler) Verdict {
	g.mu.Lock()
	defer g.mu.Unlock()
	v := g.askLocked(owner, gen, i)
	if v == Entered {
		g.slots[i].state = filling
		g.fills[i] = fill{by: f}
	}
	return v
}

// Ask returns what Enter would.
func (g *Gate) Ask(owner kv.Incarnation, gen kv.Generation, i kv.SlotID) Verdict {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.askLocked(owner, gen, i)
}

func (g *Gate) askLocked(owner kv.Incarnation, gen kv.Generation, i kv.SlotID) Verdict {
	switch s := &g.slots[i]; {
	case s.grant == nil || s.grant.gen != gen || s.grant.owner != owner || s.state == revoked:
		return Closed
	case s.state == landed:
		return Landed
	case s.state == filling:
		return Busy
	}
	return Entered
}

// Interrupt asks the filler of slot i to leave. The channel is closed when it
// has; nil means that there is none.
func (g *Gate) Interrupt(i kv.SlotID) <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	f, ok := g.fills[i]
	if !ok {
		return nil
	}
	if f.left == nil {
		f.left = make(chan struct{})
		g.fills[i] = f
	}
	f.by.Interrupt()
	return f.left
}

// Leave ends what Enter began; the caller writes the slot no more. After it the
// filler is interrupted no more.
func (g *Gate) Leave(i kv.SlotID, full bool) Outcome {
	g.mu.Lock()
	defer g.mu.Unlock()
	f, ok := g.fills[i]
	if !ok {
		panic(fmt.Sprintf("gate: nobody fills slot %d", i))
	}
	delete(g.fills, i)
	if f.left != nil {
		close(f.left)
	}
	s := &g.slots[i]
	switch {
	case s.state == revoked:
		*s = slot{}
		return Fenced
	case full:
		s.state = landed
		return Full
	}
	s.state = open
	return Empty
}

// Revoke closes the slots that are open under gen, in any state, and returns
// those that are fenced by it. The others that it closed have a filler, which
// is interrupted, and whose Leave says Fenced.
func (g *Gate) Revoke(gen kv.Generation, slots []kv.SlotID) (fenced []kv.SlotID) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, i := range slots {
		s := &g.slots[i]
		if s.grant == nil || s.grant.gen != gen {
			continue
		}
		switch s.state {
		case open, landed:
			*s = slot{}
			fenced = append(fenced, i)
		case filling:
			s.state = revoked
			g.fills[i].by.Interrupt()
		}
	}
	return fenced
}
