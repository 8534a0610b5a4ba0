package sim

import (
	"bytes"
	"errors"
	"reflect"
	"strings"
	"testing"
	"unsafe"

	"github.com/berthkv/berth/internal/explore"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/slot"
)

// TestPlants: each fault that is planted, in what surrounds the cores or in a
// core's memory, is found by a rule that it breaks, and the scenario that shows
// it is made small; without it the same scenario passes. The explorer has more:
// those of ranks, of LMCache's senders and of engines that block.
func TestPlants(t *testing.T) {
	for _, c := range []struct {
		plant  explore.Plant
		link   string
		faults []Kind
		finds  []string
	}{
		{explore.PlantDoubleCount, "tcp", nil, []string{"check"}},
		{explore.PlantGrantShort, "tcp", nil, []string{"check"}}, // the sender says so
		{explore.PlantSwallow, "tcp", nil, []string{"R4"}},
		{explore.PlantOtherEnding, "tcp", nil, []string{"R5"}},
		{explore.PlantFreeOnCancel, "tcp", []Kind{Delay, Slow}, []string{"R6", "check"}}, // the gate refuses
		{explore.PlantCommitOnGrant, "tcp", nil, []string{"R7"}},
		{explore.PlantNoEarmark, "tcp", nil, []string{"R8"}},
		{explore.PlantRepeatIsNew, "tcp", []Kind{Twice}, []string{"R5", "R9"}},
		{explore.PlantNoLimit, "tcp", nil, []string{"R11"}},
		{explore.PlantDropFence, "tcp", nil, []string{"R10", "R12", "check"}},
		{explore.PlantLeak, "tcp", nil, []string{"R10", "R12"}},
		{explore.PlantNoWake, "tcp", nil, []string{"R10"}},
		{explore.PlantNoGeneration, "shm", []Kind{Delay}, []string{"R7"}},
	} {
		t.Run(string(c.plant), func(t *testing.T) {
			o := Options{Requests: 300, Senders: 3, Receivers: 2, Capacity: 16, Staging: 8, Load: Mixed, Rate: 1.5, Faults: c.faults, Every: 10,
				Links: []string{c.link}, Lease: 3e9}
			if o.Faults == nil {
				o.Faults = []Kind{}
			}
			if c.plant == explore.PlantNoGeneration { // few staging slots are used again soon
				o.Senders, o.Receivers, o.Staging, o.Rate, o.Load = 2, 1, 2, 0.1, Small
			}
			for o.Seed = 1; o.Seed < 20; o.Seed++ {
				sc := Random(o)
				sc.Plant = c.plant
				switch c.plant {
				case explore.PlantNoLimit:
					sc.MaxWaiting = 3
				case explore.PlantSwallow:
					sc.Requests[7].Chunks = sc.Capacity + 1
				case explore.PlantNoWake: // what nobody reads is given up by time alone
					for i := 0; i < len(sc.Requests); i += 20 {
						sc.Requests[i].Unread = true
					}
				case explore.PlantNoGeneration: // who gives a request up uses its staging slots for another
					for i := 0; i < len(sc.Requests); i += 3 {
						sc.Requests[i].Leaves = kv.Duration(1+i%40) * 20 * kv.Millisecond
					}
				}
				_, err := Simulate(sc, Run{CheckEvery: 4})
				var v *Violation
				if !errors.As(err, &v) {
					continue
				}
				found := false
				for _, f := range c.finds {
					found = found || v.Rule == f
				}
				if !found {
					t.Fatalf("%v; want one of %v", v, c.finds)
				}
				smaller(t, sc, v)
				return
			}
			t.Fatal("it is not found")
		})
	}
}

// smaller checks that what Minimise returns is small, still fails when it is
// written and read again, and does not fail without its plant.
func smaller(t *testing.T, sc *Scenario, v *Violation) {
	runs := 0
	small, w := Minimise(sc, v, Run{CheckEvery: 4}, func() bool { runs++; return runs < 400 })
	if w.Rule != v.Rule || len(small.Requests) > len(sc.Requests)/4 {
		t.Errorf("%d requests of %d are left for %s, %d faults of %d: %v", len(small.Requests), len(sc.Requests), v.Rule, len(small.Faults), len(sc.Faults), w)
	}
	var text bytes.Buffer
	small.Write(&text)
	again, err := Read(bytes.NewReader(text.Bytes()))
	if err != nil {
		t.Fatalf("%v:\n%s", err, text.String())
	}
	var lines []string
	_, err = Simulate(again, Run{CheckEvery: 4, Trace: func(f string, a ...any) { lines = append(lines, f) }})
	var x *Violation
	if !errors.As(err, &x) || *x != *w {
		t.Errorf("read again it is %v, and was %v", err, w)
	}
	if len(lines) == 0 {
		t.Error("nothing is told of it")
	}
	again.Plant = ""
	if _, err := Simulate(again, Run{CheckEvery: 4}); err != nil {
		t.Errorf("without the plant: %v", err)
	}
	t.Logf("%v\n%d requests, %d faults, %d lines of trace\n%s", w, len(small.Requests), len(small.Faults), len(lines), text.String())
}

// TestRead: scenarios are read as they were written, and what is none is
// refused.
func TestRead(t *testing.T) {
	sc := Random(Options{Seed: 3, Requests: 50, Faults: Kinds, Every: 2})
	sc.Plant = explore.PlantLeak
	var b bytes.Buffer
	sc.Write(&b)
	got, err := Read(&b)
	if err != nil || !reflect.DeepEqual(sc, got) {
		t.Errorf("%v\n%+v\n%+v", err, sc, got)
	}
	for _, bad := range []string{"", "world seed=x", "nonsense", "request", "request 1 what", "fault nothing at=1 for=1 s0", "fault crash at=1", "world colour=red",
		"world senders=1 receivers=1 proxies=1", "request 1 at=1 s-"} {
		if _, err := Read(strings.NewReader(bad)); err == nil {
			t.Errorf("%q is read", bad)
		}
	}
}

// A slot is counted free twice: that cannot be planted around the core.
func init() {
	pokes[explore.PlantDoubleCount] = func(r *receiver) {
		pool := reflect.ValueOf(r.node).Elem().FieldByName("intake").Elem().FieldByName("pool").Elem().FieldByName("count")
		n := reflect.NewAt(pool.Type(), unsafe.Pointer(pool.UnsafeAddr())).Elem().Index(int(slot.Free))
		n.SetInt(n.Int() + 1)
	}
}
