package intake

import (
	"fmt"
	"strings"
	"testing"
)

// TestRandomHistories runs short histories of everything that may happen, and
// asks the observer: among other things that each request has one ending in
// whatever order cancels, deadlines and completions come (r14, r52, r105). A
// failure names the seed and tells the story.
func TestRandomHistories(t *testing.T) {
	const histories, parts = 50_000, 4
	for part := range uint64(parts) {
		t.Run(fmt.Sprint("part=", part), func(t *testing.T) {
			for i := range uint64(histories / parts) {
				run := func(tell bool) (string, error) {
					seed := i*parts + part
					h := newHistory(newSeeded(seed), seed%8 < 4)
					h.check, h.tracing = i%16 == 0 || tell, tell
					err := h.run(12 + int(i%3)*10)
					return fmt.Sprintf("seed %d:\n%s", seed, strings.Join(h.trace, "\n")), err
				}
				if _, err := run(false); err != nil {
					story, again := run(true)
					t.Fatalf("%v\n(with checks: %v)\n%s", err, again, story)
				}
			}
		})
	}
}

// FuzzSteps lets a fuzzer choose the history.
func FuzzSteps(f *testing.F) {
	f.Add([]byte("a berth is booked before the ship enters the harbour"))
	f.Add([]byte{0, 0, 10, 0, 2, 0, 9, 0, 0, 20, 3, 5, 0, 1, 30, 200, 60, 17, 40, 41, 42, 43})
	for seed := range uint64(20) {
		s, b := newSeeded(seed), make([]byte, 400)
		for i := range b {
			b[i] = byte(s.pick(256))
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		h := newHistory(&fuzzed{b}, len(b)%2 == 0)
		h.check = true
		if err := h.run(min(len(b)/4, 200)); err != nil {
			t.Fatal(err)
		}
	})
}
