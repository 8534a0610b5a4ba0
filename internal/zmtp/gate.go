package zmtp

import (
	"context"
	"errors"
	"sync"
)

// gate wakes all who wait for a change. The zero value is ready.
type gate struct {
	mu sync.Mutex // guards ch
	ch chan struct{}
}

// wait returns a channel that the next open closes.
func (g *gate) wait() <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ch == nil {
		g.ch = make(chan struct{})
	}
	return g.ch
}

func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ch != nil {
		close(g.ch)
		g.ch = nil
	}
}

// retry calls try, again after each open, until it is done or ctx ends.
func (g *gate) retry(ctx context.Context, try func() error) error {
	waits := func(err error) bool { return errors.Is(err, ErrWouldBlock) || errors.Is(err, ErrNoPeer) }
	err := try()
	for waits(err) {
		opened := g.wait()
		if err = try(); !waits(err) {
			break
		}
		select {
		case <-opened:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return err
}
