package chaos

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"time"
)

// loopback is one address of loopback for each node, and for each node a second
// one, at which a relay listens and by which the others know it. Rules tell
// receivers apart but not senders; a cut direction is one that is not read; what
// is lost breaks its connection.
type loopback struct {
	wire *wire
	why  error // why it is not namespaces
	used byte
}

func (l *loopback) String() string {
	s := "loopback, with a user-space relay before each node"
	if l.why != nil {
		s += fmt.Sprintf(" (no network namespaces: %v)", l.why)
	}
	return s
}

func (l *loopback) perSender() bool { return false }

func (l *loopback) place(name string) (*place, error) {
	l.used++
	p, err := newPlace(name, func() error { return nil })
	if err != nil {
		return nil, err
	}
	own := netip.AddrFrom4([4]byte{127, 88, 1, l.used})
	p.ip, p.bind, p.loop = netip.AddrFrom4([4]byte{127, 88, 2, l.used}), own.String(), own.String()
	r := &relay{wire: l.wire, node: p.ip, own: own, conns: map[net.Conn]struct{}{}}
	for _, port := range []int{allocPort, initPort, notifyPort, dataPort, webPort} {
		if err := r.listen(port); err != nil {
			r.close()
			p.close()
			return nil, err
		}
	}
	p.end = r.close
	return p, nil
}

// relay passes on connections to one node.
type relay struct {
	wire      *wire
	node, own netip.Addr
	listeners []net.Listener
	wg        sync.WaitGroup

	mu     sync.Mutex
	conns  map[net.Conn]struct{}
	closed bool
}

func (r *relay) listen(port int) error {
	l, err := net.Listen("tcp4", net.JoinHostPort(r.node.String(), strconv.Itoa(port)))
	if err != nil {
		return err
	}
	r.listeners = append(r.listeners, l)
	what, _ := trafficOf(uint16(port))
	r.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			r.wg.Go(func() { r.serve(c, what, port) })
		}
	})
	return nil
}

func (r *relay) serve(in net.Conn, what traffic, port int) {
	defer in.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	var d net.Dialer
	out, err := d.DialContext(ctx, "tcp4", net.JoinHostPort(r.own.String(), strconv.Itoa(port)))
	if err != nil {
		return
	}
	defer out.Close()
	if !r.add(in, out) {
		return
	}
	defer r.remove(in, out)
	var wg sync.WaitGroup
	stop := make(chan struct{})
	var once sync.Once
	cut := func() { once.Do(func() { close(stop); in.Close(); out.Close() }) }
	nobody := netip.Addr{}
	wg.Go(func() { defer cut(); r.pump(out, in, nobody, r.node, what, stop) })
	wg.Go(func() { defer cut(); r.pump(in, out, r.node, nobody, what, stop) })
	wg.Wait()
}

// pump copies one direction, as the rules say.
func (r *relay) pump(to, from net.Conn, src, dst netip.Addr, what traffic, stop <-chan struct{}) {
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		for {
			cut, lost, delay, changed := r.wire.verdict(src, dst, what)
			if lost {
				return
			}
			if cut {
				select {
				case <-changed:
					continue
				case <-stop:
					return
				}
			}
			if delay > 0 {
				t := time.NewTimer(delay)
				select {
				case <-t.C:
				case <-stop:
					t.Stop()
					return
				}
			}
			break
		}
		if _, err := to.Write(buf[:n]); err != nil {
			return
		}
	}
}

func (r *relay) add(cs ...net.Conn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range cs {
		r.conns[c] = struct{}{}
	}
	return !r.closed
}

func (r *relay) remove(cs ...net.Conn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range cs {
		delete(r.conns, c)
	}
}

func (r *relay) close() {
	for _, l := range r.listeners {
		l.Close()
	}
	r.mu.Lock()
	r.closed = true
	for c := range r.conns {
		c.Close()
	}
	r.mu.Unlock()
	r.wg.Wait()
}
