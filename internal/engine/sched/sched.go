// Package sched decides what the demo engine computes next. It is pure: the
// engine tells it what happened and does what it says.
//
// A request goes waiting -> started -> running -> gone. Waiting requests hold
// nothing. A started one has the room for its KV memory, and nothing else: it
// may be waiting for its transfer to be granted, or for arrived KV to be
// copied. Only running ones are computed, in turn, a quantum of tokens each.
//
// The rule that matters: a running request never waits for a started or a
// waiting one. Each step spends its whole budget on what is running, and a
// request that was started has its room already, so that nothing stands between
// a granted prompt and its turn.
package sched

import (
	"errors"
	"fmt"
)

// ID names a request for the life of the engine.
type ID uint64

// Local is the class of requests that are not sent anywhere. Every other class
// is one receiver.
const Local = ""

// Config holds the limits; all are at least 1.
type Config struct {
	Budget  int // tokens computed in a step
	Quantum int // tokens that one request gets before the next has its turn
	Seats   int // local requests that are started or running at once
	Begun   int // prompts for one receiver that are started or running at once
	Sending int // such prompts for all receivers together
	Queue   int // waiting requests
}

// Validate reports the first limit below 1, by name.
func (c Config) Validate() error {
	for _, f := range []struct {
		name string
		v    int
	}{{"budget", c.Budget}, {"quantum", c.Quantum}, {"seats", c.Seats}, {"begun", c.Begun}, {"sending", c.Sending}, {"queue", c.Queue}} {
		if f.v < 1 {
			return fmt.Errorf("%s is %d, must be at least 1", f.name, f.v)
		}
	}
	return nil
}

// ErrFull is Add's refusal at Config.Queue waiting requests.
var ErrFull = errors.New("the queue of waiting requests is full")

type state int

const (
	waiting state = iota
	started
	running
)

type entry struct {
	id    ID
	class string
	state state
	left  int // tokens known and not yet computed; 0 unless running
}

// Scheduler holds the requests of an engine. It is not safe for concurrent
// use.
//
// Invariants (checked by check):
//  1. a class has at most Begun started and running entries, Local at most
//     Seats, all classes but Local together at most Sending;
//  2. the queue holds exactly the waiting entries, at most Queue;
//  3. the ring holds exactly the running entries, and the cursor is inside it;
//  4. left is 0 unless running.
type Scheduler struct {
	cfg     Config
	entries map[ID]*entry
	queue   []*entry       // waiting, by arrival
	ring    []*entry       // running
	cursor  int            // whose turn it is in the ring
	taken   map[string]int // started and running, by class
}

// New returns an empty scheduler. The config must be valid.
func New(c Config) *Scheduler {
	return &Scheduler{cfg: c, entries: map[ID]*entry{}, taken: map[string]int{}}
}

// Add queues a new request of a class. It errs with ErrFull.
func (s *Scheduler) Add(id ID, class string) error {
	if len(s.queue) >= s.cfg.Queue {
		return ErrFull
	}
	if s.entries[id] != nil {
		panic(fmt.Sprintf("sched: request %d added twice", id))
	}
	e := &entry{id: id, class: class}
	s.entries[id] = e
	s.queue = append(s.queue, e)
	return nil
}

// Start returns the waiting requests that may start now, by arrival. A request
// whose class is full is passed by those of other classes.
func (s *Scheduler) Start() []ID {
	var ids []ID
	rest := s.queue[:0]
	for _, e := range s.queue {
		if !s.room(e.class) {
			rest = append(rest, e)
			continue
		}
		s.taken[e.class]++
		e.state = started
		ids = append(ids, e.id)
	}
	clear(s.queue[len(rest):])
	s.queue = rest
	return ids
}

func (s *Scheduler) room(class string) bool {
	if class == Local {
		return s.taken[Local] < s.cfg.Seats
	}
	return s.taken[class] < s.cfg.Begun && s.sending() < s.cfg.Sending
}

func (s *Scheduler) sending() (n int) {
	for class, taken := range s.taken {
		if class != Local {
			n += taken
		}
	}
	return n
}

// Run lets a started request be computed: it has `tokens` tokens to compute.
// Of one that is gone it does nothing.
func (s *Scheduler) Run(id ID, tokens int) {
	e := s.entries[id]
	if e == nil {
		return
	}
	if e.state != started || tokens < 1 {
		panic(fmt.Sprintf("sched: request %d run with %d tokens in state %d", id, tokens, e.state))
	}
	e.state, e.left = running, tokens
	s.ring = append(s.ring, e)
}

// More gives a running request one more token to compute. Of one that is gone
// it does nothing.
func (s *Scheduler) More(id ID) {
	if e := s.entries[id]; e != nil && e.state == running {
		e.left++
	}
}

// Remove forgets a request, in any state; the room it had is free at once. Of
// one that is gone it does nothing.
func (s *Scheduler) Remove(id ID) {
	e := s.entries[id]
	if e == nil {
		return
	}
	delete(s.entries, id)
	if e.state == waiting {
		s.queue = without(s.queue, e)
		return
	}
	if s.taken[e.class]--; s.taken[e.class] == 0 {
		delete(s.taken, e.class)
	}
	if e.state == running {
		for i, r := range s.ring {
			if r == e && i < s.cursor {
				s.cursor--
			}
		}
		s.ring = without(s.ring, e)
		if s.cursor >= len(s.ring) {
			s.cursor = 0
		}
	}
}

func without(list []*entry, e *entry) []*entry {
	for i, x := range list {
		if x == e {
			copy(list[i:], list[i+1:])
			list[len(list)-1] = nil
			return list[:len(list)-1]
		}
	}
	return list
}

// Work is a request's share of a step.
type Work struct {
	ID     ID
	Tokens int // at least 1
}

// Step plans the next step and counts its tokens as computed: quantum by
// quantum around the ring, beginning where the last step ended, until the
// budget is spent or nothing is left.
func (s *Scheduler) Step() []Work {
	n := len(s.ring)
	share := make([]int, n)
	budget := s.cfg.Budget
	for idle := 0; budget > 0 && idle < n; {
		e := s.ring[s.cursor]
		take := min(s.cfg.Quantum, e.left, budget)
		if take == 0 {
			idle++
		} else {
			idle = 0
		}
		e.left -= take
		budget -= take
		share[s.cursor] += take
		s.cursor = (s.cursor + 1) % n
	}
	var work []Work
	for i, tokens := range share {
		if tokens > 0 {
			work = append(work, Work{s.ring[i].id, tokens})
		}
	}
	return work
}

// Waiting returns the number of requests that are not started.
func (s *Scheduler) Waiting() int { return len(s.queue) }

// Started returns the number of requests that are started or running.
func (s *Scheduler) Started() int { return len(s.entries) - len(s.queue) }

// check panics when an invariant does not hold.
func (s *Scheduler) check() {
	taken := map[string]int{}
	counts := [3]int{}
	for _, e := range s.entries {
		counts[e.state]++
		if e.state != waiting {
			taken[e.class]++
		}
		if e.left < 0 || e.left > 0 && e.state != running {
			panic(fmt.Sprintf("sched: request %d has %d tokens left in state %d", e.id, e.left, e.state))
		}
	}
	sending := 0
	for class, n := range taken {
		limit := s.cfg.Begun
		if class == Local {
			limit = s.cfg.Seats
		} else {
			sending += n
		}
		if n > limit || n != s.taken[class] {
			panic(fmt.Sprintf("sched: class %q has %d, counted %d, limit %d", class, n, s.taken[class], limit))
		}
	}
	if len(taken) != len(s.taken) || sending > s.cfg.Sending {
		panic(fmt.Sprintf("sched: taken is %v, should be %v", s.taken, taken))
	}
	if counts[waiting] != len(s.queue) || len(s.queue) > s.cfg.Queue || counts[running] != len(s.ring) {
		panic(fmt.Sprintf("sched: %v entries, queue %d, ring %d", counts, len(s.queue), len(s.ring)))
	}
	if s.cursor < 0 || s.cursor >= max(len(s.ring), 1) {
		panic(fmt.Sprintf("sched: cursor %d of %d", s.cursor, len(s.ring)))
	}
}
