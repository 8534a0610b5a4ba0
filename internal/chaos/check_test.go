package chaos

import (
	"slices"
	"strings"
	"testing"
)

// story builds a history: two attempts, each sent, claimed, read and released,
// that follow each other over the same slots.
func story() []Event {
	const s, d = "prefill-1/engine#1", "decode-tcp/engine#1"
	var h []Event
	for i := range 2 {
		a, o := uint64(i+1), uint64(10*i+1)
		req := []string{"first", "second"}[i]
		r := func(slot uint32, index int) Read {
			return Read{Slot: slot, Index: index, Key: chunkKey(a, index), Attempt: a, Of: index}
		}
		h = append(h,
			Event{Op: opBegin, Engine: s, Agent: "S", Order: o, Req: req, Attempt: a, Total: 2, Text: "decode-tcp"},
			Event{Op: opBegin, Ret: true, Engine: s, Agent: "S", Order: o, Req: req, Attempt: a},
			Event{Op: opStage, Engine: s, Agent: "S", Order: o, Req: req, Attempt: a, Slots: []uint32{4, 5}},
			Event{Op: opSubmit, Engine: s, Agent: "S", Order: o, Req: req, Attempt: a, Index: []int{0, 1}},
			Event{Op: opGive, Engine: s, Agent: "S", Order: o, Req: req, Attempt: a, Slots: []uint32{4, 5}},
			Event{Op: opEnded, Engine: s, Agent: "S", Order: o, Req: req, Attempt: a, Ending: "ready"},
			Event{Op: opWait, Ret: true, Engine: d, Agent: "D", Order: o, Req: req, Ending: "ready"},
			Event{Op: opClaim, Engine: d, Agent: "D", Order: o, Req: req},
			Event{Op: opClaim, Ret: true, Engine: d, Agent: "D", Order: o, Req: req, Slots: []uint32{7, 8}, Index: []int{0, 1}},
			Event{Op: opRead, Ret: true, Engine: d, Agent: "D", Order: o, Req: req, Reads: []Read{r(7, 0), r(8, 1)}},
			Event{Op: opRelease, Engine: d, Agent: "D", Order: o, Req: req},
			Event{Op: opRelease, Ret: true, Engine: d, Agent: "D", Order: o, Req: req})
	}
	for i := range h {
		h[i].T = int64(i + 1)
	}
	return h
}

// find returns the n-th event of that kind.
func find(t *testing.T, h []Event, n int, op string, ret bool) *Event {
	t.Helper()
	for i := range h {
		if h[i].Op == op && h[i].Ret == ret {
			if n == 0 {
				return &h[i]
			}
			n--
		}
	}
	t.Fatalf("no %s", op)
	return nil
}

// TestCheck: the checker takes a true history, and each lie is found by the rule
// that it breaks.
func TestCheck(t *testing.T) {
	for _, row := range []struct {
		name string
		lie  func(t *testing.T, h []Event) []Event
		rule string // "": the history is still possible
	}{
		{"true", func(_ *testing.T, h []Event) []Event { return h }, ""},
		{"torn bytes", func(t *testing.T, h []Event) []Event {
			find(t, h, 1, opRead, true).Reads[1].Err = "byte 512 and those after it are not of attempt 2"
			return h
		}, "H1"},
		{"another chunk of the same prompt", func(t *testing.T, h []Event) []Event {
			find(t, h, 0, opRead, true).Reads[1] = Read{Slot: 8, Index: 1, Key: chunkKey(1, 1), Attempt: 1, Of: 0}
			return h
		}, "H1"},
		{"the bytes of the generation before", func(t *testing.T, h []Event) []Event {
			for i := range 2 {
				find(t, h, 1, opRead, true).Reads[i] = Read{Slot: uint32(7 + i), Index: i, Key: chunkKey(1, i), Attempt: 1, Of: i}
			}
			return h
		}, "H2"},
		{"another receiver's bytes", func(t *testing.T, h []Event) []Event {
			find(t, h, 0, opBegin, false).Text = "decode-shm"
			return h
		}, "H2"},
		{"read before submitted", func(t *testing.T, h []Event) []Event {
			find(t, h, 0, opRead, true).T = 2
			return h
		}, "H3"},
		{"a mixed claim", func(t *testing.T, h []Event) []Event {
			find(t, h, 0, opBegin, false).Req, find(t, h, 1, opBegin, false).Req = "second", "second"
			find(t, h, 1, opRead, true).Reads[0] = Read{Slot: 7, Index: 0, Key: chunkKey(1, 0), Attempt: 1, Of: 0}
			return h
		}, "H4"},
		{"half a claim", func(t *testing.T, h []Event) []Event {
			e := find(t, h, 0, opClaim, true)
			e.Slots, e.Index = e.Slots[:1], e.Index[:1]
			return h
		}, "H4"},
		{"a slot of two readers", func(t *testing.T, h []Event) []Event {
			find(t, h, 1, opClaim, true).T = find(t, h, 0, opRelease, false).T - 1
			find(t, h, 1, opClaim, false).T = 1
			return h
		}, "H5"},
		{"one reader of the two is dead", func(t *testing.T, h []Event) []Event {
			e := find(t, h, 1, opClaim, true)
			e.T = find(t, h, 0, opRelease, false).T - 1
			for i := range h {
				if h[i].Order == 1 && strings.HasPrefix(h[i].Engine, "decode") {
					h[i].Engine = "decode-tcp/engine#0"
				}
			}
			return append(h, Event{T: e.T - 1, Op: opDied, Engine: "decode-tcp/engine#0"})
		}, ""},
		{"a staging slot of two orders", func(t *testing.T, h []Event) []Event {
			find(t, h, 1, opStage, false).T = find(t, h, 0, opGive, false).T - 1
			return h
		}, "H5"},
		{"claimed after release", func(t *testing.T, h []Event) []Event {
			find(t, h, 0, opBegin, false).Req = "second"
			for i := range 2 {
				find(t, h, 1, opRead, true).Reads[i] = Read{Slot: uint32(7 + i), Index: i, Key: chunkKey(1, i), Attempt: 1, Of: i}
			}
			find(t, h, 0, opRead, true).Req = "second"
			return h
		}, "H6"},
		{"ready before all is submitted", func(t *testing.T, h []Event) []Event {
			find(t, h, 0, opSubmit, false).Index = []int{0}
			return h
		}, "H7"},
		{"failed for one, ready for the other", func(t *testing.T, h []Event) []Event {
			e := find(t, h, 0, opEnded, false)
			e.Ending, e.Reason = "cancelled", "cancelled"
			return h
		}, "H7"},
		{"ready for one, failed for the other", func(t *testing.T, h []Event) []Event {
			e := find(t, h, 0, opWait, true)
			e.Ending, e.Reason = "failed", "deadline"
			return h
		}, "H7"},
		{"the sender lost its peer, which was ready", func(t *testing.T, h []Event) []Event {
			e := find(t, h, 0, opEnded, false)
			e.Ending, e.Reason = "failed", "peer_lost"
			return h
		}, ""},
		{"no ending", func(t *testing.T, h []Event) []Event {
			find(t, h, 0, opEnded, false).Op = "nothing"
			return h
		}, "H8"},
		{"no ending of a killed engine's", func(t *testing.T, h []Event) []Event {
			find(t, h, 0, opEnded, false).Op = opDied
			return h[:12]
		}, ""},
		{"two endings", func(t *testing.T, h []Event) []Event {
			return append(h, *find(t, h, 0, opEnded, false))
		}, "H8"},
	} {
		t.Run(row.name, func(t *testing.T) {
			got := check(row.lie(t, story()))
			switch {
			case row.rule == "" && len(got) > 0:
				t.Errorf("found %q", got)
			case row.rule != "" && !slices.ContainsFunc(got, func(f string) bool { return strings.HasPrefix(f, row.rule+":") }):
				t.Errorf("found %q, want one of %s", got, row.rule)
			}
		})
	}
}

// TestContent: any word of another tag is found.
func TestContent(t *testing.T) {
	b, other := make([]byte, slotBytes), make([]byte, slotBytes)
	mine := tag{attempt: 7, index: 3, length: slotBytes, prompt: 9}
	fill(b, mine)
	if got, err := verify(b); got != mine || err != nil {
		t.Fatalf("%+v: %v", got, err)
	}
	for _, o := range []tag{{8, 3, slotBytes, 9}, {7, 2, slotBytes, 9}, {7, 3, slotBytes, 8}} {
		fill(other, o)
		for at := 0; at < slotBytes; at += 512 {
			mixed := slices.Clone(b)
			copy(mixed[at:], other[at:])
			if got, err := verify(mixed); err == nil && got == mine {
				t.Fatalf("the bytes of %+v from %d on are taken for those of %+v", o, at, mine)
			}
		}
	}
	if _, err := verify(b[:slotBytes-tokenBytes]); err == nil {
		t.Error("a shorter chunk is taken for a whole one")
	}
}

// TestGrowth: a leak is told from what goes up and down.
func TestGrowth(t *testing.T) {
	s := newSeries()
	for i := range 60 {
		at := timeOf(i)
		s.add("flat", at, footprint{RSS: 50<<20 + int64(i%7)<<20, FDs: 30 + i%3, Goroutines: 60 + i%5})
		s.add("memory", at, footprint{RSS: 50<<20 + int64(i)<<19, FDs: 30, Goroutines: 60})
		s.add("descriptors", at, footprint{RSS: 50 << 20, FDs: 30 + i/2, Goroutines: 60})
		s.add("goroutines", at, footprint{RSS: 50 << 20, FDs: 30, Goroutines: 60 + i})
	}
	for _, g := range s.growth() {
		if g.Grows != (g.Process != "flat") {
			t.Errorf("%s: %s", g.Process, g)
		}
	}
	if g := s.growth()[2]; g.Process != "goroutines" || g.Goroutines < 3599 || g.Goroutines > 3601 {
		t.Errorf("%+v: one more each second is 3600 an hour", g)
	}
}
