package engine

import (
	"context"
	"errors"
	"net"
	"strconv"

	"golang.org/x/sync/errgroup"

	"github.com/berthkv/berth/internal/fault"
)

// The way of a prompt's KV out of the prefill engine:
//
//	admit    rank by rank, ascending: begin, then wait for the grant
//	compute  the engine's loop, in steps                    (parallel to ship)
//	ship     each rank: stage, copy whole chunks, submit    (parallel to compute)
//	settle   wait for every rank's ending; one bad ending cancels the others
//	give up  where an agent was lost meanwhile: tell the next one, in the background
//
// Before admit is through, the request holds nothing in this engine and is not
// computed. While it ships, it waits for its own tokens and for staging slots,
// never for another prompt.

// sendSpec is where a prompt's KV goes.
type sendSpec struct {
	req        string
	host       string
	initPorts  []int // by rank; may be empty
	allocPorts []int // by rank
	berthProxy bool
}

// class is the receiver's name in the scheduler.
func (s *sendSpec) class() string {
	return net.JoinHostPort(s.host, strconv.Itoa(s.allocPorts[0]))
}

// transfer is a prompt being sent, owned by one goroutine.
type transfer struct {
	e      *Engine
	r      *request
	hashes []string
	begun  []begunRank             // ascending
	stop   context.CancelCauseFunc // ends the transfer's context: everything here, but not the answer
}

// begunRank is a rank at which the transfer was begun.
type begunRank struct {
	number int
	begin  Begin
	link   *link
	lost   context.Context // the transfer's context, ended by the loss of the connection too
	done   func()
	t      Transfer
}

// transfer sends a started request's prompt. It lets the loop compute it as
// soon as that is right.
func (e *Engine) transfer(r *request) {
	defer e.settled(r)
	ctx, stop := context.WithCancelCause(r.ctx)
	defer stop(nil)
	t := &transfer{e: e, r: r, hashes: e.cfg.keyer().hashes(r.prompt), stop: stop}
	defer func() {
		for _, b := range t.begun {
			b.done()
		}
	}()

	err := t.admit(ctx)
	if err != nil {
		e.notSent(r, err)
	}
	switch {
	case err == nil:
		e.run(r)
		if err = t.ship(ctx); err != nil {
			e.notSent(r, err)
		}
	case r.ctx.Err() != nil: // the request itself has ended
	case e.cfg.FailOnTransfer:
		e.fail(r, transferError(t.r.send.req, err))
	default:
		e.run(r) // the decode side computes the rest as well
	}
	e.idle(r)
	t.settle(ctx, err)
}

// notSent notes why a request's KV will not come, for its answer.
func (e *Engine) notSent(r *request, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	r.notSent = err
}

// whyNotSent returns what is known of that, nil if nothing.
func (e *Engine) whyNotSent(r *request) *whyNotSent {
	e.mu.Lock()
	defer e.mu.Unlock()
	if r.notSent == nil {
		return nil
	}
	var f *fault.Error
	if errors.As(r.notSent, &f) {
		return &whyNotSent{f.Code, f.Text}
	}
	return &whyNotSent{fault.Internal, r.notSent.Error()}
}

func transferError(req string, err error) error {
	return fault.New(fault.CodeOf(err), "the transfer of request %q failed: %v", req, err)
}

// admit begins the request at every rank, each after the grant of the one
// before. On error t.begun still names the ranks that know the request.
func (t *transfer) admit(ctx context.Context) error {
	s := t.r.send
	for i, rank := range t.e.ranks {
		link, bound, done, err := rank.use(ctx)
		if err != nil {
			return err
		}
		b := Begin{
			Req: s.req, TotalChunks: len(t.hashes), Host: s.host, AllocPort: s.allocPorts[i],
			BerthProxy: s.berthProxy, Deadline: t.e.cfg.RequestTimeout,
		}
		if len(s.initPorts) > 0 {
			b.InitPort = s.initPorts[i]
		}
		sent, err := link.agent.Begin(bound, b)
		if err != nil {
			err = cause(bound, err)
			done()
			return err
		}
		t.begun = append(t.begun, begunRank{number: i, begin: b, link: link, lost: bound, done: done, t: sent})
		t.e.wg.Go(func() { t.watch(ctx, bound, sent) })
		select {
		case <-sent.Granted():
		case <-bound.Done():
			return context.Cause(bound)
		}
	}
	return nil
}

// watch stops the transfer when a rank ends it badly or its agent is lost.
func (t *transfer) watch(ctx, bound context.Context, sent Transfer) {
	select {
	case <-sent.Ended():
		if err := sent.Err(); err != nil {
			t.stop(err)
		}
	case <-bound.Done():
		t.stop(context.Cause(bound))
	case <-ctx.Done():
	}
}

// ship sends each rank's share of the chunks as they are computed. When it
// returns, nothing of the sequence is read any more and no slot is held.
func (t *transfer) ship(ctx context.Context) error {
	var g errgroup.Group
	for _, b := range t.begun {
		g.Go(func() error {
			err := t.shipRank(b)
			if err != nil {
				t.stop(err)
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return cause(ctx, err)
	}
	return nil
}

func (t *transfer) shipRank(b begunRank) error {
	total, prompt := len(t.hashes), len(t.r.prompt)
	chunk := t.e.cfg.ChunkSize
	for sent := 0; sent < total; {
		tokens, err := t.r.computed.reach(b.lost, min(prompt, (sent+1)*chunk))
		if err != nil {
			return err
		}
		ready := tokens / chunk
		if tokens == prompt {
			ready = total
		}
		n, err := t.batch(b, sent, min(ready-sent, b.link.agent.Info().MaxStage))
		if err != nil {
			return err
		}
		sent += n
	}
	return nil
}

// batch stages, copies and submits up to `most` chunks from the first on, and
// returns how many.
func (t *transfer) batch(b begunRank, first, most int) (n int, err error) {
	e, chunk := t.e, t.e.cfg.ChunkSize
	slots, err := b.link.turn.stage(b.lost, b.t, most)
	if err != nil {
		return 0, err
	}
	defer b.link.turn.handIn()
	n = len(slots)
	staged := make([]Staged, n)
	bytes := 0
	for i, slot := range slots {
		index := first + i
		tokens := min(chunk, len(t.r.prompt)-index*chunk)
		bytes += t.r.seq.Gather(b.number, index*chunk, tokens, b.link.agent.Staging(slot))
		staged[i] = Staged{Index: index, Key: e.cfg.keyer().key(b.number, t.hashes[index]), Slot: slot, Tokens: tokens}
	}
	err = b.t.Submit(b.lost, staged, first+n == len(t.hashes))
	switch {
	case err == nil:
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return 0, cause(b.lost, err) // the agent's connection sees to the slots
	default:
		return 0, errors.Join(err, b.t.Unstage(b.lost, slots))
	}
	e.stats.batches.Add(1)
	e.stats.chunksSent.Add(uint64(n))
	e.stats.bytesSent.Add(uint64(bytes))
	return n, nil
}

// settle waits for the request's endings and cancels it where it goes on for
// nothing.
func (t *transfer) settle(ctx context.Context, err error) {
	for _, b := range t.begun {
		if err != nil {
			break
		}
		select {
		case <-b.t.Ended():
			err = b.t.Err()
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
	}
	if err == nil {
		t.e.stats.sent.Add(1)
		return
	}
	t.stop(err)
	t.e.stats.sendFailed.Add(1)
	t.e.cfg.Log.Warn("transfer failed", "req", t.r.send.req, "err", err)
	bye, cancel := context.WithTimeout(context.WithoutCancel(ctx), t.e.cfg.ShutdownTimeout)
	defer cancel()
	var g errgroup.Group
	for _, b := range t.begun {
		g.Go(func() error {
			bye, cancel := context.WithCancel(bye)
			defer cancel()
			defer context.AfterFunc(b.link.lost, cancel)()
			err := b.t.Cancel(bye)
			b.link.turn.handIn()
			if err != nil && b.begin.BerthProxy {
				t.e.giveUp(b)
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		t.e.cfg.Log.Info("cancel not answered", "req", t.r.send.req, "err", err)
	}
}

// giveUp says of a rank's request whose agent was lost, through the next agent,
// that nothing will come of it: the lost one may not have told the receiver of
// it, and the proxy waits for the receiver's word. It does not wait; there are at
// most as many to be given up as were being sent when the agent was lost.
func (e *Engine) giveUp(b begunRank) {
	e.wg.Go(func() {
		ctx, cancel := context.WithTimeout(e.ctx, e.cfg.RequestTimeout)
		defer cancel()
		for gone := b.link; ; {
			select {
			case <-gone.lost.Done():
			case <-ctx.Done():
				return // it is there, and only slow to answer
			}
			next, err := e.giveUpAtNext(ctx, b)
			if err == nil {
				return
			}
			if next != nil {
				select {
				case <-next.agent.Done(): // it was lost too
					gone = next
					continue
				default:
				}
			}
			e.cfg.Log.Warn("nobody was told that a transfer is lost", "req", b.begin.Req, "rank", b.number, "err", err)
			return
		}
	})
}

func (e *Engine) giveUpAtNext(ctx context.Context, b begunRank) (*link, error) {
	rank := e.ranks[b.number]
	for {
		if err := rank.connected(ctx); err != nil {
			return nil, err
		}
		if link, bound, done, err := rank.use(ctx); err == nil {
			defer done()
			return link, link.agent.GiveUp(bound, b.begin, b.link.agent.Info().Incarnation)
		}
	}
}

// cause returns why ctx ended if it has, which explains an error better than
// that a call was interrupted, and err otherwise.
func cause(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}
