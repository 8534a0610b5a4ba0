package engine

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/berthkv/berth/internal/fault"
)

// Waits between two attempts to reach an agent: doubled from the first to the
// last.
const (
	firstBackoff = 20 * time.Millisecond
	lastBackoff  = 2 * time.Second
	dialTimeout  = 5 * time.Second
)

// rank keeps the connection to one rank's agent, and dials again when it is
// lost. Whoever uses the connection holds a lease on it; the agent's memory
// stays mapped until the last lease is returned.
type rank struct {
	number     int
	dial       Dialer
	chunkBytes int64 // of a full chunk
	sends      bool  // the engine needs a staging pool
	log        *slog.Logger

	mu struct {
		sync.Mutex
		link    *link         // nil while there is no connection
		reason  error         // why not
		changed chan struct{} // closed and replaced at each change of link; nil until somebody waits
	}
}

// link is one connection, the staging turn on it, and who uses it.
type link struct {
	agent Agent
	turn  turnstile
	lost  context.Context // done when the connection is lost
	users sync.WaitGroup
}

func newRank(number int, dial Dialer, chunkBytes int64, sends bool, log *slog.Logger) *rank {
	r := &rank{number: number, dial: dial, chunkBytes: chunkBytes, sends: sends, log: log.With("rank", number)}
	r.mu.reason = fault.New(fault.PeerLost, "the agent of rank %d was not reached yet", number)
	return r
}

// use returns the connection and a context that also ends when it is lost. The
// caller calls done when it no longer touches the agent or its memory.
func (r *rank) use(ctx context.Context) (l *link, bound context.Context, done func(), err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	l = r.mu.link
	if l == nil {
		return nil, nil, nil, r.mu.reason
	}
	l.users.Add(1)
	bound, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(l.lost, func() { cancel(context.Cause(l.lost)) })
	return l, bound, func() {
		stop()
		cancel(nil)
		l.users.Done()
	}, nil
}

// state returns nil while the agent is connected, else why it is not.
func (r *rank) state() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mu.reason
}

// connected waits until there is a connection.
func (r *rank) connected(ctx context.Context) error {
	for {
		r.mu.Lock()
		link, reason := r.mu.link, r.mu.reason
		if r.mu.changed == nil {
			r.mu.changed = make(chan struct{})
		}
		changed := r.mu.changed
		r.mu.Unlock()
		if link != nil {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), reason)
		}
	}
}

func (r *rank) set(l *link, reason error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.link, r.mu.reason = l, reason
	if r.mu.changed != nil {
		close(r.mu.changed)
		r.mu.changed = nil
	}
}

// run keeps a connection until ctx ends. It returns when the last one is
// closed.
func (r *rank) run(ctx context.Context) {
	backoff := firstBackoff
	for ctx.Err() == nil {
		agent, err := r.connect(ctx)
		if err != nil {
			r.set(nil, fault.New(fault.PeerLost, "the agent of rank %d is not reached: %v", r.number, err))
			r.log.Warn("agent not reached", "err", err, "retry", backoff.String())
			select {
			case <-time.After(backoff):
			case <-ctx.Done():
			}
			backoff = min(2*backoff, lastBackoff)
			continue
		}
		backoff = firstBackoff
		r.log.Info("agent connected")
		r.serve(ctx, agent)
	}
}

// connect dials once and checks that the agent has what the engine needs.
func (r *rank) connect(ctx context.Context) (Agent, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	agent, err := r.dial(ctx)
	if err != nil {
		return nil, err
	}
	if err := r.suits(agent.Info()); err != nil {
		return nil, errors.Join(err, agent.Close())
	}
	return agent, nil
}

func (r *rank) suits(i Info) error {
	switch {
	case i.SlotBytes < r.chunkBytes:
		return fault.New(fault.LayoutMismatch, "a chunk has %d bytes, a slot of the agent %d", r.chunkBytes, i.SlotBytes)
	case r.sends && i.MaxStage < 1:
		return fault.New(fault.Unsupported, "the engine sends, and the agent has no staging pool (max_stage %d)", i.MaxStage)
	}
	return nil
}

// serve offers a connection until it is lost or ctx ends, and closes it.
func (r *rank) serve(ctx context.Context, agent Agent) {
	lost, lose := context.WithCancelCause(context.Background())
	l := &link{agent: agent, lost: lost}
	r.set(l, nil)
	reason := fault.New(fault.PeerLost, "the agent of rank %d is gone", r.number)
	select {
	case <-agent.Done():
		r.log.Warn("agent lost")
	case <-ctx.Done():
		reason = fault.New(fault.PeerLost, "the engine is closing")
	}
	// Nobody new first, then those who use it: their waits end with `lost`, so
	// that the memory is left before it goes away.
	r.set(nil, reason)
	lose(reason)
	l.users.Wait()
	if err := agent.Close(); err != nil {
		r.log.Warn("agent's connection not closed", "err", err)
	}
}
