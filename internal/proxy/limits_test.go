package proxy

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"github.com/berthkv/berth/internal/kv"
)

// TestBody: what is accepted as a request's body, at each limit and past it.
func TestBody(t *testing.T) {
	const limit = 200
	f := newFleet(t, 1, 1, true, func(c *Config) {
		c.MaxBody = limit
		c.Timeouts.Body = 50 * time.Millisecond
	})
	fits := `{"prompt":"` + strings.Repeat("x", limit-len(`{"prompt":""}`)) + `"}`
	for _, c := range []struct {
		name, body string
		header     []string
		status     int
		text       string
	}{
		{"at the limit", fits, nil, 200, ""},
		{"past it", fits + " ", nil, 413, "the body has 201 bytes; at most 200 are accepted"},
		{"no JSON", "prompt=x", nil, 400, "the body is not a request: not valid JSON"},
		{"empty", "", nil, 400, "the body is not a request: not valid JSON"},
		{"a list", "[]", nil, 400, "not a JSON object but an array"},
		{"a form", fits, []string{"Content-Type", "application/x-www-form-urlencoded"}, 415, "must be application/json"},
		{"nonsense", fits, []string{"Content-Type", ";;"}, 415, "must be application/json"},
		{"with a charset", fits, []string{"Content-Type", "application/json; charset=utf-8"}, 200, ""},
		{"packed", fits, []string{"Content-Encoding", "gzip"}, 415, "it must be sent as it is"},
	} {
		t.Run(c.name, func(t *testing.T) {
			status, h, answer := f.post("/v1/completions", c.body, c.header...)
			if status != c.status || !strings.Contains(gjson.Get(answer, "error.message").Str, c.text) {
				t.Errorf("%d %s; want %d, %s", status, answer, c.status, c.text)
			}
			if h.Get("Content-Type") != jsonType || h.Get(requestIDHeader) == "" {
				t.Errorf("headers %v", h)
			}
		})
	}

	t.Run("past it, length not told", func(t *testing.T) {
		req, err := http.NewRequestWithContext(soon(t), http.MethodPost, f.srv.URL+"/v1/completions", io.MultiReader(strings.NewReader(fits), strings.NewReader("  ")))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := f.http.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if answer, _ := io.ReadAll(resp.Body); resp.StatusCode != 413 || !strings.Contains(string(answer), "more than 200 bytes") {
			t.Errorf("%d %s", resp.StatusCode, answer)
		}
	})

	// raw sends bytes and returns the answer's status line and body.
	raw := func(t *testing.T, request string) string {
		c, err := net.Dial("tcp", f.srv.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(patience))
		fmt.Fprint(c, request)
		answer, err := io.ReadAll(c)
		if err != nil {
			t.Fatal(err)
		}
		return string(answer)
	}
	t.Run("that never comes whole", func(t *testing.T) {
		answer := raw(t, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
		if !strings.HasPrefix(answer, "HTTP/1.1 408 ") || !strings.Contains(answer, "the body took longer than 50ms") {
			t.Errorf("%s", answer)
		}
	})
	t.Run("that is not HTTP", func(t *testing.T) {
		for _, garbage := range []string{"\x00\x01\x02\r\n\r\n", "GET\r\n\r\n", "\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\r\n\r\n"} {
			if answer := raw(t, garbage); !strings.HasPrefix(answer, "HTTP/1.1 400 ") {
				t.Errorf("%q: %q", garbage, answer)
			}
		}
		if status, _, _ := f.post("/v1/completions", fits); status != 200 { // r28
			t.Errorf("after garbage: %d", status)
		}
	})
	f.settled()
}

// holdDecode keeps the decode engine's requests, which stuck counts, until release
// is closed.
func (f *fleet) holdDecode() (stuck *gauge, release chan struct{}) {
	stuck, release = newGauge(), make(chan struct{})
	f.decodes[0].setHook(func(_ http.ResponseWriter, r *http.Request, _ gjson.Result) bool {
		stuck.add(1)
		select {
		case <-release:
		case <-r.Context().Done():
		}
		return false
	})
	return stuck, release
}

// TestTooManyRequests: at the limit, one more gets 503 and when to come again;
// the others are unharmed.
func TestTooManyRequests(t *testing.T) {
	const limit = 3
	f := newFleet(t, 1, 1, true, func(c *Config) { c.MaxInFlight = limit })
	stuck, release := f.holdDecode()
	statuses := make(chan int, limit)
	for range limit {
		go func() {
			status, _, _, _ := ask(soon(t), f.http, f.srv.URL+"/v1/completions", `{"prompt":"hello"}`)
			statuses <- status
		}()
	}
	if err := stuck.until(soon(t), limit); err != nil {
		t.Fatal(err)
	}
	status, h, answer := f.post("/v1/completions", `{"prompt":"hello"}`)
	if status != 503 || h.Get("Retry-After") != "1" || gjson.Get(answer, "error.message").Str != "3 requests are in flight, which is the limit" {
		t.Errorf("%d %v %s", status, h, answer)
	}
	close(release)
	for range limit {
		if s := <-statuses; s != 200 {
			t.Errorf("status %d", s)
		}
	}
	if s := f.settled(); s.Requests[Refused] != 1 || s.Requests[Answered] != limit {
		t.Errorf("%v", s.Requests)
	}
}

// TestTooManyConnections: at the limit, connections that ask for nothing make room
// for one that does; one whose request is being answered does not.
func TestTooManyConnections(t *testing.T) {
	const limit = 4
	f := newFleet(t, 1, 1, true, func(c *Config) { c.MaxConns = limit })
	came, goOn := make(chan struct{}), make(chan struct{})
	release := sync.OnceFunc(func() { close(goOn) })
	t.Cleanup(release) // before the fleet's own end, which waits for the request
	f.prefills[0].setHook(func(http.ResponseWriter, *http.Request, gjson.Result) bool {
		close(came)
		<-goOn
		f.prefills[0].setHook(nil)
		return true
	})
	open := func() (net.Conn, error) {
		c, err := net.Dial("tcp", f.srv.Listener.Addr().String())
		if err == nil {
			t.Cleanup(func() { c.Close() })
			c.SetDeadline(time.Now().Add(patience))
		}
		return c, err
	}
	read := func(c net.Conn) error {
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			return err
		}
		_, err = io.Copy(io.Discard, resp.Body)
		return err
	}
	speak := func(c net.Conn) error {
		fmt.Fprint(c, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
		return read(c)
	}
	busy, err := open()
	if err != nil {
		t.Fatal(err)
	}
	body := `{"model":"m","prompt":"hello","max_tokens":2}`
	fmt.Fprintf(busy, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	select {
	case <-came:
	case <-time.After(patience):
		t.Fatal("the request did not come to the engine")
	}
	for i := range limit - 1 {
		c, err := open()
		if err == nil {
			err = speak(c)
		}
		if err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
	}
	for newcomers, end := 0, time.Now().Add(patience); newcomers < limit; {
		c, err := open()
		if err == nil {
			err = speak(c)
		}
		switch {
		case err == nil:
			newcomers++
		case time.Now().After(end):
			t.Fatalf("only %d newcomers were answered in %v: %v", newcomers, patience, err)
		}
	}
	release()
	if err := read(busy); err != nil {
		t.Errorf("the request in flight: %v", err)
	}
}

// TestHeaders: what goes to the engines, and what does not.
func TestHeaders(t *testing.T) {
	f := newFleet(t, 1, 1, true, nil)
	_, h, _ := f.post("/v1/completions", `{"prompt":"hello"}`, "Authorization", "Bearer k", requestIDHeader, "abc", "Traceparent", "00-1",
		"Connection", "X-Mine", "X-Mine", "1", "Te", "trailers", "Accept", "text/event-stream", "Accept-Encoding", "gzip", "Proxy-Authorization", "Basic x")
	if h.Get(requestIDHeader) != "abc" {
		t.Errorf("%v", h)
	}
	seen := append(f.prefills[0].asked("/tokenize"), f.prefills[0].asked("/v1/completions")...)
	seen = append(seen, f.decodes[0].asked("/v1/completions")...)
	if len(seen) != 3 {
		t.Fatalf("%d requests", len(seen))
	}
	for _, s := range seen {
		for name, want := range map[string]string{"Authorization": "Bearer k", requestIDHeader: "abc", "Traceparent": "00-1",
			"Content-Type": jsonType, "X-Mine": "", "Te": "", "Accept-Encoding": "", "Proxy-Authorization": ""} {
			if got := s.header.Get(name); got != want {
				t.Errorf("%s: %s is %q, want %q", s.path, name, got, want)
			}
		}
	}
	for _, id := range []string{"", strings.Repeat("x", maxRequestID+1)} {
		_, h, _ = f.post("/v1/completions", `{"prompt":"hello"}`, requestIDHeader, id)
		if got := h.Get(requestIDHeader); len(got) != 32 {
			t.Errorf("the X-Request-Id made for %.10q is %q", id, got)
		}
	}
	if _, h, _ = f.post("/v1/completions", `{"prompt":"hello"}`, requestIDHeader, strings.Repeat("x", maxRequestID)); len(h.Get(requestIDHeader)) != maxRequestID {
		t.Errorf("an X-Request-Id at the limit was replaced")
	}
	f.settled()
}

// TestNamesAreUnique: a req_id is used once, by one incarnation.
func TestNamesAreUnique(t *testing.T) {
	one := newFleet(t, 1, 1, true, nil)
	two := newFleet(t, 1, 1, true, func(c *Config) { c.Incarnation = kv.Incarnation{9} })
	seen := map[string]bool{}
	for _, f := range []*fleet{one, two} {
		for range 3 {
			f.post("/v1/completions", `{"prompt":"hello"}`)
		}
		for _, w := range f.watcher.order {
			if seen[w.req.ReqID] || len(w.req.ReqID) > kv.MaxReqID || !strings.HasPrefix(w.req.ReqID, f.proxy.cfg.Incarnation.String()) {
				t.Errorf("req_id %q", w.req.ReqID)
			}
			seen[w.req.ReqID] = true
		}
	}
}

// tellingListener tells when it is closed.
type tellingListener struct {
	net.Listener
	closed func()
}

func (l *tellingListener) Close() error {
	l.closed()
	return l.Listener.Close()
}

// TestShutdown (r92): what is in flight gets its time, then is told; what comes
// later is refused; nothing is left.
func TestShutdown(t *testing.T) {
	for _, c := range []struct {
		name  string
		grace time.Duration
	}{{"drains", patience}, {"cuts", 50 * time.Millisecond}} {
		t.Run(c.name, func(t *testing.T) {
			f := newFleet(t, 1, 1, true, func(cfg *Config) { cfg.Timeouts.Shutdown = c.grace })
			inner, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			closed := make(chan struct{})
			l := &tellingListener{Listener: inner, closed: sync.OnceFunc(func() { close(closed) })}
			reached, release := make(chan struct{}), make(chan struct{})
			f.decodes[0].setHook(func(_ http.ResponseWriter, r *http.Request, _ gjson.Result) bool {
				close(reached)
				select {
				case <-release:
				case <-r.Context().Done():
				}
				return false
			})
			ctx, stop := context.WithCancel(context.Background())
			served := make(chan error, 1)
			go func() { served <- f.proxy.Serve(ctx, l) }()
			type answer struct {
				status int
				body   string
				err    error
			}
			answers := make(chan answer, 1)
			go func() {
				status, _, body, err := ask(soon(t), f.http, "http://"+l.Addr().String()+"/v1/completions", `{"prompt":"hello"}`)
				answers <- answer{status, body, err}
			}()
			<-reached
			stop()
			if c.name == "drains" {
				<-closed
				status, h, answer := f.post("/v1/completions", `{"prompt":"hello"}`)
				if status != 503 || h.Get("Retry-After") != "1" {
					t.Errorf("a new request: %d %v %s", status, h, answer)
				}
				if err := f.proxy.Ready(soon(t)); !errors.Is(err, errShuttingDown) {
					t.Errorf("ready: %v", err)
				}
				close(release)
			}
			a := <-answers
			if c.name == "drains" && (a.err != nil || a.status != 200) {
				t.Errorf("what was in flight: %+v", a)
			}
			if c.name == "cuts" && (a.err != nil || a.status != 503 || gjson.Get(a.body, "error.message").Str != errShuttingDown.Error()) {
				t.Errorf("what was in flight: %+v", a)
			}
			if err := <-served; err != nil {
				t.Errorf("Serve: %v", err)
			}
			if _, err := net.Dial("tcp", l.Addr().String()); err == nil {
				t.Error("the port is still open")
			}
			f.proxy.Close() // harmless
		})
	}

	t.Run("stops by itself", func(t *testing.T) {
		f := newFleet(t, 1, 1, true, nil)
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
		if err := f.proxy.Serve(soon(t), l); err == nil {
			t.Error("a closed listener was no error")
		}
	})
}

// panicking is a Watcher with a broken invariant.
type panicking struct{}

func (panicking) Watch(context.Context, WatchRequest) (Watch, error) { panic("broken") }

// TestPanic: a bug costs its own request, which is told no internals.
func TestPanic(t *testing.T) {
	f := newFleet(t, 1, 1, true, nil)
	f.proxy.watcher = panicking{}
	status, _, answer := f.post("/v1/completions", `{"prompt":"hello"}`)
	if status != 500 || gjson.Get(answer, "error.message").Str != "internal error" {
		t.Errorf("%d %s", status, answer)
	}
	if status, _, _ := f.post("/v1/completions", `{"prompt":"hello","n":2}`); status != 200 {
		t.Errorf("the next request: %d", status)
	}
	s := f.settled()
	if s.Requests[Internal] != 1 || s.Failures[Failure{StepTokenize, "internal"}] != 1 || s.Nodes[0].InFlight != 0 || s.Nodes[1].InFlight != 0 {
		t.Errorf("%+v", s)
	}
}

// TestSlowBodies: a client that withholds the end of a large body keeps no other
// out: its own goes.
func TestSlowBodies(t *testing.T) {
	f := newFleet(t, 1, 1, true, func(c *Config) { c.MaxBodies = 6000 })
	slow, err := net.Dial("tcp", f.srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer slow.Close()
	slow.SetDeadline(time.Now().Add(patience))
	fmt.Fprintf(slow, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 260\r\n\r\n{%s", strings.Repeat(" ", 250))
	counted := func() bool {
		f.proxy.bodies.mu.Lock()
		defer f.proxy.bodies.mu.Unlock()
		return f.proxy.bodies.held == firstPiece
	}
	for ctx := soon(t); !counted(); {
		if ctx.Err() != nil {
			t.Fatal("the slow body is not read")
		}
		runtime.Gosched()
	}
	if status, _, answer := f.post("/v1/completions", fmt.Sprintf(`{"prompt":"hello"%s}`, strings.Repeat(" ", 182))); status != 200 {
		t.Errorf("%d %s", status, answer)
	}
	resp, err := http.ReadResponse(bufio.NewReader(slow), nil)
	if err != nil || resp.StatusCode != 503 {
		t.Errorf("the slow one: %v %v", resp, err)
	}
	f.settled()
	if b := f.proxy.bodies; b.held != 0 || len(b.reading) != 0 {
		t.Errorf("%d bytes of bodies are counted, %d are being read when nothing is in flight", b.held, len(b.reading))
	}
}

// TestTooManyBodies: when the bodies of the requests in flight are as large as they
// may be, one more gets 503; what has ended makes room.
func TestTooManyBodies(t *testing.T) {
	f := newFleet(t, 1, 1, true, func(c *Config) { c.MaxBodies = 6000 })
	stuck, release := f.holdDecode()
	body := fmt.Sprintf(`{"prompt":"hello"%s}`, strings.Repeat(" ", 3982)) // 4000 bytes
	first := make(chan int, 1)
	go func() {
		status, _, _, _ := ask(soon(t), f.http, f.srv.URL+"/v1/completions", body)
		first <- status
	}()
	if err := stuck.until(soon(t), 1); err != nil {
		t.Fatal(err)
	}
	status, h, answer := f.post("/v1/completions", body)
	if status != 503 || h.Get("Retry-After") != "1" || !strings.Contains(answer, "have 6000 bytes, which is the limit") {
		t.Errorf("%d %v %s", status, h, answer)
	}
	close(release)
	if s := <-first; s != 200 {
		t.Errorf("status %d", s)
	}
	if status, _, answer := f.post("/v1/completions", body); status != 200 {
		t.Errorf("after the end of the other: %d %s", status, answer)
	}
	f.settled()
	if b := f.proxy.bodies; b.held != 0 || len(b.reading) != 0 {
		t.Errorf("%d bytes of bodies are counted, %d are being read when nothing is in flight", b.held, len(b.reading))
	}
}
