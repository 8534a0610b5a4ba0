package engine

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/http"
	"testing"

	"github.com/berthkv/berth/internal/engine/model"
	"github.com/berthkv/berth/internal/kv"
)

// FuzzBody is any body of a completion, chat or tokenize request. What is
// accepted keeps to the model's limits; what is not gets an error of a 4xx
// status that can be written as JSON.
func FuzzBody(f *testing.F) {
	for _, s := range []string{
		`{"prompt":"hello","max_tokens":3,"stop":["a","b"],"stream":true}`,
		`{"prompt":[1,2,300],"n":1,"logprobs":false,"ignore_eos":true}`,
		`{"prompt":[[1,2]],"kv_transfer_params":{"disagg_spec":{"req_id":"r","receiver_host":"h","receiver_alloc_port":[1],"receiver_init_port":[]}}}`,
		`{"messages":[{"role":"user","content":[{"type":"text","text":"x"}]}],"max_completion_tokens":1}`,
		`{"kv_transfer_params":{"disagg_spec":{"req_id":"r"}},"prompt":"x"}`,
		`null`, `[]`, `{"prompt":["a","b"]}`, `{"stop":7}`, `{"max_tokens":1e99,"prompt":""}`,
	} {
		f.Add(true, byte(0), []byte(s))
		f.Add(false, byte(1), []byte(s))
	}
	const context = 64
	f.Fuzz(func(t *testing.T, chat bool, role byte, body []byte) {
		refused := func(err error) bool {
			if err == nil {
				return false
			}
			var e *apiError
			if !errors.As(err, &e) || e.status < 400 || e.status > 499 || e.text == "" {
				t.Fatalf("%q: refused with %#v", body, err)
			}
			if _, err := json.Marshal(map[string]string{"message": e.text, "param": e.param}); err != nil {
				t.Fatal(err)
			}
			return true
		}
		c, err := decode(http.MaxBytesReader(nil, readCloser{bytes.NewReader(body)}, 1<<16))
		if refused(err) || refused(c.unsupported()) {
			return
		}
		tokens, err := c.tokenize(chat, context)
		if !refused(err) {
			if len(tokens) >= context || len(tokens) == 0 && c.Prompt == nil && !chat {
				t.Fatalf("%q: a prompt of %d tokens", body, len(tokens))
			}
			for _, tok := range tokens {
				if tok < 0 || tok >= model.VocabSize {
					t.Fatalf("%q: token %d", body, tok)
				}
			}
			if l, err := c.limits(chat, len(tokens), context); !refused(err) && (l.maxTokens < 1 || len(tokens)+l.maxTokens > context || len(l.stop) > maxStops) {
				t.Fatalf("%q: limits %+v for %d tokens", body, l, len(tokens))
			}
		}
		send, load, err := c.transfer([]Role{Prefill, Decode, Both, Undivided}[int(role)%4], 1)
		if refused(err) {
			return
		}
		if len(load) > kv.MaxReqID || send != nil && (len(send.req) > kv.MaxReqID || send.host == "" || len(send.allocPorts) != 1 || send.allocPorts[0] < 1) {
			t.Fatalf("%q: send %+v, load %q", body, send, load)
		}
	})
}

type readCloser struct{ *bytes.Reader }

func (readCloser) Close() error { return nil }
