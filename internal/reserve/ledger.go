// Package reserve is the reservation ledger of a receive pool: who is promised
// room, who waits for it, and in which order (design R1 to R4 and R8). It is
// pure and single-threaded; package intake composes it.
//
// # Order
//
// Each sender has a line, in order of arrival. Between lines runs a deficit
// round robin with a quantum of one chunk: in each round every line saves one
// chunk, and has its turn when its savings cover its front request, to whose
// need they are limited. What is admitted is paid from them. Rounds in which
// nobody has a turn are not played but jumped over, so that the next line is
// found in one descent of a tree. First fit: what does not fit is overtaken by
// what does, in the order of turns, and of arrival within a line.
//
// So lines that wait over the same time are given the same number of chunks, give
// or take the largest need, as far as their requests fit when it is their turn
// and no allowance (below) runs out.
//
// # Who is overtaken, by what, and how far (R8)
//
// The reach of the pool is capacity - quarantined - lock-step: the most that
// can come free without help from those who wait. A request that needs more is
// blocked. The front of a line is its oldest request that is not blocked.
//
// A request r is overtaken by the chunks of each request that is admitted while
// r waits and that is
//   - of r's own sender, and arrived later; or
//   - of another sender, while r is the front of its line, and behind r: not
//     the front of its own line; or a front that was overtaken by fewer chunks
//     than r; or by equally many, and it is a front for a shorter time.
//
// For a request that is first in its line when it comes this is simply: what
// arrived later and was admitted earlier. Behind requests of its own sender it
// is not overtaken by others' requests: how fast a line moves is decided by the
// round robin, and a long line earns its sender no more than a short one.
//
// A request that is not blocked is overtaken by at most Config.Bypass chunks,
// the last one included: what would take it further must wait. The front that
// has been overtaken most is the guard, whose allowance is what is left to
// Bypass; at 0 it has the earmark: all freed room is kept for it. What passes a
// blocked request is outside that bound, and is counted at most up to Bypass.
package reserve

import (
	"fmt"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
)

// Sender names whose line a request stands in: an owner, by the caller's
// number. A sender that has nothing waiting leaves no trace.
type Sender uint32

// Config is fixed for the life of a Ledger.
type Config struct {
	Capacity   int64 // slots of the pool, 1 to kv.MaxSlots
	Bypass     int64 // admission_bypass_chunks, ≥ 0; 0 is strictly in order
	MaxWaiting int   // max_waiting, ≥ 0: requests that may wait; see Request for one sender's share
}

// Ledger is the state. Check verifies these invariants; 1 holds only when the
// caller has finished telling what one event changed (a slot goes from
// lock-step to quarantined in two halves).
//
//  1. free, quarantined and lock-step are ≥ 0, and their sum ≤ capacity.
//  2. Every waiting request is in exactly one line, its sender's, in order of
//     arrival, needs 1 to capacity, and is found by its id; no line is empty;
//     at most MaxWaiting wait.
//  3. Every tree is well formed: links, heap order, summaries.
//  4. The front of a line is the first that needs at most the reach, and the
//     line is in fronts if and only if there is one.
//  5. Weights in lines and fronts are ≥ 0. As suffix sums they are how far
//     requests were overtaken; in fronts that is at most Bypass.
//  6. Turns are in order, and a line with a front has its turn at most as many
//     rounds from now as the front needs chunks.
type Ledger struct {
	cfg                         Config
	free, quarantined, lockStep int64

	waiting int
	arrived uint64 // requests that ever waited: the order of arrival
	round   int64  // of the round robin

	ids   table   // request id → index in requests
	reqs  forest  // one sequence for each line; weights: overtaken by its own sender's
	infos []info  // parallel to reqs
	spare []int32 // requests not in use
	lines []line  // index 0 unused
	known table   // sender → index in lines
	idle  []int32 // lines not in use
	turns lineup  // by the round of their turn
	// fronts holds the lines that have a front, most overtaken first. The suffix
	// sum is by how many chunks the front was overtaken, others' included; those
	// are added to the request itself when it ceases to be a front.
	fronts  lineup
	scratch []int32
}

// info is what is known of a waiting request besides its id and need.
type info struct {
	arrival uint64
	line    int32
}

// line is a sender's waiting requests; its index is also its node in turns and
// fronts.
type line struct {
	sender Sender
	queue  sequence // in reqs, in order of arrival
	front  int32    // its oldest request that is not blocked, 0: none
	turn   int64    // the round of its turn
	count  int
	chunks int64
}

// lineup is an order of lines: a forest of one sequence, whose nodes have the
// lines' indices.
type lineup struct {
	forest
	seq sequence
}

// New returns a ledger with all slots free. It panics on a Config out of range.
func New(c Config) *Ledger {
	if c.Capacity < 1 || c.Capacity > kv.MaxSlots || c.Bypass < 0 || c.MaxWaiting < 0 {
		panic(fmt.Sprintf("reserve: config out of range: %+v", c))
	}
	return &Ledger{
		cfg:    c,
		free:   c.Capacity,
		reqs:   newForest(),
		infos:  make([]info, 1),
		lines:  make([]line, 1),
		turns:  lineup{forest: newForest()},
		fronts: lineup{forest: newForest()},
	}
}

// Request asks for need slots for a request that is not known yet, or repeats
// one that waits (which keeps its place). Ids are the caller's, unique among
// those that wait.
//
//   - (true, nil): admitted, need slots have left free and are the caller's
//     until Return;
//   - (false, nil): it waits, until Next yields it or Remove takes it away;
//   - (false, err): refused, nothing is left behind: too_large (need above
//     capacity) or busy (max_waiting wait already, or it would be above its
//     sender's share). The text names both numbers.
//
// A sender's share: another request of it may wait while fewer than three times
// the places left do. So a sender alone has three quarters of max_waiting, k that
// ask for all there is leave about one place in 1+3k, and one of whom nothing waits
// finds a place as long as there are any.
//
// A need of 0 is admitted at once. A negative need panics.
func (l *Ledger) Request(id uint64, s Sender, need int64) (admitted bool, err *fault.Error) {
	switch {
	case need < 0:
		panic(fmt.Sprintf("reserve: a need of %d", need))
	case need > l.cfg.Capacity:
		return false, fault.New(fault.TooLarge, "total_chunks is %d, the pool's capacity is %d", need, l.cfg.Capacity)
	case need == 0:
		return true, nil
	case l.ids.get(id) != 0:
		return false, nil
	}
	i := l.push(id, s, need)
	if need <= min(l.free, l.Reach()) && l.pick() == i {
		l.admit(i)
		return true, nil
	}
	others, left := l.lines[l.infos[i].line].count-1, l.cfg.MaxWaiting-(l.waiting-1)
	switch {
	case left < 1:
		l.drop(i)
		return false, fault.New(fault.Busy, "%d requests wait, max_waiting is %d", l.waiting, l.cfg.MaxWaiting)
	case others >= 3*left:
		l.drop(i)
		return false, fault.New(fault.Busy, "%d requests of this sender wait, at most three times the %d places left of max_waiting %d may", others, left, l.cfg.MaxWaiting)
	}
	return false, nil
}

// Next admits the next request that may go now and returns its id; its slots
// are the caller's until Return. Call it until ok is false after every Return,
// Remove and SetBlocked: until then a newcomer that would fit waits behind those
// that may go. SetBlocked may be called between two calls of Next, and should be
// when an admission changes the count of lock-step slots.
func (l *Ledger) Next() (id uint64, ok bool) {
	i := l.pick()
	if i == 0 {
		return 0, false
	}
	id = l.ids.key(i)
	l.admit(i)
	return id, true
}

// Remove takes a waiting request away (cancel, deadline, sender lost). It
// reports false, and does nothing, for one that does not wait.
func (l *Ledger) Remove(id uint64) bool {
	i := l.ids.get(id)
	if i == 0 {
		return false
	}
	l.drop(i)
	return true
}

// Return gives n slots back to free: released, rolled back, surplus, or fenced.
// Returning more than is out panics.
func (l *Ledger) Return(n int64) {
	if n < 0 || n > l.cfg.Capacity-l.free {
		panic(fmt.Sprintf("reserve: %d slots returned, %d of %d are out", n, l.cfg.Capacity-l.free, l.cfg.Capacity))
	}
	l.free += n
}

// SetBlocked tells how many of the slots that are not free are quarantined, and
// how many lock-step: reserved for or granted to unfinished requests of legacy
// owners that have an unanswered first batch (F of design 4.2). Both replace
// what was said before. Its cost is logarithmic, and grows with the number of
// senders whose requests it blocks or unblocks.
func (l *Ledger) SetBlocked(quarantined, lockStep int64) {
	if quarantined < 0 || lockStep < 0 {
		panic(fmt.Sprintf("reserve: %d slots quarantined, %d lock-step", quarantined, lockStep))
	}
	before := l.Reach()
	l.quarantined, l.lockStep = quarantined, lockStep
	if after := l.Reach(); after != before {
		l.refront(min(before, after))
	}
}

// Free returns the slots that are neither promised nor in use.
func (l *Ledger) Free() int64 { return l.free }

// Reach returns capacity - quarantined - lock-step: a request that needs more
// cannot be admitted before others change that.
func (l *Ledger) Reach() int64 { return l.cfg.Capacity - l.quarantined - l.lockStep }

// Waiting returns the number of requests that wait.
func (l *Ledger) Waiting() int { return l.waiting }
