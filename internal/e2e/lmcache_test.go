package e2e

import (
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/berthkv/berth"
	"github.com/berthkv/berth/client"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/wire"
	"github.com/berthkv/berth/internal/zmtp"
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
	take := func(t *testing.T, e *client.Client, by string, ks []string) {
		t.Helper()
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
			take(t, r.engine(t), "by", ks)
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
		take(t, r.engine(t), "by", keys("l", 0, 5))
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
		take(t, r.engine(t), "by", keys("n", 0, 2))
		r.until(t, "free", allFree)
	})
	// Equal keys are held apart (fault 14): none is called already sent across
	// requests, and one request's end leaves the other's chunks.
	for _, name := range []string{"receiver_dedup_pins_existing_key_via_ref_count_up", "receiver_dedup_multiple_existing_keys_each_pinned_once",
		"remove_calls_ref_count_down_and_conditional_delete", "dedup_pin_then_remove_verifies_call_sequence"} {
		t.Run(name, func(t *testing.T) {
			r, a, b := start(t, nil)
			ks := keys("d", 0, 4)
			x := a.alloc(allocRequest("one", 3, []string{ks[0], ks[2], ks[3]}, true))
			y := b.alloc(allocRequest("two", 4, ks, true))
			if refused(x) || refused(y) || len(x) != 3 || len(y) != 4 {
				t.Fatalf("%v and %v", x, y)
			}
			for _, slot := range y {
				if slices.Contains(x, slot) {
					t.Errorf("slot %d is both requests'", slot)
				}
			}
			e := r.engine(t)
			take(t, e, "by-two", ks)
			if s := r.status(t); s.Pool.Granted != 3 || s.Pool.Free != 7 {
				t.Errorf("after two's release: %+v", *s.Pool)
			}
			take(t, e, "by-one", []string{ks[0], ks[2], ks[3]})
			r.until(t, "free", allFree)
		})
	}
	t.Run("put_duplicate_calls_ref_count_down_on_new_obj", func(t *testing.T) {
		r, a, _ := start(t, nil)
		ks := keys("p", 0, 2)
		first := a.alloc(allocRequest("twice", 3, ks, false))
		again := a.alloc(allocRequest("twice", 3, append(ks, keys("p", 2, 3)...), true))
		if len(again) != 3 || !slices.Equal(first, again[:2]) {
			t.Errorf("granted %v, then %v", first, again)
		}
		if s := r.status(t); s.Pool.Granted != 3 {
			t.Errorf("%+v", *s.Pool)
		}
		a.send(&msg.CancelNotif{ReqID: "twice"})
		a.recv()
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
	t.Run("sender_nonblocking_fifo_transfers", func(t *testing.T) {
		r, w := startHandReceiver(t), startWords(t)
		s := startAgent(t, sending(8).with(w.settings()))
		e := s.engine(t)
		var trs []*client.Transfer
		for i := range 4 {
			tr := begin(t, e, fmt.Sprintf("req-%d", i), 1, r.port)
			r.answer(t, r.request(t)) // its admission
			granted(t, tr)
			trs = append(trs, tr)
		}
		var asked []handRequest
		for _, tr := range trs { // each submit returns; no answer has come
			if err := tr.Submit(ctxFor(t), stage(t, e, tr, 0, 1), 1); err != nil {
				t.Fatal(err)
			}
			asked = append(asked, r.request(t))
		}
		for i, q := range asked {
			if want := fmt.Sprintf("req-%d", i); q.m.ReqID != want {
				t.Errorf("request %d asks for %s", i, q.m.ReqID)
			}
			select {
			case <-trs[i].Ended():
				t.Errorf("%s has ended before its answer", trs[i].Req())
			default:
			}
			r.answer(t, q, int64(i))
			r.answer(t, r.request(t)) // the last flag
			if end := ended(t, trs[i]); end.Err() != nil {
				t.Error(end)
			}
			w.await(t, trs[i].Req())
		}
		s.until(t, "free", allFree)
	})
	t.Run("sender_chunk_ordering", func(t *testing.T) {
		r, w := startHandReceiver(t), startWords(t)
		s := startAgent(t, sending(8).with(w.settings()))
		e := s.engine(t)
		tr := begin(t, e, "chunked", 2, r.port)
		r.answer(t, r.request(t))
		granted(t, tr)
		if err := tr.Submit(ctxFor(t), stage(t, e, tr, 0, 1), client.NoEnd); err != nil {
			t.Fatal(err)
		}
		slow := r.request(t)
		if err := tr.Submit(ctxFor(t), stage(t, e, tr, 1, 2), 2); err != nil {
			t.Fatal(err)
		}
		if n := w.count("chunked"); n != 0 {
			t.Errorf("the proxy has %d words before the first batch is done", n)
		}
		r.answer(t, slow, 0)
		for last := false; !last; {
			q := r.request(t)
			last = q.m.IsLastBatch
			if n := w.count("chunked"); n != 0 {
				t.Errorf("the proxy has %d words before the last batch is done", n)
			}
			r.answer(t, q, []int64{1}[:len(q.m.Keys)]...)
		}
		w.await(t, "chunked")
		if end := ended(t, tr); end.Err() != nil || w.count("chunked") != 1 {
			t.Errorf("%+v, %d words", end, w.count("chunked"))
		}
	})
	t.Run("sender_dedup_calls_ref_count_down_on_skipped_chunks", func(t *testing.T) {
		r, w := startHandReceiver(t), startWords(t)
		s := startAgent(t, sending(8).with(w.settings()))
		e := s.engine(t)
		tr := begin(t, e, "dedup", 2, r.port)
		r.answer(t, r.request(t))
		granted(t, tr)
		if err := tr.Submit(ctxFor(t), stage(t, e, tr, 0, 2), 2); err != nil {
			t.Fatal(err)
		}
		q := r.request(t)
		r.reply(t, q, &msg.AllocResponse{RemoteIndexes: []int64{5}, AlreadySent: []int64{0}})
		for !q.m.IsLastBatch {
			q = r.request(t)
			r.answer(t, q)
		}
		if end := ended(t, tr); end.Err() != nil {
			t.Error(end)
		}
		w.await(t, "dedup")
		s.until(t, "free", allFree)
	})
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

// handReceiver is an LMCache receiver whose answers a test gives by hand.
type handReceiver struct {
	router   *zmtp.Router
	port     int
	requests chan handRequest
}

// handRequest is an AllocRequest and where its answer goes.
type handRequest struct {
	m    *msg.AllocRequest
	conn zmtp.ConnID
}

func startHandReceiver(t *testing.T) *handReceiver {
	t.Helper()
	r := &handReceiver{requests: make(chan handRequest, 64)}
	ready := make(chan struct{}) // r.router is set
	var err error
	r.router, err = zmtp.ListenRouter(ctxFor(t), "127.0.0.1:0", func(e zmtp.Event) {
		if e.Kind != zmtp.Message {
			return
		}
		<-ready
		m, err := wire.Decode(e.Frames[len(e.Frames)-1])
		switch m := m.(type) {
		case *msg.AllocRequest:
			r.requests <- handRequest{m, e.Conn}
		case *msg.Hello: // which LMCache does not know
			r.reply(t, handRequest{conn: e.Conn}, &msg.AllocResponse{RemoteIndexes: []int64{-1}})
		default:
			t.Errorf("the receiver got %T, %v", m, err)
		}
	}, zmtp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	close(ready)
	t.Cleanup(func() { r.router.Close() })
	r.port = int(r.router.Addr().Port())
	return r
}

// request waits for the next AllocRequest.
func (r *handReceiver) request(t *testing.T) handRequest {
	t.Helper()
	select {
	case q := <-r.requests:
		return q
	case <-time.After(limit):
		t.Fatal("no AllocRequest")
		panic("unreachable")
	}
}

func (r *handReceiver) answer(t *testing.T, q handRequest, slots ...int64) {
	t.Helper()
	if slots == nil {
		slots = []int64{}
	}
	r.reply(t, q, &msg.AllocResponse{RemoteIndexes: slots})
}

func (r *handReceiver) reply(t *testing.T, q handRequest, m *msg.AllocResponse) {
	b, err := wire.Append(nil, m)
	if err == nil {
		err = r.router.Send(q.conn, nil, b)
	}
	if err != nil {
		t.Error(err)
	}
}

// words counts the ProxyNotifs that reach a proxy.
type words struct {
	port  int
	heard chan string
	n     map[string]int
}

func startWords(t *testing.T) *words {
	t.Helper()
	w := &words{heard: make(chan string, 64), n: map[string]int{}}
	p, err := zmtp.ListenPull(ctxFor(t), "127.0.0.1:0", func(e zmtp.Event) {
		if e.Kind != zmtp.Message {
			return
		}
		if m, err := wire.Decode(e.Frames[len(e.Frames)-1]); err != nil {
			t.Error(err)
		} else if m, ok := m.(*msg.ProxyNotif); ok {
			w.heard <- m.ReqID
		}
	}, zmtp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	w.port = int(p.Addr().Port())
	return w
}

func (w *words) settings() settings {
	return settings{"pd_skip_proxy_notification": "false", "pd_proxy_host": "127.0.0.1", "pd_proxy_port": strconv.Itoa(w.port)}
}

// count returns how many words about a request have come.
func (w *words) count(req string) int {
	for {
		select {
		case id := <-w.heard:
			w.n[id]++
			continue
		default:
		}
		return w.n[req]
	}
}

func (w *words) await(t *testing.T, req string) {
	t.Helper()
	deadline := time.After(limit)
	for w.count(req) == 0 {
		select {
		case id := <-w.heard:
			w.n[id]++
		case <-deadline:
			t.Fatalf("no ProxyNotif for %s", req)
		}
	}
}
