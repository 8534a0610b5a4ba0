package openai

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/tidwall/gjson"
)

// Splice makes one answer of the prefill engine's first token and the decode
// engine's stream: one id, model and time of creation, the endpoint's own shape,
// usage that adds up, stop strings found across the seam. It knows both forms:
// events to send on (Head, Next) for a streamed answer, one document (Answer)
// for one that is not. Not safe for concurrent use.
type Splice struct {
	req      *Request
	first    *First
	id       string // of the answer, as JSON
	prompt   int64  // tokens of the prompt
	boundary *boundary
	again    bool // the first token is the decode engine's too
	ended    bool // nothing more is to come

	// The answer so far.
	tokens     int64 // tokens told by usage, the first one included
	text       strings.Builder
	ids        []string
	idsLost    bool   // an engine did not return the ids of its text
	finish     string // raw JSON, "" before the end
	stopReason string // raw JSON
	usage      string // raw JSON, "" if no engine told it
}

// NewSplice begins an answer. limit is what Request.Limit returned.
func NewSplice(req *Request, first *First, prompt Tokens, limit int64) *Splice {
	s := &Splice{req: req, first: first, prompt: prompt.N}
	id := first.doc.Get("id").Str
	if req.Kind == Chat {
		id = "chatcmpl-" + strings.TrimPrefix(id, "cmpl-")
	}
	s.id = quote(id)
	if s.again = first.half() && limit != 1; s.again {
		s.boundary, _ = newBoundary(nil, false, "")
		return s
	}
	s.tokens = 1
	if first.HasToken {
		s.ids = append(s.ids, strconv.FormatInt(first.Token, 10))
	}
	stops := req.Stop
	if first.Ended() || limit == 1 {
		s.ended = true
		s.finish, s.stopReason = quote(first.Finish), rawOrNull(first.choice.Get("stop_reason"))
		if first.Finish == "" {
			s.finish = quote("length")
		}
		if u := first.doc.Get("usage"); u.IsObject() {
			s.usage = u.Raw
		}
		stops = nil
	}
	var out string
	s.boundary, out = newBoundary(stops, req.KeepStop, first.Text)
	s.text.WriteString(out)
	return s
}

// Ended reports whether the answer is complete: no further event is needed.
func (s *Splice) Ended() bool { return s.ended }

// Head returns the events for the client that the first token makes (for chat,
// the role too), the end of the stream included if the token ended it.
func (s *Splice) Head() [][]byte {
	if !s.req.Stream {
		return nil
	}
	var out [][]byte
	choice := s.first.choice.clone()
	choice.Delete("prompt_logprobs", "routed_experts")
	choice.Set("finish_reason", "null")
	choice.Set("stop_reason", "null")
	if s.ended {
		choice.Set("finish_reason", s.finish)
		choice.Set("stop_reason", s.stopReason)
	}
	choice.Set("text", quote(s.text.String()))
	doc := s.first.doc.clone()
	doc.Delete("usage", "prompt_logprobs")
	if u := s.first.doc.Get("usage"); s.req.EachUsage && u.IsObject() && !s.again {
		doc.Set("usage", u.Raw)
	}
	if s.again {
		choice.Delete("token_ids")
	} else if s.first.HasToken {
		choice.Set("token_ids", "["+s.ids[0]+"]")
	}
	if s.req.Kind == Chat {
		role := &Object{}
		role.Set("index", "0")
		role.Set("delta", `{"role":"assistant","content":""}`)
		role.Set("logprobs", "null")
		role.Set("finish_reason", "null")
		opening := doc.clone()
		if ids := choice.Get("prompt_token_ids"); s.req.TokenIDs && ids.IsArray() {
			opening.Set("prompt_token_ids", ids.Raw)
		}
		out = append(out, s.event(opening, role))
		choice.Delete("prompt_token_ids")
	}
	out = append(out, s.event(doc, choice))
	if s.ended {
		out = append(out, s.closing()...)
	}
	return out
}

// Next takes the data of the decode stream's next event and returns the events
// for the client. An error means that the engine broke off or sent what is no
// part of an answer; an *Error among them is one that the engine itself sent.
func (s *Splice) Next(data []byte) ([][]byte, error) {
	if s.ended {
		return nil, nil
	}
	if string(data) == "[DONE]" {
		if s.finish == "" {
			return nil, fmt.Errorf("the stream is done without a finish_reason")
		}
		s.ended = true
		return s.closing(), nil
	}
	doc, err := ParseObject(data)
	if err != nil {
		return nil, fmt.Errorf("an event is not an answer: %w", err)
	}
	if doc.given("error") {
		status, ok := integer(doc.Get("error").Get("code"))
		if !ok || status < 400 || status > 599 {
			status = 502
		}
		return nil, EngineError(int(status), append([]byte(nil), data...))
	}
	told := false // this event tells usage
	if u := doc.Get("usage"); u.IsObject() {
		if s.usage, err = s.addUsage(u); err != nil {
			return nil, fmt.Errorf("usage: %w", err)
		}
		told = true
		if n, ok := integer(u.Get("completion_tokens")); ok {
			s.tokens = s.firstTokens() + n
		}
	}
	choices := doc.Get("choices").Array()
	if len(choices) == 0 {
		return nil, nil // the usage at the end: closing sends it on
	}
	choice, err := onlyChoice(choices)
	if err != nil {
		return nil, err
	}
	if s.finish != "" {
		return nil, fmt.Errorf("an event follows the one with the finish_reason")
	}
	text := choice.Get("text")
	if text.Type != gjson.String {
		return nil, fmt.Errorf("choices[0].text is %s", typeName(text))
	}
	out := s.take(choice, text.Str)
	ids := choice.Get("token_ids").Array()
	for _, id := range ids {
		s.ids = append(s.ids, id.Raw)
	}
	s.idsLost = s.idsLost || len(ids) == 0 && text.Str != ""
	doc.Delete("usage")
	if told && s.req.EachUsage {
		doc.Set("usage", s.usage)
	}
	choice.Set("text", quote(out))
	choice.Delete("prompt_token_ids") // those of the second leg: with the first token
	s.text.WriteString(out)
	var events [][]byte
	if s.req.Stream {
		events = append(events, s.event(doc, choice))
	}
	if s.ended {
		events = append(events, s.closing()...)
	}
	return events, nil
}

// take puts the next text through the boundary and returns what goes out. If
// a stop string across the seam ends the answer here, the choice says so.
func (s *Splice) take(choice *Object, text string) string {
	finish, reason := choice.Get("finish_reason"), choice.Get("stop_reason")
	out, stopped := s.boundary.next(text, reason.Str, s.tokens > s.req.MinTokens)
	switch {
	case stopped != "":
		s.finish, s.stopReason, s.ended = `"stop"`, quote(stopped), true
		choice.Set("finish_reason", s.finish)
		choice.Set("stop_reason", s.stopReason)
	case finish.Type == gjson.String:
		s.finish, s.stopReason = finish.Raw, rawOrNull(reason)
		out += s.boundary.flush()
	}
	return out
}

// event finishes a streamed event: the answer's own identity and shape.
func (s *Splice) event(doc, choice *Object) []byte {
	s.identify(doc)
	if !s.req.TokenIDs {
		choice.Delete("token_ids", "prompt_token_ids")
	}
	if s.req.Kind == Chat {
		doc.Set("object", `"chat.completion.chunk"`)
		if choice.given("text") {
			choice.rename("text", "delta", `{"content":`+choice.Get("text").Raw+`}`)
		}
	}
	doc.Set("choices", list(choice))
	return doc.Bytes()
}

// list returns a JSON array of one object.
func list(o *Object) string {
	b := append(make([]byte, 0, o.size()+2), '[')
	return string(append(o.append(b), ']'))
}

// closing returns the event with the usage, if the client asked for one.
func (s *Splice) closing() [][]byte {
	if !s.req.Stream || !s.req.Usage || s.usage == "" {
		return nil
	}
	doc := s.first.doc.clone()
	s.identify(doc)
	doc.Delete("prompt_logprobs")
	if s.req.Kind == Chat {
		doc.Set("object", `"chat.completion.chunk"`)
	}
	doc.Set("choices", "[]")
	doc.Set("usage", s.usage)
	return [][]byte{doc.Bytes()}
}

// Answer returns the document of an answer that is not streamed, once it has
// ended.
func (s *Splice) Answer() []byte {
	doc, choice := s.first.doc.clone(), s.first.choice.clone()
	s.identify(doc)
	choice.Set("text", quote(s.text.String()))
	choice.Set("finish_reason", s.finish)
	choice.Set("stop_reason", s.stopReason)
	switch {
	case !s.req.TokenIDs:
		choice.Delete("token_ids", "prompt_token_ids")
	case s.idsLost:
		choice.Delete("token_ids")
	default:
		choice.Set("token_ids", "["+strings.Join(s.ids, ",")+"]")
	}
	if s.req.Kind == Chat {
		doc.Set("object", `"chat.completion"`)
		if ids := choice.Get("prompt_token_ids"); ids.Exists() {
			doc.Set("prompt_token_ids", ids.Raw)
			choice.Delete("prompt_token_ids")
		}
		choice.rename("text", "message", `{"role":"assistant","content":`+choice.Get("text").Raw+`,"refusal":null}`)
	}
	doc.Set("choices", list(choice))
	doc.Delete("usage")
	if s.usage != "" {
		doc.Set("usage", s.usage)
	}
	return doc.Bytes()
}

// identify gives an event or answer the one id, model and time of creation: the
// first leg's.
func (s *Splice) identify(doc *Object) {
	doc.Delete("kv_transfer_params")
	for _, name := range []string{"created", "model"} {
		if v := s.first.doc.Get(name); v.Exists() {
			doc.Set(name, v.Raw)
		}
	}
	doc.Set("id", s.id)
}

func rawOrNull(v gjson.Result) string {
	if !v.Exists() {
		return "null"
	}
	return v.Raw
}
