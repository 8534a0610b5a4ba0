// Package reserve is the reservation ledger of a receive pool: who is promised
// room, who waits for it, and in which order (design R1 to R4 and R8). It is
// pure and single-threaded; package intake composes it.
//
// # Order
//
// Each sender has a line, in order of arrival. Between lines runs a deficit
// round robin with a quantum of one chunk: in each round every line that waits
// saves one chunk, and has its turn when its savings cover its front request.
// Rounds in which nobody has a turn are not played but jumped over, so picking
// the next line is one descent of a tree. First fit: what does not fit is
// overtaken by what does.
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
//     the front of its own line, or a front that was overtaken by fewer chunks
//     than r, or by equally many and is a front for a shorter time.
//
// So a request is no longer overtaken by others' while it stands behind its own
// sender's: that is its sender's share, which the round robin decides, and a
// sender gains nothing by a long line. For a request that is alone in its line
// the rule says simply: what arrived later and was admitted earlier.
//
// A request that is not blocked is overtaken by at most Config.Bypass chunks,
// the last one included: what would take it further must wait. The request that
// has come closest is the guard; when it has reached Bypass it has the earmark,
// all freed room is kept for it. What passes a blocked request is outside the
// bound, and counts at most as far as Bypass: then it has the earmark as soon
// as its block ends.
package reserve

import "github.com/berthkv/berth/internal/fault"

// Sender names whose line a request stands in: an owner, by the caller's
// number. A sender that has nothing waiting leaves no trace.
type Sender uint32

// Config is fixed for the life of a Ledger.
type Config struct {
	Capacity   int64 // slots of the pool, 1 to kv.MaxSlots
	Bypass     int64 // admission_bypass_chunks, ≥ 0; 0 is strictly in order
	MaxWaiting int   // max_waiting, ≥ 0: requests that may wait
}

// Request asks for need slots for a request that is not known yet, or repeats
// one that waits (which keeps its place). Ids are the caller's, unique among
// those that wait.
//
//   - (true, nil): admitted, need slots have left free and are the caller's
//     until Return;
//   - (false, nil): it waits, until Next yields it or Remove takes it away;
//   - (false, err): refused, nothing is left behind: too_large (need above
//     capacity) or busy (max_waiting wait already). The text names both
//     numbers.
//
// A need of 0 is admitted at once. A negative need panics.
func (l *Ledger) Request(id uint64, s Sender, need int64) (admitted bool, err *fault.Error) {
	panic("body follows")
}

// Next admits the next request that may go now and returns its id; its slots
// are the caller's until Return. Call it until ok is false after every Return,
// Remove and SetBlocked. SetBlocked may be called between two calls, and should
// be when an admission changes the count of lock-step slots.
func (l *Ledger) Next() (id uint64, ok bool) { panic("body follows") }

// Remove takes a waiting request away (cancel, deadline, sender lost). It
// reports false, and does nothing, for one that does not wait.
func (l *Ledger) Remove(id uint64) bool { panic("body follows") }

// Return gives n slots back to free: released, rolled back, surplus, or fenced.
// Returning more than is out panics.
func (l *Ledger) Return(n int64) { panic("body follows") }

// SetBlocked tells how many of the slots that are not free are quarantined, and
// how many lock-step: reserved for or granted to unfinished requests of legacy
// owners that have an unanswered first batch (F of design 4.2). Both replace
// what was said before.
func (l *Ledger) SetBlocked(quarantined, lockStep int64) { panic("body follows") }

// Free returns the slots that are neither promised nor in use.
func (l *Ledger) Free() int64 { panic("body follows") }

// Reach returns capacity - quarantined - lock-step: a request that needs more
// cannot be admitted before others change that.
func (l *Ledger) Reach() int64 { panic("body follows") }

// Waiting returns the number of requests that wait.
func (l *Ledger) Waiting() int { panic("body follows") }

// Reason is what a waiting request waits for.
type Reason uint8

const (
	Room       Reason = iota // its need is above free
	Turn                     // it would fit, but room is kept for the guard
	Quarantine               // blocked by quarantine: its need is above capacity - quarantined
	LockStep                 // blocked by lock-step senders: its need is above reach
)

// Why explains a waiting request.
type Why struct {
	For       Reason
	Need      int64
	Free      int64
	Earmarked bool  // freed room is kept for this one
	Overtaken int64 // chunks, at most Config.Bypass
}

// Why explains why the request waits; ok is false for one that does not wait.
func (l *Ledger) Why(id uint64) (w Why, ok bool) { panic("body follows") }

// Overtaken returns the chunks that have overtaken a waiting request, at most
// Config.Bypass, and 0 for one that does not wait.
func (l *Ledger) Overtaken(id uint64) int64 { panic("body follows") }

// Line is one sender's waiting requests.
type Line struct {
	Sender  Sender
	Waiting int
	Chunks  int64  // sum of their needs
	Oldest  uint64 // id of the oldest
}

// Lines iterates over the senders that have something waiting, in the order of
// their turns. The ledger must not be changed meanwhile.
func (l *Ledger) Lines(yield func(Line) bool) { panic("body follows") }

// Clone returns an independent copy.
func (l *Ledger) Clone() *Ledger { panic("body follows") }

// Encode appends a canonical form of the state to b: ledgers that will answer
// every sequence of calls alike are encoded alike, whatever their history. Ids
// and senders are written as the functions rename them, so that the caller can
// replace its counters by ranks; nil leaves them as they are.
func (l *Ledger) Encode(b []byte, id func(uint64) uint64, sender func(Sender) uint64) []byte {
	panic("body follows")
}

// Check verifies the numbered invariants of Ledger and returns the first that
// does not hold.
func (l *Ledger) Check() error { panic("body follows") }

// New returns a ledger with all slots free. It panics on a Config out of range.
func New(c Config) *Ledger { panic("body follows") }

// Ledger is the state.
type Ledger struct{}
