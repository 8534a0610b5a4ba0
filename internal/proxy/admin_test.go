package proxy

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"
)

// admin serves a fleet's operator's side.
func (f *fleet) admin() *httptest.Server {
	srv := httptest.NewServer(f.proxy.AdminMux())
	f.t.Cleanup(srv.Close)
	return srv
}

func call(t *testing.T, method, url string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(soon(t), method, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	defer http.DefaultClient.CloseIdleConnections()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	if got := resp.Header.Get("Content-Type"); got != jsonType {
		t.Errorf("%s %s: %s", method, url, got)
	}
	return resp.StatusCode, string(body)
}

// TestEndpoints: what each path answers; the rest is a 404 or 405 in OpenAI's
// shape.
func TestEndpoints(t *testing.T) {
	f := newFleet(t, 1, 1, true, nil)
	admin := f.admin()
	node := f.decodes[0].addr().String()
	for _, c := range []struct {
		method, url string
		status      int
		path, want  string
	}{
		{"GET", f.srv.URL + "/health", 200, "status", "ok"},
		{"GET", f.srv.URL + "/ready", 200, "ready", "true"},
		{"GET", f.srv.URL + "/v1/models", 200, "data.0.id", "m"},
		{"GET", f.srv.URL + "/v1/completions", 405, "error.code", "method_not_allowed"},
		{"DELETE", f.srv.URL + "/v1/models", 405, "error.code", "method_not_allowed"},
		{"GET", f.srv.URL + "/v1/embeddings", 404, "error.message", "there is nothing at /v1/embeddings"},
		{"GET", f.srv.URL + "/v1/status", 404, "error.code", "not_found"},
		{"POST", f.srv.URL + "/admin/nodes/" + node + "/drain", 404, "error.code", "not_found"},
		{"GET", admin.URL + "/health", 200, "status", "ok"},
		{"GET", admin.URL + "/ready", 200, "ready", "true"},
		{"GET", admin.URL + "/v1/status", 200, "role", "proxy"},
		{"GET", admin.URL + "/admin/nodes", 200, "nodes.1.node", node},
		{"POST", admin.URL + "/admin/nodes", 405, "error.code", "method_not_allowed"},
		{"GET", admin.URL + "/admin/nodes/" + node + "/drain", 405, "error.code", "method_not_allowed"},
		{"POST", admin.URL + "/admin/nodes/nobody:1/drain", 404, "error.code", "not_found"},
		{"POST", admin.URL + "/admin/nodes/" + node + "/explode", 404, "error.code", "not_found"},
		{"GET", admin.URL + "/v1/completions", 404, "error.code", "not_found"},
	} {
		status, body := call(t, c.method, c.url)
		if status != c.status || gjson.Get(body, c.path).String() != c.want {
			t.Errorf("%s %s: %d %s; want %d, %s = %s", c.method, c.url, status, body, c.status, c.path, c.want)
		}
	}
}

// TestDrain: a drained node takes no new requests, and resumes; with all of a
// role drained the proxy is not ready and says so.
func TestDrain(t *testing.T) {
	f := newFleet(t, 2, 2, true, nil)
	admin := f.admin()
	name := func(e *fakeEngine) string { return e.addr().String() }
	for _, e := range []*fakeEngine{f.prefills[0], f.decodes[0]} {
		status, body := call(t, "POST", admin.URL+"/admin/nodes/"+name(e)+"/drain")
		if status != 200 || !gjson.Get(body, `nodes.#(node=="`+name(e)+`").drained`).Bool() {
			t.Errorf("%d %s", status, body)
		}
	}
	for range 6 {
		f.post("/v1/completions", `{"prompt":"hello"}`)
	}
	if a, b := len(f.prefills[0].asked("/tokenize")), len(f.prefills[1].asked("/tokenize")); a != 0 || b != 6 {
		t.Errorf("prefill engines got %d and %d", a, b)
	}
	if a, b := len(f.decodes[0].asked("/v1/completions")), len(f.decodes[1].asked("/v1/completions")); a != 0 || b != 6 {
		t.Errorf("decode engines got %d and %d", a, b)
	}
	call(t, "POST", admin.URL+"/admin/nodes/"+name(f.decodes[1])+"/drain")
	status, body := call(t, "GET", f.srv.URL+"/ready")
	const reason = "no decode engine takes requests: all 2 are drained"
	if status != 503 || gjson.Get(body, "reason").Str != reason {
		t.Errorf("%d %s", status, body)
	}
	status, h, answer := f.post("/v1/completions", `{"prompt":"hello"}`)
	if status != 503 || h.Get("Retry-After") == "" || gjson.Get(answer, "error.message").Str != reason {
		t.Errorf("%d %s", status, answer)
	}
	call(t, "POST", admin.URL+"/admin/nodes/"+name(f.decodes[0])+"/resume")
	if status, _, answer := f.post("/v1/completions", `{"prompt":"hello"}`); status != 200 {
		t.Errorf("%d %s", status, answer)
	}
	if s := f.settled(); s.Failures[Failure{StepRead, "busy"}] != 1 {
		t.Errorf("%v", s.Failures)
	}
}

// TestReady: with an engine gone, or sick, the reason names it.
func TestReady(t *testing.T) {
	f := newFleet(t, 2, 1, true, nil)
	again := func() (int, string) {
		f.proxy.probes.mu.Lock()
		f.proxy.probes.mu.until = time.Time{} // as if the last answer were old
		f.proxy.probes.mu.Unlock()
		return call(t, "GET", f.srv.URL+"/ready")
	}
	f.prefills[0].srv.Close()
	if status, body := again(); status != 200 {
		t.Errorf("with one prefill engine left: %d %s", status, body)
	}
	f.prefills[1].srv.Close()
	status, body := again()
	reason := gjson.Get(body, "reason").Str
	if status != 503 || !strings.HasPrefix(reason, "no prefill engine answers: ") || !strings.Contains(reason, f.prefills[1].addr().String()) {
		t.Errorf("%d %s", status, body)
	}
}

// TestStatus shows a request in flight with its step, its nodes and its names.
func TestStatus(t *testing.T) {
	f := newFleet(t, 1, 1, true, nil)
	admin := f.admin()
	reached, release := make(chan struct{}), make(chan struct{})
	f.decodes[0].setHook(func(_ http.ResponseWriter, r *http.Request, _ gjson.Result) bool {
		close(reached)
		select {
		case <-release:
		case <-r.Context().Done():
		}
		return false
	})
	done := make(chan struct{})
	go func() {
		defer close(done)
		ask(soon(t), f.http, f.srv.URL+"/v1/completions", `{"prompt":"hello"}`, requestIDHeader, "mine")
	}()
	<-reached
	_, body := call(t, "GET", admin.URL+"/v1/status")
	var s Status
	if err := json.Unmarshal([]byte(body), &s); err != nil {
		t.Fatal(err)
	}
	if !s.Ready || s.InFlight != 1 || s.States[StepDecode] != 1 || len(s.Requests) != 1 {
		t.Fatalf("%s", body)
	}
	r := s.Requests[0]
	if r.ID != f.watcher.reqID(0) || r.RequestID != "mine" || r.Endpoint != "completions" || r.State != StepDecode ||
		r.Prefill != f.prefills[0].addr().String() || r.Decode != f.decodes[0].addr().String() {
		t.Errorf("%+v", r)
	}
	close(release)
	<-done
	f.settled()
	_, body = call(t, "GET", admin.URL+"/v1/status")
	if gjson.Get(body, "outcomes.answered").Int() != 1 || gjson.Get(body, "in_flight").Int() != 0 {
		t.Errorf("%s", body)
	}
	stats := f.proxy.Stats()
	for _, step := range []Step{StepRead, StepTokenize, StepWatch, StepPrefill, StepTransfer, StepDecode} {
		if stats.StepSeconds[step].N != 1 {
			t.Errorf("%s was counted %d times", step, stats.StepSeconds[step].N)
		}
	}
	if stats.TTFT.N != 1 {
		t.Errorf("%d first tokens", stats.TTFT.N)
	}
}

func TestHistogram(t *testing.T) {
	var h Histogram
	for _, d := range []time.Duration{0, time.Millisecond, time.Millisecond + 1, 300 * time.Second, 301 * time.Second} {
		h.observe(d)
	}
	if h.Counts[0] != 2 || h.Counts[1] != 1 || h.Counts[len(Bounds)-1] != 1 || h.Counts[len(Bounds)] != 1 || h.N != 5 || h.Sum < 601 {
		t.Errorf("%+v", h)
	}
}
