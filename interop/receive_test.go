//go:build interop && nixl

package interop

import (
	"fmt"
	"testing"

	"github.com/berthkv/berth"
)

// LMCache senders to a Berth receiver: every chunk's digest is the sender's.
func TestReceive(t *testing.T) {
	part(t, "2 LMCache senders to a Berth receiver")
	w := listenWords(t)
	r := receiving(t, plain, 10, nil)
	procs := startPeers(t, 3)
	var senders []*lmcacheSender
	for i, p := range procs {
		senders = append(senders, p.sender(plain, fmt.Sprint("s", i), 16, w.port))
	}
	a := senders[0]

	t.Run("one batch", func(t *testing.T) {
		keys := plain.keys(3)
		d := a.put(r.target(), "one", keys, 3, true, 0)
		r.take(w, "one", keys, d)
		r.untilFree()
	})
	t.Run("partial chunks", func(t *testing.T) {
		for i, n := range []int{1, 2, 5} {
			req := fmt.Sprint("partial", i)
			keys := plain.keys(n)
			d := a.put(r.target(), req, keys, n, true, 77)
			r.take(w, req, keys, d)
		}
		r.untilFree()
	})
	t.Run("several batches, a claim before the end misses", func(t *testing.T) {
		keys := plain.keys(8)
		d := a.put(r.target(), "batches", keys[:3], 8, false, 0)
		r.until("three granted", func(s berth.Status) bool { return s.Pool.Granted == 3 })
		if req, _ := r.find("early", keys); req != "" {
			t.Errorf("%q is found before it is complete", req)
		}
		if _, err := r.engine.Claim(ctxFor(t), "early", "batches"); err == nil {
			t.Error("it is claimed before it is complete")
		}
		d = append(d, a.put(r.target(), "batches", keys[3:6], 8, false, 0)...)
		d = append(d, a.put(r.target(), "batches", keys[6:], 8, true, 100)...)
		r.take(w, "batches", keys, d)
		r.untilFree()
	})
	t.Run("three senders", func(t *testing.T) {
		type sent struct {
			req     string
			keys, d []string
		}
		results := make(chan sent, 30)
		for i, s := range senders {
			go func() {
				for j := range 10 {
					req, keys := fmt.Sprintf("three-%d-%d", i, j), plain.keys(1+(i+j)%3)
					got := s.try(s.command(r.target(), req, keys, len(keys), true, 10*j))
					if got.Error != "" {
						t.Errorf("%s: %s", req, got.Error)
					}
					results <- sent{req, keys, got.SHA256}
				}
			}()
		}
		for range 30 {
			x := <-results
			r.take(w, x.req, x.keys, x.d)
		}
		r.untilFree()
	})
	// The seeds' own example from one LMCache sender, which is lock-step: the
	// second request is refused within a round trip, the first completes.
	t.Run("interleaved, one sender", func(t *testing.T) {
		ka, kb := plain.keys(8), plain.keys(8)
		d := a.put(r.target(), "A", ka[:4], 8, false, 0)
		r.until("A's batch", func(s berth.Status) bool { return s.Pool.Granted == 4 })
		a.put(r.target(), "B", kb[:4], 8, false, 0)
		d = append(d, a.put(r.target(), "A", ka[4:], 8, true, 0)...)
		r.take(w, "A", ka, d)
		if w.count("B") != 0 {
			t.Error("the proxy was told of B")
		}
		r.untilFree()
		if !r.logs.contains("lock-step") {
			t.Error("the log does not say why B was refused")
		}
	})
	t.Run("interleaved, two senders", func(t *testing.T) {
		b := senders[1]
		ka, kb := plain.keys(8), plain.keys(8)
		da := a.put(r.target(), "A2", ka[:4], 8, false, 0)
		r.until("A2's batch", func(s berth.Status) bool { return s.Pool.Granted == 4 })
		db := b.put(r.target(), "B2", kb[:4], 8, false, 0)
		r.until("B2 waits", func(s berth.Status) bool { return s.Waiting == 1 })
		da = append(da, a.put(r.target(), "A2", ka[4:], 8, true, 0)...)
		r.take(w, "A2", ka, da)
		db = append(db, b.put(r.target(), "B2", kb[4:], 8, true, 0)...)
		r.take(w, "B2", kb, db)
		r.untilFree()
	})
	t.Run("a sender's cancel frees", func(t *testing.T) {
		keys := plain.keys(6)
		a.put(r.target(), "C", keys[:2], 6, false, 0)
		r.until("C's batch", func(s berth.Status) bool { return s.Pool.Granted == 2 })
		// LMCache's sender says nothing of a cancel while an allocation is
		// unanswered: not before it has written.
		a.until("written", func(x reply) bool { return x.Free == 16 })
		a.cancel("C")
		r.untilFree()
	})
	// Fault 12: what a dead sender held comes back.
	t.Run("killed sender", func(t *testing.T) {
		victim := senders[2]
		victim.put(r.target(), "D", plain.keys(4), 8, false, 0)
		r.until("D's batch", func(s berth.Status) bool { return s.Pool.Granted == 4 })
		victim.kill()
		r.untilFree()
		keys := plain.keys(3)
		r.take(w, "after", keys, a.put(r.target(), "after", keys, 3, true, 0))
	})
	// LMCache never repeats its handshake: a restarted receiver refuses, says
	// what to do, and serves new senders.
	t.Run("restarted receiver", func(t *testing.T) {
		port := r.target()
		r.engine.Close()
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
		again := receiving(t, plain, 10, settings{"pd_peer_init_port": fmt.Sprint(port.init), "pd_peer_alloc_port": fmt.Sprint(port.alloc)})
		a.put(port, "stale", plain.keys(2), 2, true, 0)
		poll(t, "refused in the log", func() (any, bool) { return again.logs.tail(), again.logs.contains("restart that prefiller") })
		fresh := startPeers(t, 1)[0].sender(plain, "fresh", 16, w.port)
		keys := plain.keys(4)
		again.take(w, "fresh", keys, fresh.put(port, "fresh", keys, 4, true, 9))
		if w.count("stale") != 0 {
			t.Error("the proxy was told of the refused request")
		}
	})
}

// Every element type that KV caches have, and the MLA layout, in both
// directions.
func TestLayouts(t *testing.T) {
	part(t, "2, 3 layouts, both ways")
	w := listenWords(t)
	p := startPeers(t, 1)[0]
	for _, l := range []layout{{"bfloat16", false, 2}, {"half", false, 2}, {"float", false, 4}, {"fp8_e4m3fn", false, 1}, {"fp8_e5m2", false, 1}, {"bfloat16", true, 2}} {
		name := l.dtype
		if l.mla {
			name += " MLA"
		}
		t.Run(name, func(t *testing.T) {
			r := receiving(t, l, 6, nil)
			s := p.sender(l, "s"+name, 6, w.port)
			for _, lastToks := range []int{0, 1, 200} {
				req, keys := fmt.Sprintf("in %s %d", name, lastToks), l.keys(4)
				r.take(w, req, keys, s.put(r.target(), req, keys, 4, true, lastToks))
			}
			b := sending(t, l, 8, w.port, nil)
			to := p.receiver(l, "r"+name, 6, newTarget(t), 20)
			for _, lastToks := range []int{0, 1, 200} {
				req, keys := fmt.Sprintf("out %s %d", name, lastToks), l.keys(4)
				deliver(t, w, b, to, req, keys, 3, lastToks)
			}
		})
	}
}
