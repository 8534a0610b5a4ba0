package engine_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/berthkv/berth/internal/engine"
	"github.com/berthkv/berth/internal/engine/enginetest"
	"github.com/berthkv/berth/internal/engine/kvcache"
	"github.com/berthkv/berth/internal/engine/model"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// tiny is a model that is fast enough for the race detector.
var tiny = model.Config{Layers: 2, Heads: 4, KVHeads: 2, HeadSize: 8, FFN: 48, Context: 200, Seed: 7}

const chunk = 16

// server is an engine behind HTTP.
type server struct {
	*engine.Engine
	t    testing.TB
	http *httptest.Server
	came chan struct{} // one token for each request that has come
	left chan struct{} // and for each that was answered or left
}

func start(t testing.TB, cfg engine.Config) *server {
	t.Helper()
	cfg.Model = tiny
	cfg.ChunkSize = chunk
	e, err := engine.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	s := &server{Engine: e, t: t, came: make(chan struct{}, 1000), left: make(chan struct{}, 1000)}
	h := e.Handler()
	s.http = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.came <- struct{}{}
		context.AfterFunc(r.Context(), func() { s.left <- struct{}{} })
		h.ServeHTTP(w, r)
	}))
	t.Cleanup(func() {
		s.http.CloseClientConnections()
		s.http.Close()
		e.Close()
		e.Close() // harmless
	})
	return s
}

type object = map[string]any

// await receives from a channel, within a time that no passing test needs.
func await[T any](t testing.TB, what string, ch <-chan T) T {
	t.Helper()
	select {
	case v := <-ch:
		return v
	case <-time.After(30 * time.Second):
		t.Fatalf("%s did not happen", what)
		panic("unreachable")
	}
}

// post sends a body and returns status and answer.
func (s *server) post(path string, body any) (int, []byte) {
	s.t.Helper()
	return s.postCtx(context.Background(), path, body)
}

// postCtx is post for a client that may leave: then the status is 0.
func (s *server) postCtx(ctx context.Context, path string, body any) (int, []byte) {
	s.t.Helper()
	b, ok := body.(string)
	if !ok {
		raw, err := json.Marshal(body)
		if err != nil {
			s.t.Error(err)
			return 0, nil
		}
		b = string(raw)
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.http.URL+path, strings.NewReader(b))
	if err != nil {
		s.t.Error(err)
		return 0, nil
	}
	resp, err := s.http.Client().Do(req)
	if err != nil {
		return 0, []byte(err.Error())
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, []byte(err.Error())
	}
	return resp.StatusCode, raw
}

func (s *server) get(path string) (int, string) {
	s.t.Helper()
	resp, err := s.http.Client().Get(s.http.URL + path)
	if err != nil {
		s.t.Fatal(err)
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return resp.StatusCode, string(raw)
}

// completion is what the tests look at in an answer.
type completion struct {
	ID      string
	Object  string
	Model   string
	Choices []struct {
		Text           *string
		Message        *struct{ Role, Content string }
		Delta          *struct{ Role, Content string }
		FinishReason   string `json:"finish_reason"`
		StopReason     string `json:"stop_reason"`
		TokenIDs       []int  `json:"token_ids"`
		PromptTokenIDs []int  `json:"prompt_token_ids"`
	}
	Usage *struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
		Total      int `json:"total_tokens"`
	}
	PromptTokenIDs []int `json:"prompt_token_ids"`
	KV             struct {
		First  int                          `json:"first_tok"`
		Failed *struct{ Code, Text string } `json:"failed"`
	} `json:"kv_transfer_params"`
}

// complete posts a completion that must succeed.
func (s *server) complete(body object) (completion, error) {
	s.t.Helper()
	status, raw := s.post("/v1/completions", body)
	if status != http.StatusOK {
		return completion{}, fmt.Errorf("status %d: %s", status, raw)
	}
	var c completion
	return c, json.Unmarshal(raw, &c)
}

// events reads a stream; done says that it ended with [DONE].
func events(t testing.TB, raw []byte) (list []completion, done bool) {
	t.Helper()
	lines := bufio.NewScanner(bytes.NewReader(raw))
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		switch {
		case lines.Text() == "":
		case !ok:
			t.Errorf("no event: %q", lines.Text())
		case data == "[DONE]":
			done = true
		default:
			var c completion
			if err := json.Unmarshal([]byte(data), &c); err != nil {
				t.Errorf("%q: %v", data, err)
			}
			list = append(list, c)
		}
	}
	return list, done
}

// undivided returns an engine that computes everything itself.
func undivided(t testing.TB) *server { return start(t, engine.Config{}) }

// answer returns the tokens of the answer to a prompt.
func (s *server) answer(prompt []int, maxTokens int) []int {
	s.t.Helper()
	c, err := s.complete(object{"prompt": prompt, "max_tokens": maxTokens, "return_token_ids": true})
	if err != nil {
		s.t.Error(err)
		return nil
	}
	return c.Choices[0].TokenIDs
}

// spec is the disagg_spec of a prefill request to the receivers at these ports.
func spec(req string, host string, ports ...int) object {
	return object{"ret_first_tok": true, "disagg_spec": object{
		"req_id": req, "receiver_host": host, "receiver_init_port": ports, "receiver_alloc_port": ports, "berth_proxy": true,
	}}
}

// divided is a prefill and a decode engine in one fleet.
type divided struct {
	fleet *enginetest.Fleet
	p, d  *server
	ports []int // of the decode side's ranks
	pn    []*enginetest.Node
	dn    []*enginetest.Node
}

const decodeHost = "decode"

// divide starts a prefill and a decode engine of so many ranks. change may
// adapt their configs and the fleet before they start.
func divide(t testing.TB, ranks, staging, receive int, change func(f *enginetest.Fleet, p, d *engine.Config)) *divided {
	t.Helper()
	v := &divided{fleet: enginetest.New(tiny.Layout(kvcache.BFloat16, ranks), chunk)}
	p, d := engine.Config{Role: engine.Prefill}, engine.Config{Role: engine.Decode}
	if change != nil {
		change(v.fleet, &p, &d)
	}
	v.dn = nodes(v.fleet, &d, decodeHost, ranks, 0, receive)
	v.pn = nodes(v.fleet, &p, "prefill", ranks, staging, 0)
	for i := range ranks {
		v.ports = append(v.ports, 8400+i)
	}
	t.Cleanup(func() { v.fleet.Check(t) })
	v.p, v.d = start(t, p), start(t, d)
	v.p.connected()
	v.d.connected()
	return v
}

// connected waits until the engine has its agents.
func (s *server) connected() {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if err := s.Connected(ctx); err != nil {
		s.t.Fatal(err)
	}
}

// nodes gives an engine one agent for each rank.
func nodes(f *enginetest.Fleet, c *engine.Config, host string, ranks, staging, receive int) (list []*enginetest.Node) {
	for i := range ranks {
		n := f.Node(host, 8400+i, staging, receive)
		list = append(list, n)
		c.Agents = append(c.Agents, n.Dial)
	}
	return list
}

// prefill is the first leg: it returns the first token.
func (v *divided) prefill(req string, prompt []int) (first int, err error) {
	c, err := v.p.complete(object{"prompt": prompt, "max_tokens": 1, "kv_transfer_params": spec(req, decodeHost, v.ports...)})
	if err != nil {
		return 0, err
	}
	return c.KV.First, nil
}

// decode is the second leg: it returns the rest.
func (v *divided) decode(req string, prompt []int, first, maxTokens int) ([]int, error) {
	c, err := v.d.complete(object{"prompt": append(slices.Clone(prompt), first), "max_tokens": maxTokens - 1, "return_token_ids": true,
		"kv_transfer_params": object{"disagg_spec": object{"req_id": req}}})
	if err != nil {
		return nil, err
	}
	return c.Choices[0].TokenIDs, nil
}

// answer is both legs, as a proxy does them.
func (v *divided) answer(req string, prompt []int, maxTokens int) ([]int, error) {
	first, err := v.prefill(req, prompt)
	if err != nil {
		return nil, err
	}
	if first == model.EOS || maxTokens == 1 {
		// The decoder is not needed: the proxy gives the room back.
		for _, n := range v.dn {
			n.Free(req)
		}
		return []int{first}, nil
	}
	rest, err := v.decode(req, prompt, first, maxTokens)
	return append([]int{first}, rest...), err
}

func randomPrompt(rng *rand.Rand, n int) []int {
	p := make([]int, n)
	for i := range p {
		p[i] = rng.Intn(256)
	}
	return p
}
