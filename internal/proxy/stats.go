package proxy

import (
	"maps"
	"sync"
	"time"

	"github.com/berthkv/berth/internal/fault"
)

// Stats is what the proxy has counted since it started, and what it is doing.
type Stats struct {
	InFlight    int
	Requests    map[Outcome]uint64 // ended requests
	Failures    map[Failure]uint64 // those that were not answered
	Whole       map[string]uint64  // sent whole to a decode engine, by the request's field that asked for it
	Recomputed  map[Failure]uint64 // prompts that a decode engine computed because a leg failed
	Now         map[Step]int       // requests in each step
	StepSeconds map[Step]Histogram // time that requests spent in each step
	TTFT        Histogram          // seconds from a request's arrival to its first token
	Nodes       []NodeStats
}

// Failure is where and why.
type Failure struct {
	Step Step
	Code fault.Code
}

// Histogram counts observations of seconds.
type Histogram struct {
	Counts [len(Bounds) + 1]uint64 // not cumulative; the last is above all bounds
	Sum    float64                 // seconds
	N      uint64
}

// Bounds are the upper bounds of a Histogram's buckets in seconds, inclusive.
var Bounds = [...]float64{0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 300}

func (h *Histogram) observe(d time.Duration) {
	s := d.Seconds()
	i := 0
	for i < len(Bounds) && s > Bounds[i] {
		i++
	}
	h.Counts[i]++
	h.Sum += s
	h.N++
}

// counters gather Stats.
type counters struct {
	mu struct {
		sync.Mutex
		requests   map[Outcome]uint64
		failures   map[Failure]uint64
		whole      map[string]uint64
		recomputed map[Failure]uint64
		seconds    map[Step]Histogram
		ttft       Histogram
	}
}

func newCounters() *counters {
	c := &counters{}
	c.mu.requests = map[Outcome]uint64{}
	c.mu.failures = map[Failure]uint64{}
	c.mu.whole = map[string]uint64{}
	c.mu.recomputed = map[Failure]uint64{}
	c.mu.seconds = map[Step]Histogram{}
	return c
}

// ended counts a request; f is nil if it was answered.
func (c *counters) ended(f *failure) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if f == nil {
		c.mu.requests[Answered]++
		return
	}
	c.mu.requests[f.outcome]++
	c.mu.failures[Failure{f.step, f.code()}]++
}

func (c *counters) whole(reason string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.whole[reason]++
}

func (c *counters) recomputed(step Step, code fault.Code) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.recomputed[Failure{step, code}]++
}

func (c *counters) step(step Step, d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	h := c.mu.seconds[step]
	h.observe(d)
	c.mu.seconds[step] = h
}

func (c *counters) firstToken(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.ttft.observe(d)
}

func (c *counters) fill(s *Stats) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s.Requests = maps.Clone(c.mu.requests)
	s.Failures = maps.Clone(c.mu.failures)
	s.Whole = maps.Clone(c.mu.whole)
	s.Recomputed = maps.Clone(c.mu.recomputed)
	s.StepSeconds = maps.Clone(c.mu.seconds)
	s.TTFT = c.mu.ttft
}
