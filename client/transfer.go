package client

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/localapi"
)

// Begin is a prompt to be sent to one rank of a receiver.
type Begin struct {
	Req         string
	TotalChunks int
	Host        string // of the receiver
	AllocPort   int
	InitPort    int           // for LMCache receivers; 0: not given
	Deadline    time.Duration // from now to ready; 0: the agent's request_timeout_sec
	Stage       int           // staging slots wanted with the grant, if they are free
	BerthProxy  bool          // a Berth proxy watches the receiver
}

// Transfer is a request that this client began: its events, which cannot be
// missed, and its calls.
type Transfer struct {
	c       *Client
	req     string
	granted chan struct{}
	ended   chan struct{}

	// The reader's.
	abandoned bool // Begin's caller gave up
	once      sync.Once
	slots     []Slot // set before granted is closed
	ending    Ending // set before ended is closed
}

// Begin asks for room for a prompt. It returns when the agent has accepted the
// request; the Transfer tells what becomes of it. If ctx ends first, the
// request is cancelled.
func (c *Client) Begin(ctx context.Context, b Begin) (*Transfer, error) {
	t := &Transfer{c: c, req: b.Req, granted: make(chan struct{}), ended: make(chan struct{})}
	c.mu.Lock()
	err, live := c.err, c.transfers[b.Req] != nil
	if err == nil && !live {
		c.transfers[b.Req] = t
	}
	c.mu.Unlock()
	switch {
	case err != nil:
		return nil, err
	case live:
		return nil, fault.New(fault.BadRequest, "req %q is live already", b.Req)
	}
	_, err = do(ctx, c, &localapi.Begin{
		Req: b.Req, TotalChunks: int64(b.TotalChunks), Host: b.Host, AllocPort: int64(b.AllocPort), InitPort: int64(b.InitPort),
		DeadlineMS: millis(b.Deadline), Stage: int64(b.Stage), BerthProxy: b.BerthProxy,
	}, func(_ *localapi.Done, err error) {
		if err != nil {
			c.forget(t)
			return
		}
		t.abandoned = true
		c.send(&localapi.Cancel{Req: b.Req})
	})
	switch {
	case err == nil:
		return t, nil
	case !errors.Is(err, ctx.Err()): // it was not accepted, and ctx has no part in it
		c.forget(t)
	}
	return nil, err
}

// GiveUp says that nothing will come of a request that was begun as b through
// an agent that was lost: that one, whose incarnation is lost, may not have told
// the receiver of it, and then nobody else could tell the proxy. It changes
// nothing if this agent is the same one, which knows, and nothing of what has
// become ready. (PROTOCOL.md, 4.6.)
func (c *Client) GiveUp(ctx context.Context, b Begin, lost string) error {
	if c.info.Incarnation == lost {
		return nil
	}
	b.TotalChunks, b.Stage, b.BerthProxy = 1, 0, true // for a moment, so as little as can be
	if _, err := c.Begin(ctx, b); err != nil {
		return err
	}
	_, err := c.Cancel(ctx, b.Req, PeerLost, "its sender's agent was lost")
	return err
}

// forget drops a transfer that was not accepted.
func (c *Client) forget(t *Transfer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.transfers[t.req] == t {
		delete(c.transfers, t.req)
	}
}

// grant is called by the reader; only the first counts.
func (t *Transfer) grant(slots []Slot) {
	t.once.Do(func() {
		t.slots = slots
		close(t.granted)
	})
}

// end is called once, by the reader.
func (t *Transfer) end(e Ending) {
	t.ending = e
	close(t.ended)
}

// Req returns the request's name.
func (t *Transfer) Req() string { return t.req }

// Granted is closed when the whole prompt has its room.
func (t *Transfer) Granted() <-chan struct{} { return t.granted }

// Slots returns the staging slots that came with the grant, maybe none: they
// count as staged. Valid once Granted is closed.
func (t *Transfer) Slots() []Slot { return t.slots }

// Ended is closed when the request has its ending, and when the connection is
// gone.
func (t *Transfer) Ended() <-chan struct{} { return t.ended }

// Ending returns how it ended. Valid once Ended is closed.
func (t *Transfer) Ending() Ending { return t.ending }

// Stage, Unstage, Submit and Cancel are the Client's, for this request.
func (t *Transfer) Stage(ctx context.Context, n int) ([]Slot, error) {
	return t.c.Stage(ctx, t.req, n)
}

// Unstage is Client.Unstage for this request.
func (t *Transfer) Unstage(ctx context.Context, slots []Slot) error {
	return t.c.Unstage(ctx, t.req, slots)
}

// Submit is Client.Submit for this request.
func (t *Transfer) Submit(ctx context.Context, chunks []Staged, end int) error {
	return t.c.Submit(ctx, t.req, chunks, end)
}

// Cancel is Client.Cancel for this request.
func (t *Transfer) Cancel(ctx context.Context, reason Code, text string) (Ending, error) {
	return t.c.Cancel(ctx, t.req, reason, text)
}

// Stage waits for n staging slots of a granted request, at most Info().MaxStage,
// and returns exactly n; ctx's deadline goes along. The caller owes a Submit or
// an Unstage of each, whatever becomes of the request.
func (c *Client) Stage(ctx context.Context, req string, n int) ([]Slot, error) {
	return c.stage(ctx, &localapi.Stage{Req: req, N: int64(n), DeadlineMS: untilDeadline(ctx)})
}

// TryStage is Stage, but errs with Busy instead of waiting.
func (c *Client) TryStage(ctx context.Context, req string, n int) ([]Slot, error) {
	return c.stage(ctx, &localapi.Stage{Req: req, N: int64(n), NonBlocking: true})
}

func (c *Client) stage(ctx context.Context, m *localapi.Stage) ([]Slot, error) {
	a, err := do(ctx, c, m, func(a *localapi.Slots, err error) {
		if err == nil {
			c.giveBack(m.Req, a.Slots)
		}
	})
	if err != nil {
		return nil, err
	}
	for _, s := range a.Slots {
		if int(s) >= c.info.StagingCapacity {
			return nil, fault.New(fault.Internal, "the agent staged slot %d of %d", s, c.info.StagingCapacity)
		}
	}
	return a.Slots, nil
}

// giveBack unstages what nobody waits for any more.
func (c *Client) giveBack(req string, slots []Slot) {
	if len(slots) > 0 {
		c.send(&localapi.Unstage{Req: req, Slots: slots})
	}
}

// Unstage gives staged slots back unused.
func (c *Client) Unstage(ctx context.Context, req string, slots []Slot) error {
	_, err := do[*localapi.Done](ctx, c, &localapi.Unstage{Req: req, Slots: slots}, nil)
	return err
}

// NoEnd is the `end` of a Submit that is not the last.
const NoEnd = -1

// Submit hands staged slots over to be sent as one batch, and returns when it
// is under way. end is the request's final number of chunks, with its last
// batch, else NoEnd. On nil error the slots are the agent's; on an error of the
// agent they are still the caller's, to unstage.
func (c *Client) Submit(ctx context.Context, req string, chunks []Staged, end int) error {
	m := &localapi.Submit{Req: req, Chunks: chunks}
	if end != NoEnd {
		m.HasEnd, m.End = true, int64(end)
	}
	slots := make([]Slot, len(chunks)) // copied: a caller that gives up owns chunks again
	for i, s := range chunks {
		slots[i] = s.Slot
	}
	_, err := do(ctx, c, m, func(_ *localapi.Done, err error) {
		if err != nil {
			c.giveBack(req, slots)
		}
	})
	return err
}

func millis(d time.Duration) int64 {
	return int64((d + time.Millisecond - 1) / time.Millisecond)
}

// untilDeadline returns the time until ctx's deadline, at least 1 ms, or 0
// without one.
func untilDeadline(ctx context.Context) int64 {
	at, ok := ctx.Deadline()
	if !ok {
		return 0
	}
	return max(millis(time.Until(at)), 1)
}
