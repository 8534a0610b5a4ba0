package e2e

import (
	"testing"

	"github.com/berthkv/berth"
	"github.com/berthkv/berth/internal/msg"
)

// What LMCache's own tests of its receiver check, checked over the wire of an
// agent; docs/lmcache.md has the table of them. Each subtest has the name of the
// test there.
func TestLMCache_receiver(t *testing.T) {
	start := func(t *testing.T, more settings) (*agent, *dealer, *dealer) {
		r := startAgent(t, receiving(t, 10).with(more))
		return r, dial(t, r.port(), "10.0.0.5-to-x"), dial(t, r.port(), "10.0.0.6-to-x")
	}
	waits := func(s berth.Status) bool { return s.Waiting == 1 }
	indexes := func(t *testing.T, d *dealer) []int64 {
		t.Helper()
		d.t = t
		m, ok := d.recv().(*msg.AllocResponse)
		if !ok {
			t.Fatalf("answered with %T", m)
		}
		return m.RemoteIndexes
	}
	// take is what the decode engine does with a complete request.
	take := func(t *testing.T, r *agent, by string, ks []string) {
		t.Helper()
		e := r.engine(t)
		req, n, err := e.Find(ctxFor(t), by, ks)
		if err != nil || n != len(ks) {
			t.Fatalf("found %q, %d of %d chunks: %v", req, n, len(ks), err)
		}
		if _, err := e.Claim(ctxFor(t), by, req); err != nil {
			t.Fatal(err)
		}
		if err := e.Release(ctxFor(t), by, req); err != nil {
			t.Fatal(err)
		}
		e.Close()
	}

	t.Run("receiver_nonblocking_async_sleep", func(t *testing.T) {
		r, a, b := start(t, nil)
		a.alloc(allocRequest("hold", 8, keys("h", 0, 8), true))
		a.send(allocRequest("big", 9, keys("b", 0, 9), false))
		r.until(t, "waiting", waits)
		if got := b.alloc(allocRequest("small", 2, keys("s", 0, 2), true)); refused(got) { // overtakes
			t.Errorf("a request that fits waits behind one that does not: %v", got)
		}
	})
	for _, name := range []string{"receiver_flow_control_inflight", "receiver_reservation_released_unblocks_waiting_request"} {
		t.Run(name, func(t *testing.T) {
			r, a, b := start(t, nil)
			ks := keys("f", 0, 10)
			a.alloc(allocRequest("fill", 10, ks[:6], false))
			b.send(allocRequest("wait", 1, keys("w", 0, 1), true))
			r.until(t, "waiting", waits)
			a.alloc(allocRequest("fill", 10, ks[6:], false))
			a.alloc(allocRequest("fill", 10, nil, true))
			// LMCache's counts only what is promised and admits the waiting one now,
			// into slots that are not free. Here it waits until they are.
			if s := r.status(t); s.Waiting != 1 {
				t.Errorf("%d wait before the decoder has read", s.Waiting)
			}
			take(t, r, "by", ks)
			if got := indexes(t, b); refused(got) || len(got) != 1 {
				t.Errorf("after the release: %v", got)
			}
		})
	}
	t.Run("receiver_last_chunk_shape_override", func(t *testing.T) {
		r, a, _ := start(t, nil)
		m := allocRequest("part", 3, keys("p", 0, 3), true)
		m.LastChunkToks = 7
		a.alloc(m)
		e := r.engine(t)
		if _, _, err := e.Find(ctxFor(t), "by", keys("p", 0, 3)); err != nil {
			t.Fatal(err)
		}
		got, err := e.Claim(ctxFor(t), "by", "part")
		if err != nil {
			t.Fatal(err)
		}
		for i, want := range []int64{chunkTokens, chunkTokens, 7} {
			if c := got.Chunks[i]; c.Tokens != want || c.Bytes != want*slotBytes/chunkTokens {
				t.Errorf("chunk %d has %d tokens in %d bytes", i, c.Tokens, c.Bytes)
			}
		}
	})
	for _, c := range []struct {
		name          string
		total, n1, n2 int
	}{{"exact-then-overflow", 5, 5, 1}, {"partial-then-overflow", 4, 3, 2}} {
		t.Run("receiver_fail_fast_overflow/"+c.name, func(t *testing.T) {
			r, a, _ := start(t, nil)
			if got := a.alloc(allocRequest("over", int64(c.total), keys("o", 0, c.n1), false)); refused(got) {
				t.Fatalf("the first batch: %v", got)
			}
			if got := a.alloc(allocRequest("over", int64(c.total), keys("o", c.n1, c.n1+c.n2), false)); !refused(got) || len(got) != c.n2 {
				t.Errorf("%d chunks of %d: %v", c.n1+c.n2, c.total, got)
			}
			if req, _, _ := r.engine(t).Find(ctxFor(t), "by", keys("o", 0, c.n1)); req != "" {
				t.Errorf("%q is found after it was rolled back", req)
			}
			if got := a.alloc(allocRequest("other", 1, keys("x", 0, 1), true)); refused(got) {
				t.Errorf("an unrelated request: %v", got)
			}
		})
	}
	// R2: inside a reservation there is nothing to time out; what can time out is
	// the admission, and it leaves nothing.
	for _, name := range []string{"receiver_alloc_timeout", "receiver_reservation_admission_timeout"} {
		t.Run(name, func(t *testing.T) {
			r, a, b := start(t, settings{"pd_allocation_timeout_sec": "0.3"})
			a.alloc(allocRequest("hog", 10, keys("h", 0, 3), false))
			if got := b.alloc(allocRequest("blocked", 1, keys("b", 0, 1), false)); !refused(got) {
				t.Errorf("granted %v with every slot promised", got)
			}
			if s := r.status(t); s.Waiting != 0 || s.Pool.Granted != 3 || s.Pool.Reserved != 7 {
				t.Errorf("%d wait, %+v", s.Waiting, *s.Pool)
			}
			if got := a.alloc(allocRequest("hog", 10, keys("h", 3, 10), true)); refused(got) || len(got) != 7 {
				t.Errorf("the second batch of an admitted request: %v", got)
			}
		})
	}
	t.Run("receiver_is_last_batch_cleanup", func(t *testing.T) {
		r, a, _ := start(t, nil)
		a.alloc(allocRequest("life", 5, keys("l", 0, 3), false))
		a.alloc(allocRequest("life", 5, keys("l", 3, 5), true))
		if s := r.status(t); s.Pool.Reserved != 0 || s.Pool.Granted != 5 {
			t.Errorf("%+v", *s.Pool)
		}
		take(t, r, "by", keys("l", 0, 5))
		r.until(t, "free", allFree)
		if s := r.status(t); len(s.Requests) != 0 {
			t.Errorf("left: %+v", s.Requests)
		}
	})
	t.Run("receiver_admission_control", func(t *testing.T) {
		_, a, b := start(t, nil)
		a.alloc(allocRequest("A", 3, keys("a", 0, 2), false))
		b.send(allocRequest("B", 1, keys("b", 0, 1), true))
		a.send(allocRequest("A", 3, keys("a", 2, 3), true))
		if x, y := indexes(t, a), indexes(t, b); refused(x) || refused(y) {
			t.Errorf("%v and %v", x, y)
		}
	})
	t.Run("receiver_error_response", func(t *testing.T) {
		_, a, _ := start(t, nil)
		m := allocRequest("err", 1, keys("e", 0, 1), true)
		m.DType = "float16"
		if got := a.alloc(m); len(got) != 1 || got[0] != -1 {
			t.Errorf("%v, want [-1]", got)
		}
	})
	t.Run("receiver_reject_legacy_sender_zero_total_chunks", func(t *testing.T) {
		r, a, _ := start(t, nil)
		if got := a.alloc(allocRequest("zero", 0, keys("z", 0, 1), false)); !refused(got) {
			t.Errorf("granted %v", got)
		}
		r.until(t, "free", allFree)
	})
	t.Run("receiver_cancel_notif_releases_keys_and_reservation", func(t *testing.T) {
		r, a, _ := start(t, nil)
		a.alloc(allocRequest("cancel", 5, keys("c", 0, 3), false))
		a.send(&msg.CancelNotif{ReqID: "cancel", Keys: keys("c", 0, 3)})
		if got := indexes(t, a); len(got) != 0 {
			t.Errorf("the cancel is answered with %v", got)
		}
		if s := r.status(t); !allFree(s) || len(s.Requests) != 0 {
			t.Errorf("left: %+v %+v", *s.Pool, s.Requests)
		}
	})
	t.Run("receiver_no_req_id_skips_admission", func(t *testing.T) {
		r, a, _ := start(t, nil)
		if got := a.alloc(allocRequest("", 0, keys("n", 0, 2), false)); refused(got) || len(got) != 2 {
			t.Errorf("%v", got)
		}
		// It is a request of its own, complete at once, and counted (R1).
		if s := r.status(t); s.Pool.Reserved != 0 || s.Pool.Granted != 2 {
			t.Errorf("%+v", *s.Pool)
		}
		take(t, r, "by", keys("n", 0, 2))
		r.until(t, "free", allFree)
	})
	t.Run("receiver_batch_failure_rolls_back_prior_batches", func(t *testing.T) {
		r, a, _ := start(t, nil)
		a.alloc(allocRequest("back", 6, keys("b", 0, 3), false))
		m := allocRequest("back", 6, keys("b", 3, 6), true)
		m.Shape = []int64{1 << 40, 1 << 40}
		if got := a.alloc(m); !refused(got) || len(got) != 3 {
			t.Errorf("%v", got)
		}
		if s := r.status(t); !allFree(s) {
			t.Errorf("left: %+v", *s.Pool)
		}
	})
}

// What LMCache's tests of its sender check, seen from the engine.
func TestLMCache_sender(t *testing.T) {
	t.Run("sender_flow_control_backpressure", func(t *testing.T) {
		r := startAgent(t, receiving(t, 10))
		s := startAgent(t, sending(4))
		e := s.engine(t)
		tr := begin(t, e, "full", 8, r.port())
		granted(t, tr)
		first := stage(t, e, tr, 0, 2)
		if err := tr.Submit(ctxFor(t), first, -1); err != nil {
			t.Fatal(err)
		}
		send(t, e, tr, 8) // waits for its own slots, batch by batch, repeats included
		if end := ended(t, tr); end.Err() != nil {
			t.Fatal(end)
		}
		receive(t, r.engine(t), "full", 8)
		s.until(t, "free", allFree)
	})
	t.Run("sender_per_receiver_concurrency", func(t *testing.T) {
		full, r := startAgent(t, receiving(t, 2)), startAgent(t, receiving(t, 10))
		s := startAgent(t, sending(10))
		e := s.engine(t)
		hold := begin(t, e, "hold", 2, full.port())
		granted(t, hold)
		slow := begin(t, e, "slow", 2, full.port()) // waits at its receiver
		fast := begin(t, e, "fast", 2, r.port())
		granted(t, fast)
		send(t, e, fast, 2)
		if end := ended(t, fast); end.Err() != nil {
			t.Fatal(end)
		}
		select {
		case <-slow.Granted():
			t.Error("granted without room")
		default:
		}
	})
}
