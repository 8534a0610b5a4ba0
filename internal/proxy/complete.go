package proxy

import (
	"context"
	"errors"
	"fmt"
	"mime"
	"net/http"
	"os"
	"runtime/debug"
	"time"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/openai"
)

// complete answers one request of a client.
func (p *Proxy) complete(w http.ResponseWriter, r *http.Request, kind openai.Kind) {
	id := requestID(r.Header)
	w.Header().Set(requestIDHeader, id)
	begun := time.Now()
	entry, err := p.registry.enter(id, string(kind), begun)
	if err != nil {
		f := &failure{step: StepRead, outcome: Refused, api: unavailable("%v", err)}
		p.stats.ended(f)
		p.refuse(w, f.api, "1")
		return
	}
	defer func() { p.registry.leave(entry, time.Now(), p.stats) }()

	ctx, cancel := within(r.Context(), p.cfg.Timeouts.Request, "the request")
	defer cancel()
	ctx, abort := context.WithCancelCause(ctx)
	defer abort(nil)
	defer context.AfterFunc(p.base, func() { abort(errShuttingDown) })()

	x := &exchange{p: p, ctx: ctx, header: forEngine(r.Header, id), reply: newReply(w, p.cfg.Timeouts.Write), entry: entry, begun: begun}
	x.body = p.bodies.open(x.reply.ctl.SetReadDeadline)
	defer x.body.close()
	p.settle(x, func() *failure {
		body, f := x.read(r)
		if f != nil {
			return f
		}
		req, bad := openai.ParseRequest(kind, body)
		if bad != nil {
			return &failure{step: StepRead, outcome: BadRequest, api: bad}
		}
		x.req = req
		return x.run()
	})
}

// settle runs a request to its end: counts it, logs it, tells the client.
func (p *Proxy) settle(x *exchange, run func() *failure) {
	f := func() (f *failure) {
		defer func() {
			if r := recover(); r != nil {
				f = &failure{outcome: Internal, cause: fmt.Errorf("panic: %v\n%s", r, debug.Stack()),
					api: &openai.Error{Status: 500, Code: string(fault.Internal), Message: "internal error"}}
			}
		}()
		return run()
	}()
	if f != nil && f.step == "" {
		f.step = p.registry.step(x.entry)
	}
	p.stats.ended(f)
	if f == nil {
		return
	}
	if f.outcome != BadRequest && f.outcome != ClientGone {
		p.log.warn(string(f.outcome), "a request was not answered", x.attrs("step", f.step, "error", f.Error())...)
	}
	if err := x.reply.fail(f.api, f.retry); err != nil {
		p.log.to.Debug("the client does not take its error", x.attrs("error", err)...)
	}
}

// read returns the client's body.
func (x *exchange) read(r *http.Request) ([]byte, *failure) {
	limit := x.p.cfg.MaxBody
	bad := func(status int, code fault.Code, format string, args ...any) *failure {
		return &failure{step: StepRead, outcome: BadRequest,
			api: &openai.Error{Status: status, Code: string(code), Message: fmt.Sprintf(format, args...)}}
	}
	if t := r.Header.Get("Content-Type"); t != "" {
		if kind, _, err := mime.ParseMediaType(t); err != nil || kind != jsonType {
			return nil, bad(http.StatusUnsupportedMediaType, fault.Unsupported, "the body is %.100q; it must be %s", t, jsonType)
		}
	}
	if e := r.Header.Get("Content-Encoding"); e != "" && e != "identity" {
		return nil, bad(http.StatusUnsupportedMediaType, fault.Unsupported, "the body is encoded as %.100q; it must be sent as it is", e)
	}
	if r.ContentLength > limit {
		return nil, bad(http.StatusRequestEntityTooLarge, fault.TooLarge, "the body has %d bytes; at most %d are accepted", r.ContentLength, limit)
	}
	if err := x.reply.ctl.SetReadDeadline(time.Now().Add(x.p.cfg.Timeouts.Body)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return nil, x.gone(StepRead, err)
	}
	body, err := x.body.readAll(http.MaxBytesReader(x.reply.w, r.Body, limit))
	var tooLarge *http.MaxBytesError
	switch {
	case x.body.read():
		return nil, &failure{step: StepRead, outcome: Refused, retry: "1",
			api: unavailable("the bodies of the requests in flight have %d bytes, which is the limit, and this one is being read for the longest time", x.p.cfg.MaxBodies)}
	case errors.As(err, &tooLarge):
		return nil, bad(http.StatusRequestEntityTooLarge, fault.TooLarge, "the body has more than %d bytes", limit)
	case errors.Is(err, os.ErrDeadlineExceeded):
		f := bad(http.StatusRequestTimeout, fault.Deadline, "the body took longer than %v", x.p.cfg.Timeouts.Body)
		f.outcome = TimedOut
		return nil, f
	case err != nil:
		return nil, x.gone(StepRead, err)
	}
	// From here on the server watches the connection for the client's leaving.
	if err := x.reply.ctl.SetReadDeadline(time.Time{}); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return nil, x.gone(StepRead, err)
	}
	return body, nil
}
