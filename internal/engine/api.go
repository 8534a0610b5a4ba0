package engine

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/berthkv/berth/internal/engine/model"
	"github.com/berthkv/berth/internal/kv"
)

// Limits of a request, besides the size of its body.
const (
	maxStops     = 64
	maxStopBytes = 1 << 10
)

// apiError is an answer that is an error, in OpenAI's form.
type apiError struct {
	status int
	param  string // the field at fault, or ""
	text   string
}

func (e *apiError) Error() string { return e.text }

func badField(param, format string, args ...any) *apiError {
	return &apiError{status: http.StatusBadRequest, param: param, text: param + ": " + fmt.Sprintf(format, args...)}
}

// call is the body of a completion, chat or tokenize request. Fields that it
// does not name are ignored.
type call struct {
	Model         *string        `json:"model"`
	Prompt        *promptField   `json:"prompt"`
	Messages      []messageField `json:"messages"`
	MaxTokens     *int           `json:"max_tokens"`
	MaxCompletion *int           `json:"max_completion_tokens"` // chat's newer name of max_tokens
	Stream        bool           `json:"stream"`
	StreamOptions *struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
	Stop           stopField   `json:"stop"`
	IgnoreEOS      bool        `json:"ignore_eos"`
	ReturnTokenIDs bool        `json:"return_token_ids"`
	KVTransfer     *kvTransfer `json:"kv_transfer_params"`

	// Accepted, without effect: decoding is greedy.
	Temperature *float64 `json:"temperature"`
	TopP        *float64 `json:"top_p"`
	Seed        *int64   `json:"seed"`

	// Refused unless they ask for nothing.
	N              *int            `json:"n"`
	BestOf         *int            `json:"best_of"`
	Echo           bool            `json:"echo"`
	Suffix         *string         `json:"suffix"`
	Logprobs       json.RawMessage `json:"logprobs"`
	Tools          []any           `json:"tools"`
	ResponseFormat *struct {
		Type string `json:"type"`
	} `json:"response_format"`
}

// kvTransfer is kv_transfer_params.
type kvTransfer struct {
	RetFirstTok bool          `json:"ret_first_tok"`
	Spec        *disaggregate `json:"disagg_spec"`
}

type disaggregate struct {
	ReqID        string `json:"req_id"`
	ReceiverHost string `json:"receiver_host"`
	InitPorts    []int  `json:"receiver_init_port"`
	AllocPorts   []int  `json:"receiver_alloc_port"`
	BerthProxy   bool   `json:"berth_proxy"`
}

// promptField is a string, a list of token ids, or a list of one of these.
type promptField struct {
	text   *string
	tokens []int
}

var errPrompt = errors.New("must be a string, a list of token ids, or a list of one of these")

func (p *promptField) UnmarshalJSON(b []byte) error {
	if p.one(b) {
		return nil
	}
	var list []json.RawMessage
	if err := json.Unmarshal(b, &list); err != nil || len(list) == 0 || len(list[0]) == 0 || list[0][0] != '"' && list[0][0] != '[' {
		return badField("prompt", "%v", errPrompt)
	}
	if len(list) > 1 {
		return badField("prompt", "%d prompts in one request; this engine takes 1", len(list))
	}
	if !p.one(list[0]) {
		return badField("prompt", "%v", errPrompt)
	}
	return nil
}

// one reads a single prompt.
func (p *promptField) one(b []byte) bool {
	*p = promptField{}
	var text string
	if json.Unmarshal(b, &text) == nil {
		p.text = &text
		return true
	}
	return json.Unmarshal(b, &p.tokens) == nil
}

// stopField is a string or a list of strings.
type stopField []string

func (s *stopField) UnmarshalJSON(b []byte) error {
	var one *string
	if err := json.Unmarshal(b, &one); err == nil {
		if one != nil {
			*s = stopField{*one}
		}
		return nil
	}
	if err := json.Unmarshal(b, (*[]string)(s)); err != nil {
		return badField("stop", "must be a string or a list of strings")
	}
	return nil
}

// messageField is a chat message whose content is a string or a list of text
// parts.
type messageField struct {
	Role    string       `json:"role"`
	Content contentField `json:"content"`
}

type contentField string

func (c *contentField) UnmarshalJSON(b []byte) error {
	if err := json.Unmarshal(b, (*string)(c)); err == nil {
		return nil
	}
	var parts []struct{ Type, Text string }
	if err := json.Unmarshal(b, &parts); err != nil {
		return badField("messages", "content must be a string or a list of text parts")
	}
	for _, p := range parts {
		if p.Type != "text" {
			return badField("messages", "a content part of type %q; this engine takes text", p.Type)
		}
		*c += contentField(p.Text)
	}
	return nil
}

// decode reads one call from a body of at most `limit` bytes.
func decode(body io.Reader) (*call, error) {
	raw, err := io.ReadAll(body)
	var long *http.MaxBytesError
	switch {
	case errors.As(err, &long):
		return nil, &apiError{status: http.StatusRequestEntityTooLarge, text: fmt.Sprintf("the body is longer than %d bytes", long.Limit)}
	case err != nil:
		return nil, &apiError{status: http.StatusBadRequest, text: "the body could not be read: " + err.Error()}
	}
	c := new(call)
	err = json.Unmarshal(raw, c)
	var field *apiError
	var wrong *json.UnmarshalTypeError
	switch {
	case err == nil && bytes.Equal(bytes.TrimSpace(raw), []byte("null")):
		return nil, &apiError{status: http.StatusBadRequest, text: "the body is not a JSON object"}
	case err == nil:
		return c, nil
	case errors.As(err, &field):
		return nil, field
	case errors.As(err, &wrong) && wrong.Field != "":
		return nil, badField(wrong.Field, "must be %s, not %s", kindName(wrong.Type.Kind().String()), wrong.Value)
	case errors.As(err, &wrong):
		return nil, &apiError{status: http.StatusBadRequest, text: "the body is not a JSON object"}
	}
	return nil, &apiError{status: http.StatusBadRequest, text: "the body is not valid JSON: " + err.Error()}
}

func kindName(kind string) string {
	switch {
	case strings.HasPrefix(kind, "int"):
		return "an integer"
	case strings.HasPrefix(kind, "float"):
		return "a number"
	case kind == "bool":
		return "true or false"
	case kind == "slice":
		return "a list"
	case kind == "struct":
		return "an object"
	}
	return "a " + kind
}

// tokenize returns the tokens of a call's prompt or messages.
func (c *call) tokenize(chat bool, context int) (tokens []int, err error) {
	field := "prompt"
	switch {
	case chat:
		field = "messages"
		if len(c.Messages) == 0 {
			return nil, badField("messages", "must not be empty")
		}
		messages := make([]model.Message, len(c.Messages))
		for i, m := range c.Messages {
			messages[i] = model.Message{Role: m.Role, Text: string(m.Content)}
		}
		t, unknown, ok := model.EncodeChat(messages)
		if !ok {
			return nil, badField("messages", "message %d has the unknown role %q", unknown, messages[unknown].Role)
		}
		tokens = t
	case c.Prompt == nil:
		return nil, badField("prompt", "is missing")
	case c.Prompt.text != nil:
		tokens = model.Encode(*c.Prompt.text)
	default:
		if len(c.Prompt.tokens) == 0 {
			return nil, badField("prompt", "must not be empty")
		}
		tokens = c.Prompt.tokens
	}
	for i, t := range tokens {
		if t < 0 || t >= model.VocabSize {
			return nil, badField(field, "token %d is %d; the vocabulary has %d", i, t, model.VocabSize)
		}
	}
	// One position must be left for the answer.
	if len(tokens) >= context {
		return nil, badField(field, "has %d tokens; the model's context is %d, of which the answer needs at least 1", len(tokens), context)
	}
	return tokens, nil
}

// limits returns where the answer to a prompt of `prompt` tokens ends.
func (c *call) limits(chat bool, prompt, context int) (limits, error) {
	l := limits{stop: c.Stop, ignoreEOS: c.IgnoreEOS}
	field, given := "max_tokens", c.MaxTokens
	if chat && c.MaxCompletion != nil {
		field, given = "max_completion_tokens", c.MaxCompletion
	}
	switch room := context - prompt; {
	case given == nil && chat:
		l.maxTokens = room
	case given == nil:
		l.maxTokens = min(16, room) // OpenAI's default
	case *given < 1:
		return l, badField(field, "is %d, must be at least 1", *given)
	case *given > room:
		return l, badField(field, "is %d, with a prompt of %d tokens more than the model's context of %d", *given, prompt, context)
	default:
		l.maxTokens = *given
	}
	if len(c.Stop) > maxStops {
		return l, badField("stop", "has %d strings, at most %d are allowed", len(c.Stop), maxStops)
	}
	for _, s := range c.Stop {
		if s == "" || len(s) > maxStopBytes {
			return l, badField("stop", "a string of %d bytes; 1 to %d are allowed", len(s), maxStopBytes)
		}
	}
	return l, nil
}

// unsupported refuses what this engine cannot do.
func (c *call) unsupported() error {
	asks := func(raw json.RawMessage) bool {
		s := string(bytes.TrimSpace(raw))
		return s != "" && s != "null" && s != "false"
	}
	for _, f := range []struct {
		name string
		asks bool
	}{
		{"n", c.N != nil && *c.N != 1},
		{"best_of", c.BestOf != nil && *c.BestOf != 1},
		{"echo", c.Echo},
		{"suffix", c.Suffix != nil && *c.Suffix != ""},
		{"logprobs", asks(c.Logprobs)},
		{"tools", len(c.Tools) > 0},
		{"response_format", c.ResponseFormat != nil && c.ResponseFormat.Type != "text"},
	} {
		if f.asks {
			return badField(f.name, "is not supported by the demo engine")
		}
	}
	return nil
}

// transfer checks kv_transfer_params against what the engine is. send is where
// the prompt's KV goes, load the request whose KV has come; both may be absent.
func (c *call) transfer(role Role, ranks int) (send *sendSpec, load string, err error) {
	if c.KVTransfer == nil || c.KVTransfer.Spec == nil {
		return nil, "", nil
	}
	const at = "kv_transfer_params.disagg_spec"
	s := c.KVTransfer.Spec
	switch {
	case s.ReqID == "" || len(s.ReqID) > kv.MaxReqID:
		return nil, "", badField(at+".req_id", "has %d bytes; 1 to %d are allowed", len(s.ReqID), kv.MaxReqID)
	case s.ReceiverHost == "" && role.receives():
		return nil, s.ReqID, nil
	case s.ReceiverHost == "" && role.sends():
		return nil, "", badField(at+".receiver_host", "is missing, and an engine of role %q does not receive", role)
	case !role.sends():
		return nil, "", badField(at, "an engine of role %q does not send", role)
	case len(s.AllocPorts) != ranks:
		return nil, "", badField(at+".receiver_alloc_port", "has %d ports, the engine has %d ranks", len(s.AllocPorts), ranks)
	case len(s.InitPorts) != 0 && len(s.InitPorts) != ranks:
		return nil, "", badField(at+".receiver_init_port", "has %d ports, the engine has %d ranks", len(s.InitPorts), ranks)
	}
	for name, ports := range map[string][]int{"receiver_alloc_port": s.AllocPorts, "receiver_init_port": s.InitPorts} {
		for _, p := range ports {
			if p < 1 || p > 65535 {
				return nil, "", badField(at+"."+name, "%d is no port", p)
			}
		}
	}
	return &sendSpec{req: s.ReqID, host: s.ReceiverHost, initPorts: s.InitPorts, allocPorts: s.AllocPorts, berthProxy: s.BerthProxy}, "", nil
}
