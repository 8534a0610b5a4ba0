//go:build interop && nixl

package interop

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/berthkv/berth/client"
)

// tally counts how requests ended.
type tally struct {
	mu sync.Mutex
	n  map[string]int
}

func (c *tally) add(ending string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n[ending]++
}

func (c *tally) sum() (n int) {
	for _, x := range c.n {
		n += x
	}
	return n
}

// Two LMCache senders and a Berth sender into one Berth receiver: 1,000 requests
// of random sizes, cancels and killed senders among them. R1 holds in every
// status answer, every digest is right, and in the end all slots are free. A
// refusal by the lock-step rule is a legal ending, and counted.
func TestMixed(t *testing.T) {
	part(t, "4 mixed senders, 1,000 requests")
	const (
		capacity = 24
		fromEach = 250 // of each LMCache sender
		fromUs   = 501
		largest  = 8
		kills    = 2 // of each LMCache sender
	)
	w := listenWords(t)
	// Now and then an LMCache sender forgets a request that it was told to cancel
	// and says nothing more of it: its deadline ends it.
	r := receiving(t, plain, capacity, settings{"lease_sec": "2", "request_timeout_sec": "10", "pd_allocation_timeout_sec": "2", "log_level": "warn"})
	s := sending(t, plain, 64, w.port, settings{"log_level": "warn"})
	procs := startPeers(t, 2+2*kills)
	ends := &tally{n: map[string]int{}}

	watched, stop := context.WithCancel(t.Context())
	var watching, working sync.WaitGroup
	watching.Go(func() { // R1, all the time
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for ; watched.Err() == nil; <-tick.C {
			st, err := r.Status(watched)
			if err != nil {
				return
			}
			if p := st.Pool; p.Free+p.Reserved+p.Granted+p.Committed+p.Claimed+p.Quarantined != p.Capacity {
				t.Errorf("R1: the terms of %+v do not sum to the capacity", *p)
				return
			}
		}
	})

	// A request is taken by its keys when LMCache's sender has sent the word.
	take := func(req string, keys, want []string) error {
		got, n, err := r.engine.Find(ctxFor(t), req, keys)
		if err != nil || got != req || n != len(keys) {
			return fmt.Errorf("found %q with %d of %d chunks: %v", got, n, len(keys), err)
		}
		return compare(t, r, req, want)
	}
	for i := range 2 {
		working.Go(func() {
			rng := rand.New(rand.NewPCG(7, uint64(i)))
			mine := procs[i*(1+kills) : (i+1)*(1+kills)]
			s, err := mine[0].trySender(plain, fmt.Sprint("s", i), 2*largest, w.port)
			if err != nil {
				t.Error(err)
				return
			}
			killAt := map[int]bool{fromEach / 3: true, 2 * fromEach / 3: true}
			for n := 0; n < fromEach; {
				// Two requests at a time, their batches in turn.
				var pair []*put
				for range min(1+rng.IntN(2), fromEach-n) {
					keys := plain.keys(1 + rng.IntN(largest))
					pair = append(pair, &put{req: fmt.Sprintf("l%d-%d", i, n), keys: keys, lastToks: rng.IntN(tokens), cancel: rng.IntN(20) == 0})
					n++
				}
				for left := true; left; {
					left = false
					for _, p := range pair {
						left = p.next(s, r.target(), rng) || left
					}
				}
				if killAt[n] || killAt[n-1] {
					delete(killAt, n)
					delete(killAt, n-1)
					s.kill()
					mine = mine[1:]
					if s, err = mine[0].trySender(plain, fmt.Sprint("s", i), 2*largest, w.port); err != nil {
						t.Error(err)
						return
					}
					for _, p := range pair { // perhaps the word was out
						if w.count(p.req) > 0 && take(p.req, p.keys, p.digests) == nil {
							ends.add("LMCache: ready before its sender was killed")
						} else {
							ends.add("LMCache: lost with its sender")
						}
					}
					continue
				}
				// Both at once: a decoder that reads one only when the other has ended
				// would come too late.
				var reading sync.WaitGroup
				for _, p := range pair {
					reading.Go(func() {
						ending, err := p.outcome(r, w, take)
						if err != nil {
							t.Errorf("%s (cancelled: %v): %v", p.req, p.cancel, err)
						}
						ends.add("LMCache: " + ending)
					})
				}
				reading.Wait()
			}
		})
	}
	for i := range 3 {
		working.Go(func() {
			rng := rand.New(rand.NewPCG(8, uint64(i)))
			for n := range fromUs / 3 {
				req, keys := fmt.Sprintf("b%d-%d", i, n), plain.keys(1+rng.IntN(largest))
				tr, err := s.tryBegin(r.target(), req, len(keys))
				if err != nil {
					t.Errorf("%s: %v", req, err)
					continue
				}
				if rng.IntN(20) == 0 {
					tr.Cancel(ctxFor(t), "cancelled", "test")
				}
				select {
				case <-tr.Granted():
				case <-tr.Ended():
				}
				var want []string
				for from := 0; from < len(keys); {
					to := min(from+1+rng.IntN(4), len(keys))
					end := client.NoEnd
					if to == len(keys) {
						end = len(keys)
					}
					d, err := s.submit(tr, from, keys[from:to], end, 0)
					if err != nil { // the request has ended
						if _, err := tr.Cancel(ctxFor(t), "cancelled", err.Error()); err != nil {
							t.Errorf("%s: %v", req, err)
						}
						break
					}
					want = append(want, d...)
					from = to
				}
				s.ended(tr)
				if tr.Ending().Err() == nil {
					if err := compare(t, r, req, want); err != nil {
						t.Errorf("%s: %v", req, err)
					}
				}
				ends.add("Berth: " + string(tr.Ending().Ending))
			}
		})
	}
	working.Wait()
	r.untilFree()
	stop()
	watching.Wait()
	s.untilFree()
	for _, k := range slices.Sorted(maps.Keys(ends.n)) {
		t.Logf("%4d  %s", ends.n[k], k)
	}
	if ends.sum() != 2*fromEach+fromUs {
		t.Errorf("%d requests have ended, %d were made", ends.sum(), 2*fromEach+fromUs)
	}
	if ready := ends.n["LMCache: ready"] + ends.n["Berth: ready"]; ready < ends.sum()/2 {
		t.Errorf("only %d of %d are ready", ready, ends.sum())
	}
}

// compare claims a request, compares and releases it.
func compare(t *testing.T, r *agent, req string, want []string) error {
	got, err := r.engine.Claim(ctxFor(t), req, req)
	if err != nil {
		return err
	}
	var digests []string
	for _, c := range got.Chunks {
		digests = append(digests, digest(r.engine.Receive(c.Slot)[:c.Bytes]))
	}
	if !slices.Equal(digests, want) {
		return fmt.Errorf("other bytes arrived than were sent")
	}
	return r.engine.Release(ctxFor(t), req, req)
}

func (p *peerProcess) trySender(l layout, at string, slots, notify int) (*lmcacheSender, error) {
	c := open(l, at, "sender", slots, 20)
	c["proxy"] = notify
	if r := p.try(c); r.Error != "" {
		return nil, fmt.Errorf("%s", r.Error)
	}
	return &lmcacheSender{p, at, l}, nil
}

// put is a request of an LMCache sender, submitted batch by batch.
type put struct {
	req      string
	keys     []string
	lastToks int
	cancel   bool
	sent     int
	digests  []string
	err      string
}

// next submits the next batch and reports whether more are to come.
func (p *put) next(s *lmcacheSender, to target, rng *rand.Rand) bool {
	if p.sent == len(p.keys) || p.err != "" {
		return false
	}
	n := min(1+rng.IntN(4), len(p.keys)-p.sent)
	last := p.sent+n == len(p.keys)
	toks := 0
	if last {
		toks = p.lastToks
	}
	r := s.try(s.command(to, p.req, p.keys[p.sent:p.sent+n], len(p.keys), last, toks))
	p.err = r.Error
	p.digests = append(p.digests, r.SHA256...)
	p.sent += n
	if p.cancel && (last || rng.IntN(2) == 0) {
		s.try(command{"op": "cancel", "at": s.at, "req": p.req})
		p.sent = len(p.keys)
	}
	return p.sent < len(p.keys)
}

// outcome is how a request has ended. One that is ready is taken; one that was
// cancelled may be so before.
func (p *put) outcome(r *agent, w *words, take func(req string, keys, want []string) error) (string, error) {
	said, err := p.end(r, w)
	switch {
	case err != nil:
		return "error", err
	case !said && p.cancel:
		return "cancelled", nil
	case !said:
		return "refused", nil
	}
	err = take(p.req, p.keys, p.digests)
	switch {
	case !p.cancel && err != nil:
		if e, waited := r.engine.Wait(ctxFor(r.t), p.req, time.Millisecond); waited == nil {
			err = fmt.Errorf("%w; it has ended as %+v", err, e)
		}
		return "error", err
	case !p.cancel:
		return "ready", nil
	case err == nil:
		return "ready, cancelled too late", nil
	}
	return "cancelled when ready", nil
}

// end waits for the sender's word, or for a bad ending at the receiver, which
// decides: the sender tracks some that were refused or cancelled for ever.
func (p *put) end(r *agent, w *words) (said bool, err error) {
	if p.err != "" {
		return false, fmt.Errorf("%s", p.err)
	}
	ctx, cancel := context.WithCancel(ctxFor(r.t))
	defer cancel()
	over := make(chan error, 1)
	go func() {
		e, err := r.engine.Wait(ctx, p.req, limit)
		if err == nil && e.Err() == nil {
			err = fmt.Errorf("is ready, though nobody has vouched for it")
		}
		over <- err
	}()
	for {
		n, wake := w.look(p.req)
		if n > 0 {
			return true, nil
		}
		select {
		case <-wake:
		case err := <-over:
			return false, err
		}
	}
}
