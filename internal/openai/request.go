package openai

import (
	"github.com/tidwall/gjson"
)

// Kind is which of the two endpoints a request came to.
type Kind string

const (
	Completions Kind = "completions"
	Chat        Kind = "chat"
)

// Path returns the endpoint's path.
func (k Kind) Path() string {
	if k == Chat {
		return "/v1/chat/completions"
	}
	return "/v1/completions"
}

// DefaultMaxTokens is what a completions request without max_tokens asks for.
// (A chat request without it goes on to the end of the context, and so does a
// completions request whose max_tokens is null.)
const DefaultMaxTokens = 16

// Request is a client's request: what the proxy needs to know of it, and the
// document itself, from which the engines' requests are made.
type Request struct {
	Kind       Kind
	Model      string
	Stream     bool
	Usage      bool     // the client wants usage at the end of the stream
	EachUsage  bool     // and in every event
	TokenIDs   bool     // the client wants token ids
	MaxTokens  int64    // 0: to the end of the context
	MinTokens  int64    // tokens before anything may end the answer
	Stop       []string // without empty ones
	KeepStop   bool     // a stop string is part of the answer
	Prompt     Tokens   // set if the client gave token ids
	Whole      string   // why two legs could not answer it rightly; "" if they can
	doc        *Object
	tokenizing bool // the prompt must be tokenized
}

// ParseRequest reads a client's body. kv_transfer_params, which only the proxy
// may set, are dropped, also where vLLM takes them from vllm_xargs. What it must
// understand and does not is a 400 that names the field; what it need not
// understand is left for the engine to judge.
func ParseRequest(kind Kind, body []byte) (*Request, *Error) {
	doc, err := ParseObject(body)
	if err != nil {
		return nil, BadRequest("", "the body is not a request: %v", err)
	}
	doc.Delete("kv_transfer_params")
	if x := doc.Get("vllm_xargs"); x.IsObject() {
		xargs, err := objectOf(x)
		if err != nil {
			return nil, BadRequest("vllm_xargs", "vllm_xargs: %v", err)
		}
		xargs.Delete("kv_transfer_params")
		doc.Set("vllm_xargs", xargs.String())
	}
	r := &Request{Kind: kind, doc: doc, Whole: wholeReason(doc)}
	p := fieldParser{doc: doc}
	r.Model = p.str("model")
	r.Stream = p.boolean("stream")
	r.TokenIDs = p.boolean("return_token_ids")
	r.KeepStop = p.boolean("include_stop_str_in_output")
	r.MinTokens = p.count("min_tokens", 0)
	r.Stop = p.stop()
	r.MaxTokens = p.maxTokens(kind)
	r.Usage, r.EachUsage = p.streamOptions(r.Stream)
	if kind == Chat {
		r.chat(&p)
	} else {
		r.prompt(&p)
	}
	if p.err != nil {
		return nil, p.err
	}
	return r, nil
}

// prompt reads a completions request's prompt: a text to be tokenized, or token
// ids. A list of prompts goes whole.
func (r *Request) prompt(p *fieldParser) {
	v := r.doc.Get("prompt")
	switch {
	case v.Type == gjson.String:
		r.tokenizing = true
	case v.IsArray() && v.Get("#").Int() == 0:
		p.fail("prompt", "prompt is empty")
	case v.IsArray() && v.Get("0").Type != gjson.Number:
		ok := true
		v.ForEach(func(_, e gjson.Result) bool {
			ok = e.Type == gjson.String || e.IsArray()
			return ok
		})
		if !ok {
			p.fail("prompt", "prompt is neither a text, nor token ids, nor a list of these")
		}
		r.orWhole("prompt")
	case v.IsArray():
		ids, err := ParseTokens(v)
		if err != nil {
			p.fail("prompt", "prompt: %v", err)
		}
		r.Prompt = ids
	case r.Whole == "" || v.Exists() && v.Type != gjson.Null:
		p.fail("prompt", "prompt is %s; it must be a text or token ids", typeName(v))
	}
}

// chat reads a chat request's messages. Those with parts that are not text go
// whole: their KV is not a function of the token ids alone.
func (r *Request) chat(p *fieldParser) {
	r.tokenizing = true
	v := r.doc.Get("messages")
	if !v.IsArray() || v.Get("#").Int() == 0 {
		p.fail("messages", "messages is %s; it must be a list of at least one message", typeName(v))
		return
	}
	v.ForEach(func(_, m gjson.Result) bool {
		if !m.IsObject() {
			p.fail("messages", "a message is %s; it must be an object", typeName(m))
			return false
		}
		m.Get("content").ForEach(func(_, part gjson.Result) bool {
			if part.IsObject() && part.Get("type").Str != "text" {
				r.orWhole("content")
			}
			return true
		})
		return true
	})
}

func (r *Request) orWhole(reason string) {
	if r.Whole == "" {
		r.Whole = reason
	}
}

// fieldParser reads fields and keeps the first fault.
type fieldParser struct {
	doc *Object
	err *Error
}

func (p *fieldParser) fail(param, format string, args ...any) {
	if p.err == nil {
		p.err = BadRequest(param, format, args...)
	}
}

func (p *fieldParser) str(name string) string {
	v := p.doc.Get(name)
	if p.doc.given(name) && v.Type != gjson.String {
		p.fail(name, "%s is %s; it must be a string", name, typeName(v))
	}
	return v.Str
}

func (p *fieldParser) boolean(name string) bool {
	v := p.doc.Get(name)
	if p.doc.given(name) && !v.IsBool() {
		p.fail(name, "%s is %s; it must be true or false", name, typeName(v))
	}
	return v.Type == gjson.True
}

// count reads an integer that is at least min; 0 if it is not given.
func (p *fieldParser) count(name string, min int64) int64 {
	if !p.doc.given(name) {
		return 0
	}
	v := p.doc.Get(name)
	n, ok := integer(v)
	if !ok || n < min {
		p.fail(name, "%s is %.40s; it must be an integer of at least %d", name, v.Raw, min)
		return 0
	}
	return n
}

func (p *fieldParser) maxTokens(kind Kind) int64 {
	if kind == Completions && p.doc.find("max_tokens") < 0 {
		return DefaultMaxTokens
	}
	n := p.count("max_tokens", 1)
	if kind == Chat && p.doc.given("max_completion_tokens") {
		n = p.count("max_completion_tokens", 1)
	}
	return n
}

func (p *fieldParser) stop() []string {
	v := p.doc.Get("stop")
	if !p.doc.given("stop") {
		return nil
	}
	if v.Type != gjson.String && !v.IsArray() {
		p.fail("stop", "stop is %s; it must be a string or a list of strings", typeName(v))
	}
	var out []string
	for _, s := range v.Array() {
		if s.Type != gjson.String {
			p.fail("stop", "stop holds %s; it must be a string or a list of strings", typeName(s))
		}
		if s.Str != "" {
			out = append(out, s.Str)
		}
	}
	return out
}

func (p *fieldParser) streamOptions(stream bool) (usage, each bool) {
	if !p.doc.given("stream_options") {
		return false, false
	}
	v := p.doc.Get("stream_options")
	if !v.IsObject() {
		p.fail("stream_options", "stream_options is %s; it must be an object", typeName(v))
	}
	if !stream {
		p.fail("stream_options", "stream_options are only for stream: true")
	}
	usage = v.Get("include_usage").Type == gjson.True
	return usage, usage && v.Get("continuous_usage_stats").Type == gjson.True
}
