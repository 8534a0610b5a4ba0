package admin

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func serve(t *testing.T, permit func(netip.Addr) bool, s Source) (addr string) {
	t.Helper()
	srv, addr, err := Serve(t.Context(), "127.0.0.1:0", permit, Handler(s), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { srv.Close() })
	return addr
}

func get(t *testing.T, addr, path string) (int, string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := c.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), err
}

// TestEndpoints: /ready gives the reason in its body, /health is 200 as long as
// the process is there, and a status that cannot be had is 503.
func TestEndpoints(t *testing.T) {
	for name, c := range map[string]struct {
		reason string
		err    error
		path   string
		status int
		body   string
	}{
		"ready":           {"", nil, "/ready", 200, "ready"},
		"not ready":       {"draining", nil, "/ready", 503, "draining"},
		"status":          {"draining", nil, "/v1/status", 200, `{"waiting":2}`},
		"closed":          {"", errors.New("the agent is closed"), "/v1/status", 503, "the agent is closed"},
		"ready of closed": {"", errors.New("the agent is closed"), "/ready", 503, "the agent is closed"},
		"health":          {"draining", errors.New("the agent is closed"), "/health", 200, "ok"},
		"metrics":         {"", nil, "/metrics", 200, "# metrics"},
		"unknown":         {"", nil, "/v2", 404, ""},
	} {
		t.Run(name, func(t *testing.T) {
			addr := serve(t, nil, Source{
				Status:  func(context.Context) (any, string, error) { return map[string]int{"waiting": 2}, c.reason, c.err },
				Metrics: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "# metrics") }),
			})
			if status, body, err := get(t, addr, c.path); err != nil || status != c.status || !strings.Contains(body, c.body) {
				t.Errorf("%s: %d %q, %v; want %d %q", c.path, status, body, err, c.status, c.body)
			}
		})
	}
}

// TestPermit: who may not connect is closed at accept, and others are served.
func TestPermit(t *testing.T) {
	source := Source{Metrics: http.NotFoundHandler()}
	from := make(chan netip.Addr, 10)
	refused := serve(t, func(ip netip.Addr) bool { from <- ip; return false }, source)
	if status, body, err := get(t, refused, "/health"); err == nil {
		t.Errorf("served: %d %q", status, body)
	}
	if ip := <-from; ip != netip.MustParseAddr("127.0.0.1") {
		t.Errorf("asked for %v", ip)
	}
	served := serve(t, func(netip.Addr) bool { return true }, source)
	if status, _, err := get(t, served, "/health"); err != nil || status != 200 {
		t.Errorf("%d, %v", status, err)
	}
	if _, _, err := Serve(t.Context(), refused, nil, nil, slog.New(slog.DiscardHandler)); err == nil {
		t.Error("a taken port is no error")
	}
}
