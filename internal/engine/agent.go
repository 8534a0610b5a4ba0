package engine

import (
	"context"
	"time"

	"github.com/berthkv/berth/internal/kv"
)

// Agent is one connection to the berth agent of one rank: all that the engine
// knows of it. Its methods may be called concurrently. Errors carry a
// fault.Code.
//
// A call with an ended ctx is made all the same. When ctx ends first, a call
// returns ctx's error, and the implementation gives back whatever a late answer
// leaves with it (slots staged or not taken): the caller owns nothing then.
type Agent interface {
	// Info describes the pools. It does not change while the connection lives.
	Info() Info
	// Staging returns the memory of a staging slot, Info().SlotBytes long,
	// writable. The caller may write it from Stage until Submit or Unstage, and
	// never after Close.
	Staging(slot kv.SlotID) []byte
	// Receive returns the memory of a receive slot, read-only. The caller may
	// read it from Claim until Release, and never after Close.
	Receive(slot kv.SlotID) []byte

	// Begin asks for room for a prompt. It returns when the agent has accepted
	// the request; grant and ending are told by the Transfer.
	Begin(ctx context.Context, b Begin) (Transfer, error)

	// GiveUp says of a request that was begun as b through the agent that was lost,
	// of that incarnation, that nothing will come of it. It changes nothing at the
	// same agent.
	GiveUp(ctx context.Context, b Begin, lost string) error

	// Wait returns nil when a request of that name is ready, and its ending as
	// an error when it failed or was cancelled.
	Wait(ctx context.Context, req string, deadline time.Duration) error
	// Find gives `by` the one unclaimed request that holds the longest prefix
	// of keys, and says how many of them; chunks is 0 when there is none.
	Find(ctx context.Context, by string, keys []string) (req string, chunks int, err error)
	// Claim gives `by` all chunks of a ready request until Release.
	Claim(ctx context.Context, by, req string) (Claimed, error)
	// Release frees what `by` claimed or found of a request.
	Release(ctx context.Context, by, req string) error

	// Done is closed when the connection is lost. Every blocked call returns
	// then.
	Done() <-chan struct{}
	// Close unmaps the pools and closes the connection. No other call may be
	// running.
	Close() error
}

// Dialer makes a connection to a rank's agent. The engine calls it again, with
// back-off, after a connection was lost.
type Dialer func(ctx context.Context) (Agent, error)

// Info describes an agent's pools.
type Info struct {
	Incarnation string // another after a restart
	SlotBytes   int64
	MaxStage    int // most slots of one Stage; 0 without a staging pool
}

// Begin is a prompt that shall be sent to one rank of a receiver.
type Begin struct {
	Req         string
	TotalChunks int
	Host        string // the receiver
	InitPort    int    // for LMCache receivers
	AllocPort   int
	BerthProxy  bool          // a Berth proxy watches the receiver
	Deadline    time.Duration // from now to ready
}

// Transfer is one prompt on its way to one rank.
type Transfer interface {
	// Granted is closed when the whole prompt has its room.
	Granted() <-chan struct{}
	// Ended is closed when the request has its ending; Err then returns nil
	// for ready, and what went wrong otherwise.
	Ended() <-chan struct{}
	Err() error
	// Stage takes n staging slots, n at most Info().MaxStage, and returns
	// exactly n. The caller owes a Submit or an Unstage of each. With wait it
	// waits for them, and errs with fault.Holding if it would have to while the
	// engine holds staged slots; without, it errs with fault.Busy instead of
	// waiting. Before the grant it errs with fault.NotGranted.
	Stage(ctx context.Context, n int, wait bool) ([]kv.SlotID, error)
	// Unstage returns slots that were staged and are not submitted, whatever has
	// become of their request.
	Unstage(ctx context.Context, slots []kv.SlotID) error
	// Submit hands staged slots over to be sent: they are the agent's from then
	// on. When the agent refuses it has taken nothing, and the caller still owes
	// an Unstage. end: these are the prompt's last chunks.
	Submit(ctx context.Context, chunks []Staged, end bool) error
	// Cancel ends the request, whatever its state, and is harmless after its
	// end. It returns when the agent writes nothing of it any more.
	Cancel(ctx context.Context) error
}

// Staged is a chunk in a staging slot.
type Staged struct {
	Index  int // in the prompt
	Key    string
	Slot   kv.SlotID
	Tokens int
}

// Claimed is what a Claim gives.
type Claimed struct {
	Chunks []Chunk // by ascending index
	Format kv.Format
	DType  kv.DType
	Shape  []int64 // of a full chunk
}

// Chunk is a claimed chunk: the first Bytes bytes of a receive slot.
type Chunk struct {
	Index  int // in the prompt
	Key    string
	Slot   kv.SlotID
	Tokens int
	Bytes  int64
}
