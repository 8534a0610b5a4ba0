package proxy

import (
	"context"
	"fmt"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/openai"
)

// transfer is the movement of one attempt's KV, watched at its receivers.
type transfer struct {
	x     *exchange
	spec  *openai.Spec
	watch Watch

	// Set by watched.
	ctx     context.Context // ends when the transfer fails, with the *failure as cause
	abort   context.CancelCauseFunc
	settled chan struct{} // closed when ending and err are set
	ending  Ending
	err     error

	said   *failure     // what the prefill engine said of it, nil if nothing
	unused *fault.Error // why the answer was given without the KV, nil if it was not
}

// watchTransfer names a new attempt and asks its receivers to watch it. The
// caller closes the transfer.
func (x *exchange) watchTransfer(dec *node) (*transfer, *failure) {
	after := x.p.cfg.Timeouts
	t := &transfer{x: x, spec: x.p.newSpec(dec)}
	x.attempt(t.spec.ReqID)
	w, err := x.p.watcher.Watch(x.ctx, WatchRequest{
		ReqID:     t.spec.ReqID,
		Receivers: dec.receivers,
		Deadline:  after.Tokenize + after.Watch + after.Prefill + after.Transfer,
	})
	if err != nil {
		return nil, t.unwatched(x.ctx, err)
	}
	t.watch = w
	return t, nil
}

// watched returns nil once the receivers watch: the prefill may begin. From then
// on the ending is awaited.
func (t *transfer) watched() *failure {
	ctx, stop := within(t.x.ctx, t.x.p.cfg.Timeouts.Watch, "the watch at the receivers")
	defer stop()
	if err := t.watch.Accepted(ctx); err != nil {
		return t.unwatched(ctx, err)
	}
	t.ctx, t.abort = context.WithCancelCause(t.x.ctx)
	t.settled = make(chan struct{})
	go t.follow()
	return nil
}

// unwatched is the failure of a watch that some receiver does not have.
func (t *transfer) unwatched(ctx context.Context, err error) *failure {
	if ctx.Err() != nil {
		return t.x.failed(ctx, StepWatch, "", err)
	}
	return transferFailure(StepWatch, fault.CodeOf(err), err.Error())
}

// follow waits for the ending; close ends it.
func (t *transfer) follow() {
	defer close(t.settled)
	t.ending, t.err = t.watch.Result(t.ctx)
	if f := t.failure(); f != nil {
		t.abort(f)
	}
}

// failure is what a settled transfer's ending means, nil if it is ready.
func (t *transfer) failure() *failure {
	switch {
	case t.err != nil:
		return transferFailure(StepTransfer, fault.CodeOf(t.err), t.err.Error())
	case t.ending.Ending == msg.EndReady:
		return nil
	}
	text := t.ending.Text
	if text == "" {
		text = string(t.ending.Ending)
	}
	return transferFailure(StepTransfer, t.ending.Reason, fmt.Sprintf("rank %d: %s", t.ending.Rank, text))
}

// told takes what the prefill engine's answer says of the transfer. Nobody else
// may know: where its agent was lost or refused, no receiver has heard of it.
func (t *transfer) told(first *openai.First) {
	if first.Failed != "" {
		t.said = transferFailure(StepTransfer, fault.Code(first.Failed), "the prefill engine: "+first.FailedText)
	}
}

// wait returns nil once the KV is at every rank: never before (r26). The
// receivers' word, where there is one, stands against the engine's.
func (t *transfer) wait() *failure {
	if t.said != nil {
		select {
		case <-t.settled:
		default:
			return t.said
		}
	}
	ctx, stop := within(t.x.ctx, t.x.p.cfg.Timeouts.Transfer, "the KV transfer")
	defer stop()
	select {
	case <-t.settled:
	case <-ctx.Done():
	}
	if t.x.ctx.Err() == nil && ctx.Err() == nil {
		return t.failure()
	}
	f := t.x.failed(ctx, StepTransfer, "", ctx.Err())
	if f.outcome == TimedOut && t.x.ctx.Err() == nil {
		return transferFailure(StepTransfer, fault.Deadline, f.api.Message)
	}
	return f
}

// close ends the watch: what did not end well, and what nobody will read, is
// cancelled at the receivers.
func (t *transfer) close(code fault.Code, text string) {
	if code == "" {
		t.watch.Close()
	} else {
		t.watch.Cancel(code, text)
	}
	if t.settled != nil {
		t.abort(nil)
		<-t.settled
	}
}

func transferFailure(step Step, code fault.Code, text string) *failure {
	return &failure{step: step, outcome: TransferFailed, elsewhere: true,
		api: &openai.Error{Status: 502, Code: string(code), Message: fmt.Sprintf("the KV transfer failed: %s", text)}}
}
