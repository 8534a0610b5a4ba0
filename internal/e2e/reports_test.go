package e2e

import (
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/berthkv/berth"
	"github.com/berthkv/berth/client"
)

// oneAtATime sends whole requests; the engine's staged slots are one request's
// at a time.
type oneAtATime struct {
	mu sync.Mutex
}

func (o *oneAtATime) send(t *testing.T, c *client.Client, tr *client.Transfer, total int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	send(t, c, tr, total)
}

// r6, r79, r80, r85: a burst of a hundred prompts from one prefill to one decode
// node, a tenth of them given up, ends completely, and then the whole pool can be
// had by one request.
func TestReports_burst(t *testing.T) {
	const slots, prompts = 10, 100
	r, s := startAgent(t, receiving(t, slots)), startAgent(t, sending(slots))
	sender, receiver := s.engine(t), r.engine(t)
	var wg sync.WaitGroup
	var turn oneAtATime
	for i := range prompts {
		req, total := fmt.Sprintf("req-%d", i), 1+i*7%slots
		tr := begin(t, sender, req, total, r.port())
		wg.Go(func() {
			if i%10 == 3 {
				tr.Cancel(ctxFor(t), "", "given up")
				if e := ended(t, tr); e.Ending != "cancelled" {
					t.Errorf("%s: %+v", req, e)
				}
				return
			}
			granted(t, tr)
			turn.send(t, sender, tr, total)
			if e := ended(t, tr); e.Err() != nil {
				t.Errorf("%s: %+v", req, e)
			}
			receive(t, receiver, req, total)
		})
	}
	wg.Wait()
	r.until(t, "free", allFree)
	s.until(t, "free", allFree)
	if st := r.status(t); st.Totals.Ready != prompts-prompts/10 || st.Waiting != 0 {
		t.Errorf("%+v", st.Totals)
	}
	whole := begin(t, sender, "whole", slots, r.port())
	granted(t, whole)
	send(t, sender, whole, slots)
	receive(t, receiver, "whole", slots)
}

// r9, r10, r11, r34: requests with one prefix in common each have their own
// chunks: those that are read and those that are given up do not touch each
// other, and all room comes back.
func TestReports_shared_keys(t *testing.T) {
	const total = 3
	keys := []string{"k0", "k1", "k2"}
	for _, n := range []int{2, 8} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			r, s := startAgent(t, receiving(t, n*total)), startAgent(t, sending(8))
			sender, receiver := s.engine(t), r.engine(t)
			for i := range n {
				tr := begin(t, sender, fmt.Sprintf("req-%d", i), total, r.port())
				granted(t, tr)
				chunks := stage(t, sender, tr, 0, total)
				for k := range chunks {
					chunks[k].Key = keys[k]
				}
				if err := tr.Submit(ctxFor(t), chunks, total); err != nil {
					t.Fatal(err)
				}
				if e := ended(t, tr); e.Err() != nil {
					t.Fatal(e)
				}
			}
			found := map[string]string{} // request → who found it
			for i := range n {
				by := fmt.Sprintf("by-req-%d", i)
				req, matched, err := receiver.Find(ctxFor(t), by, keys)
				if err != nil || matched != total || found[req] != "" {
					t.Fatalf("find: %q, %d matched, %v; had %v", req, matched, err, found)
				}
				found[req] = by
			}
			for i := range n {
				req := fmt.Sprintf("req-%d", i)
				if i%2 == 1 { // given up, twice
					for range 2 {
						if _, err := receiver.Cancel(ctxFor(t), req, "", "given up"); err != nil {
							t.Error(err)
						}
					}
					continue
				}
				got, err := receiver.Claim(ctxFor(t), found[req], req)
				if err != nil || len(got.Chunks) != total {
					t.Fatalf("%s: %d chunks, %v", req, len(got.Chunks), err)
				}
				for k, c := range got.Chunks {
					if !slices.Equal(receiver.Receive(c.Slot)[:c.Bytes], chunkData(req, k)) {
						t.Errorf("chunk %d of %s is another's", k, req)
					}
				}
				for range 2 {
					if err := receiver.Release(ctxFor(t), found[req], req); err != nil {
						t.Error(err)
					}
				}
			}
			r.until(t, "free", allFree)
		})
	}
}

// r15: the last request of a run is given up in the middle; without any more
// traffic its room is free.
func TestReports_last_request_given_up(t *testing.T) {
	r, s := startAgent(t, receiving(t, 4)), startAgent(t, sending(4))
	sender := s.engine(t)
	r.engine(t)
	tr := begin(t, sender, "last", 4, r.port())
	granted(t, tr)
	if err := tr.Submit(ctxFor(t), stage(t, sender, tr, 0, 2), client.NoEnd); err != nil {
		t.Fatal(err)
	}
	r.until(t, "in the middle", func(s berth.Status) bool { return s.Pool.Committed == 2 && s.Pool.Granted == 2 })
	if _, err := tr.Cancel(ctxFor(t), "", "given up"); err != nil {
		t.Fatal(err)
	}
	r.until(t, "free", allFree)
	s.until(t, "free", allFree)
}

// r101: both sides start at the same time, over and over, in either order.
func TestReports_simultaneous_start(t *testing.T) {
	for i := range 50 {
		rs, ss := receiving(t, 2), sending(2)
		var r, s *agent
		var wg sync.WaitGroup
		begun := make(chan struct{})
		start := []func(){func() { r = startAgent(t, rs) }, func() { s = startAgent(t, ss) }}
		for _, f := range start {
			wg.Go(func() { <-begun; f() })
		}
		close(begun)
		wg.Wait()
		if t.Failed() {
			t.Fatalf("start %d", i)
		}
		sender, receiver := s.engine(t), r.engine(t)
		tr := begin(t, sender, "first", 2, r.port())
		granted(t, tr)
		for j := range 2 { // a sender of two slots stages one at a time
			end := client.NoEnd
			if j == 1 {
				end = 2
			}
			if err := tr.Submit(ctxFor(t), stage(t, sender, tr, j, j+1), end); err != nil {
				t.Fatal(err)
			}
		}
		receive(t, receiver, "first", 2)
		sender.Close()
		receiver.Close()
		s.Close()
		r.Close()
	}
}

// r93: senders that come and go with requests in every phase: every request
// ends, and the receiver is as it was.
func TestReports_senders_come_and_go(t *testing.T) {
	r := startAgent(t, receiving(t, 6))
	receiver := r.engine(t)
	for i := range 12 {
		s := startAgent(t, sending(4))
		sender := s.engine(t)
		req := fmt.Sprintf("req-%d", i)
		tr := begin(t, sender, req, 4, r.port())
		if i%4 > 0 {
			granted(t, tr)
		}
		if i%4 > 1 {
			if err := tr.Submit(ctxFor(t), stage(t, sender, tr, 0, 2), client.NoEnd); err != nil {
				t.Fatal(err)
			}
		}
		if i%4 > 2 {
			if err := tr.Submit(ctxFor(t), stage(t, sender, tr, 2, 4), 4); err != nil {
				t.Fatal(err)
			}
			receive(t, receiver, req, 4)
		}
		s.Close() // without a word: as if it had died
		sender.Close()
	}
	r.until(t, "free", func(s berth.Status) bool { return allFree(s) && len(s.Requests) == 0 && s.Waiting == 0 })
}
