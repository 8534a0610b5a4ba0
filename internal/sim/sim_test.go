package sim

import (
	"runtime"
	"testing"
)

// passes runs a scenario and fails the test with how to run it again.
func passes(t *testing.T, o Options, run Run) Report {
	t.Helper()
	r, err := Simulate(Random(o), run)
	if err != nil {
		t.Fatalf("%v\nrun it again: %s", err, Again(o))
	}
	return r
}

// TestSeeds: a few seeds with every pattern of arrivals and every kind of fault.
func TestSeeds(t *testing.T) {
	struck, read, all := map[Kind]int{}, 0, 0
	for i, load := range Loads {
		for seed := range uint64(5) {
			r := passes(t, Options{Seed: seed + 100*uint64(i), Requests: 400, Load: load, Faults: Kinds, Every: 20 + 40*float64(seed)}, Run{CheckEvery: 8})
			for k, n := range r.Faults.Kinds {
				struck[k] += n
			}
			read, all = read+r.Over["read"], all+r.Requests
		}
	}
	if read < all/3 {
		t.Errorf("of %d requests %d were read", all, read)
	}
	for _, k := range Kinds {
		if struck[k] < 3 {
			t.Errorf("%d faults of kind %s struck", struck[k], k)
		}
	}
}

// TestWithoutFaults: what nothing disturbs ends ready, unless its client, its
// deadline or its size says otherwise.
func TestWithoutFaults(t *testing.T) {
	for _, link := range []string{"tcp", "shm", "nixl"} {
		sc := Random(Options{Seed: 5, Requests: 500, Senders: 4, Receivers: 2, Load: Poisson, Rate: 0.5, Faults: []Kind{}, Links: []string{link}, Lease: 15e9})
		sc.MaxWaiting = 1000
		for i := range sc.Requests {
			q := &sc.Requests[i]
			q.Leaves, q.Unread, q.Deadline = 0, false, 30e9
			q.Chunks, q.End = min(q.Chunks, sc.Capacity), min(q.End, sc.Capacity)
		}
		r, err := Simulate(sc, Run{CheckEvery: 8})
		if err != nil || r.Over["read"] != len(sc.Requests) || r.Busy != 0 {
			t.Errorf("%s: %v: %s, busy %d", link, err, counts(r.Over), r.Busy)
		}
	}
}

// TestSameTrace: a run depends on its scenario alone.
func TestSameTrace(t *testing.T) {
	o := Options{Seed: 7, Requests: 1500, Senders: 6, Receivers: 3, Load: Mixed, Faults: Kinds, Every: 30, Links: []string{"tcp", "shm", "nixl"}}
	want := passes(t, o, Run{}).Trace
	for _, procs := range []int{1, 4} {
		was := runtime.GOMAXPROCS(procs)
		got := passes(t, o, Run{}).Trace
		runtime.GOMAXPROCS(was)
		if got != want {
			t.Errorf("with GOMAXPROCS %d the trace is %s, and was %s", procs, got, want)
		}
	}
	o.Seed++
	if got := passes(t, o, Run{}).Trace; got == want {
		t.Error("another seed has the same trace")
	}
}
