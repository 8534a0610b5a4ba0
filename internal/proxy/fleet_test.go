package proxy

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tidwall/gjson"
	"go.uber.org/goleak"

	"github.com/berthkv/berth/internal/kv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds every wait of a test; nothing depends on its length.
const patience = 30 * time.Second

// fleet is a proxy before fake engines, with a fake watcher between.
type fleet struct {
	t        testing.TB
	prefills []*fakeEngine
	decodes  []*fakeEngine
	watcher  *fakeWatcher
	proxy    *Proxy
	srv      *httptest.Server
	http     *http.Client
	running  *gauge // handlers of the proxy
}

// gauge counts what runs and tells when it changes.
type gauge struct {
	mu      sync.Mutex
	n       int
	changed chan struct{}
}

func newGauge() *gauge { return &gauge{changed: make(chan struct{})} }

func (g *gauge) add(d int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.n += d
	close(g.changed)
	g.changed = make(chan struct{})
}

func (g *gauge) until(ctx context.Context, want int) error {
	for {
		g.mu.Lock()
		n, changed := g.n, g.changed
		g.mu.Unlock()
		if n == want {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%d, want %d: %w", n, want, ctx.Err())
		}
	}
}

// newFleet starts one. Prefill engines deliver: a transfer is ready once the
// engine has been asked; unless deliver is false.
func newFleet(t testing.TB, prefills, decodes int, deliver bool, change func(*Config)) *fleet {
	f := &fleet{t: t, watcher: newWatcher(t)}
	cfg := Config{Incarnation: kv.Incarnation{1, 2, 3}}
	for range prefills {
		e := newEngine(t)
		if deliver {
			e.setHook(f.deliver)
		}
		f.prefills = append(f.prefills, e)
		cfg.Prefillers = append(cfg.Prefillers, e.addr())
	}
	for i := range decodes {
		e := newEngine(t)
		f.decodes = append(f.decodes, e)
		cfg.Decoders = append(cfg.Decoders, Decoder{Addr: e.addr(), Receivers: []Receiver{
			{"10.0.0.9", 8300 + 2*i, 8400 + 2*i}, {"10.0.0.9", 8301 + 2*i, 8401 + 2*i}}})
	}
	if change != nil {
		change(&cfg)
	}
	p, err := New(cfg, f.watcher)
	if err != nil {
		t.Fatal(err)
	}
	f.proxy = p
	f.srv = httptest.NewUnstartedServer(nil)
	f.running = newGauge()
	inner := p.Handler()
	f.srv.Config = p.Server(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.running.add(1)
		defer f.running.add(-1)
		inner.ServeHTTP(w, r)
	}))
	f.srv.Start()
	f.http = f.srv.Client()
	t.Cleanup(func() {
		f.srv.CloseClientConnections()
		p.Close()
		f.srv.Close()
		for i, how := range f.watcher.endings() {
			if how == "open" {
				t.Errorf("watch %d was never ended", i)
			}
		}
		if s := p.Stats(); s.InFlight != 0 {
			t.Errorf("%d requests are in flight after the end", s.InFlight)
		}
	})
	return f
}

// deliver plays the prefill engine's agent: the transfer ends, well unless
// outcome says otherwise, before the engine answers.
func (f *fleet) deliver(_ http.ResponseWriter, _ *http.Request, body gjson.Result) bool {
	if id := body.Get("kv_transfer_params.disagg_spec.req_id"); id.Exists() {
		f.watcher.deliver(id.Str)
	}
	return false
}

// post sends a request and returns the whole answer.
func (f *fleet) post(path, body string, header ...string) (status int, h http.Header, answer string) {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	status, h, answer, err := ask(ctx, f.http, f.srv.URL+path, body, header...)
	if err != nil {
		f.t.Fatalf("%s: %v", body, err)
	}
	return status, h, answer
}

func ask(ctx context.Context, c *http.Client, url, body string, header ...string) (int, http.Header, string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		return 0, nil, "", err
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := c.Do(req)
	if err != nil {
		return 0, nil, "", err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	return resp.StatusCode, resp.Header, string(answer), err
}

// settled waits until the proxy has no request left.
func (f *fleet) settled() Stats {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := f.running.until(ctx, 0); err != nil {
		f.t.Fatalf("requests are still in flight: %v", err)
	}
	return f.proxy.Stats()
}
