package proxy

import (
	"net/http"
	"time"

	"github.com/tidwall/gjson"

	"github.com/berthkv/berth/internal/openai"
)

// whole has a decode engine answer all of the request, and hands its answer on
// as it is.
func (x *exchange) whole() *failure {
	const who = "the decode engine"
	dec, f := x.take(x.p.decoders, true)
	if f != nil {
		return f
	}
	defer x.p.decoders.done(dec)
	x.at(StepWhole)
	s, err := x.begin(dec, x.req.Kind.Path(), x.req.WholeBody())
	defer s.close()
	if err != nil {
		return x.failed(s.ctx, StepWhole, who, err)
	}
	if s.resp.StatusCode == http.StatusOK && isEvents(s.resp) {
		return x.relay(s)
	}
	doc, err := x.p.client.readAll(s.resp)
	if err == nil && s.resp.StatusCode != http.StatusOK {
		err = statusError(s.resp, doc)
	}
	if err != nil {
		return x.failed(s.ctx, StepWhole, who, err)
	}
	copyEndToEnd(x.reply.w.Header(), s.resp.Header)
	if err := x.reply.document(http.StatusOK, doc); err != nil {
		return x.gone(StepWhole, err)
	}
	return nil
}

// relay hands a stream on, event by event. One that breaks off, or tells an
// error, ends with an error event (r95).
func (x *exchange) relay(s *stream) *failure {
	const who = "the decode engine"
	for first := true; ; first = false {
		e, err := s.next()
		if err != nil {
			return x.failed(s.ctx, StepWhole, who, err)
		}
		if e.Done() {
			break
		}
		if gjson.ValidBytes(e.Data) && gjson.GetBytes(e.Data, "error").IsObject() {
			return x.failed(s.ctx, StepWhole, who, openai.EngineError(http.StatusBadGateway, e.Data))
		}
		if err := x.reply.event(e); err != nil {
			return x.gone(StepWhole, err)
		}
		if first {
			if err := x.reply.flush(); err != nil {
				return x.gone(StepWhole, err)
			}
			x.p.stats.firstToken(time.Since(x.begun))
		}
	}
	if err := x.reply.done(); err != nil {
		return x.gone(StepWhole, err)
	}
	s.drain()
	return nil
}
