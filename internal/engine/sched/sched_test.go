package sched

import (
	"errors"
	"fmt"
	"math/rand"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
)

// Scenario scripts: one command a line, its answer, and the state after it.
func TestScenarios(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		var s *Scheduler
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			arg := func(key string, absent int) int {
				for _, a := range d.CmdArgs {
					if a.Key == key {
						n, err := strconv.Atoi(a.Vals[0])
						if err != nil {
							d.Fatalf(t, "%s: %v", key, err)
						}
						return n
					}
				}
				return absent
			}
			id := ID(arg("id", 0))
			out := ""
			switch d.Cmd {
			case "new":
				s = New(Config{Budget: arg("budget", 100), Quantum: arg("quantum", 16), Seats: arg("seats", 10),
					Begun: arg("begun", 2), Sending: arg("sending", 10), Queue: arg("queue", 10)})
			case "add":
				class := Local
				for _, a := range d.CmdArgs {
					if a.Key == "to" {
						class = a.Vals[0]
					}
				}
				if err := s.Add(id, class); err != nil {
					out = err.Error() + "\n"
				}
			case "start":
				out = fmt.Sprintf("start %v\n", s.Start())
			case "run":
				s.Run(id, arg("tokens", 1))
			case "more":
				s.More(id)
			case "remove":
				s.Remove(id)
			case "step":
				var b strings.Builder
				for _, w := range s.Step() {
					fmt.Fprintf(&b, "compute %d: %d tokens\n", w.ID, w.Tokens)
				}
				out = b.String()
			default:
				d.Fatalf(t, "unknown command %q", d.Cmd)
			}
			s.check()
			return out + fmt.Sprintf("waiting %d, started %d, running %d\n", s.Waiting(), s.Started(), len(s.ring))
		})
	})
}

// Random histories: the invariants hold after each event; a runnable request is
// never overlooked while budget is left; and it is served within the number of
// steps that a fair turn allows, whatever is waiting or started meanwhile.
func TestRandomHistories(t *testing.T) {
	for seed := range int64(300) {
		rng := rand.New(rand.NewSource(seed))
		cfg := Config{Budget: 1 + rng.Intn(40), Quantum: 1 + rng.Intn(20), Seats: 1 + rng.Intn(4),
			Begun: 1 + rng.Intn(3), Sending: 1 + rng.Intn(5), Queue: 1 + rng.Intn(10)}
		s := New(cfg)
		var all []ID
		hungry := map[ID]int{} // steps since a runnable request was served last
		next := ID(1)
		for range 300 {
			switch rng.Intn(7) {
			case 0, 1:
				full := s.Waiting() >= cfg.Queue
				err := s.Add(next, []string{Local, "a", "b", "c"}[rng.Intn(4)])
				if full != errors.Is(err, ErrFull) {
					t.Fatalf("seed %d: %d of %d waiting, Add says %v", seed, s.Waiting(), cfg.Queue, err)
				}
				if err == nil {
					all = append(all, next)
				}
				next++
			case 2:
				s.Start()
				for _, e := range s.queue {
					if s.room(e.class) {
						t.Fatalf("seed %d: request %d was not started", seed, e.id)
					}
				}
			case 3:
				for id, e := range s.entries {
					if e.state == started && rng.Intn(2) == 0 {
						s.Run(id, 1+rng.Intn(50))
					}
				}
			case 4:
				for id, e := range s.entries {
					if e.state == running && e.left == 0 {
						s.More(id)
					}
				}
			case 5:
				if len(all) > 0 {
					i := rng.Intn(len(all))
					s.Remove(all[i])
					delete(hungry, all[i])
					all = slices.Delete(all, i, i+1)
				}
			case 6:
				runnable := map[ID]int{}
				total := 0
				for _, e := range s.ring {
					if e.left > 0 {
						runnable[e.id] = e.left
						total += e.left
					}
				}
				spent := 0
				for _, w := range s.Step() {
					if w.Tokens < 1 || w.Tokens > runnable[w.ID] {
						t.Fatalf("seed %d: %d tokens of %d for request %d", seed, w.Tokens, runnable[w.ID], w.ID)
					}
					spent += w.Tokens
					delete(runnable, w.ID)
					delete(hungry, w.ID)
				}
				if spent != min(cfg.Budget, total) {
					t.Fatalf("seed %d: spent %d of budget %d with %d tokens to compute", seed, spent, cfg.Budget, total)
				}
				for id := range runnable {
					if hungry[id]++; hungry[id] > len(s.ring)*(cfg.Quantum/cfg.Budget+2) {
						t.Fatalf("seed %d: request %d was passed over for %d steps", seed, id, hungry[id])
					}
				}
			}
			s.check()
		}
	}
}

func TestValidate(t *testing.T) {
	ok := Config{1, 1, 1, 1, 1, 1}
	if err := ok.Validate(); err != nil {
		t.Error(err)
	}
	for _, name := range []string{"budget", "quantum", "seats", "begun", "sending", "queue"} {
		c := ok
		*map[string]*int{"budget": &c.Budget, "quantum": &c.Quantum, "seats": &c.Seats, "begun": &c.Begun, "sending": &c.Sending, "queue": &c.Queue}[name] = 0
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A caller that breaks the order of calls is told at once.
func TestMisusePanics(t *testing.T) {
	for name, f := range map[string]func(s *Scheduler){
		"add twice":         func(s *Scheduler) { _ = s.Add(1, Local) },
		"run while waiting": func(s *Scheduler) { s.Run(1, 1) },
		"run with nothing":  func(s *Scheduler) { s.Start(); s.Run(1, 0) },
		"run twice":         func(s *Scheduler) { s.Start(); s.Run(1, 1); s.Run(1, 1) },
	} {
		t.Run(name, func(t *testing.T) {
			s := New(Config{1, 1, 1, 1, 1, 1000})
			if err := s.Add(1, Local); err != nil {
				t.Fatal(err)
			}
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			f(s)
		})
	}
}
