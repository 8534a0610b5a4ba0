// Package lobby accepts connections for the links that listen, and keeps those
// that have not said hello yet few and short: by the thousand, they cost
// nothing and delay nobody who speaks at once.
package lobby

import (
	"errors"
	"net"
	"sync"
	"time"
)

const (
	// MaxWaiting is how many connections may be without a hello at a time; one
	// more closes the oldest of them.
	MaxWaiting = 64
	// HelloTimeout is how long one may be without.
	HelloTimeout = 5 * time.Second
	// acceptPause is the wait after an error of the listener that is not its
	// end: no descriptors are left.
	acceptPause = 100 * time.Millisecond
)

// Config says how connections are taken in. Zero limits get the default.
type Config struct {
	Permit       func(net.Conn) bool // nil: all are permitted
	MaxWaiting   int
	HelloTimeout time.Duration
	// Serve has a goroutine and owns the connection, which has a deadline until
	// it calls Admit. The connection is closed when Serve returns.
	Serve func(net.Conn)
}

// Lobby is a listener with its connections.
type Lobby struct {
	cfg      Config
	listener net.Listener
	stop     chan struct{}
	wg       sync.WaitGroup // the accept loop and every Serve

	mu      sync.Mutex
	shut    bool
	waiting []net.Conn // oldest first
}

// Open starts to accept from l, which is the lobby's from now on.
func Open(l net.Listener, cfg Config) *Lobby {
	if cfg.MaxWaiting == 0 {
		cfg.MaxWaiting = MaxWaiting
	}
	if cfg.HelloTimeout == 0 {
		cfg.HelloTimeout = HelloTimeout
	}
	b := &Lobby{cfg: cfg, listener: l, stop: make(chan struct{})}
	b.wg.Add(1)
	go b.accept()
	return b
}

func (b *Lobby) accept() {
	defer b.wg.Done()
	for {
		nc, err := b.listener.Accept()
		switch {
		case err == nil:
			b.enter(nc)
		case errors.Is(err, net.ErrClosed):
			return
		default:
			t := time.NewTimer(acceptPause)
			select {
			case <-t.C:
			case <-b.stop:
				t.Stop()
				return
			}
		}
	}
}

func (b *Lobby) enter(nc net.Conn) {
	if b.cfg.Permit != nil && !b.cfg.Permit(nc) {
		nc.Close()
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.shut {
		nc.Close()
		return
	}
	if len(b.waiting) >= b.cfg.MaxWaiting {
		b.waiting[0].Close() // its Serve gets an error
		b.waiting = b.waiting[1:]
	}
	b.waiting = append(b.waiting, nc)
	b.wg.Add(1)
	go func() {
		defer b.wg.Done()
		defer nc.Close()
		defer b.leave(nc)
		if nc.SetDeadline(time.Now().Add(b.cfg.HelloTimeout)) == nil {
			b.cfg.Serve(nc)
		}
	}()
}

// Admit ends the waiting of a connection that has said hello; its deadline is
// taken away.
func (b *Lobby) Admit(nc net.Conn) error {
	b.leave(nc)
	return nc.SetDeadline(time.Time{})
}

func (b *Lobby) leave(nc net.Conn) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, w := range b.waiting {
		if w == nc {
			b.waiting = append(b.waiting[:i], b.waiting[i+1:]...)
			return
		}
	}
}

// Shut closes the listener and the connections that wait, and returns at once.
// Connections that have been admitted are for their owner to close.
func (b *Lobby) Shut() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.shut {
		return
	}
	b.shut = true
	close(b.stop)
	b.listener.Close()
	for _, nc := range b.waiting {
		nc.Close()
	}
}

// Wait returns when every Serve has. Call it after Shut.
func (b *Lobby) Wait() { b.wg.Wait() }
