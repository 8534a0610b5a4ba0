package sim

import (
	"fmt"
	"syscall"
	"testing"

	"github.com/berthkv/berth/internal/kv"
)

// deployment is a scenario of n times ten nodes without faults: each sender
// sends to so many receivers, each receiver is as busy, whatever n.
func deployment(n, requests int, seed uint64) *Scenario {
	return Random(Options{Seed: seed, Requests: requests, Senders: 6 * n, Receivers: max(16*n/5, 3), Capacity: 64, Staging: 64, Load: Poisson, Rate: 0.5,
		Faults: []Kind{}, Links: []string{"tcp", "shm", "nixl"}, Lease: 15e9})
}

// half is when the second half of a scenario's requests begins to come: every
// session is up by then.
func half(sc *Scenario) kv.Instant { return kv.Instant(sc.Requests[len(sc.Requests)/2].At) }

// TestCostOfNodes: a request takes as many steps among a hundred nodes as among
// ten: nothing that happens to it looks at nodes that have no part in it.
func TestCostOfNodes(t *testing.T) {
	cost := func(n, requests int) float64 {
		sc := deployment(n, requests, 7)
		w := begin(sc, Run{CheckEvery: 1 << 20})
		first := 0
		for w.now < w.last && w.step() {
			if w.now < half(sc) {
				first = w.steps
			}
		}
		if w.bad != nil {
			t.Fatal(w.bad)
		}
		return float64(w.steps-first) / float64(requests/2)
	}
	few, many := cost(1, 2000), cost(10, 6000)
	t.Logf("%.1f steps a request of 10 nodes, %.1f of 100", few, many)
	if many > 1.05*few {
		t.Errorf("a request takes %.1f steps among 10 nodes and %.1f among 100", few, many)
	}
}

// BenchmarkNodes is the time of a request: in one deployment of ten nodes, in
// one of 995, and in 99 of ten that have nothing to do with each other and take
// turns. What a request among many nodes takes longer than the last, it takes
// because of them; what the last takes longer than the first, because the
// memory of many nodes is in no cache.
func BenchmarkNodes(b *testing.B) {
	const requests = 40_000
	for _, c := range []struct{ deployments, size int }{{1, 1}, {99, 1}, {1, 100}} {
		b.Run(fmt.Sprintf("%dx%d", c.deployments, c.size*10), func(b *testing.B) {
			for b.Loop() {
				var ws []*world
				for i := range c.deployments {
					ws = append(ws, begin(deployment(c.size, requests/c.deployments, uint64(i)), Run{CheckEvery: 1 << 20}))
				}
				steps, start := 0, kv.Duration(0)
				for len(ws) > 0 {
					for i := 0; i < len(ws); i++ {
						w := ws[i]
						on := w.step()
						for on && len(w.ready) > 0 { // an event, and the turns that it brings
							on = w.step()
						}
						if start == 0 && w.now >= half(w.sc) {
							start = used()
							for _, o := range ws {
								steps -= o.steps
							}
						}
						if !on {
							if w.bad != nil {
								b.Fatal(w.bad)
							}
							steps += w.steps
							ws = append(ws[:i], ws[i+1:]...)
							i--
						}
					}
				}
				b.ReportMetric(float64(used()-start)/1e3/(requests/2), "µs/request")
				b.ReportMetric(float64(steps)/(requests/2), "steps/request")
			}
		})
	}
}

// used is the CPU time of this process so far.
func used() kv.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return kv.Duration(u.Utime.Nano() + u.Stime.Nano())
}
