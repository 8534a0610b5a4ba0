package proxy

import (
	"context"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/berthkv/berth/internal/openai"
)

// Proxy is the front door. It is safe for concurrent use; Close it.
type Proxy struct {
	cfg        Config
	watcher    Watcher
	client     *client
	prefillers *nodes
	decoders   *nodes
	registry   *registry
	stats      *counters
	log        *limitedLog
	models     *modelCache
	probes     *probes
	bodies     *bodies

	attempts atomic.Uint64 // req_ids given out
	closing  atomic.Bool
	base     context.Context // ends what is in flight when the proxy closes
	stop     context.CancelCauseFunc
}

// New returns a proxy for the engines of cfg. It starts nothing: serve Handler,
// or call Serve. All faults of cfg are reported at once.
func New(cfg Config, w Watcher) (*Proxy, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	p := &Proxy{
		cfg:        cfg,
		watcher:    w,
		client:     newClient(cfg),
		prefillers: &nodes{},
		decoders:   &nodes{},
		registry:   newRegistry(cfg.MaxInFlight),
		stats:      newCounters(),
		log:        newLimitedLog(cfg.Log),
		models:     &modelCache{},
		bodies:     &bodies{max: cfg.MaxBodies},
	}
	p.base, p.stop = context.WithCancelCause(context.Background())
	p.probes = &probes{p: p}
	for _, a := range cfg.Prefillers {
		p.prefillers.all = append(p.prefillers.all, &node{name: a.String(), role: rolePrefill})
	}
	for _, d := range cfg.Decoders {
		p.decoders.all = append(p.decoders.all, &node{name: d.String(), role: roleDecode, receivers: d.Receivers})
	}
	return p, nil
}

// newSpec names a new attempt: unique among all proxies and their restarts.
func (p *Proxy) newSpec(dec *node) *openai.Spec {
	s := &openai.Spec{
		ReqID: fmt.Sprintf("%s-%d", p.cfg.Incarnation, p.attempts.Add(1)),
		Host:  dec.receivers[0].Host,
	}
	for _, r := range dec.receivers {
		s.InitPorts = append(s.InitPorts, r.InitPort)
		s.AllocPorts = append(s.AllocPorts, r.AllocPort)
	}
	return s
}

// Stats returns a snapshot of the counters.
func (p *Proxy) Stats() Stats {
	var s Stats
	p.stats.fill(&s)
	list, steps := p.registry.list(time.Now())
	s.InFlight, s.Now = len(list), steps
	s.Nodes = append(p.prefillers.stats(), p.decoders.stats()...)
	return s
}

// Close ends what is in flight: clients are told that the proxy shuts down,
// transfers are cancelled. It returns when all of it has ended. A second call is
// harmless.
func (p *Proxy) Close() {
	// 1. Nothing new.
	p.closing.Store(true)
	p.registry.close()
	// 2. What runs hears of it, and ends: each of its waits is on a context.
	p.stop(errShuttingDown)
	<-p.registry.idle
	// 3. The connections to the engines.
	p.client.transport.CloseIdleConnections()
}

// Handler serves the clients: /v1/completions, /v1/chat/completions, /v1/models,
// /health and /ready.
func (p *Proxy) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/v1/completions", p.posted(func(w http.ResponseWriter, r *http.Request) { p.complete(w, r, openai.Completions) }))
	mux.HandleFunc("/v1/chat/completions", p.posted(func(w http.ResponseWriter, r *http.Request) { p.complete(w, r, openai.Chat) }))
	mux.HandleFunc("/v1/models", p.got(p.serveModels))
	p.common(mux)
	return mux
}

// common adds what both servers answer.
func (p *Proxy) common(mux *http.ServeMux) {
	mux.HandleFunc("/health", p.got(p.serveHealth))
	mux.HandleFunc("/ready", p.got(p.serveReady))
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		p.refuse(w, &openai.Error{Status: http.StatusNotFound, Code: "not_found", Message: fmt.Sprintf("there is nothing at %.200s", r.URL.Path)}, "")
	})
}

func (p *Proxy) got(h http.HandlerFunc) http.HandlerFunc    { return p.only("GET", h) }
func (p *Proxy) posted(h http.HandlerFunc) http.HandlerFunc { return p.only("POST", h) }

// only answers other methods than the one with 405.
func (p *Proxy) only(method string, h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if r.Method == method || method == "GET" && r.Method == "HEAD" {
			h(w, r)
			return
		}
		w.Header().Set("Allow", method)
		p.refuse(w, &openai.Error{Status: http.StatusMethodNotAllowed, Code: "method_not_allowed",
			Message: fmt.Sprintf("%s does not take %.20s; use %s", r.URL.Path, r.Method, method)}, "")
	}
}

// refuse answers with an error; whether the client takes it is its own affair.
func (p *Proxy) refuse(w http.ResponseWriter, e *openai.Error, retry string) {
	_ = newReply(w, p.cfg.Timeouts.Write).fail(e, retry)
}

// answer answers with a JSON document, as refuse does.
func (p *Proxy) answer(w http.ResponseWriter, status int, doc []byte) {
	_ = newReply(w, p.cfg.Timeouts.Write).document(status, doc)
}
