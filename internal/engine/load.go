package engine

import (
	"context"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
)

// The way of a prompt's KV into the decode engine:
//
//	await    all ranks: wait until the request is ready, or find one that fits
//	claim    all ranks, once the request has its place in the engine
//	scatter  into the sequence's memory
//	release  as soon as the copy is done
//
// What did not arrive, or is not this prompt's, is computed here.

// await waits until a named request is ready at every rank.
func (e *Engine) await(ctx context.Context, req string) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, rank := range e.ranks {
		g.Go(func() error {
			l, bound, done, err := rank.use(ctx)
			if err != nil {
				return err
			}
			defer done()
			return cause(bound, l.agent.Wait(bound, req, e.cfg.TransferWait))
		})
	}
	return g.Wait()
}

// find looks for KV of a prompt that nobody named, and gives it to `by`. It
// returns "" when there is none, or when the ranks hold different requests.
// LMCache's proxy appends the first token of the answer to the prompt, so the
// prompt without its last token is tried too.
func (e *Engine) find(ctx context.Context, by string, prompt []int) (req string, err error) {
	for number := range e.ranks {
		found, err := e.findAt(ctx, number, by, prompt)
		if err != nil || found == "" || number > 0 && found != req {
			for _, r := range []string{req, found} {
				if r != "" {
					e.release(ctx, by, r)
				}
			}
			return "", err
		}
		req = found
	}
	return req, nil
}

// findAt returns the request of one rank that holds the longer prefix of either
// form of the prompt, and gives back the other.
func (e *Engine) findAt(ctx context.Context, number int, by string, prompt []int) (best string, err error) {
	l, bound, done, err := e.ranks[number].use(ctx)
	if err != nil {
		return "", err
	}
	defer done()
	most := 0
	for _, tokens := range [][]int{prompt[:len(prompt)-1], prompt} {
		if len(tokens) == 0 {
			continue
		}
		req, matched, err := l.agent.Find(bound, by, e.cfg.keyer().keys(number, tokens))
		if err != nil {
			return best, cause(bound, err)
		}
		if matched == 0 || req == best {
			continue
		}
		worse := best
		if matched > most {
			best, most = req, matched
		} else {
			worse = req
		}
		if worse != "" {
			e.release(ctx, by, worse)
		}
	}
	return best, nil
}

// release frees at every rank what `by` found or claimed of a request. It also
// works when ctx has ended: a slot must not wait for its time to live because
// a client has left.
func (e *Engine) release(ctx context.Context, by, req string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), e.cfg.ShutdownTimeout)
	defer cancel()
	var g errgroup.Group
	for _, rank := range e.ranks {
		g.Go(func() error {
			l, bound, done, err := rank.use(ctx)
			if err != nil {
				return err
			}
			defer done()
			return l.agent.Release(bound, by, req)
		})
	}
	if err := g.Wait(); err != nil {
		e.cfg.Log.Info("release not answered", "req", req, "err", err)
	}
}

// load claims a started request's KV, copies it and lets the loop compute the
// rest.
func (e *Engine) load(r *request) {
	defer e.idle(r)
	have, err := e.fetch(r)
	e.release(r.ctx, r.name, r.load)
	switch {
	case err != nil && e.cfg.FailOnTransfer:
		e.stats.loadFailed.Add(1)
		e.fail(r, transferError(r.load, err))
		return
	case err != nil:
		e.stats.loadFailed.Add(1)
		e.cfg.Log.Warn("KV not loaded, the prompt is computed here", "req", r.load, "err", err)
	default:
		e.stats.loaded.Add(1)
	}
	// One position is always computed: the answer begins with its result.
	r.done = min(have, len(r.prompt)-1)
	e.stats.tokensLoaded.Add(uint64(r.done))
	e.stats.tokensArrivedComputed.Add(uint64(have - r.done))
	e.run(r)
}

// fetch copies the longest prefix of the prompt that every rank holds into the
// request's sequence and returns its tokens. On error it is 0.
func (e *Engine) fetch(r *request) (have int, err error) {
	r.seq = e.sequence(r)
	prefix := make([]int, len(e.ranks))
	g, ctx := errgroup.WithContext(r.ctx)
	for number, rank := range e.ranks {
		g.Go(func() error {
			l, bound, done, err := rank.use(ctx)
			if err != nil {
				return err
			}
			defer done()
			claimed, err := l.agent.Claim(bound, r.name, r.load)
			if err != nil {
				return cause(bound, err)
			}
			prefix[number], err = e.scatter(l.agent, number, r, claimed)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return 0, err
	}
	return slices.Min(prefix), nil
}

// scatter copies a rank's claimed chunks into the sequence as far as they are a
// prefix of the prompt, and returns the tokens of that prefix. It errs when
// they are of another layout, or when not even the first is of this prompt.
func (e *Engine) scatter(a Agent, number int, r *request, c Claimed) (tokens int, err error) {
	layout, chunk := e.cfg.layout(), e.cfg.ChunkSize
	if want := layout.Shape(chunk); c.Format != kv.Format2LTD || c.DType != e.cfg.DType || !slices.Equal(c.Shape, want) {
		return 0, fault.New(fault.LayoutMismatch, "rank %d: chunks of fmt %d, dtype %q, shape %v; this engine's are fmt %d, dtype %q, shape %v",
			number, c.Format, c.DType, c.Shape, kv.Format2LTD, e.cfg.DType, want)
	}
	k := e.cfg.keyer()
	whole := k.hashes(r.prompt)
	for i, part := range c.Chunks {
		if part.Index != i || tokens != i*chunk {
			break // a gap: what follows is of no use
		}
		if part.Tokens < 1 || part.Tokens > chunk || part.Bytes != int64(layout.ChunkBytes(part.Tokens)) {
			return 0, fault.New(fault.LayoutMismatch, "rank %d: chunk %d has %d tokens and %d bytes; at most %d tokens, %d bytes for so many",
				number, i, part.Tokens, part.Bytes, chunk, layout.ChunkBytes(part.Tokens))
		}
		end := tokens + part.Tokens
		if end > len(r.prompt) {
			break
		}
		hash := whole[i]
		if end < len(r.prompt) && part.Tokens < chunk {
			hash = k.hashes(r.prompt[:end])[i]
		}
		if part.Key != k.key(number, hash) {
			break // another prompt's
		}
		r.seq.Scatter(number, tokens, part.Tokens, a.Receive(part.Slot))
		tokens = end
	}
	if tokens == 0 {
		return 0, fault.New(fault.BadRequest, "rank %d: the %d chunks of request %q are not a prefix of this prompt", number, len(c.Chunks), r.load)
	}
	return tokens, nil
}
