package proxy

import (
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/berthkv/berth/internal/openai"
)

// AdminMux serves the operator: /health, /ready, /v1/status, GET /admin/nodes,
// POST /admin/nodes/{node}/drain (takes no new requests) and .../resume. It is
// for http_addr, not for clients; the caller may add to it.
func (p *Proxy) AdminMux() *http.ServeMux {
	mux := http.NewServeMux()
	mux.HandleFunc("/v1/status", p.got(p.serveStatus))
	mux.HandleFunc("/admin/nodes", p.got(p.serveNodes))
	mux.HandleFunc("/admin/nodes/{node}/{action}", p.posted(p.serveDrain))
	p.common(mux)
	return mux
}

// Status is the document of /v1/status.
type Status struct {
	Role       string             `json:"role"` // "proxy"
	Ready      bool               `json:"ready"`
	Reason     string             `json:"reason,omitempty"` // why it is not ready
	InFlight   int                `json:"in_flight"`
	Limit      int                `json:"limit"` // of requests in flight
	Policy     Policy             `json:"policy"`
	States     map[Step]int       `json:"states"`   // requests in each step
	Outcomes   map[Outcome]uint64 `json:"outcomes"` // ended requests
	Whole      uint64             `json:"whole"`    // sent whole to a decode engine
	Recomputed uint64             `json:"recomputed"`
	Nodes      []NodeStats        `json:"nodes"`
	Requests   []RequestStatus    `json:"requests"` // in flight, oldest first
}

func (p *Proxy) serveStatus(w http.ResponseWriter, r *http.Request) {
	s := p.Stats()
	st := Status{Role: "proxy", InFlight: s.InFlight, Limit: p.cfg.MaxInFlight, Policy: p.cfg.Policy,
		Outcomes: map[Outcome]uint64{}, Nodes: s.Nodes}
	st.Requests, st.States = p.registry.list(time.Now())
	for _, o := range Outcomes {
		st.Outcomes[o] = s.Requests[o]
	}
	for _, n := range s.Whole {
		st.Whole += n
	}
	for _, n := range s.Recomputed {
		st.Recomputed += n
	}
	if err := p.Ready(r.Context()); err != nil {
		st.Reason = err.Error()
	} else {
		st.Ready = true
	}
	p.answer(w, http.StatusOK, encode(st))
}

func (p *Proxy) serveNodes(w http.ResponseWriter, _ *http.Request) {
	p.answer(w, http.StatusOK, encode(map[string]any{"nodes": append(p.prefillers.stats(), p.decoders.stats()...)}))
}

func (p *Proxy) serveDrain(w http.ResponseWriter, r *http.Request) {
	name, action := r.PathValue("node"), r.PathValue("action")
	if action != "drain" && action != "resume" {
		p.refuse(w, &openai.Error{Status: http.StatusNotFound, Code: "not_found", Message: fmt.Sprintf("a node can drain or resume, not %.40q", action)}, "")
		return
	}
	// An engine may have both roles.
	prefill := p.prefillers.drain(name, action == "drain")
	decode := p.decoders.drain(name, action == "drain")
	if !prefill && !decode {
		var names []string
		for _, n := range append(p.prefillers.stats(), p.decoders.stats()...) {
			names = append(names, n.Node)
		}
		p.refuse(w, &openai.Error{Status: http.StatusNotFound, Code: "not_found",
			Message: fmt.Sprintf("there is no node %.100q; there are %s", name, strings.Join(names, ", "))}, "")
		return
	}
	p.serveNodes(w, r)
}
