package openai

import (
	"strings"
	"testing"
)

// TestRequest/refuses: JSON that is not a request is a 400 that names the field.
func TestRequest(t *testing.T) {
	t.Run("refuses", func(t *testing.T) {
		for _, c := range []struct {
			kind              Kind
			body, param, text string
		}{
			{Completions, ``, "", "not valid JSON"},
			{Completions, `{"prompt":"x"`, "", "not valid JSON"},
			{Completions, `{"prompt":"x"} {}`, "", "not valid JSON"},
			{Completions, `{"prompt":"x",}`, "", "not valid JSON"},
			{Completions, `{"prompt":NaN}`, "", "not valid JSON"},
			{Completions, "{\"prompt\":\"\xff\"}", "", "not valid UTF-8"},
			{Completions, `null`, "", "not a JSON object but null"},
			{Completions, `"prompt"`, "", "not a JSON object but a string"},
			{Completions, `[{"prompt":"x"}]`, "", "not a JSON object but an array"},
			{Completions, `{"prompt":"x","stream":false,"stream":true}`, "", `"stream" is given twice`},
			{Completions, `{"prompt":"x","y":` + strings.Repeat("[", MaxDepth) + strings.Repeat("]", MaxDepth) + `}`, "", "nested 129 deep; at most 128"},
			{Completions, strings.Repeat("[", 1<<20), "", "nested 1048576 deep"},
			{Completions, `{"prompt":"x"` + manyFields(MaxFields) + `}`, "", "more than 1024 fields"},
			{Completions, `{}`, "prompt", "prompt is missing"},
			{Completions, `{"prompt":null}`, "prompt", "prompt is null"},
			{Completions, `{"prompt":7}`, "prompt", "prompt is a number"},
			{Completions, `{"prompt":{}}`, "prompt", "prompt is an object"},
			{Completions, `{"prompt":[]}`, "prompt", "prompt is empty"},
			{Completions, `{"prompt":[1,"x"]}`, "prompt", `token id 1 is "x"`},
			{Completions, `{"prompt":["x",1]}`, "prompt", "prompt is neither"},
			{Completions, `{"prompt":[null]}`, "prompt", "prompt is neither"},
			{Completions, `{"prompt":[1.5]}`, "prompt", "token id 0 is 1.5"},
			{Completions, `{"prompt":[-1]}`, "prompt", "token id 0 is -1"},
			{Completions, `{"prompt":[1e3]}`, "prompt", "token id 0 is 1e3"},
			{Completions, `{"prompt":[99999999999999999999]}`, "prompt", "token id 0 is 99999999999999999999"},
			{Completions, `{"prompt":"x","model":3}`, "model", "model is a number"},
			{Completions, `{"prompt":"x","stream":"yes"}`, "stream", "stream is a string"},
			{Completions, `{"prompt":"x","stream":1}`, "stream", "stream is a number"},
			{Completions, `{"prompt":"x","max_tokens":0}`, "max_tokens", "max_tokens is 0; it must be an integer of at least 1"},
			{Completions, `{"prompt":"x","max_tokens":-5}`, "max_tokens", "max_tokens is -5"},
			{Completions, `{"prompt":"x","max_tokens":1.5}`, "max_tokens", "max_tokens is 1.5"},
			{Completions, `{"prompt":"x","max_tokens":"9"}`, "max_tokens", `max_tokens is "9"`},
			{Completions, `{"prompt":"x","max_tokens":9223372036854775808}`, "max_tokens", "max_tokens is 9223372036854775808"},
			{Completions, `{"prompt":"x","min_tokens":-1}`, "min_tokens", "min_tokens is -1"},
			{Completions, `{"prompt":"x","stop":7}`, "stop", "stop is a number"},
			{Completions, `{"prompt":"x","stop":["a",7]}`, "stop", "stop holds a number"},
			{Completions, `{"prompt":"x","stream_options":{"include_usage":true}}`, "stream_options", "only for stream: true"},
			{Completions, `{"prompt":"x","stream":true,"stream_options":[]}`, "stream_options", "stream_options is an array"},
			{Completions, `{"prompt":"x","vllm_xargs":{"a":1,"a":2}}`, "vllm_xargs", `"a" is given twice`},
			{Chat, `{"prompt":"x"}`, "messages", "messages is missing"},
			{Chat, `{"messages":"x"}`, "messages", "messages is a string"},
			{Chat, `{"messages":[]}`, "messages", "messages is an array"},
			{Chat, `{"messages":["x"]}`, "messages", "a message is a string"},
			{Chat, `{"messages":[{"role":"user","content":"x"}],"max_completion_tokens":0}`, "max_completion_tokens", "max_completion_tokens is 0"},
		} {
			_, bad := ParseRequest(c.kind, []byte(c.body))
			if bad == nil {
				t.Errorf("%.60s: accepted", c.body)
				continue
			}
			if bad.Status != 400 || bad.Param != c.param || !strings.Contains(bad.Message, c.text) {
				t.Errorf("%.60s: %d, param %q, %q; want 400, param %q, %q", c.body, bad.Status, bad.Param, bad.Message, c.param, c.text)
			}
		}
	})

	t.Run("at the limits", func(t *testing.T) {
		for _, body := range []string{
			`{"prompt":"x","y":` + strings.Repeat("[", MaxDepth-1) + strings.Repeat("]", MaxDepth-1) + `}`,
			`{"prompt":"x"` + manyFields(MaxFields-1) + `}`,
			`{"prompt":"[[[[\"[[[[","max_tokens":9223372036854775807}`,
		} {
			if _, bad := ParseRequest(Completions, []byte(body)); bad != nil {
				t.Errorf("%.60s: %v", body, bad)
			}
		}
	})

	t.Run("whole", func(t *testing.T) {
		const prompt, messages = `{"prompt":"x",`, `{"messages":[{"role":"user","content":"x"}],`
		for _, c := range []struct {
			kind       Kind
			body, want string
		}{
			{Completions, prompt + `"n":1}`, ""},
			{Completions, prompt + `"n":2}`, "n"},
			{Completions, prompt + `"n":null,"best_of":null,"echo":false,"suffix":"","logprobs":null}`, ""},
			{Completions, prompt + `"best_of":3}`, "best_of"},
			{Completions, prompt + `"echo":true}`, "echo"},
			{Completions, prompt + `"suffix":"z"}`, "suffix"},
			{Completions, prompt + `"logprobs":0}`, "logprobs"},
			{Completions, prompt + `"prompt_logprobs":1}`, "prompt_logprobs"},
			{Completions, prompt + `"guided_regex":"a+"}`, "guided_regex"},
			{Completions, prompt + `"presence_penalty":0.5}`, "presence_penalty"},
			{Completions, prompt + `"frequency_penalty":0.0,"repetition_penalty":1.1}`, ""},
			{Completions, `{"prompt":["x","y"]}`, "prompt"},
			{Completions, `{"prompt":["x"]}`, "prompt"},
			{Completions, `{"prompt":[[1,2],[3]]}`, "prompt"},
			{Completions, `{"prompt_embeds":"AAAA"}`, "prompt_embeds"},
			{Chat, messages + `"logprobs":true}`, "logprobs"},
			{Chat, messages + `"logprobs":false,"tools":[],"response_format":{"type":"text"}}`, ""},
			{Chat, messages + `"tools":[{"type":"function"}]}`, "tools"},
			{Chat, messages + `"response_format":{"type":"json_object"}}`, "response_format"},
			{Chat, `{"messages":[{"role":"user","content":[{"type":"text","text":"x"}]}]}`, ""},
			{Chat, `{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}`, "content"},
			{Chat, `{"messages":[{"role":"assistant","content":null}]}`, ""},
		} {
			r, bad := ParseRequest(c.kind, []byte(c.body))
			if bad != nil {
				t.Errorf("%s: %v", c.body, bad)
			} else if r.Whole != c.want {
				t.Errorf("%s: whole because of %q, want %q", c.body, r.Whole, c.want)
			}
		}
	})
}

func manyFields(n int) string {
	var b strings.Builder
	for i := range n {
		b.WriteString(`,"f` + strings.Repeat("i", i+1) + `":0`)
	}
	return b.String()
}

func TestEngineError(t *testing.T) {
	for _, c := range []struct{ body, message, out string }{
		{`{"error":{"message":"no such model","code":404}}`, "no such model", `{"error":{"message":"no such model","code":404}}`},
		{`{"object":"error","message":"old shape"}`, "old shape", `{"error":{"message":"old shape","type":"invalid_request_error","param":null,"code":null}}`},
		{`{"detail":"Not Found"}`, "Not Found", `{"error":{"message":"Not Found","type":"invalid_request_error","param":null,"code":null}}`},
		{`<html>`, "the engine answered with status 404", `{"error":{"message":"the engine answered with status 404","type":"invalid_request_error","param":null,"code":null}}`},
	} {
		e := EngineError(404, []byte(c.body))
		if e.Message != c.message || string(e.Body()) != c.out {
			t.Errorf("%s: %q, %s", c.body, e.Message, e.Body())
		}
	}
}
