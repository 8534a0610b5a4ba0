package proxy

import (
	"context"
	"time"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/msg"
)

// Receiver is the agent beside one rank of a decode engine: its host and its
// init and alloc port.
type Receiver struct {
	Host      string
	InitPort  int
	AllocPort int
}

// WatchRequest asks how the transfer named ReqID ends at each receiver. Deadline
// bounds the time until it is ready.
type WatchRequest struct {
	ReqID     string
	Receivers []Receiver
	Deadline  time.Duration
}

// Ending is how a transfer ended: ready at every rank, or the first bad ending.
type Ending struct {
	Ending msg.Ending
	Reason fault.Code // unless ready
	Text   string
	Rank   int // of a bad ending
}

// Watcher speaks with receivers for the proxy. It is safe for concurrent use.
type Watcher interface {
	// Watch begins a watch and returns at once or with the context's end. On a
	// nil error the caller owns the Watch and ends it with exactly one of Cancel
	// and Close. A typed refusal (busy) is possible.
	Watch(ctx context.Context, req WatchRequest) (Watch, error)
}

// Watch is one transfer that is watched. Its methods may be called from
// different goroutines.
type Watch interface {
	// Accepted returns nil once every receiver has the watch, so that the prefill
	// may start, and an error when one cannot have it.
	Accepted(ctx context.Context) error
	// Result returns the ending once there is one; an error only when the context
	// ends or the watcher is closed.
	Result(ctx context.Context) (Ending, error)
	// Cancel ends the transfer at all receivers, also after it was ready (what no
	// engine has claimed is freed), and the watch. It does not wait.
	Cancel(reason fault.Code, text string)
	// Close ends the watch of a transfer that was ready and used. It does not wait.
	Close()
}
