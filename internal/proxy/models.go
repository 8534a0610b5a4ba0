package proxy

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"time"

	"github.com/berthkv/berth/internal/openai"
)

// How long an engine's /v1/models is believed, and that it tells nothing.
const (
	modelsKept   = time.Minute
	noModelsKept = time.Second
)

// modelCache remembers the context lengths of models, for prompts that need no
// tokenizing (the answer of /tokenize tells it for the others).
type modelCache struct {
	mu struct {
		sync.Mutex
		until time.Time
		lens  map[string]int64 // nil if no engine told
	}
}

// contextLen returns a model's context length in tokens, 0 if it cannot be
// learned: then the engines judge. All engines of a proxy serve the same models.
func (p *Proxy) contextLen(ctx context.Context, n *node, model string, h http.Header) int64 {
	c := p.models
	c.mu.Lock()
	lens, fresh := c.mu.lens, time.Now().Before(c.mu.until)
	c.mu.Unlock()
	if !fresh {
		lens = nil
		kept := noModelsKept
		if doc, err := p.client.document(ctx, http.MethodGet, n, "/v1/models", h, nil); err == nil {
			if lens, err = openai.ParseModels(doc); err == nil {
				kept = modelsKept
			}
		}
		c.mu.Lock()
		c.mu.lens, c.mu.until = lens, time.Now().Add(kept)
		c.mu.Unlock()
	}
	if n, ok := lens[model]; ok || model != "" || len(lens) != 1 {
		return n
	}
	for _, n := range lens {
		return n
	}
	return 0
}

// serveModels hands on what the first engine that answers says.
func (p *Proxy) serveModels(w http.ResponseWriter, r *http.Request) {
	ctx, stop := within(r.Context(), p.cfg.Timeouts.Tokenize, "the list of models")
	defer stop()
	id := requestID(r.Header)
	w.Header().Set(requestIDHeader, id)
	h := forEngine(r.Header, id)
	answer := &openai.Error{Status: http.StatusBadGateway, Code: "peer_lost", Message: "no engine tells its models"}
	for _, n := range append(p.decoders.taking(), p.prefillers.taking()...) {
		doc, err := p.client.document(ctx, http.MethodGet, n, "/v1/models", h, nil)
		if err == nil {
			p.answer(w, http.StatusOK, doc)
			return
		}
		var status *engineStatus
		if errors.As(err, &status) && status.api.Status < 500 {
			answer = status.api
			break
		}
	}
	p.refuse(w, answer, "")
}
