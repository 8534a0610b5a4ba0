package openai

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/tidwall/gjson"
)

// FuzzSplice is what two engines may answer: any document, any stream. What the
// client gets is valid JSON under one id; and whether it asked for a stream or
// not, it reads the same text, the same finish_reason and the same usage.
func FuzzSplice(f *testing.F) {
	const first = `{"id":"cmpl-r1","created":1700,"model":"m","choices":[{"index":0,"text":"aE","finish_reason":"length","token_ids":[4]}],"usage":{"prompt_tokens":3,"total_tokens":4,"completion_tokens":1}}`
	const rest = `{"choices":[{"index":0,"text":"N","finish_reason":null}],"usage":{"prompt_tokens":4,"total_tokens":5,"completion_tokens":1}}` + "\n" +
		`{"choices":[{"index":0,"text":"D","finish_reason":"length","stop_reason":null,"token_ids":[5]}]}` + "\n" +
		`{"choices":[],"usage":{"prompt_tokens":4,"total_tokens":6,"completion_tokens":2}}` + "\n[DONE]"
	f.Add(`{"prompt":"x","max_tokens":9,"stop":["END"]}`, first, rest)
	f.Add(`{"prompt":"x","max_tokens":9,"stop":["ENx","\n"],"return_token_ids":true,"include_stop_str_in_output":true}`, first, rest)
	f.Add(`{"prompt":[1],"max_tokens":1}`, first, "")
	f.Add(`{"prompt":[1],"min_tokens":2}`, `{"choices":[{"text":"","finish_reason":"stop"}],"kv_transfer_params":{"first_tok":7}}`, `{"error":{"code":500,"message":"x"}}`)
	f.Add(`{"prompt":"x"}`, `{"choices":[{"text":"\u00e9","token_ids":[1]}]}`, `{"choices":[{"text":"\ud83d\ude00","finish_reason":"stop"}]}`+"\n[DONE]")
	f.Fuzz(func(t *testing.T, body, first, stream string) {
		text, ending, ok := spliced(t, Completions, body, first, stream, false)
		if !ok {
			return
		}
		streamed, also, _ := spliced(t, Completions, body, first, stream, true)
		if text != streamed || ending != also {
			t.Errorf("not streamed %q, %s; streamed %q, %s", text, ending, streamed, also)
		}
		var o map[string]json.RawMessage
		if json.Unmarshal([]byte(body), &o) != nil || o["prompt"] == nil {
			return
		}
		chat := `{"messages":[{"role":"user","content":"x"}],` + body[strings.Index(body, "{")+1:]
		if !gjson.Valid(chat) {
			return
		}
		if said, also, ok := spliced(t, Chat, chat, first, stream, true); ok && also == ending && said != text {
			t.Errorf("a completion is %q, the chat %q", text, said)
		}
	})
}

// spliced carries an answer through, and returns what the client reads.
func spliced(t *testing.T, kind Kind, body, first, stream string, streaming bool) (text, ending string, ok bool) {
	req, bad := ParseRequest(kind, []byte(body))
	if bad != nil {
		return "", "", false
	}
	req.Stream, req.Usage, req.EachUsage = streaming, true, false
	one, err := ParseFirst([]byte(first))
	if err != nil {
		return "", "", false
	}
	prompt := Tokens{list: "1,2,3", N: 3}
	limit, bad := req.Limit(prompt, 4096)
	if bad != nil {
		return "", "", false
	}
	s := NewSplice(req, one, prompt, limit)
	for _, b := range [][]byte{req.PrefillBody(prompt, &Spec{ReqID: "r"}), req.DecodeBody(prompt, limit, s, nil)} {
		if !json.Valid(b) {
			t.Fatalf("an engine would be asked %q", b)
		}
	}
	out := s.Head()
	for line := range strings.SplitSeq(stream, "\n") {
		if s.Ended() {
			break
		}
		events, err := s.Next([]byte(line))
		if err != nil {
			return "", "", false
		}
		out = append(out, events...)
	}
	if !s.Ended() {
		return "", "", false
	}
	if !streaming {
		doc := s.Answer()
		if !json.Valid(doc) {
			t.Fatalf("the answer is %q", doc)
		}
		c := gjson.GetBytes(doc, "choices.0")
		return c.Get("text").Str, c.Get("finish_reason").Str + " " + rawOrNull(c.Get("stop_reason")) + " " + gjson.GetBytes(doc, "usage.total_tokens").Raw, true
	}
	var b strings.Builder
	usage, finished, ids := "", 0, map[string]bool{}
	for _, e := range out {
		if !json.Valid(e) || bytes.ContainsAny(e, "\r\n") {
			t.Fatalf("an event is %q", e)
		}
		doc := gjson.ParseBytes(e)
		ids[doc.Get("id").Raw] = true
		c := doc.Get("choices.0")
		b.WriteString(c.Get("text").Str + c.Get("delta.content").Str)
		if c.Get("finish_reason").Type == gjson.String {
			ending = c.Get("finish_reason").Str + " " + rawOrNull(c.Get("stop_reason"))
			finished++
		}
		if u := doc.Get("usage.total_tokens"); u.Exists() {
			usage = u.Raw
		}
	}
	if finished != 1 || len(ids) != 1 {
		t.Fatalf("%d events with a finish_reason, %d ids in %q", finished, len(ids), out)
	}
	return b.String(), ending + " " + usage, true
}

// FuzzEngineDocs is what engines may answer to the proxy's other questions.
func FuzzEngineDocs(f *testing.F) {
	f.Add([]byte(`{"tokens":[1,2,3],"count":3,"max_model_len":4096}`))
	f.Add([]byte(`{"object":"list","data":[{"id":"m","max_model_len":2048},{"id":"n"}]}`))
	f.Add([]byte(`{"tokens":[-1,1.5,1e30]}`))
	f.Add([]byte(`{"error":{"message":"x","code":400}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if ids, _, err := ParseTokenized(b); err == nil {
			var list []int64
			if err := json.Unmarshal([]byte(ids.String()), &list); err != nil || int64(len(list)) != ids.N {
				t.Fatalf("%q: %s with %d tokens, %v", b, ids, ids.N, err)
			}
			for _, id := range list {
				if id < 0 {
					t.Fatalf("%q: token %d", b, id)
				}
			}
		}
		if lens, err := ParseModels(b); err == nil && len(lens) > MaxFields {
			t.Fatalf("%d models", len(lens))
		}
		for _, status := range []int{400, 500} {
			if e := EngineError(status, b); !json.Valid(e.Body()) {
				t.Fatalf("%q became the error %q", b, e.Body())
			}
		}
	})
}
