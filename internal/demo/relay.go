package demo

import (
	"context"
	"io"
	"net"
	"sync"
	"time"
)

// relay passes TCP connections on to an engine, so that the demo can cut those
// between the proxy and that engine.
type relay struct {
	target string
	l      net.Listener
	wg     sync.WaitGroup

	mu     sync.Mutex
	conns  map[net.Conn]struct{}
	closed bool
}

func newRelay(target string) (*relay, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	r := &relay{target: target, l: l, conns: map[net.Conn]struct{}{}}
	r.wg.Go(r.accept)
	return r, nil
}

func (r *relay) port() int { return r.l.Addr().(*net.TCPAddr).Port }

func (r *relay) accept() {
	for {
		c, err := r.l.Accept()
		if err != nil {
			return
		}
		r.wg.Go(func() { r.serve(c) })
	}
}

func (r *relay) serve(in net.Conn) {
	defer in.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	var d net.Dialer
	out, err := d.DialContext(ctx, "tcp", r.target)
	if err != nil {
		return
	}
	defer out.Close()
	if !r.add(in, out) {
		return
	}
	defer r.remove(in, out)
	var wg sync.WaitGroup
	for _, p := range [][2]net.Conn{{in, out}, {out, in}} {
		wg.Go(func() {
			io.Copy(p[1], p[0])
			p[1].(*net.TCPConn).CloseWrite()
		})
	}
	wg.Wait()
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

// cut breaks every connection that is open.
func (r *relay) cut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c := range r.conns {
		c.(*net.TCPConn).SetLinger(0)
		c.Close()
	}
}

func (r *relay) close() {
	r.l.Close()
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	r.cut()
	r.wg.Wait()
}
