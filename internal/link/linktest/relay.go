package linktest

import (
	"errors"
	"net"
	"sync"
	"testing"
)

// Relay is a Between for links over TCP: it passes connections on to one
// address. Its fields after mu are guarded by it.
type Relay struct {
	listener net.Listener
	wg       sync.WaitGroup

	mu     sync.Mutex
	cond   sync.Cond
	target string
	shut   bool
	stall  bool
	budget int64 // bytes that may still pass while stalled
	conns  map[net.Conn]struct{}
}

// NewRelay starts a relay that ends with the test.
func NewRelay(t testing.TB) Between {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &Relay{listener: l, conns: map[net.Conn]struct{}{}}
	r.cond.L = &r.mu
	r.wg.Add(1)
	go r.accept()
	t.Cleanup(func() {
		r.Shut()
		l.Close()
		r.wg.Wait()
	})
	return r
}

// Route implements Between.
func (r *Relay) Route(addr string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.target = addr
	return r.listener.Addr().String()
}

// Stall implements Between. The bytes are counted over all connections.
func (r *Relay) Stall(n int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stall, r.budget = true, n
	r.cond.Broadcast() // connections that had stopped share the new budget
}

// Resume implements Between.
func (r *Relay) Resume() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stall = false
	r.cond.Broadcast()
}

// Cut implements Between.
func (r *Relay) Cut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cutLocked()
}

func (r *Relay) cutLocked() {
	for c := range r.conns {
		c.Close()
	}
	clear(r.conns)
	r.cond.Broadcast()
}

// Shut implements Between.
func (r *Relay) Shut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.shut = true
	r.cutLocked()
}

func (r *Relay) accept() {
	defer r.wg.Done()
	for {
		in, err := r.listener.Accept()
		if err != nil {
			return
		}
		out, err := r.dial()
		if err != nil {
			in.Close()
			continue
		}
		r.mu.Lock()
		r.conns[in], r.conns[out] = struct{}{}, struct{}{}
		if r.shut {
			r.cutLocked()
		}
		r.mu.Unlock()
		r.wg.Add(2)
		go r.pass(out, in, true)
		go r.pass(in, out, false)
	}
}

func (r *Relay) dial() (net.Conn, error) {
	r.mu.Lock()
	target, shut := r.target, r.shut
	r.mu.Unlock()
	if shut {
		return nil, errors.New("shut")
	}
	return net.Dial("tcp", target)
}

// pass copies one direction; the one towards the receiver can be stalled.
func (r *Relay) pass(to, from net.Conn, data bool) {
	defer r.wg.Done()
	defer to.Close()
	defer from.Close()
	buf := make([]byte, 16<<10)
	for {
		n, err := from.Read(buf)
		for b := buf[:n]; len(b) > 0; {
			m := len(b)
			if data {
				m = r.allowed(from, m)
			}
			if m == 0 {
				return
			}
			if _, err := to.Write(b[:m]); err != nil {
				return
			}
			b = b[m:]
		}
		if err != nil {
			return
		}
	}
}

// allowed waits until some of n bytes may pass and returns how many; 0 when
// the connection is cut.
func (r *Relay) allowed(c net.Conn, n int) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	for r.stall && r.budget == 0 {
		if _, ok := r.conns[c]; !ok {
			return 0
		}
		r.cond.Wait()
	}
	if r.stall {
		n = int(min(int64(n), r.budget))
		r.budget -= int64(n)
	}
	return n
}
