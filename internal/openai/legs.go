package openai

import "strconv"

// chatOnly are the fields of a chat request that make its prompt or its shape:
// they have done their work, or mean something else, once it goes on as token
// ids to /v1/completions.
var chatOnly = []string{
	"messages", "max_completion_tokens", "add_generation_prompt", "continue_final_message", "add_special_tokens",
	"chat_template", "chat_template_kwargs", "mm_processor_kwargs", "documents", "tools", "tool_choice",
	"parallel_tool_calls", "functions", "function_call", "response_format", "logprobs", "top_logprobs", "modalities",
}

// tokenizeFields are what POST /tokenize takes of a request, besides the prompt
// or the messages.
var tokenizeFields = []string{
	"model", "add_special_tokens", "add_generation_prompt", "continue_final_message", "chat_template",
	"chat_template_kwargs", "mm_processor_kwargs",
}

// WholeBody returns the request for an engine that answers all of it.
func (r *Request) WholeBody() []byte { return r.doc.Bytes() }

// TokenizeBody returns the request for POST /tokenize, nil if the client gave
// token ids.
func (r *Request) TokenizeBody() []byte {
	if !r.tokenizing {
		return nil
	}
	o := &Object{}
	for _, name := range tokenizeFields {
		if r.doc.given(name) {
			o.Set(name, r.doc.Get(name).Raw)
		}
	}
	name := "prompt"
	if r.Kind == Chat {
		name = "messages"
	}
	o.Set(name, r.doc.Get(name).Raw)
	return o.Bytes()
}

// Limit returns how many tokens the answer may have: what the client asks for,
// but no more than the context has room for. 0 is "no limit known". A prompt
// without tokens, or one that leaves no room, is a 400.
func (r *Request) Limit(prompt Tokens, contextLen int64) (int64, *Error) {
	param := "prompt"
	if r.Kind == Chat {
		param = "messages"
	}
	if prompt.N == 0 {
		return 0, BadRequest(param, "the prompt has no tokens")
	}
	if contextLen <= 0 {
		return r.MaxTokens, nil
	}
	room := contextLen - prompt.N
	if room < 1 {
		err := BadRequest(param, "the prompt has %d tokens; a context of %d leaves no room for an answer", prompt.N, contextLen)
		err.Code = "context_length_exceeded"
		return 0, err
	}
	if r.MaxTokens == 0 || r.MaxTokens > room {
		return room, nil
	}
	return r.MaxTokens, nil
}

// Spec is what the engines' connectors are told of a transfer (LMCache's
// disagg_spec), one init and one alloc port a rank.
type Spec struct {
	ReqID      string
	Host       string
	InitPorts  []int
	AllocPorts []int
}

// prefillParams are the kv_transfer_params of the prefill leg.
func (s Spec) prefillParams() string {
	return `{"ret_first_tok":true,"disagg_spec":{"req_id":` + quote(s.ReqID) + `,"receiver_host":` + quote(s.Host) +
		`,"receiver_init_port":` + intList(s.InitPorts) + `,"receiver_alloc_port":` + intList(s.AllocPorts) +
		`,"berth_proxy":true}}`
}

// decodeParams are those of the decode leg.
func (s Spec) decodeParams() string {
	return `{"disagg_spec":{"req_id":` + quote(s.ReqID) + `}}`
}

func intList(ns []int) string {
	b := []byte{'['}
	for i, n := range ns {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(b, int64(n), 10)
	}
	return string(append(b, ']'))
}

// leg returns the request of a leg without what differs between the two.
func (r *Request) leg(prompt Tokens) *Object {
	o := r.doc.clone()
	if r.Kind == Chat {
		o.Delete(chatOnly...)
	}
	o.Delete("stream_options", "kv_transfer_params")
	o.Set("prompt", prompt.String())
	return o
}

// PrefillBody returns the request of the first leg: one token, and its id.
func (r *Request) PrefillBody(prompt Tokens, spec *Spec) []byte {
	o := r.leg(prompt)
	o.Set("max_tokens", "1")
	if r.MinTokens > 1 {
		o.Set("min_tokens", "1")
	}
	o.Set("stream", "false")
	o.Set("return_token_ids", "true")
	o.Set("kv_transfer_params", spec.prefillParams())
	return o.Bytes()
}

// DecodeBody returns the request of the second leg, which is always streamed:
// the rest of an answer of limit tokens (0: to the end of the context) after its
// first token, which is generated once more if it is half a character. spec is
// nil if the engine must compute the prompt itself.
func (r *Request) DecodeBody(prompt Tokens, limit int64, s *Splice, spec *Spec) []byte {
	done := s.firstTokens()
	if done > 0 {
		prompt = prompt.with(s.first.Token)
	}
	o := r.leg(prompt)
	if limit > 0 {
		o.Set("max_tokens", strconv.FormatInt(limit-done, 10))
	} else {
		o.Set("max_tokens", "null")
	}
	if r.MinTokens > 0 {
		o.Set("min_tokens", strconv.FormatInt(r.MinTokens-done, 10))
	}
	o.Set("stream", "true")
	if each := r.EachUsage || s.boundary.open(); each || r.Usage || !r.Stream {
		options := `{"include_usage":true}`
		if each {
			options = `{"include_usage":true,"continuous_usage_stats":true}`
		}
		o.Set("stream_options", options)
	}
	if spec != nil {
		o.Set("kv_transfer_params", spec.decodeParams())
	}
	return o.Bytes()
}
