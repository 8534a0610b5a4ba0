//go:build interop && nixl

package interop

import (
	"fmt"
	"syscall"
	"testing"

	"github.com/berthkv/berth"

	"github.com/berthkv/berth/client"
)

// deliver sends a request from Berth to an LMCache receiver, compares, and
// removes it as the engine does.
func deliver(t *testing.T, w *words, b *agent, to *lmcacheReceiver, req string, keys []string, batch, lastToks int) {
	t.Helper()
	tr := b.begin(to.target, req, len(keys))
	b.granted(tr)
	d := b.send(tr, keys, batch, lastToks)
	arrived(t, w, b, to, tr, keys, d)
}

func arrived(t *testing.T, w *words, b *agent, to *lmcacheReceiver, tr *client.Transfer, keys, d []string) {
	t.Helper()
	if e := b.ended(tr); e.Err() != nil {
		t.Fatalf("%s: %+v", tr.Req(), e)
	}
	w.await(tr.Req())
	same(t, tr.Req(), to.digests(keys), d)
	if n := to.remove(keys); n != len(keys) {
		t.Errorf("%s: %d of %d chunks removed", tr.Req(), n, len(keys))
	}
}

// Berth senders to an LMCache receiver.
func TestSend(t *testing.T) {
	part(t, "3 Berth senders to an LMCache receiver")
	w := listenWords(t)
	procs := startPeers(t, 1)
	at := newTarget(t)
	r := procs[0].receiver(plain, "r", 10, at, 20)
	s := sending(t, plain, 24, w.port, nil)

	t.Run("batches and partial chunks", func(t *testing.T) {
		for i, c := range []struct{ n, batch, last int }{{1, 1, 0}, {1, 1, 33}, {3, 3, 0}, {8, 3, 0}, {10, 4, 77}, {10, 1, 255}} {
			deliver(t, w, s, r, fmt.Sprint("batch", i), plain.keys(c.n), c.batch, c.last)
		}
		r.untilFree(10)
		s.untilFree()
	})
	t.Run("three senders", func(t *testing.T) {
		agents := []*agent{s, sending(t, plain, 8, w.port, nil), sending(t, plain, 8, w.port, nil)}
		for round := range 5 {
			var trs []*client.Transfer
			var keys, ds [][]string
			for i, a := range agents {
				k := plain.keys(3)
				tr := a.begin(at, fmt.Sprintf("three-%d-%d", round, i), 3)
				trs, keys = append(trs, tr), append(keys, k)
			}
			for i, a := range agents {
				a.granted(trs[i])
				ds = append(ds, a.send(trs[i], keys[i], 2, 40))
			}
			for i, a := range agents {
				arrived(t, w, a, r, trs[i], keys[i], ds[i])
			}
		}
		r.untilFree(10)
	})
	// The seeds' example (fault 1 as sender): one request waits at that receiver
	// while another of the same sender goes on; both complete.
	t.Run("interleaved, one sender", func(t *testing.T) {
		ka, kb := plain.keys(8), plain.keys(8)
		a := s.begin(at, "A", 8)
		s.granted(a)
		da, err := s.submit(a, 0, ka[:4], client.NoEnd, 0)
		if err != nil {
			t.Fatal(err)
		}
		b := s.begin(at, "B", 8)
		r.until("A's slots", func(x reply) bool { return len(x.Keys) == 4 })
		// Once it has allocated all of A, that receiver may admit B.
		select {
		case <-b.Granted():
			t.Error("B is granted beside A")
		default:
		}
		rest, err := s.submit(a, 4, ka[4:], 8, 0)
		if err != nil {
			t.Fatal(err)
		}
		arrived(t, w, s, r, a, ka, append(da, rest...))
		s.granted(b)
		arrived(t, w, s, r, b, kb, s.send(b, kb, 4, 0))
		r.untilFree(10)
	})
	t.Run("cancel", func(t *testing.T) {
		cancel := func(tr *client.Transfer) {
			t.Helper()
			if _, err := tr.Cancel(ctxFor(t), "cancelled", "test"); err != nil {
				t.Error(err)
			}
			if e := s.ended(tr); e.Ending != "cancelled" {
				t.Errorf("%s: %+v", tr.Req(), e)
			}
		}
		// Before anything is out.
		cancel(s.begin(at, "c0", 4))
		// While it waits: that receiver admits it later all the same.
		hold := s.begin(at, "hold", 8)
		s.granted(hold)
		waits := s.begin(at, "c1", 8)
		cancel(waits)
		cancel(hold)
		r.untilFree(10)
		// Granted, nothing written; and some chunks written.
		tr := s.begin(at, "c2", 5)
		s.granted(tr)
		cancel(tr)
		tr = s.begin(at, "c3", 6)
		s.granted(tr)
		if _, err := s.submit(tr, 0, plain.keys(3), client.NoEnd, 0); err != nil {
			t.Fatal(err)
		}
		cancel(tr)
		r.untilFree(10)
		// After it has ended: nothing changes.
		keys := plain.keys(2)
		tr = s.begin(at, "c4", 2)
		s.granted(tr)
		d := s.send(tr, keys, 2, 0)
		if e := s.ended(tr); e.Err() != nil {
			t.Fatal(e)
		}
		tr.Cancel(ctxFor(t), "cancelled", "too late")
		same(t, "c4", r.digests(keys), d)
		r.remove(keys)
		r.untilFree(10)
		s.untilFree()
	})
	t.Run("refused", func(t *testing.T) {
		tr := s.begin(at, "big", 11)
		if e := s.ended(tr); e.Ending != "failed" {
			t.Errorf("11 chunks at a receiver of 10: %+v", e)
		}
		r.untilFree(10)
	})
	t.Run("already sent", func(t *testing.T) {
		keys := plain.keys(6)
		a := s.begin(at, "first", 4)
		s.granted(a)
		da := s.send(a, keys[:4], 4, 0)
		if e := s.ended(a); e.Err() != nil {
			t.Fatal(e)
		}
		b := s.begin(at, "second", 6) // its first four are there
		s.granted(b)
		db := s.send(b, keys, 6, 0)
		if e := s.ended(b); e.Err() != nil {
			t.Fatal(e)
		}
		got := r.digests(keys)
		same(t, "first", got[:4], da)
		same(t, "second", got[4:], db[4:])
		r.remove(keys)     // the engine, for one request
		r.remove(keys[:4]) // and for the other: what they share is counted
		r.untilFree(10)
	})
	t.Run("receiver killed and restarted", func(t *testing.T) {
		spare := startPeers(t, 2)
		// Between requests.
		r.kill()
		r = spare[0].receiver(plain, "r", 10, at, 20)
		deliverAgain(t, w, s, r, "again")
		// In mid-request.
		tr := s.begin(at, "mid", 8)
		s.granted(tr)
		if _, err := s.submit(tr, 0, plain.keys(3), client.NoEnd, 0); err != nil {
			t.Fatal(err)
		}
		r.kill()
		if e := s.ended(tr); e.Ending != "failed" || e.Reason != "peer_lost" {
			t.Errorf("%+v", e)
		}
		r = spare[1].receiver(plain, "r", 10, at, 20)
		deliverAgain(t, w, s, r, "back")
		s.untilFree()
		r.untilFree(10)
		if w.count("mid") != 0 {
			t.Error("the proxy was told that it is ready")
		}
	})
	// A receiver that stands still takes nothing: writes are in flight for sure
	// when it is killed, or when write_timeout_sec ends them.
	t.Run("killed in mid-write", func(t *testing.T) {
		procs := startPeers(t, 3)
		for i, p := range procs {
			to := p.receiver(plain, "r", 32, newTarget(t), 20)
			var trs []*client.Transfer
			for j := range 3 {
				tr := s.begin(to.target, fmt.Sprintf("kill-%d-%d", i, j), 8)
				s.granted(tr)
				trs = append(trs, tr)
			}
			p.signal(syscall.SIGSTOP)
			for _, tr := range trs {
				if _, err := s.submit(tr, 0, plain.keys(6), client.NoEnd, 0); err != nil {
					t.Fatal(err)
				}
			}
			s.until("writes in flight", func(x berth.Status) bool { return x.Staging.Writing > 0 })
			p.kill()
			for _, tr := range trs {
				if e := s.ended(tr); e.Ending != "failed" {
					t.Errorf("%s: %+v", tr.Req(), e)
				}
			}
			s.untilFree()
		}
	})
	t.Run("stopped in mid-write", func(t *testing.T) {
		p := startPeers(t, 1)[0]
		to := p.receiver(plain, "r", 10, newTarget(t), 20)
		quick := sending(t, plain, 16, w.port, settings{"write_timeout_sec": "1"})
		tr := quick.begin(to.target, "stopped", 8)
		quick.granted(tr)
		p.signal(syscall.SIGSTOP)
		if _, err := quick.submit(tr, 0, plain.keys(8), 8, 0); err != nil {
			t.Fatal(err)
		}
		quick.until("given up", func(x berth.Status) bool { return x.Staging.Writing == 0 })
		p.signal(syscall.SIGCONT)
		if e := quick.ended(tr); e.Ending != "failed" {
			t.Errorf("%+v", e)
		}
		quick.untilFree()
		to.untilFree(10)
		deliverAgain(t, w, quick, to, "continued")
	})
}

// deliverAgain delivers once the sender has noticed that the receiver is
// another one: a begin before that fails as peer_lost, which is a true ending.
func deliverAgain(t *testing.T, w *words, b *agent, to *lmcacheReceiver, name string) {
	t.Helper()
	for try := range 20 {
		keys := plain.keys(5)
		tr := b.begin(to.target, fmt.Sprintf("%s-%d", name, try), 5)
		select {
		case <-tr.Granted():
		case <-tr.Ended():
			continue
		}
		d, err := b.submit(tr, 0, keys, 5, 50)
		if err != nil || b.ended(tr).Err() != nil {
			continue
		}
		same(t, tr.Req(), to.digests(keys), d)
		to.remove(keys)
		return
	}
	t.Fatal("no request reaches the restarted receiver")
}
