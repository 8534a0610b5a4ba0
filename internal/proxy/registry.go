package proxy

import (
	"cmp"
	"fmt"
	"slices"
	"sync"
	"time"
)

// entry is one request in flight. Its fields are guarded by the registry's mu.
type entry struct {
	seq       uint64
	requestID string // the client's X-Request-Id
	reqID     string // of the attempt, "" before
	kind      string
	step      Step
	since     time.Time // of the step
	begun     time.Time
	prefill   string
	decode    string
}

// registry knows the requests in flight, at most max.
type registry struct {
	max  int
	idle chan struct{} // closed once the registry is closed and empty

	mu struct {
		sync.Mutex
		seq     uint64
		entries map[*entry]struct{}
		steps   map[Step]int
		closed  bool
	}
}

func newRegistry(max int) *registry {
	r := &registry{max: max, idle: make(chan struct{})}
	r.mu.entries = map[*entry]struct{}{}
	r.mu.steps = map[Step]int{}
	return r
}

// enter admits a request. The error says that there are max already, or that the
// proxy is shutting down.
func (r *registry) enter(requestID, kind string, now time.Time) (*entry, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.closed {
		return nil, errShuttingDown
	}
	if len(r.mu.entries) >= r.max {
		return nil, fmt.Errorf("%d requests are in flight, which is the limit", r.max)
	}
	r.mu.seq++
	e := &entry{seq: r.mu.seq, requestID: requestID, kind: kind, step: StepRead, since: now, begun: now}
	r.mu.entries[e] = struct{}{}
	r.mu.steps[StepRead]++
	return e, nil
}

// close lets nothing new in. A second call is harmless.
func (r *registry) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.mu.closed {
		r.mu.closed = true
		r.closeIfIdleLocked()
	}
}

func (r *registry) closeIfIdleLocked() {
	if r.mu.closed && len(r.mu.entries) == 0 {
		close(r.idle)
	}
}

// at moves a request to a step; what it leaves is counted.
func (r *registry) at(e *entry, step Step, now time.Time, c *counters) {
	r.mu.Lock()
	left, took := e.step, now.Sub(e.since)
	r.mu.steps[left]--
	r.mu.steps[step]++
	e.step, e.since = step, now
	r.mu.Unlock()
	c.step(left, took)
}

// leave ends a request.
func (r *registry) leave(e *entry, now time.Time, c *counters) {
	r.mu.Lock()
	took := now.Sub(e.since)
	r.mu.steps[e.step]--
	delete(r.mu.entries, e)
	r.closeIfIdleLocked()
	r.mu.Unlock()
	c.step(e.step, took)
}

func (r *registry) attempt(e *entry, reqID string) {
	r.mu.Lock()
	e.reqID = reqID
	r.mu.Unlock()
}

func (r *registry) node(e *entry, n *node) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n.role == rolePrefill {
		e.prefill = n.name
	} else {
		e.decode = n.name
	}
}

func (r *registry) step(e *entry) Step {
	r.mu.Lock()
	defer r.mu.Unlock()
	return e.step
}

// attrs are what a log line about the request says.
func (r *registry) attrs(e *entry) []any {
	r.mu.Lock()
	defer r.mu.Unlock()
	return []any{"request_id", e.requestID, "req_id", e.reqID, "prefill", e.prefill, "decode", e.decode}
}

// RequestStatus is one request in flight.
type RequestStatus struct {
	ID        string  `json:"id"`         // of the attempt, "" before its transfer is watched
	RequestID string  `json:"request_id"` // the client's X-Request-Id
	Endpoint  string  `json:"endpoint"`
	State     Step    `json:"state"`
	Prefill   string  `json:"prefill,omitempty"`
	Decode    string  `json:"decode,omitempty"`
	Age       float64 `json:"age_seconds"`
	StepAge   float64 `json:"state_seconds"`
}

// list returns the requests in flight, oldest first, and how many are in each
// step.
func (r *registry) list(now time.Time) (list []RequestStatus, steps map[Step]int) {
	r.mu.Lock()
	entries := make([]entry, 0, len(r.mu.entries))
	for e := range r.mu.entries {
		entries = append(entries, *e)
	}
	steps = make(map[Step]int, len(Steps))
	for _, s := range Steps {
		steps[s] = r.mu.steps[s]
	}
	r.mu.Unlock()
	slices.SortFunc(entries, func(a, b entry) int { return cmp.Compare(a.seq, b.seq) })
	list = make([]RequestStatus, len(entries))
	for i, e := range entries {
		list[i] = RequestStatus{e.reqID, e.requestID, e.kind, e.step, e.prefill, e.decode,
			now.Sub(e.begun).Seconds(), now.Sub(e.since).Seconds()}
	}
	return list, steps
}
