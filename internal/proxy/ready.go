package proxy

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
)

// readyKept is how long an answer about the engines is good for.
const readyKept = time.Second

// probes ask the engines whether they are there, when somebody asks /ready: one
// round at a time, whoever asks.
type probes struct {
	p     *Proxy
	round singleflight.Group

	mu struct {
		sync.Mutex
		until time.Time
		err   error
	}
}

// Ready returns nil when the proxy can serve: it is not shutting down, and at
// least one prefill and one decode engine that take requests answer. The error
// is the reason why not.
func (p *Proxy) Ready(ctx context.Context) error {
	if p.closing.Load() {
		return errShuttingDown
	}
	for _, ns := range []*nodes{p.prefillers, p.decoders} {
		if len(ns.taking()) == 0 {
			return fmt.Errorf("no %s engine takes requests: all %d are drained", ns.all[0].role, len(ns.all))
		}
	}
	pr := p.probes
	pr.mu.Lock()
	fresh, err := time.Now().Before(pr.mu.until), pr.mu.err
	pr.mu.Unlock()
	if fresh {
		return err
	}
	select {
	case r := <-pr.round.DoChan("", func() (any, error) { return nil, pr.ask() }):
		return r.Err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// ask probes all engines at once and keeps the verdict.
func (pr *probes) ask() error {
	ctx, stop := within(pr.p.base, pr.p.cfg.Timeouts.Probe, "the engine's answer")
	defer stop()
	err := pr.anyOf(ctx, pr.p.prefillers)
	if err == nil {
		err = pr.anyOf(ctx, pr.p.decoders)
	}
	pr.mu.Lock()
	pr.mu.err, pr.mu.until = err, time.Now().Add(readyKept)
	pr.mu.Unlock()
	return err
}

// anyOf returns nil if one of the engines answers, else what each said.
func (pr *probes) anyOf(ctx context.Context, ns *nodes) error {
	taking := ns.taking()
	answers := make(chan error, len(taking))
	for _, n := range taking {
		go func() {
			resp, err := pr.p.client.do(ctx, http.MethodGet, n, "/health", nil, nil)
			if err == nil {
				resp.Body.Close()
				if resp.StatusCode >= 500 {
					err = fmt.Errorf("%s answers %s", n.name, resp.Status)
				}
			}
			answers <- err
		}()
	}
	var reasons []string
	for range taking {
		if err := <-answers; err != nil {
			reasons = append(reasons, err.Error())
		}
	}
	if len(reasons) < len(taking) || len(taking) == 0 {
		return nil
	}
	return fmt.Errorf("no %s engine answers: %s", ns.all[0].role, strings.Join(reasons, "; "))
}

func (p *Proxy) serveHealth(w http.ResponseWriter, _ *http.Request) {
	p.answer(w, http.StatusOK, []byte(`{"status":"ok"}`))
}

func (p *Proxy) serveReady(w http.ResponseWriter, r *http.Request) {
	status, answer := http.StatusOK, readiness{Ready: true}
	if err := p.Ready(r.Context()); err != nil {
		status, answer = http.StatusServiceUnavailable, readiness{Reason: err.Error()}
	}
	p.answer(w, status, encode(answer))
}

type readiness struct {
	Ready  bool   `json:"ready"`
	Reason string `json:"reason,omitempty"`
}

// encode returns the JSON of a value of ours, which cannot fail.
func encode(v any) []byte {
	doc, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return doc
}
