package intake

import (
	"strings"
	"testing"
)

// TestRandomHistories runs short histories of everything that may happen, and
// asks the observer. A failure names the seed.
func TestRandomHistories(t *testing.T) {
	n := uint64(20000)
	for seed := range n {
		if err := newObserver(newSeeded(seed), seed%2 == 0).run(60); err != nil {
			o := newObserver(newSeeded(seed), seed%2 == 0)
			o.tracing = true
			t.Fatalf("seed %d: %v\n%v\n%s", seed, err, o.run(60), strings.Join(o.trace[max(len(o.trace)-400, 0):], "\n"))
		}
	}
}

// FuzzSteps lets a fuzzer choose the history.
func FuzzSteps(f *testing.F) {
	f.Add([]byte("a berth is booked before the ship enters the harbour"))
	f.Add([]byte{0, 0, 10, 0, 2, 0, 9, 0, 0, 20, 3, 5, 0, 1, 30, 200, 60, 17, 40, 41, 42, 43})
	f.Fuzz(func(t *testing.T, b []byte) {
		o := newObserver(&fuzzed{b}, len(b)%2 == 0)
		if err := o.run(min(len(b)/4, 200)); err != nil {
			t.Fatal(err)
		}
	})
}
