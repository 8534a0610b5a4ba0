package engine_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berthkv/berth/internal/engine"
	"github.com/berthkv/berth/internal/engine/enginetest"
	"github.com/berthkv/berth/internal/engine/model"
)

// Each fault of a request is answered with its status and an OpenAI error
// object that names the field and, where there are two, both numbers.
func TestBadRequests(t *testing.T) {
	f := enginetest.New(tiny.Layout("bfloat16", 2), chunk)
	p, d := engine.Config{Role: engine.Prefill, MaxBody: 4000}, engine.Config{Role: engine.Decode}
	nodes(f, &p, "prefill", 2, 4, 0)
	nodes(f, &d, decodeHost, 2, 0, 4)
	servers := map[string]*server{"u": start(t, engine.Config{MaxBody: 4000}), "p": start(t, p), "d": start(t, d)}
	long := strings.Repeat("x", tiny.Context)
	const completions, chat, tokenize = "/v1/completions", "/v1/chat/completions", "/tokenize"
	for _, c := range []struct {
		server, path, body string
		status             int
		param, text        string // text is part of the message
	}{
		{"u", completions, ``, 400, "", "not valid JSON"},
		{"u", completions, `{`, 400, "", "not valid JSON"},
		{"u", completions, `{"prompt":"x"} {}`, 400, "", "not valid JSON"},
		{"u", completions, `[]`, 400, "", "not a JSON object"},
		{"u", completions, `null`, 400, "", "not a JSON object"},
		{"u", completions, `"x"`, 400, "", "not a JSON object"},
		{"u", completions, strings.Repeat("[", 3000), 400, "", "not valid JSON"},
		{"u", completions, `{"prompt":"` + strings.Repeat("x", 4000) + `"}`, 413, "", "longer than 4000 bytes"},
		{"u", completions, `{}`, 400, "prompt", "missing"},
		{"u", completions, `{"prompt":null}`, 400, "prompt", "missing"},
		{"u", completions, `{"prompt":[]}`, 400, "prompt", "empty"},
		{"u", completions, `{"prompt":[[]]}`, 400, "prompt", "empty"},
		{"u", completions, `{"prompt":7}`, 400, "prompt", "must be a string, a list"},
		{"u", completions, `{"prompt":[1.5]}`, 400, "prompt", "must be a string, a list"},
		{"u", completions, `{"prompt":[[["x"]]]}`, 400, "prompt", "must be a string, a list"},
		{"u", completions, `{"prompt":{"a":1}}`, 400, "prompt", "must be a string, a list"},
		{"u", completions, `{"prompt":["a","b"]}`, 400, "prompt", "2 prompts"},
		{"u", completions, `{"prompt":[1,-1]}`, 400, "prompt", "token 1 is -1; the vocabulary has 262"},
		{"u", completions, `{"prompt":[262]}`, 400, "prompt", "token 0 is 262; the vocabulary has 262"},
		{"u", completions, `{"prompt":[99999999999999999999]}`, 400, "prompt", "must be a string, a list"},
		{"u", completions, `{"prompt":"` + long + `"}`, 400, "prompt", "has 201 tokens; the model's context is 200"},
		{"u", completions, `{"prompt":"` + long[:tiny.Context-1] + `"}`, 400, "prompt", "has 200 tokens; the model's context is 200"},
		{"u", completions, `{"prompt":"x","max_tokens":199}`, 400, "max_tokens", "is 199, with a prompt of 2 tokens more than the model's context of 200"},
		{"u", completions, `{"prompt":"x","max_tokens":0}`, 400, "max_tokens", "is 0, must be at least 1"},
		{"u", completions, `{"prompt":"x","max_tokens":-5}`, 400, "max_tokens", "is -5"},
		{"u", completions, `{"prompt":"x","max_tokens":1.5}`, 400, "max_tokens", "must be an integer, not number 1.5"},
		{"u", completions, `{"prompt":"x","max_tokens":1e300}`, 400, "max_tokens", "must be an integer"},
		{"u", completions, `{"prompt":"x","max_tokens":"7"}`, 400, "max_tokens", "must be an integer, not string"},
		{"u", completions, `{"prompt":"x","stream":"yes"}`, 400, "stream", "must be true or false, not string"},
		{"u", completions, `{"prompt":"x","stream_options":[]}`, 400, "stream_options", "must be an object, not array"},
		{"u", completions, `{"prompt":"x","stream_options":{"include_usage":3}}`, 400, "stream_options.include_usage", "must be true or false"},
		{"u", completions, `{"prompt":"x","temperature":"hot"}`, 400, "temperature", "must be a number"},
		{"u", completions, `{"prompt":"x","seed":1.2}`, 400, "seed", "must be an integer"},
		{"u", completions, `{"prompt":"x","stop":7}`, 400, "stop", "must be a string or a list of strings"},
		{"u", completions, `{"prompt":"x","stop":[1]}`, 400, "stop", "must be a string or a list of strings"},
		{"u", completions, `{"prompt":"x","stop":""}`, 400, "stop", "a string of 0 bytes; 1 to 1024"},
		{"u", completions, `{"prompt":"x","stop":"` + strings.Repeat("x", 1025) + `"}`, 400, "stop", "a string of 1025 bytes; 1 to 1024"},
		{"u", completions, `{"prompt":"x","stop":[` + strings.Repeat(`"x",`, 64) + `"x"]}`, 400, "stop", "has 65 strings, at most 64"},
		{"u", completions, `{"prompt":"x","n":2}`, 400, "n", "not supported"},
		{"u", completions, `{"prompt":"x","best_of":2}`, 400, "best_of", "not supported"},
		{"u", completions, `{"prompt":"x","echo":true}`, 400, "echo", "not supported"},
		{"u", completions, `{"prompt":"x","suffix":"y"}`, 400, "suffix", "not supported"},
		{"u", completions, `{"prompt":"x","logprobs":1}`, 400, "logprobs", "not supported"},
		{"u", completions, `{"prompt":"x","model":"gpt"}`, 404, "model", "`gpt` does not exist"},
		{"u", completions, `{"prompt":"x","model":7}`, 400, "model", "must be a string"},
		{"u", chat, `{}`, 400, "messages", "empty"},
		{"u", chat, `{"messages":{}}`, 400, "messages", "must be a list"},
		{"u", chat, `{"messages":[{"role":"tool","content":"x"}]}`, 400, "messages", `unknown role "tool"`},
		{"u", chat, `{"messages":[{"role":"user","content":7}]}`, 400, "messages", "content must be"},
		{"u", chat, `{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}`, 400, "messages", `type "image_url"`},
		{"u", chat, `{"messages":[{"role":"user","content":"` + long + `"}]}`, 400, "messages", "has 204 tokens; the model's context is 200"},
		{"u", chat, `{"messages":[{"role":"user","content":"x"}],"max_completion_tokens":999}`, 400, "max_completion_tokens", "is 999"},
		{"u", chat, `{"messages":[{"role":"user","content":"x"}],"logprobs":true}`, 400, "logprobs", "not supported"},
		{"u", chat, `{"messages":[{"role":"user","content":"x"}],"tools":[{}]}`, 400, "tools", "not supported"},
		{"u", chat, `{"messages":[{"role":"user","content":"x"}],"response_format":{"type":"json_object"}}`, 400, "response_format", "not supported"},
		{"u", tokenize, `{}`, 400, "prompt", "missing"},
		{"u", tokenize, `{"prompt":"` + long + `"}`, 400, "prompt", "has 201 tokens"},
		{"u", "/v1/embeddings", `{}`, 404, "", "no POST /v1/embeddings"},

		{"u", completions, `{"prompt":"x","kv_transfer_params":7}`, 400, "kv_transfer_params", "must be an object"},
		{"u", completions, `{"prompt":"x","kv_transfer_params":{"disagg_spec":{"req_id":7}}}`, 400, "kv_transfer_params.disagg_spec.req_id", "must be a string"},
		{"u", completions, `{"prompt":"x","kv_transfer_params":{"disagg_spec":{"req_id":"r"}}}`, 400, "kv_transfer_params.disagg_spec", `role "undivided" does not send`},
		{"d", completions, `{"prompt":"x","kv_transfer_params":{"disagg_spec":{"req_id":""}}}`, 400, "kv_transfer_params.disagg_spec.req_id", "has 0 bytes; 1 to 512"},
		{"d", completions, `{"prompt":"x","kv_transfer_params":{"disagg_spec":{"req_id":"` + strings.Repeat("r", 513) + `"}}}`, 400, "kv_transfer_params.disagg_spec.req_id", "has 513 bytes; 1 to 512"},
		{"d", completions, `{"prompt":"x","kv_transfer_params":{"disagg_spec":{"req_id":"r","receiver_host":"h"}}}`, 400, "kv_transfer_params.disagg_spec", `role "decode" does not send`},
		{"p", completions, `{"prompt":"x","kv_transfer_params":{"disagg_spec":{"req_id":"r"}}}`, 400, "kv_transfer_params.disagg_spec.receiver_host", "is missing"},
		{"p", completions, `{"prompt":"x","kv_transfer_params":{"disagg_spec":{"req_id":"r","receiver_host":"h","receiver_alloc_port":[1]}}}`, 400, "kv_transfer_params.disagg_spec.receiver_alloc_port", "has 1 ports, the engine has 2 ranks"},
		{"p", completions, `{"prompt":"x","kv_transfer_params":{"disagg_spec":{"req_id":"r","receiver_host":"h","receiver_alloc_port":[1,2],"receiver_init_port":[1]}}}`, 400, "kv_transfer_params.disagg_spec.receiver_init_port", "has 1 ports, the engine has 2 ranks"},
		{"p", completions, `{"prompt":"x","kv_transfer_params":{"disagg_spec":{"req_id":"r","receiver_host":"h","receiver_alloc_port":[1,65536]}}}`, 400, "kv_transfer_params.disagg_spec.receiver_alloc_port", "65536 is no port"},
		{"p", completions, `{"prompt":"x","kv_transfer_params":{"disagg_spec":{"req_id":"r","receiver_host":"h","receiver_alloc_port":8}}}`, 400, "kv_transfer_params.disagg_spec.receiver_alloc_port", "must be a list"},
	} {
		status, raw := servers[c.server].post(c.path, c.body)
		var got struct {
			Error struct {
				Message, Type string
				Param         *string
				Code          int
			}
		}
		if err := json.Unmarshal(raw, &got); err != nil {
			t.Errorf("%.80s: %q: %v", c.body, raw, err)
			continue
		}
		param := ""
		if got.Error.Param != nil {
			param = *got.Error.Param
		}
		if status != c.status || got.Error.Code != c.status || param != c.param || !strings.Contains(got.Error.Message, c.text) || got.Error.Type == "" {
			t.Errorf("%s %.80s:\n got %d %s\nwant %d param %q, %q", c.path, c.body, status, raw, c.status, c.param, c.text)
		}
	}
	for _, s := range servers {
		if n := s.Stats().Requests; n != 0 {
			t.Errorf("%d bad requests were accepted", n)
		}
	}
	if status, _ := servers["u"].get("/v1/completions"); status != http.StatusNotFound {
		t.Errorf("GET of completions: %d", status)
	}
}

// What is at a limit is accepted.
func TestAtTheLimits(t *testing.T) {
	s := start(t, engine.Config{MaxBody: 4000})
	fits := fmt.Sprintf(`{"prompt":"x","max_tokens":1,"pad":"%s"}`, strings.Repeat("x", 4000-40))
	fits = strings.Replace(fits, "xx", strings.Repeat("x", 4000-len(fits)+2), 1)
	if len(fits) != 4000 {
		t.Fatal(len(fits))
	}
	for _, body := range []any{
		fits,
		`{"prompt":"x","max_tokens":198}`,
		object{"prompt": strings.Repeat("x", tiny.Context-2), "max_tokens": 1},
		object{"prompt": []int{model.VocabSize - 1}},
		object{"prompt": ""},
		object{"prompt": [][]int{{1, 2}}},
		object{"prompt": []string{"x"}, "n": 1, "best_of": 1, "echo": false, "logprobs": nil, "suffix": nil, "temperature": 0.7, "seed": 3, "top_p": 0.9},
		object{"prompt": "x", "stop": strings.Repeat("x", 1024)},
		object{"prompt": "x", "stop": slices.Repeat([]string{"qq"}, 64)},
		object{"prompt": "x", "stop": nil, "stream_options": nil, "kv_transfer_params": nil, "max_tokens": nil},
		object{"prompt": "x", "kv_transfer_params": object{"disagg_spec": nil}, "response_format": object{"type": "text"}, "unknown": object{}},
	} {
		if status, raw := s.post("/v1/completions", body); status != http.StatusOK {
			t.Errorf("%.60v: %d %s", body, status, raw)
		}
	}
}

func TestCompletionShape(t *testing.T) {
	s := undivided(t)
	c, err := s.complete(object{"prompt": "Hello", "model": "berth-demo", "return_token_ids": true, "ignore_eos": true})
	if err != nil {
		t.Fatal(err)
	}
	ch := c.Choices[0]
	if c.Object != "text_completion" || c.Model != "berth-demo" || !strings.HasPrefix(c.ID, "cmpl-") || len(c.Choices) != 1 {
		t.Errorf("%+v", c)
	}
	if !slices.Equal(ch.PromptTokenIDs, model.Encode("Hello")) || len(ch.TokenIDs) != 16 || *ch.Text != model.Decode(ch.TokenIDs) || ch.FinishReason != "length" {
		t.Errorf("%+v: 16 tokens are the default", ch)
	}
	if u := *c.Usage; u.Prompt != 6 || u.Completion != 16 || u.Total != 22 {
		t.Errorf("%+v", u)
	}
	_, raw := s.post("/v1/completions", object{"prompt": "Hello"})
	if strings.Contains(string(raw), "token_ids") || strings.Contains(string(raw), "kv_transfer_params") {
		t.Errorf("not asked for: %s", raw)
	}
}

func TestChat(t *testing.T) {
	s := undivided(t)
	messages := []object{{"role": "system", "content": "Be brief."}, {"role": "user", "content": []object{{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}}}}
	_, raw := s.post("/tokenize", object{"messages": messages})
	var tok struct {
		Count  int
		Max    int `json:"max_model_len"`
		Tokens []int
	}
	if err := json.Unmarshal(raw, &tok); err != nil {
		t.Fatal(err)
	}
	want, _, _ := model.EncodeChat([]model.Message{{Role: "system", Text: "Be brief."}, {Role: "user", Text: "Hello"}})
	if !slices.Equal(tok.Tokens, want) || tok.Count != len(want) || tok.Max != tiny.Context {
		t.Errorf("tokenize: %s", raw)
	}
	status, raw := s.post("/v1/chat/completions", object{"messages": messages, "max_completion_tokens": 20, "return_token_ids": true,
		"kv_transfer_params": object{"ret_first_tok": true}})
	var c completion
	if err := json.Unmarshal(raw, &c); err != nil || status != http.StatusOK {
		t.Fatalf("%d %s", status, raw)
	}
	ch := c.Choices[0]
	if c.Object != "chat.completion" || ch.Message.Role != "assistant" || ch.Message.Content != model.Decode(ch.TokenIDs) || !slices.Equal(c.PromptTokenIDs, want) {
		t.Errorf("%s", raw)
	}
	if c.KV.First != ch.TokenIDs[0] {
		t.Errorf("first_tok is %d, the answer %v", c.KV.First, ch.TokenIDs)
	}
	// The same tokens as a completion give the same answer, as the proxy needs.
	if got := s.answer(want, 20); !slices.Equal(got, ch.TokenIDs) {
		t.Errorf("completion %v, chat %v", got, ch.TokenIDs)
	}
	// Without a limit, a chat answer may fill the context.
	_, raw = s.post("/v1/chat/completions", object{"messages": messages, "ignore_eos": true, "return_token_ids": true})
	if err := json.Unmarshal(raw, &c); err != nil || len(want)+len(c.Choices[0].TokenIDs) != tiny.Context {
		t.Errorf("%d + %d tokens: %v", len(want), len(c.Choices[0].TokenIDs), err)
	}
}

// Streams and whole answers say the same.
func TestStreamEqualsWhole(t *testing.T) {
	s := undivided(t)
	for _, path := range []string{"/v1/completions", "/v1/chat/completions"} {
		for _, extra := range []object{{}, {"stop": []string{"&", "zz"}}, {"ignore_eos": true}} {
			body := object{"prompt": "Tell me more", "messages": []object{{"role": "user", "content": "Tell me more"}}, "max_tokens": 60, "return_token_ids": true}
			for k, v := range extra {
				body[k] = v
			}
			_, raw := s.post(path, body)
			var whole completion
			if err := json.Unmarshal(raw, &whole); err != nil {
				t.Fatal(err)
			}
			body["stream"], body["stream_options"] = true, object{"include_usage": true}
			_, raw = s.post(path, body)
			list, done := events(t, raw)
			if !done || len(list) < 2 {
				t.Fatalf("%d events, done %v", len(list), done)
			}
			text, finish, stop := "", "", ""
			var tokens, prompt []int
			for i, ev := range list[:len(list)-1] {
				ch := ev.Choices[0]
				if ch.Delta != nil {
					text += ch.Delta.Content
					if (ch.Delta.Role == "assistant") != (i == 0) {
						t.Errorf("event %d has role %q", i, ch.Delta.Role)
					}
				} else {
					text += *ch.Text
				}
				tokens = append(tokens, ch.TokenIDs...)
				prompt = append(prompt, append(ch.PromptTokenIDs, ev.PromptTokenIDs...)...)
				finish += ch.FinishReason
				stop += ch.StopReason
			}
			if last := list[len(list)-1]; len(last.Choices) != 0 || last.Usage == nil {
				t.Errorf("last event %+v", last)
			}
			ch := whole.Choices[0]
			want := ""
			if ch.Message != nil {
				want = ch.Message.Content
			} else {
				want = *ch.Text
			}
			if text != want || !slices.Equal(tokens, ch.TokenIDs) || finish != ch.FinishReason || stop != ch.StopReason ||
				!slices.Equal(prompt, append(ch.PromptTokenIDs, whole.PromptTokenIDs...)) {
				t.Errorf("%s %v: stream %q %v %s, whole %q %v %s", path, extra, text, tokens, finish, want, ch.TokenIDs, ch.FinishReason)
			}
		}
	}
}

// EOS ends an answer, unless it is to be ignored; it has no text.
func TestEOS(t *testing.T) {
	s := undivided(t)
	rng := rand.New(rand.NewSource(1))
	for range 100 {
		prompt := randomPrompt(rng, 10)
		c, err := s.complete(object{"prompt": prompt, "max_tokens": 100, "return_token_ids": true})
		if err != nil {
			t.Fatal(err)
		}
		ch := c.Choices[0]
		if ch.FinishReason != "stop" {
			continue
		}
		n := len(ch.TokenIDs)
		if ch.TokenIDs[n-1] != model.EOS || *ch.Text != model.Decode(ch.TokenIDs) || ch.StopReason != "" {
			t.Errorf("%+v", ch)
		}
		c, err = s.complete(object{"prompt": prompt, "max_tokens": 100, "return_token_ids": true, "ignore_eos": true})
		if err != nil || len(c.Choices[0].TokenIDs) != 100 || !slices.Equal(c.Choices[0].TokenIDs[:n], ch.TokenIDs) {
			t.Errorf("ignored: %+v (%v)", c, err)
		}
		return
	}
	t.Error("no answer ended with EOS")
}

// Many clients at once get what each would get alone.
func TestBatchingChangesNothing(t *testing.T) {
	alone, crowd := undivided(t), start(t, engine.Config{Threads: 2, TokenBudget: 24, Seats: 5})
	rng := rand.New(rand.NewSource(2))
	var wg sync.WaitGroup
	for range 30 {
		prompt := randomPrompt(rng, 1+rng.Intn(60))
		want := alone.answer(prompt, 12)
		wg.Go(func() {
			if got := crowd.answer(prompt, 12); !slices.Equal(got, want) {
				t.Errorf("%v, want %v", got, want)
			}
		})
	}
	wg.Wait()
}

func TestSmallEndpoints(t *testing.T) {
	v := divide(t, 2, 4, 10, nil)
	for path, want := range map[string]string{
		"/health":    `"status":"ok","role":"prefill"`,
		"/ready":     `"status":"ok"`,
		"/v1/models": `"id":"berth-demo"`,
		"/metrics":   "berth_engine_agent_connected{rank=\"1\"} 1\n",
	} {
		if status, body := v.p.get(path); status != http.StatusOK || !strings.Contains(body, want) {
			t.Errorf("%s: %d %s", path, status, body)
		}
	}
	if _, err := v.answer("r", []int{1, 2, 3}, 5); err != nil {
		t.Fatal(err)
	}
	_, body := v.d.get("/metrics")
	for _, want := range []string{"berth_engine_prompt_tokens_loaded_total 3\n", "berth_engine_prompt_tokens_computed_total 1\n", "# TYPE berth_engine_requests_total counter\n"} {
		if !strings.Contains(body, want) {
			t.Errorf("no %q in %s", want, body)
		}
	}
}

// More requests than the engine has places and queue are refused at once, with
// a hint when to come back; after that it serves as before.
func TestQueueIsBounded(t *testing.T) {
	t.Run("queue", func(t *testing.T) {
		v := divide(t, 1, 4, 8, func(_ *enginetest.Fleet, p, _ *engine.Config) { p.Begun, p.Queue = 1, 1 })
		prompt := randomPrompt(rand.New(rand.NewSource(3)), 8*chunk)
		if _, err := v.prefill("first", prompt); err != nil {
			t.Fatal(err)
		}
		v.fleet.Until(t, "ready first", 1)
		type result struct {
			req string
			err error
		}
		results := make(chan result, 3)
		ask := func(req string) {
			_, err := v.prefill(req, prompt)
			results <- result{req, err}
		}
		go ask("begun")
		v.fleet.Until(t, "begin begun", 1)
		go ask("queued")
		go ask("queued too") // one of the two is one too many
		if r := await(t, "the refusal", results); r.err == nil || !strings.Contains(r.err.Error(), "503") || !strings.Contains(r.err.Error(), "full (1)") {
			t.Errorf("%v", r)
		}
		v.dn[0].Free("first")
		for range 2 {
			r := await(t, "an answer", results)
			if r.err != nil {
				t.Error(r.err)
			}
			v.dn[0].Free(r.req) // as the proxy does
		}
	})
	t.Run("in flight", func(t *testing.T) {
		waiting, goOn := make(chan struct{}, 3), make(chan struct{})
		v := divide(t, 1, 4, 8, func(f *enginetest.Fleet, _, d *engine.Config) {
			f.Fault = func(op, _ string) error {
				if op == "wait" {
					waiting <- struct{}{}
					<-goOn
				}
				return nil
			}
			d.Queue, d.Seats, d.Sending = 1, 1, 1
		})
		body := object{"prompt": "x", "max_tokens": 1, "kv_transfer_params": object{"disagg_spec": object{"req_id": "r"}}}
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() { v.d.post("/v1/completions", body) })
			await(t, "the request", waiting)
		}
		status, raw := v.d.post("/v1/completions", body)
		if status != http.StatusServiceUnavailable || !strings.Contains(string(raw), "3 requests are in flight") {
			t.Errorf("%d %s", status, raw)
		}
		if _, err := v.prefill("r", []int{1}); err != nil { // what they wait for
			t.Error(err)
		}
		close(goOn)
		wg.Wait()
		v.dn[0].Free("r")
	})
}

// pipes is a listener whose connections have no buffers at all.
type pipes struct {
	accept chan net.Conn
	once   sync.Once
}

func (p *pipes) Accept() (net.Conn, error) {
	if c, ok := <-p.accept; ok {
		return c, nil
	}
	return nil, net.ErrClosed
}

func (p *pipes) Close() error {
	p.once.Do(func() { close(p.accept) })
	return nil
}

func (p *pipes) Addr() net.Addr { return &net.UnixAddr{Name: "pipe"} }

// A client that reads nothing is cut off when its time is up.
func TestClientThatReadsNothing(t *testing.T) {
	e, err := engine.New(engine.Config{Model: tiny, WriteTimeout: 10 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	l := &pipes{accept: make(chan net.Conn, 1)}
	ended := make(chan struct{})
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer close(ended)
		e.Handler().ServeHTTP(w, r)
	})}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = srv.Serve(l)
	}()
	client, conn := net.Pipe()
	l.accept <- conn
	body := `{"prompt":"x","stream":true,"max_tokens":190,"ignore_eos":true}`
	if _, err := fmt.Fprintf(client, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(body), body); err != nil {
		t.Fatal(err)
	}
	await(t, "the end of the request", ended)
	if err := srv.Shutdown(context.Background()); err != nil {
		t.Error(err)
	}
	<-served
	if _, err := io.Copy(io.Discard, client); err != nil {
		t.Error(err)
	}
}

// A request that takes too long ends with a clear error.
func TestRequestTimeout(t *testing.T) {
	v := divide(t, 1, 4, 2, func(_ *enginetest.Fleet, p, _ *engine.Config) { p.RequestTimeout = 20 * time.Millisecond })
	defer v.dn[0].Occupy(2)()
	if _, err := v.prefill("r", []int{1}); err == nil || !strings.Contains(err.Error(), "504") || !strings.Contains(err.Error(), "longer than 20ms") {
		t.Errorf("%v", err)
	}
}

func TestConfigFaults(t *testing.T) {
	dial := func(context.Context) (engine.Agent, error) { return nil, io.EOF }
	for want, c := range map[string]engine.Config{
		`role "cook"`:                        {Role: "cook"},
		"takes no agents, 1 are given":       {Agents: []engine.Dialer{dial}},
		"needs 1 to 64 agents, 0 are given":  {Role: engine.Decode},
		"needs 1 to 64 agents, 65 are given": {Role: engine.Both, Agents: slices.Repeat([]engine.Dialer{dial}, 65)},
		"3 ranks do not divide 32 KV values": {Role: engine.Prefill, Agents: slices.Repeat([]engine.Dialer{dial}, 3)},
		"chunk size is -1":                   {ChunkSize: -1},
		"threads is -1":                      {Threads: -1},
		"budget is -1":                       {TokenBudget: -1},
		"queue is -1":                        {Queue: -1},
		`dtype "half"`:                       {DType: "half"},
		"max body is -1":                     {MaxBody: -1},
		"request timeout is -1ns":            {RequestTimeout: -1},
		"context is 0":                       {Model: model.Config{Layers: 1, Heads: 1, KVHeads: 1, HeadSize: 2, FFN: 1}},
		"chunk size is -3\nthreads is -4":    {ChunkSize: -3, Threads: -4, TokenBudget: 5},
	} {
		e, err := engine.New(c)
		if err == nil {
			e.Close()
		}
		head, _, _ := strings.Cut(want, "\n")
		if err == nil || !strings.Contains(err.Error(), head) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// What an engine tells its agents at first.
func TestHello(t *testing.T) {
	h, err := engine.Config{Role: engine.Prefill, ChunkSize: 16}.Hello(1, 2)
	if err != nil {
		t.Fatal(err)
	}
	if f := h.Facts; f.SlotBytes != 2*4*16*16*2 || f.TPSize != 2 || f.TPRank != 1 || f.ChunkTokens != 16 || f.Format != 1 || f.DType != "bfloat16" {
		t.Errorf("%+v", f)
	}
	if !slices.Equal(h.Shape, []int64{2, 4, 16, 16}) || !strings.HasPrefix(h.TokenKey, "berth-demo@2@1@") || !strings.HasSuffix(h.TokenKey, "@bfloat16") {
		t.Errorf("%+v", h)
	}
	if _, err := (engine.Config{Role: engine.Prefill}).Hello(0, 3); err == nil {
		t.Error("3 ranks were accepted")
	}
}

// An agent that cannot hold the engine's chunks, or has no staging pool where
// one is needed, is refused, and /ready says why.
func TestUnfitAgent(t *testing.T) {
	f := enginetest.New(tiny.Layout("bfloat16", 1), chunk/2)
	small := f.Node("small", 1, 4, 4)
	g := enginetest.New(tiny.Layout("bfloat16", 1), chunk)
	unstaged := g.Node("unstaged", 1, 0, 4)
	for want, n := range map[string]*enginetest.Node{
		"a chunk has 2048 bytes, a slot of the agent 1024": small,
		"no staging pool (max_stage 0)":                    unstaged,
	} {
		s := start(t, engine.Config{Role: engine.Prefill, Agents: []engine.Dialer{n.Dial}})
		n.UntilClosed(t)
		if status, body := s.get("/ready"); status != http.StatusServiceUnavailable || !strings.Contains(body, want) {
			t.Errorf("/ready: %d %s, want %q", status, body, want)
		}
	}
}
