//go:build interop && nixl

package interop

import (
	"fmt"
	"net"
	"sync"
	"testing"

	"github.com/berthkv/berth"
	"github.com/berthkv/berth/client"
)

// relay passes connections on to a port, holds what goes one way, and cuts them.
type relay struct {
	l    net.Listener
	mu   sync.Mutex
	open []net.Conn
	held [2]bool // what comes from the sender, from the receiver
	wake *sync.Cond
	work sync.WaitGroup
}

func startRelay(t *testing.T, port int) *relay {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &relay{l: l}
	r.wake = sync.NewCond(&r.mu)
	r.work.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", fmt.Sprint("127.0.0.1:", port))
			if err != nil {
				in.Close()
				continue
			}
			r.mu.Lock()
			r.open = append(r.open, in, out)
			r.mu.Unlock()
			r.work.Go(func() { r.pass(out, in, 0) })
			r.work.Go(func() { r.pass(in, out, 1) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		r.cut()
		r.work.Wait()
	})
	return r
}

func (r *relay) port() int { return r.l.Addr().(*net.TCPAddr).Port }

func (r *relay) pass(to, from net.Conn, way int) {
	defer to.Close()
	b := make([]byte, 64<<10)
	for {
		n, err := from.Read(b)
		if err != nil {
			return
		}
		r.mu.Lock()
		for r.held[way] {
			r.wake.Wait()
		}
		r.mu.Unlock()
		if _, err := to.Write(b[:n]); err != nil {
			return
		}
	}
}

// hold keeps what goes one way from now on; what it held is lost by the cut.
func (r *relay) hold(way int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.held[way] = true
}

// cut ends all connections; later ones are passed on.
func (r *relay) cut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.open {
		c.Close()
	}
	r.open = nil
	r.held = [2]bool{}
	r.wake.Broadcast()
}

const (
	fromSender = iota
	fromReceiver
)

// What a request held at an LMCache receiver is given back, and no more: keys
// that it shares with another request stay for that one. Also when a connection
// is lost and it is not known whether the last message has arrived.
func TestSend_gives_back(t *testing.T) {
	part(t, "3 what a request held is given back, no more")
	w := listenWords(t)
	r := startPeers(t, 1)[0].receiver(plain, "r", 10, newTarget(t), 20)
	s := sending(t, plain, 24, w.port, nil)
	through := startRelay(t, r.alloc)
	to := target{r.init, through.port()}

	for i, c := range []struct {
		name string
		end  func(*testing.T, *client.Transfer, []string)
	}{
		{"cancelled", func(t *testing.T, tr *client.Transfer, keys []string) {
			submitAndAwait(t, s, r, tr, keys)
			if _, err := tr.Cancel(ctxFor(t), "cancelled", "test"); err != nil {
				t.Error(err)
			}
		}},
		{"lost after the batch arrived", func(t *testing.T, tr *client.Transfer, keys []string) {
			through.hold(fromReceiver)
			submitAndAwait(t, s, r, tr, keys)
			through.cut()
		}},
		{"lost before it arrived", func(t *testing.T, tr *client.Transfer, keys []string) {
			through.hold(fromSender)
			if _, err := s.submit(tr, 2, keys[2:], client.NoEnd, 0); err != nil {
				t.Fatal(err)
			}
			s.until("the batch is out", func(x berth.Status) bool { return x.Staging.Staged == 0 })
			through.cut()
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			shared := plain.keys(3)
			other := s.begin(r.target, fmt.Sprint("other", i), 3)
			s.granted(other)
			d := s.send(other, shared, 3, 0)
			if e := s.ended(other); e.Err() != nil {
				t.Fatal(e)
			}
			keys := append(plain.keys(2), shared[0], shared[1], plain.keys(1)[0])
			tr := s.begin(to, fmt.Sprint("mine", i), 6)
			s.granted(tr)
			if _, err := s.submit(tr, 0, keys[:2], client.NoEnd, 0); err != nil {
				t.Fatal(err)
			}
			r.until("the first batch", func(x reply) bool { return len(x.Keys) == 5 })
			s.until("it is written", func(x berth.Status) bool { return x.Staging.Free == x.Staging.Capacity })
			c.end(t, tr, keys)
			if e := s.ended(tr); e.Err() == nil {
				t.Errorf("%+v", e)
			}
			r.until("three free slots less", func(x reply) bool { return x.Free == 7 && x.Reserved == 0 })
			same(t, other.Req(), r.digests(shared), d)
			if n := r.remove(shared); n != 3 { // by its decoder
				t.Errorf("%d of 3 chunks removed", n)
			}
			r.untilFree(10)
			s.untilFree()
		})
	}
}

// submitAndAwait submits the second batch, of which two keys are another
// request's, and waits until the receiver has it.
func submitAndAwait(t *testing.T, s *agent, r *lmcacheReceiver, tr *client.Transfer, keys []string) {
	t.Helper()
	if _, err := s.submit(tr, 2, keys[2:], client.NoEnd, 0); err != nil {
		t.Fatal(err)
	}
	r.until("the second batch", func(x reply) bool { return len(x.Keys) == 6 })
}
