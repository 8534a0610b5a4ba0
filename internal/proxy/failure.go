package proxy

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/openai"
)

// Step is where a request is.
type Step string

const (
	StepRead     Step = "read"     // the client's body
	StepTokenize Step = "tokenize" // the prompt's token ids
	StepWatch    Step = "watch"    // until the receivers watch
	StepPrefill  Step = "prefill"  // until the first token
	StepTransfer Step = "transfer" // from then until the KV is ready
	StepDecode   Step = "decode"   // the rest of the answer
	StepWhole    Step = "whole"    // a decode engine has the whole request
)

// Steps lists every step in order.
var Steps = []Step{StepRead, StepTokenize, StepWatch, StepPrefill, StepTransfer, StepDecode, StepWhole}

// Outcome is how a request ended.
type Outcome string

const (
	Answered       Outcome = "answered"
	BadRequest     Outcome = "bad_request"     // the client's fault, in our judgement or an engine's
	Refused        Outcome = "refused"         // no room or no node for it, or shutting down
	EngineFailed   Outcome = "engine_failed"   // an engine could not be reached, broke off, or answered nonsense
	TransferFailed Outcome = "transfer_failed" // the KV could not be moved, and the policy is Fail
	TimedOut       Outcome = "timed_out"
	ClientGone     Outcome = "client_gone" // disconnected, or did not read
	Internal       Outcome = "internal"
)

// Outcomes lists every outcome.
var Outcomes = []Outcome{Answered, BadRequest, Refused, EngineFailed, TransferFailed, TimedOut, ClientGone, Internal}

// failure is why a request got no answer: where, what the client is told, and
// what the log is told besides.
type failure struct {
	step      Step // "": the request's current one
	outcome   Outcome
	api       *openai.Error
	retry     string // the Retry-After header, "" for none
	cause     error  // nil if api says it all
	elsewhere bool   // a decode engine could still answer all of it
}

func (f *failure) Error() string {
	if f.cause != nil {
		return fmt.Sprintf("%s: %s: %v", f.step, f.api.Message, f.cause)
	}
	return fmt.Sprintf("%s: %s", f.step, f.api.Message)
}

// code is the failure's kind for counters and cancels, one of fault.Codes.
func (f *failure) code() fault.Code {
	switch c := fault.Code(f.api.Code); {
	case f.outcome == ClientGone:
		return fault.Cancelled
	case f.outcome == TimedOut:
		return fault.Deadline
	case f.outcome == BadRequest:
		return fault.BadRequest
	case c.Known():
		return c
	}
	return fault.Internal
}

// stepTimeout is the cause of a context that a step's deadline ended.
type stepTimeout struct {
	what  string
	after time.Duration
}

func (e *stepTimeout) Error() string { return fmt.Sprintf("%s took longer than %v", e.what, e.after) }

// errShuttingDown is the cause of the contexts that Close ends.
var errShuttingDown = errors.New("the proxy is shutting down")

// failed says what an error of a step means: err came from work under ctx, which
// is the request's own context or made from it.
func (x *exchange) failed(ctx context.Context, step Step, who string, err error) *failure {
	var own *failure
	var timeout *stepTimeout
	var engine *engineStatus
	var told *openai.Error
	var unsent *untaken
	prompt := step != StepDecode && step != StepWhole // the prompt's part: another engine can do it
	cause := err
	if ctx.Err() == nil {
		ctx = x.ctx // a step's context hears a moment later that its request's is done
	}
	if ctx.Err() != nil {
		cause = context.Cause(ctx)
	}
	switch {
	case errors.As(err, &unsent):
		return x.gone(step, unsent.error)
	case errors.As(cause, &own):
		return own
	case errors.As(cause, &timeout):
		return &failure{step: step, outcome: TimedOut, cause: err, elsewhere: prompt && x.ctx.Err() == nil,
			api: &openai.Error{Status: 504, Code: string(fault.Deadline), Message: timeout.Error()}}
	case errors.Is(cause, errShuttingDown):
		return &failure{step: step, outcome: Refused, retry: "1", api: unavailable("%v", errShuttingDown)}
	case ctx.Err() != nil:
		return x.gone(step, cause)
	case errors.As(err, &engine) && engine.api.Status < 500:
		return &failure{step: step, outcome: BadRequest, api: engine.api, retry: engine.retry}
	case errors.As(err, &engine):
		told = engine.api
	case errors.As(err, &told):
	}
	f := &failure{step: step, outcome: EngineFailed, cause: err, elsewhere: prompt,
		api: &openai.Error{Status: 502, Code: string(fault.PeerLost), Message: who + " could not be reached, broke off, or sent no valid answer"}}
	if told != nil {
		f.api.Code, f.api.Message = "engine_failed", fmt.Sprintf("%s failed: %s", who, told.Message)
	}
	return f
}

// gone is the failure of a client that left or does not read.
func (x *exchange) gone(step Step, cause error) *failure {
	return &failure{step: step, outcome: ClientGone, cause: cause,
		api: &openai.Error{Status: fault.Cancelled.HTTPStatus(), Code: string(fault.Cancelled), Message: "the client is gone"}}
}

func unavailable(format string, args ...any) *openai.Error {
	return &openai.Error{Status: 503, Code: string(fault.Busy), Message: fmt.Sprintf(format, args...)}
}

// within returns a context that ends after d with a cause that names what took
// so long.
func within(ctx context.Context, d time.Duration, what string) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, d, &stepTimeout{what, d})
}
