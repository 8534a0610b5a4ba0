package node

import (
	"maps"
	"sync"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// Stats counts what the shell has carried out. Package metrics turns a
// Snapshot into Prometheus' form; docs/metrics.md is the contract.
type Stats struct {
	mu struct {
		sync.Mutex
		s Snapshot
		// For the quantiles in /v1/status, in microseconds up to an hour.
		admission, transfer *hdrhistogram.Histogram
	}
}

// Timing is quantiles of seconds since the start of the process.
type Timing struct {
	Count int64   `json:"count"`
	P50   float64 `json:"p50_seconds"`
	P99   float64 `json:"p99_seconds"`
}

func newTiming() *hdrhistogram.Histogram { return hdrhistogram.New(1, 3_600_000_000, 2) }

func timing(h *hdrhistogram.Histogram) Timing {
	return Timing{h.TotalCount(), float64(h.ValueAtQuantile(50)) / 1e6, float64(h.ValueAtQuantile(99)) / 1e6}
}

// timed adds a value to a timing; beyond an hour counts as an hour.
func timed(h *hdrhistogram.Histogram, seconds float64) {
	h.RecordValue(min(max(int64(seconds*1e6), 1), h.HighestTrackableValue()))
}

// Snapshot is a copy of the counters. Maps are keyed by the label values that
// the comment names.
type Snapshot struct {
	Admissions map[string]uint64 // result: admitted, waited, or the refusal's code
	Endings    map[Label]uint64  // side, ending, reason
	Events     map[Label]uint64  // side, kind: leases, violations, quarantine ...
	Slots      map[Label]uint64  // side, kind: slots concerned by those events
	Bytes      map[Label]uint64  // side, link: bytes of requests that became ready
	Late       map[string]uint64 // link: frames for slots that were not open
	Messages   map[string]uint64 // direction: in, out
	MsgBytes   map[string]uint64 // direction
	Suppressed map[string]uint64 // kind: log lines left out by the rate limit
	NotifyFail uint64
	Ready      uint64 // requests received whole
	Chunks     uint64 // of them
	ReadyBytes uint64
	Steps      uint64 // events stepped
	Batches    uint64 // times the loop woke to events

	Admission map[string]*Histogram // side: seconds from first arrival to admission
	Transfer  map[string]*Histogram // link: seconds from admission to ready
}

// Label is up to three label values.
type Label [3]string

// Histogram has cumulative-free buckets: Counts[i] is of values ≤ Bounds[i],
// the last one of all above.
type Histogram struct {
	Counts []uint64
	Sum    float64
}

// Bounds are the upper bounds in seconds of every Histogram here.
var Bounds = []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300}

func (h *Histogram) observe(v float64) {
	i := 0
	for i < len(Bounds) && v > Bounds[i] {
		i++
	}
	h.Counts[i]++
	h.Sum += v
}

// NewStats returns counters at zero.
func NewStats() *Stats {
	s := &Stats{}
	s.mu.s = Snapshot{
		Admissions: map[string]uint64{}, Endings: map[Label]uint64{}, Events: map[Label]uint64{}, Slots: map[Label]uint64{},
		Bytes: map[Label]uint64{}, Late: map[string]uint64{}, Messages: map[string]uint64{}, MsgBytes: map[string]uint64{},
		Suppressed: map[string]uint64{}, Admission: map[string]*Histogram{}, Transfer: map[string]*Histogram{},
	}
	s.mu.admission, s.mu.transfer = newTiming(), newTiming()
	return s
}

// with runs f on the counters.
func (s *Stats) with(f func(*Snapshot)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(&s.mu.s)
}

// observe adds a value to the histogram of that label.
func observe(m map[string]*Histogram, label string, v float64) {
	h := m[label]
	if h == nil {
		h = &Histogram{Counts: make([]uint64, len(Bounds)+1)}
		m[label] = h
	}
	h.observe(v)
}

func (s *Stats) received(bytes int) { s.message("in", bytes) }
func (s *Stats) sent(bytes int)     { s.message("out", bytes) }

func (s *Stats) message(direction string, bytes int) {
	s.with(func(c *Snapshot) {
		c.Messages[direction]++
		c.MsgBytes[direction] += uint64(bytes)
	})
}

// admitted and transferred time a request at the receiver: from its first
// arrival to admission, from admission to ready.
func (s *Stats) admitted(seconds float64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	observe(s.mu.s.Admission, "receive", seconds)
	timed(s.mu.admission, seconds)
}

func (s *Stats) transferred(chunks, bytes int64, seconds float64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.s.Ready++
	s.mu.s.Chunks += uint64(chunks)
	s.mu.s.ReadyBytes += uint64(bytes)
	timed(s.mu.transfer, seconds)
}

// summary returns what /v1/status shows of them.
func (s *Stats) summary() (Totals, Timings) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return Totals{int64(s.mu.s.Ready), int64(s.mu.s.Chunks), int64(s.mu.s.ReadyBytes)}, Timings{timing(s.mu.admission), timing(s.mu.transfer)}
}

func (s *Stats) late(link string) { s.with(func(c *Snapshot) { c.Late[link]++ }) }
func (s *Stats) notifyFailed()    { s.with(func(c *Snapshot) { c.NotifyFail++ }) }
func (s *Stats) batch(events int) {
	s.with(func(c *Snapshot) { c.Batches++; c.Steps += uint64(events) })
}

// Snapshot copies the counters.
func (s *Stats) Snapshot() Snapshot {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.mu.s
	c.Admissions, c.Endings, c.Events, c.Slots = maps.Clone(c.Admissions), maps.Clone(c.Endings), maps.Clone(c.Events), maps.Clone(c.Slots)
	c.Bytes, c.Late, c.Messages, c.MsgBytes = maps.Clone(c.Bytes), maps.Clone(c.Late), maps.Clone(c.Messages), maps.Clone(c.MsgBytes)
	c.Suppressed = maps.Clone(c.Suppressed)
	c.Admission, c.Transfer = cloneHistograms(c.Admission), cloneHistograms(c.Transfer)
	return c
}

func cloneHistograms(m map[string]*Histogram) map[string]*Histogram {
	out := make(map[string]*Histogram, len(m))
	for k, h := range m {
		out[k] = &Histogram{Counts: append([]uint64(nil), h.Counts...), Sum: h.Sum}
	}
	return out
}

// Stats returns the node's counters.
func (n *Node) Stats() *Stats { return n.stats }
