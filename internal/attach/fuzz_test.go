package attach

import (
	"fmt"
	"math/rand"
	"slices"
	"testing"

	"github.com/berthkv/berth/internal/kv"
)

// FuzzSteps lets a fuzzer choose who comes and goes; the model judges.
func FuzzSteps(f *testing.F) {
	f.Add([]byte("who holds the agent, and who may still touch its memory?"))
	for seed := range int64(8) {
		b := make([]byte, 160)
		rand.New(rand.NewSource(seed)).Read(b)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		pick := func(n int) int {
			if len(b) == 0 {
				return 0
			}
			x := int(b[0]) % n
			b = b[1:]
			return x
		}
		c, m, now, next := New(testConfig, 0), &model{}, kv.Instant(0), kv.ConnID(0)
		for step := 0; len(b) > 0 && step < 300; step++ {
			now = now.Add(kv.Duration(pick(12)/3*pick(12)) * kv.Second)
			var ev Event = Tick{}
			switch n := pick(8); {
			case n < 3:
				next++
				h := testHello(next-kv.ConnID(pick(8)/7), fmt.Sprint("e", pick(2)), pick(5))
				if pick(6) == 0 {
					h.EngineID, h.Part = "", PartTool
				}
				ev = h
			case n < 6 && next > 0:
				ev = ConnLost{Conn: 1 + kv.ConnID(pick(int(next)))}
			case n < 7:
				ev = ProcessGone{Process: pick(5)}
			}
			twin := c.Clone()
			got, want := told(c.Step(now, ev)), m.step(now, ev)
			slices.Sort(want[lead(want):]) // fences of one moment come in any order
			slices.Sort(got[lead(got):])
			if !slices.Equal(got, want) || c.Holder() != m.holder() {
				t.Fatalf("step %d, %+v at %d: %q, holder %q; should be %q, holder %q", step, ev, now, got, c.Holder(), want, m.holder())
			}
			if err := c.Check(); err != nil {
				t.Fatalf("step %d, %+v: %v", step, ev, err)
			}
			twin.Step(now, ev)
			if string(c.Encode(nil, now, nil)) != string(twin.Encode(nil, now, nil)) {
				t.Fatalf("step %d, %+v: a clone is encoded differently", step, ev)
			}
		}
	})
}
