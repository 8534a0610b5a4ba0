package e2e

import (
	"fmt"
	"sync"
	"testing"

	"github.com/berthkv/berth"
	"github.com/berthkv/berth/client"
)

// Fault 21: two prefill nodes of two ranks each, two receivers of 10 slots, a
// prompt of 8 chunks from each node. Each prompt is begun rank by rank in
// ascending order, after the grant of the rank before; both complete, whichever
// node comes first at rank 0. (Begun in opposite orders, or at once, each would
// hold one rank and wait for the other for ever.)
func TestRanks_two_prompts_two_ranks(t *testing.T) {
	const ranks, total = 2, 8
	receivers, readers := make([]*agent, ranks), make([]*client.Client, ranks)
	for r := range ranks {
		s := receiving(t, 10).with(settings{"rank": fmt.Sprint(r), "tp_size": "2"})
		s["pd_peer_alloc_port"] = fmt.Sprintf("%s,%s", s["pd_peer_alloc_port"], s["pd_peer_alloc_port"])
		s["pd_peer_init_port"] = fmt.Sprintf("%s,%s", s["pd_peer_init_port"], s["pd_peer_init_port"])
		receivers[r] = startAgent(t, s)
		readers[r] = rankEngine(t, receivers[r], r)
	}
	var wg sync.WaitGroup
	first := make(chan struct{}) // holds B back until A has rank 0
	for n, name := range []string{"A", "B"} {
		senders := make([]*client.Client, ranks)
		for r := range ranks {
			senders[r] = rankEngine(t, startAgent(t, sending(10).with(settings{"rank": fmt.Sprint(r), "tp_size": "2"})), r)
		}
		wg.Go(func() {
			begun := make([]*client.Transfer, ranks)
			for r := range ranks {
				if n == 1 && r == 0 {
					<-first
				}
				begun[r] = begin(t, senders[r], name, total, receivers[r].port())
				if n == 0 && r == 0 {
					granted(t, begun[r])
					close(first)
					receivers[0].until(t, "waiting for A", func(s berth.Status) bool { return s.Waiting == 1 })
					continue // B has come before A asks at rank 1
				}
				granted(t, begun[r])
			}
			for r := range ranks {
				send(t, senders[r], begun[r], total)
			}
			for r := range ranks {
				if e := ended(t, begun[r]); e.Err() != nil {
					t.Errorf("%s at rank %d: %+v", name, r, e)
				}
				receive(t, readers[r], name, total)
			}
		})
	}
	wg.Wait()
	for _, r := range receivers {
		r.until(t, "free", allFree)
	}
}

func rankEngine(t *testing.T, a *agent, rank int) *client.Client {
	t.Helper()
	l := layout
	l.TPSize = 2
	c, err := dialEngine(a.Addrs().Local, fmt.Sprintf("%s-%d", a.Addrs().Local, rank), l, rank)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}
