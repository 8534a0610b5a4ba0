package chaos

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"runtime"
	"syscall"
)

// network is where the nodes are. There are two: a network namespace for each
// node, whose only way out is a user-space switch of packets, where this process
// may make such; else loopback, with a relay before each receiver.
type network interface {
	String() string
	// place makes a node's place, to be closed.
	place(name string) (*place, error)
	// perSender reports whether rules tell senders apart.
	perSender() bool
}

// place is one node's place: an address, and a thread on which its processes are
// started and its sockets made.
type place struct {
	name string
	ip   netip.Addr // by which others reach it
	bind string     // what its processes bind
	loop string     // where its operator's endpoints are
	call chan func()
	done chan struct{}
	end  func()
}

// newPlace starts the thread; prepare runs on it first.
func newPlace(name string, prepare func() error) (*place, error) {
	p := &place{name: name, call: make(chan func()), done: make(chan struct{}), end: func() {}}
	ready := make(chan error, 1)
	go func() {
		// Never unlocked: the thread ends with this goroutine, and with it the
		// processes that it started (by their parent-death signal) and, where it
		// has one, its network.
		runtime.LockOSThread()
		err := prepare()
		ready <- err
		if err != nil {
			return
		}
		for {
			select {
			case f := <-p.call:
				f()
			case <-p.done:
				return
			}
		}
	}()
	if err := <-ready; err != nil {
		return nil, fmt.Errorf("place of %s: %w", name, err)
	}
	return p, nil
}

// do runs f on the place's thread.
func (p *place) do(f func()) {
	done := make(chan struct{})
	select {
	case p.call <- func() { f(); close(done) }:
		<-done
	case <-p.done:
	}
}

var errGone = errors.New("the place is closed")

// start starts a process in this place, in a process group of its own.
func (p *place) start(cmd *exec.Cmd) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	err := errGone
	p.do(func() { err = cmd.Start() })
	return err
}

// dial connects from this place to an address with a number for a host, so that
// the socket is made on its thread.
func (p *place) dial(ctx context.Context, _, addr string) (c net.Conn, err error) {
	err = errGone
	p.do(func() {
		var d net.Dialer
		c, err = d.DialContext(ctx, "tcp4", addr)
	})
	return c, err
}

func (p *place) close() {
	close(p.done)
	p.end()
}

// newNetwork returns the best network that this machine allows, and why it is
// none of the better ones.
func newNetwork(w *wire, kind string) (network, error) {
	if kind == "loopback" {
		return &loopback{wire: w}, nil
	}
	n := &namespaces{wire: w, ports: map[netip.Addr]*port{}}
	p, err := n.place("probe")
	if err == nil {
		p.close()
		return n, nil
	}
	if kind == "namespaces" {
		return nil, err
	}
	return &loopback{wire: w, why: err}, nil
}
