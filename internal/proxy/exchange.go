package proxy

import (
	"context"
	"net/http"
	"time"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/openai"
)

// exchange is one request on its way to an answer. It belongs to the handler's
// goroutine.
type exchange struct {
	p      *Proxy
	ctx    context.Context // ends with the client, the request's deadline or the proxy
	req    *openai.Request
	header http.Header // for the engines
	reply  *reply
	entry  *entry // what the status shows
	begun  time.Time
	body   *body
}

// run answers the request or says why not. Until a byte is out, a decode engine
// can take over what two legs failed at.
func (x *exchange) run() *failure {
	if x.req.Whole != "" {
		x.p.stats.whole(x.req.Whole)
		return x.whole()
	}
	f := x.twoLegs()
	if f != nil && f.elsewhere && !x.reply.started && x.p.cfg.Policy == Recompute {
		x.recompute(f)
		return x.whole()
	}
	return f
}

// recompute counts and logs that a decode engine computes a prompt itself.
func (x *exchange) recompute(f *failure) {
	x.p.stats.recomputed(f.step, f.code())
	x.p.log.warn("recompute", "a decode engine computes the prompt itself", x.attrs("step", f.step, "reason", f.code(), "error", f.Error())...)
}

// at notes the step that begins.
func (x *exchange) at(step Step) { x.p.registry.at(x.entry, step, time.Now(), x.p.stats) }

// attempt notes the name of the attempt.
func (x *exchange) attempt(reqID string) { x.p.registry.attempt(x.entry, reqID) }

// attrs are the attributes of a log line about this request.
func (x *exchange) attrs(more ...any) []any { return append(x.p.registry.attrs(x.entry), more...) }

// nodeHeader tells, with Config.ShowNodes, which engines a request went to, in
// the order in which they were chosen.
var nodeHeader = map[string]string{rolePrefill: "X-Berth-Prefill", roleDecode: "X-Berth-Decode"}

// take picks an engine for the request; the caller gives it back.
func (x *exchange) take(ns *nodes, leastLoaded bool) (*node, *failure) {
	n := ns.take(leastLoaded)
	if n == nil {
		role := ns.all[0].role
		return nil, &failure{outcome: Refused, retry: "5", api: unavailable("no %s engine takes requests: all %d are drained", role, len(ns.all))}
	}
	x.p.registry.node(x.entry, n)
	if x.p.cfg.ShowNodes && !x.reply.started {
		x.reply.w.Header().Add(nodeHeader[n.role], n.name)
	}
	return n, nil
}

// twoLegs is the order of the package comment.
func (x *exchange) twoLegs() (f *failure) {
	dec, f := x.take(x.p.decoders, true)
	if f != nil {
		return f
	}
	defer x.p.decoders.done(dec)
	pre, f := x.take(x.p.prefillers, false)
	if f != nil {
		return f
	}
	defer x.p.prefillers.done(pre)

	// Also for an answer of one token, which the prefill engine gives alone (r27):
	// LMCache's sender stores every prompt, and fails on one without a receiver.
	// The receivers are asked before the prompt is tokenized, so that their answer
	// is no part of the time to the first token.
	x.at(StepTokenize)
	t, f := x.watchTransfer(dec)
	if f != nil {
		return f
	}
	defer func() {
		switch {
		case f != nil && f.step == StepTokenize: // which no receiver is to blame for
			t.close(fault.Cancelled, f.Error())
		case f != nil:
			t.close(f.code(), f.Error())
		case t.unused != nil:
			t.close(t.unused.Code, t.unused.Text)
		default:
			t.close("", "")
		}
	}()
	prompt, limit, f := x.tokenize(pre)
	if f != nil {
		return f
	}
	x.at(StepWatch)
	if f := t.watched(); f != nil {
		return f
	}
	return x.legs(pre, dec, t, prompt, limit)
}

// legs asks the two engines and sends their answer.
func (x *exchange) legs(pre, dec *node, t *transfer, prompt openai.Tokens, limit int64) *failure {
	x.at(StepPrefill)
	first, f := x.prefill(pre, t, prompt, limit)
	if f != nil {
		return f
	}
	t.told(first)
	splice := openai.NewSplice(x.req, first, prompt, limit)
	if x.p.cfg.Policy == Fail && t.said != nil && !splice.Ended() {
		return t.said // before the first byte
	}
	err := x.reply.events(splice.Head())
	if err == nil {
		err = x.reply.flush() // at once: the rest waits for the KV
	}
	if err != nil {
		return x.gone(StepPrefill, err)
	}
	x.p.stats.firstToken(time.Since(x.begun))
	if splice.Ended() {
		t.unused = fault.New(fault.Cancelled, "the first token ended the answer")
	} else if f := x.rest(dec, t, prompt, limit, splice); f != nil {
		return f
	}
	if x.req.Stream {
		err = x.reply.done()
	} else {
		err = x.reply.document(http.StatusOK, splice.Answer())
	}
	if err != nil {
		return x.gone(StepDecode, err)
	}
	return nil
}

// rest waits for the KV and has the decode engine write the rest of the answer.
func (x *exchange) rest(dec *node, t *transfer, prompt openai.Tokens, limit int64, splice *openai.Splice) *failure {
	x.at(StepTransfer)
	spec := t.spec
	if f := t.wait(); f != nil {
		if !f.elsewhere || x.p.cfg.Policy != Recompute {
			return f
		}
		x.recompute(f)
		t.unused = fault.New(f.code(), "%s", f.Error())
		spec = nil
	}
	x.at(StepDecode)
	return x.decode(dec, x.req.DecodeBody(prompt, limit, splice, spec), splice)
}

// tokenize returns the prompt's token ids and how many the answer may have.
func (x *exchange) tokenize(pre *node) (prompt openai.Tokens, limit int64, f *failure) {
	ctx, stop := within(x.ctx, x.p.cfg.Timeouts.Tokenize, "tokenizing")
	defer stop()
	prompt = x.req.Prompt
	var contextLen int64
	if body := x.req.TokenizeBody(); body != nil {
		doc, err := x.p.client.document(ctx, http.MethodPost, pre, "/tokenize", x.header, body)
		if err == nil {
			prompt, contextLen, err = openai.ParseTokenized(doc)
		}
		if err != nil {
			return prompt, 0, x.failed(ctx, StepTokenize, "the prefill engine", err)
		}
	} else {
		contextLen = x.p.contextLen(ctx, pre, x.req.Model, x.header)
	}
	limit, bad := x.req.Limit(prompt, contextLen)
	if bad != nil {
		return prompt, 0, &failure{step: StepTokenize, outcome: BadRequest, api: bad}
	}
	return prompt, limit, nil
}

// prefill returns the first token. If failed transfers are not recomputed, one
// that fails meanwhile ends the wait, unless that token is the whole answer.
func (x *exchange) prefill(pre *node, t *transfer, prompt openai.Tokens, limit int64) (*openai.First, *failure) {
	parent := x.ctx
	if x.p.cfg.Policy == Fail && limit != 1 {
		parent = t.ctx
	}
	ctx, stop := within(parent, x.p.cfg.Timeouts.Prefill, "the prefill")
	defer stop()
	doc, err := x.p.client.document(ctx, http.MethodPost, pre, openai.Completions.Path(), x.header, x.req.PrefillBody(prompt, t.spec))
	var first *openai.First
	if err == nil {
		first, err = openai.ParseFirst(doc)
	}
	if err == nil {
		err = context.Cause(ctx) // a transfer that failed before the first byte is no 200
	}
	if err != nil {
		return nil, x.failed(ctx, StepPrefill, "the prefill engine", err)
	}
	return first, nil
}

// decode streams the rest of the answer through the splice.
func (x *exchange) decode(dec *node, body []byte, splice *openai.Splice) *failure {
	const who = "the decode engine"
	s, err := x.begin(dec, openai.Completions.Path(), body)
	defer s.close()
	if err != nil {
		return x.failed(s.ctx, StepDecode, who, err)
	}
	if err := x.streamed(s.resp); err != nil {
		return x.failed(s.ctx, StepDecode, who, err)
	}
	for !splice.Ended() {
		e, err := s.next()
		if err != nil {
			return x.failed(s.ctx, StepDecode, who, err)
		}
		out, err := splice.Next(e.Data)
		if err != nil {
			return x.failed(s.ctx, StepDecode, who, err)
		}
		if err := x.reply.events(out); err != nil {
			return x.gone(StepDecode, err)
		}
	}
	s.drain()
	return nil
}

// streamed checks that an answer is the event stream that was asked for.
func (x *exchange) streamed(resp *http.Response) error {
	if resp.StatusCode == http.StatusOK && isEvents(resp) {
		return nil
	}
	doc, err := x.p.client.readAll(resp)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return statusError(resp, doc)
	}
	return errNotEvents
}
