package proxy

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/tidwall/gjson"

	"github.com/berthkv/berth/internal/kv"
)

// FuzzFlags: what an operator gives is refused with words, or names nodes that
// can be dialled, none of them twice.
func FuzzFlags(f *testing.F) {
	f.Add("localhost", "8100", 1, "localhost", "8200", "8300", "8400", 1)
	f.Add("a,b", "8100", 2, "[::1]", "8200,8201", "8300", "8400", 2)
	f.Add("h", "65535", 2, "d", "1", "8300,8301", "8400,8401", 3)
	f.Add(" , ", "-1", 0, "a/b", "x", "", "8400,", -5)
	f.Add("h", "1", 1<<40, "d", "2", "3", "4", 1<<40)
	f.Fuzz(func(t *testing.T, ph, pp string, np int, dh, dp, di, da string, nd int) {
		pre, dec, err := ParseNodes(Flags{PrefillerHost: ph, PrefillerPort: pp, NumPrefillers: np,
			DecoderHost: dh, DecoderPort: dp, DecoderInitPort: di, DecoderAllocPort: da, NumDecoders: nd})
		if err != nil {
			return
		}
		seen := map[Addr]bool{}
		once := func(what string, a Addr) {
			if a.Host == "" || a.Port < 1 || a.Port > 65535 || seen[a] {
				t.Errorf("%s %v, seen %v", what, a, seen[a])
			}
			seen[a] = true
		}
		for _, a := range pre {
			once("prefiller", a)
		}
		clear(seen)
		for _, d := range dec {
			once("decoder", d.Addr)
			if len(d.Receivers) == 0 {
				t.Errorf("decoder %v has no receiver", d.Addr)
			}
		}
		clear(seen)
		for _, d := range dec {
			for _, r := range d.Receivers {
				once("alloc port", Addr{r.Host, r.AllocPort})
			}
		}
		if len(pre) == 0 || len(dec) == 0 {
			t.Error("no nodes, and no error")
		}
	})
}

// FuzzAdmin is any request to the operator's side of a proxy: answered, in JSON,
// and an error in OpenAI's shape.
func FuzzAdmin(f *testing.F) {
	for _, c := range [][2]string{{"GET", "/v1/status"}, {"GET", "/admin/nodes?x=%zz"}, {"POST", "/admin/nodes/127.0.0.1:1/drain"},
		{"POST", "/admin/nodes/%00/resume?all=1"}, {"GET", "/health"}, {"DELETE", "/v1/models"}, {"POST", "/admin/nodes/a%2fb/drain"}} {
		f.Add(c[0], c[1])
	}
	p, err := New(Config{Incarnation: kv.Incarnation{1}, Prefillers: []Addr{{"127.0.0.1", 1}}, Decoders: []Decoder{{Addr: Addr{"127.0.0.1", 2}, Receivers: []Receiver{{"127.0.0.1", 3, 4}}}}},
		newWatcher(f))
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { p.Close() })
	h := p.AdminMux()
	f.Fuzz(func(t *testing.T, method, target string) {
		u, err := url.ParseRequestURI(target)
		if err != nil || method == "" || !strings.HasPrefix(u.Path, "/") {
			return
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, (&http.Request{Method: method, URL: u, RequestURI: target, Host: "h", Header: http.Header{}, Body: http.NoBody}).WithContext(t.Context()))
		if w.Code >= 300 && w.Code < 400 {
			return // the mux cleans paths
		}
		doc := w.Body.Bytes()
		if w.Body.Len() > 0 && !json.Valid(doc) && method != http.MethodHead {
			t.Errorf("%s %q: %d %q", method, target, w.Code, doc)
		}
		if w.Code >= 400 && method != http.MethodHead && gjson.GetBytes(doc, "error.message").Str == "" && gjson.GetBytes(doc, "ready").Type == gjson.Null {
			t.Errorf("%s %q: %d without an error: %q", method, target, w.Code, doc)
		}
	})
}

// FuzzClient is any body of a client, sent to the proxy's handler; its engines
// refuse everything. It is answered once, in OpenAI's shape.
func FuzzClient(f *testing.F) {
	f.Add("/v1/completions", "application/json", []byte(`{"prompt":"x","max_tokens":3,"stream":true}`))
	f.Add("/v1/chat/completions", "application/json", []byte(`{"messages":[{"role":"user","content":"x"}],"n":2}`))
	f.Add("/v1/completions", "text/plain", []byte(`{"prompt":[1,2,-3]}`))
	f.Add("/v1/completions", "", []byte("\x00\xff{"))
	p, err := New(Config{Incarnation: kv.Incarnation{1}, Prefillers: []Addr{{"127.0.0.1", 1}}, Decoders: []Decoder{{Addr: Addr{"127.0.0.1", 1}, Receivers: []Receiver{{"127.0.0.1", 1, 1}}}}},
		newWatcher(f))
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { p.Close() })
	h := p.Handler()
	f.Fuzz(func(t *testing.T, path, kind string, body []byte) {
		if path != "/v1/completions" && path != "/v1/chat/completions" {
			path = "/v1/completions"
		}
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, path, bytes.NewReader(body))
		r.Header.Set("Content-Type", strings.Map(func(c rune) rune {
			if c < ' ' || c > '~' {
				return -1
			}
			return c
		}, kind))
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		doc, err := io.ReadAll(w.Body)
		if err != nil || w.Code < 400 || !json.Valid(doc) || gjson.GetBytes(doc, "error.message").Str == "" {
			t.Errorf("%s %q: %d %q", path, body, w.Code, doc)
		}
	})
}
