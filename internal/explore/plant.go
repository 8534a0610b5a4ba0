package explore

import (
	"slices"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/intake"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// Plant is a fault that is planted on purpose, in what surrounds the cores, to
// show that the search finds it; "" is the real thing. Those with a poke reach
// into a core's memory and are set by the tests alone.
type Plant string

const (
	PlantDoubleCount   Plant = "slot-counted-twice"         // R1; a poke
	PlantGrantShort    Plant = "grant-short"                // R2: a grant has less than was reserved
	PlantStageFirst    Plant = "stage-before-reserve"       // R3: staging is taken before admission
	PlantSwallow       Plant = "refusal-swallowed"          // R4: who can never be served is not told
	PlantOtherEnding   Plant = "ending-changed"             // R5: the sender hears another ending
	PlantFreeOnCancel  Plant = "free-on-cancel"             // R6: slots are free before their fence
	PlantDrainedEarly  Plant = "drained-early"              // R6: Drained with writes in flight
	PlantNoGeneration  Plant = "staging-without-generation" // R6: the copier does not look whether the source was reused
	PlantCommitOnGrant Plant = "commit-on-grant"            // R7: what is granted counts as landed
	PlantNoEarmark     Plant = "no-earmark"                 // R8: small ones pass for ever
	PlantRepeatIsNew   Plant = "repeat-is-new"              // R9: what comes twice counts twice
	PlantNoWake        Plant = "no-wake"                    // R10: nobody wakes the receiver
	PlantNoLimit       Plant = "no-limit"                   // R11: max_waiting is not kept
	PlantDropFence     Plant = "fence-dropped"              // R12: a fence is not reported
	PlantLeak          Plant = "chunk-not-released"         // R12: the reader forgets a chunk
	PlantSingleLock    Plant = "single-lock"                // one message a receiver at a time
	PlantAnyOrder      Plant = "ranks-in-any-order"
	PlantBlockOnGrant  Plant = "block-before-granted" // an engine waits for a grant and for nothing else
	PlantOneOwner      Plant = "lock-step-one-owner"  // F of one owner alone; a poke
)

func (p Plant) is(q Plant) bool { return p == q }

// poke changes a receiver's core around a step. undo runs after the step.
type poke struct {
	before func(c *intake.Core, e intake.Event) (undo func())
	after  func(c *intake.Core, e intake.Event)
}

// pokes are set by tests.
var pokes = map[Plant]poke{}

func (p Plant) beforeRecv(c *intake.Core, e intake.Event) (undo func()) {
	if f := pokes[p].before; f != nil {
		return f(c, e)
	}
	return func() {}
}

func (p Plant) afterRecv(c *intake.Core, e intake.Event) {
	if f := pokes[p].after; f != nil {
		f(c, e)
	}
}

// Bypass and waiting are what a receiver is told of its limits.
func (p Plant) Bypass(n int) int64 {
	if p.is(PlantNoEarmark) {
		return 1 << 20
	}
	return int64(n)
}

func (p Plant) waiting(n int) int {
	if p.is(PlantNoLimit) || n == 0 {
		return maxWaiting
	}
	return n
}

// Sent is what becomes of a receiver's message; nil when it is lost.
func (p Plant) Sent(m msg.Message) msg.Message {
	switch v := m.(type) {
	case *msg.Granted:
		if p.is(PlantGrantShort) && len(v.Slots) > 1 {
			k := *v
			k.Slots = slices.Clone(v.Slots[1:])
			return &k
		}
	case *msg.Error:
		if p.is(PlantSwallow) && v.Code == fault.TooLarge {
			return nil
		}
	case *msg.Ended:
		if p.is(PlantOtherEnding) && v.Ending == msg.EndCancelled {
			k := *v
			k.Ending, k.Reason = msg.EndFailed, fault.Internal
			return &k
		}
	}
	return m
}

// drainEarly says Drained for a sender that does not.
func (w *world) drainEarly(r int, conn kv.ConnID, id msgID) {
	v, ok := w.x.m.message(id).(*msg.Ended)
	if !ok || v.Seq == 0 || !w.x.plant.is(PlantDrainedEarly) {
		return
	}
	m := w.x.m.number(&msg.Drained{Re: v.Seq, Begin: v.Begin})
	w.after(func() {
		w.stepR(r, ev(evReceived, uint64(conn), uint64(m)), func() intake.Event {
			return intake.Received{Conn: conn, Msg: w.x.m.message(m)}
		})
	})
}

// repeated is the second copy of a message.
func (w *world) repeated(id msgID) msgID {
	if v, ok := w.x.m.message(id).(*msg.Begin); ok && w.x.plant.is(PlantRepeatIsNew) {
		k := *v
		k.Begin, k.Seq = v.Begin+1, v.Seq+100
		return w.x.m.number(&k)
	}
	return id
}

// holdsBack: with one lock for each receiver, a sender says nothing while a
// Begin of it waits.
func (w *world) holdsBack(n int) bool {
	return w.x.plant.is(PlantSingleLock) && slices.ContainsFunc(w.prompts(n/w.x.ranks), func(i int) bool {
		return w.x.specs[i].sender == n && w.atts[i].place == waiting
	})
}

// blockedOnGrant: an engine waits for a prompt to be granted, and does nothing
// else meanwhile.
func (w *world) blockedOnGrant(e int) bool {
	return w.x.plant.is(PlantBlockOnGrant) && slices.ContainsFunc(w.prompts(e), func(i int) bool {
		a := w.atts[i]
		return a.begun && !a.granted && a.told.how == 0 && !a.gone
	})
}

// stagedFirst counts the staging slots that wait with their prompts for
// admission.
func (w *world) stagedFirst(n int) (count int) {
	if !w.x.plant.is(PlantStageFirst) {
		return 0
	}
	for _, i := range w.prompts(n / w.x.ranks) {
		if w.x.specs[i].sender == n && w.waitsWithStaging(i) {
			count++
		}
	}
	return count
}

func (w *world) waitsWithStaging(i int) bool {
	a := w.atts[i]
	return w.x.plant.is(PlantStageFirst) && a.begun && !a.granted && a.told.how == 0 && !a.gone
}

// prompts are the attempts of an engine.
func (w *world) prompts(e int) (out []int) {
	for i := range w.x.specs {
		if w.x.specs[i].engine == e {
			out = append(out, i)
		}
	}
	return out
}
