package engine

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"github.com/berthkv/berth/internal/fault"
)

// Handler returns the engine's HTTP server. Its limits: Config.MaxBody for a
// body, and as many requests at once as the engine has places and queue; more
// are answered with 503.
func (e *Engine) Handler() http.Handler {
	places := make(chan struct{}, e.cfg.Queue+e.cfg.Seats+e.cfg.Sending)
	limited := func(h func(http.ResponseWriter, *http.Request) error) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			select {
			case places <- struct{}{}:
				defer func() { <-places }()
			default:
				e.stats.refused.Add(1)
				writeError(w, fault.New(fault.Busy, "%d requests are in flight", cap(places)))
				return
			}
			r.Body = http.MaxBytesReader(w, r.Body, e.cfg.MaxBody)
			if err := h(w, r); err != nil {
				writeError(w, err)
			}
		}
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/completions", limited(func(w http.ResponseWriter, r *http.Request) error { return e.generate(w, r, false) }))
	mux.HandleFunc("POST /v1/chat/completions", limited(func(w http.ResponseWriter, r *http.Request) error { return e.generate(w, r, true) }))
	mux.HandleFunc("POST /tokenize", limited(e.serveTokenize))
	mux.HandleFunc("GET /v1/models", e.serveModels)
	mux.HandleFunc("GET /health", e.serveHealth)
	mux.HandleFunc("GET /ready", e.serveReady)
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		e.writeMetrics(w)
	})
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		writeError(w, &apiError{status: http.StatusNotFound, text: "there is no " + r.Method + " " + r.URL.Path})
	})
	return mux
}

// bind returns ctx, ended by the engine's end too.
func (e *Engine) bind(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(e.ctx, func() { cancel(errClosing) })
	return ctx, func() { stop(); cancel(nil) }
}

// generate serves a completion or chat request from its body to the last byte
// of its answer. An error it returns is to be written; one that comes after the
// first byte is part of the stream.
func (e *Engine) generate(w http.ResponseWriter, hr *http.Request, chat bool) error {
	c, err := decode(hr.Body)
	if err != nil {
		return err
	}
	r, err := e.accept(c, chat)
	if err != nil {
		return err
	}
	ctx, unbind := e.bind(hr.Context())
	defer unbind()
	found, err := e.locate(ctx, r)
	if err != nil {
		return err
	}
	if found {
		// Freed when it was loaded; again here, where it never was.
		defer e.release(ctx, r.name, r.load)
	}
	if err := e.submit(r); err != nil {
		return err
	}
	defer e.abandon(r)
	return e.respond(ctx, w, r, c, chat)
}

// accept checks a call and makes a request of it.
func (e *Engine) accept(c *call, chat bool) (*request, error) {
	if c.Model != nil && *c.Model != e.cfg.Name {
		return nil, &apiError{status: http.StatusNotFound, param: "model", text: "the model `" + *c.Model + "` does not exist"}
	}
	if err := c.unsupported(); err != nil {
		return nil, err
	}
	prompt, err := c.tokenize(chat, e.cfg.Model.Context)
	if err != nil {
		return nil, err
	}
	limits, err := c.limits(chat, len(prompt), e.cfg.Model.Context)
	if err != nil {
		return nil, err
	}
	send, load, err := c.transfer(e.cfg.Role, e.cfg.ranks())
	if err != nil {
		return nil, err
	}
	return &request{
		name: e.name(), prompt: prompt, send: send, load: load,
		answer: answer{limits: limits}, out: newOutput(),
	}, nil
}

// locate waits for the KV of a request that names some, and on the decode side
// looks for that of one that does not; found says that it did find some. What
// does not come is computed, unless the engine is told to fail.
func (e *Engine) locate(ctx context.Context, r *request) (found bool, err error) {
	switch {
	case r.load != "":
		if err = e.await(ctx, r.load); err != nil {
			e.stats.loadFailed.Add(1)
		}
	case r.send == nil && e.cfg.Role == Decode:
		if r.load, err = e.find(ctx, r.name, r.prompt); err == nil {
			return r.load != "", nil
		}
	}
	if err == nil || ctx.Err() != nil {
		return false, cause(ctx, err)
	}
	req := r.load
	r.load = ""
	if e.cfg.FailOnTransfer && req != "" {
		return false, transferError(req, err)
	}
	e.cfg.Log.Warn("KV not there, the prompt is computed here", "req", req, "err", err)
	return false, nil
}

func (e *Engine) serveTokenize(w http.ResponseWriter, r *http.Request) error {
	c, err := decode(r.Body)
	if err != nil {
		return err
	}
	tokens, err := c.tokenize(c.Prompt == nil && c.Messages != nil, e.cfg.Model.Context)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, map[string]any{"count": len(tokens), "max_model_len": e.cfg.Model.Context, "tokens": tokens, "token_strs": nil})
	return nil
}

func (e *Engine) serveModels(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, map[string]any{"object": "list", "data": []any{map[string]any{
		"id": e.cfg.Name, "object": "model", "created": 0, "owned_by": "berth", "root": e.cfg.Name, "max_model_len": e.cfg.Model.Context,
	}}})
}

// serveHealth answers 200 while the process lives; the body says what is wrong.
func (e *Engine) serveHealth(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, e.health())
}

// serveReady answers 200 only when the engine can serve.
func (e *Engine) serveReady(w http.ResponseWriter, _ *http.Request) {
	h := e.health()
	status := http.StatusOK
	if h.Status != "ok" {
		status = http.StatusServiceUnavailable
	}
	writeJSON(w, status, h)
}

type health struct {
	Status string `json:"status"` // "ok" or "degraded"
	Role   Role   `json:"role"`
	Reason string `json:"reason,omitempty"`
}

func (e *Engine) health() health {
	h := health{Status: "ok", Role: e.cfg.Role}
	if err := e.Ready(); err != nil {
		h.Status, h.Reason = "degraded", err.Error()
	}
	return h
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // our own types always encode
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(b, '\n')) // a client that has left needs no answer
}

// errorBody returns the status and the OpenAI error object for err.
func errorBody(err error) (status int, body any) {
	status, param := http.StatusInternalServerError, ""
	var api *apiError
	var f *fault.Error
	switch {
	case errors.As(err, &api):
		status, param = api.status, api.param
	case errors.Is(err, errClosing):
		status = http.StatusServiceUnavailable
	case errors.As(err, &f):
		status = f.Code.HTTPStatus()
	}
	kind := map[int]string{
		http.StatusBadRequest: "BadRequestError", http.StatusNotFound: "NotFoundError", http.StatusRequestEntityTooLarge: "BadRequestError",
		http.StatusServiceUnavailable: "ServiceUnavailableError",
	}[status]
	if kind == "" {
		kind = "InternalServerError"
	}
	object := map[string]any{"message": err.Error(), "type": kind, "param": nil, "code": status}
	if param != "" {
		object["param"] = param
	}
	return status, map[string]any{"error": object}
}

func writeError(w http.ResponseWriter, err error) {
	status, body := errorBody(err)
	if status == http.StatusServiceUnavailable {
		w.Header().Set("Retry-After", "1")
	}
	writeJSON(w, status, body)
}

// now is the `created` of an answer.
func now() int64 { return time.Now().Unix() }
