package proxy

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/tidwall/gjson"
)

// spoken is what a client reads out of an answer, streamed or not.
type spoken struct {
	Status                int
	Type                  string
	Text, Finish, Stop    string
	IDs, PromptIDs, Usage string
	Roles                 string
	ID                    string
	Ended                 bool // [DONE], or a document
}

func read(status int, contentType, id, answer string) spoken {
	s := spoken{Status: status, Type: contentType, Ended: true}
	docs := []string{answer}
	if strings.HasPrefix(contentType, "text/event-stream") {
		docs = nil
		for e := range strings.SplitSeq(strings.TrimSuffix(answer, "\n\n"), "\n\n") {
			docs = append(docs, strings.TrimPrefix(e, "data: "))
		}
		if s.Ended = docs[len(docs)-1] == "[DONE]"; s.Ended {
			docs = docs[:len(docs)-1]
		}
	}
	var ids []string
	for _, d := range docs {
		v := gjson.Parse(d)
		if !gjson.Valid(d) || !strings.Contains(v.Get("id").Str, id) || v.Get("kv_transfer_params.disagg_spec").Exists() {
			s.ID = "bad document " + d
		}
		c := v.Get("choices.0")
		for _, path := range []string{"text", "message.content", "delta.content"} {
			s.Text += c.Get(path).Str
		}
		s.Roles += c.Get("delta.role").Str + c.Get("message.role").Str
		if f := c.Get("finish_reason"); f.Type == gjson.String {
			s.Finish += f.Str
			s.Stop = c.Get("stop_reason").Raw
		}
		for _, t := range c.Get("token_ids").Array() {
			ids = append(ids, t.Raw)
		}
		s.PromptIDs += c.Get("prompt_token_ids").Raw
		if u := v.Get("usage"); u.IsObject() {
			s.Usage = fmt.Sprint(u.Get("prompt_tokens"), u.Get("completion_tokens"), u.Get("total_tokens"))
		}
	}
	s.IDs = strings.Join(ids, ",")
	return s
}

// TestAnswersEqual: 400 random requests, answered through two legs, equal what
// the undivided engine says: text, token ids, ends, usage.
func TestAnswersEqual(t *testing.T) {
	f := newFleet(t, 2, 2, true, nil)
	single := newEngine(t)
	for _, e := range append(f.prefills, append(f.decodes, single)...) {
		e.eos, e.accents = 60, true
	}
	rng := rand.New(rand.NewPCG(3, 4))
	direct := *f
	direct.srv = single.srv
	twoLegs := 0
	for n := range 400 {
		body := map[string]any{"model": "m"}
		path := "/v1/completions"
		prompt := strings.Repeat("x", 1+rng.IntN(70)) + fmt.Sprint(n)
		switch rng.IntN(3) {
		case 0:
			path = "/v1/chat/completions"
			body["messages"] = []any{map[string]any{"role": "user", "content": prompt}}
		case 1:
			body["prompt"] = prompt
		default:
			body["prompt"] = byteIDs(prompt)
		}
		some := func(k string, v any) {
			if rng.IntN(2) == 0 {
				body[k] = v
			}
		}
		some("max_tokens", 1+rng.IntN(12))
		if path == "/v1/chat/completions" {
			some("max_completion_tokens", 1+rng.IntN(12))
		}
		some("stream", true)
		if body["stream"] == true {
			some("stream_options", map[string]any{"include_usage": true, "continuous_usage_stats": rng.IntN(2) == 0})
		}
		some("return_token_ids", true)
		some("stop", []string{word(rng), word(rng)})
		some("include_stop_str_in_output", true)
		if rng.IntN(4) == 0 {
			body["min_tokens"] = rng.IntN(4)
			if m, ok := body["max_tokens"].(int); ok {
				body["min_tokens"] = min(m, body["min_tokens"].(int))
			}
		}
		if rng.IntN(10) == 0 {
			body["presence_penalty"] = 0.5 // goes whole
		} else {
			twoLegs++
		}
		raw, err := json.Marshal(body)
		if err != nil {
			t.Fatal(err)
		}
		id := fmt.Sprintf("r-%d", n)
		status, h, answer := f.post(path, string(raw), requestIDHeader, id)
		got := read(status, h.Get("Content-Type"), id, answer)
		status, h, answer2 := direct.post(path, string(raw), requestIDHeader, id)
		want := read(status, h.Get("Content-Type"), id, answer2)
		if path == "/v1/chat/completions" {
			got.PromptIDs, want.PromptIDs = "", "" // the fake's place for them differs
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("%s\n%s\n%s", raw, diff, answer)
		}
	}
	s := f.settled()
	if s.Requests[Answered] != 400 || len(s.Failures) != 0 || len(s.Recomputed) != 0 {
		t.Errorf("%+v", s)
	}
	for _, how := range f.watcher.endings() {
		if how != "closed" && how != "cancelled cancelled" {
			t.Errorf("a transfer was %s", how)
		}
	}
	for _, e := range f.decodes {
		if len(e.asked("/v1/completions")) < twoLegs/6 {
			t.Errorf("a decode engine got only %d of %d", len(e.asked("/v1/completions")), twoLegs)
		}
	}
}

func word(rng *rand.Rand) string {
	b := make([]byte, 1+rng.IntN(3))
	for i := range b {
		b[i] = "abcd"[rng.IntN(4)]
	}
	return string(b)
}

func byteIDs(s string) []int {
	out := make([]int, len(s))
	for i := range s {
		out[i] = int(s[i])
	}
	return out
}
