package client

import (
	"context"
	"time"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/localapi"
)

// Wait returns how the request of that name at this receiver ends: the first
// that is ready, or another ending when one has ended and none is live. After
// `deadline`, more than 0, it errs with Deadline.
func (c *Client) Wait(ctx context.Context, req string, deadline time.Duration) (Ending, error) {
	return ending(do[*localapi.Ending](ctx, c, &localapi.Wait{Req: req, DeadlineMS: millis(deadline)}, nil))
}

// Find gives `by`, the engine's name of its own request, the one unclaimed
// request that holds the longest prefix of keys, and says how many of them;
// matched is 0 when there is none.
func (c *Client) Find(ctx context.Context, by string, keys []string) (req string, matched int, err error) {
	a, err := do(ctx, c, &localapi.Find{By: by, Keys: keys}, func(a *localapi.Found, err error) {
		if err == nil && a.Req != "" {
			c.send(&localapi.Release{By: by, Req: a.Req})
		}
	})
	if err != nil {
		return "", 0, err
	}
	return a.Req, int(a.Matched), nil
}

// Claim gives `by` all chunks of a ready request to read, until Release.
func (c *Client) Claim(ctx context.Context, by, req string) (*Claimed, error) {
	a, err := do(ctx, c, &localapi.Claim{By: by, Req: req}, func(_ *localapi.Claimed, err error) {
		if err == nil {
			c.send(&localapi.Release{By: by, Req: req})
		}
	})
	if err != nil {
		return nil, err
	}
	for _, k := range a.Chunks {
		if int(k.Slot) >= c.info.ReceiveCapacity || k.Bytes < 0 || k.Bytes > c.info.SlotBytes {
			return nil, fault.New(fault.Internal, "the agent gave %d bytes in slot %d of %d, of %d bytes", k.Bytes, k.Slot,
				c.info.ReceiveCapacity, c.info.SlotBytes)
		}
	}
	return a, nil
}

// Release says that `by` has read these chunks of a request, by index; all that
// are left if none is named. It also drops what Find gave.
func (c *Client) Release(ctx context.Context, by, req string, chunks ...int64) error {
	_, err := do[*localapi.Done](ctx, c, &localapi.Release{By: by, Req: req, Chunks: chunks}, nil)
	return err
}
