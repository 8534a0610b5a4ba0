package chaos

import (
	"encoding/json"
	"io"
	"sync"

	"golang.org/x/sys/unix"
)

// Event is one line of a history: an engine says what it asks its agent before
// it asks, and what it was told after it was told. So the true moment lies
// between a call and its return, and what a killed engine had asked is known.
type Event struct {
	T       int64    `json:"t"` // CLOCK_MONOTONIC, ns: one clock for all processes of a machine
	Op      string   `json:"op"`
	Ret     bool     `json:"ret,omitempty"` // the return of a call
	Engine  string   `json:"engine"`        // one process: its name and how often it was started
	Agent   string   `json:"agent,omitempty"`
	Order   uint64   `json:"order,omitempty"` // of the same engine: what belongs together
	Req     string   `json:"req,omitempty"`
	Attempt uint64   `json:"attempt,omitempty"`
	Total   int      `json:"total,omitempty"`
	Slots   []uint32 `json:"slots,omitempty"`
	Index   []int    `json:"index,omitempty"` // of the chunks in Slots
	Reads   []Read   `json:"reads,omitempty"`
	Ending  string   `json:"ending,omitempty"`
	Reason  string   `json:"reason,omitempty"`
	Text    string   `json:"text,omitempty"`
	Lost    bool     `json:"lost,omitempty"` // the connection to the agent was gone by then
}

// Read is what an engine found in a slot that it had claimed.
type Read struct {
	Slot    uint32 `json:"slot"`
	Index   int    `json:"index"`   // the claim's
	Key     string `json:"key"`     // the claim's
	Attempt uint64 `json:"attempt"` // the bytes'
	Of      int    `json:"of"`      // the bytes' index
	Err     string `json:"err,omitempty"`
}

// The operations of a history. Those of a sender name an attempt.
const (
	opBegin   = "begin"   // call, return
	opGranted = "granted" // event
	opStage   = "stage"   // return: the engine has these slots
	opGive    = "give"    // call: submit or unstage, the engine has them no more
	opSubmit  = "submit"  // call: these chunks may be seen from now on
	opEnded   = "ended"   // event: the sender heard the ending
	opWait    = "wait"    // return: the receiver's engine heard the ending
	opClaim   = "claim"   // call, return
	opRead    = "read"    // return
	opRelease = "release" // call, return
	opDone    = "done"    // return: the order is carried out
	opDied    = "died"    // of an engine, before it was killed
)

func clock() int64 {
	var ts unix.Timespec
	unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // cannot fail for this clock
	return ts.Nano()
}

// recorder writes events as lines, each in one write.
type recorder struct {
	mu sync.Mutex
	w  io.Writer
}

func (r *recorder) add(e Event) {
	e.T = clock()
	r.write(e)
}

func (r *recorder) write(e Event) {
	b, err := json.Marshal(e)
	if err != nil {
		panic(err) // an Event has nothing that JSON cannot say
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.w.Write(append(b, '\n')) // without a reader the process is about to be killed
}
