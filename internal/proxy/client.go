package proxy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"time"

	"github.com/berthkv/berth/internal/openai"
)

// client speaks HTTP with the engines, over kept connections.
type client struct {
	http      *http.Client
	transport *http.Transport
	maxAnswer int64
}

func newClient(cfg Config) *client {
	t := &http.Transport{
		DialContext:         (&net.Dialer{Timeout: 5 * time.Second, KeepAlive: 15 * time.Second}).DialContext,
		MaxConnsPerHost:     cfg.MaxInFlight + 16, // those of /ready and /v1/models besides
		MaxIdleConnsPerHost: 256,
		// Engines (uvicorn) close idle connections after 5 s; a request that meets
		// that moment cannot be told from one that was lost on the way.
		IdleConnTimeout:    4 * time.Second,
		DisableCompression: true,
		ForceAttemptHTTP2:  false,
		// A prompt of some thousand token ids in one write and one read, not in
		// pieces of 4 KiB that each wake somebody.
		WriteBufferSize: 16 << 10,
		ReadBufferSize:  16 << 10,
	}
	return &client{
		http: &http.Client{
			Transport:     t,
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
		transport: t,
		maxAnswer: cfg.MaxAnswer,
	}
}

// engineStatus is an engine's answer other than 200.
type engineStatus struct {
	api   *openai.Error
	retry string
}

func (e *engineStatus) Error() string { return e.api.Error() }

// do sends a request and returns the answer whatever its status; the caller
// closes its body.
func (c *client) do(ctx context.Context, method string, n *node, path string, h http.Header, body []byte) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://"+n.name+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	for k, v := range h {
		req.Header[k] = v
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	return c.http.Do(req)
}

// document sends a request and returns the body of a 200 answer. Another status
// is an *engineStatus; a body above the limit is an error.
func (c *client) document(ctx context.Context, method string, n *node, path string, h http.Header, body []byte) ([]byte, error) {
	resp, err := c.do(ctx, method, n, path, h, body)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	doc, err := c.readAll(resp)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, statusError(resp, doc)
	}
	return doc, nil
}

// readAll reads a body that is not streamed.
func (c *client) readAll(resp *http.Response) ([]byte, error) {
	if n := resp.ContentLength; 0 < n && n <= min(c.maxAnswer, maxPiece) { // more is not allocated before it is there
		doc := make([]byte, n)
		_, err := io.ReadFull(resp.Body, doc)
		return doc, err
	}
	doc, err := io.ReadAll(io.LimitReader(resp.Body, c.maxAnswer+1))
	if err != nil {
		return nil, err
	}
	if int64(len(doc)) > c.maxAnswer {
		return nil, fmt.Errorf("the answer is larger than %d bytes", c.maxAnswer)
	}
	return doc, nil
}

// statusError reads an answer other than 200 as an error.
func statusError(resp *http.Response, doc []byte) error {
	status := resp.StatusCode
	if status < 400 { // a redirect, or success without an answer
		return fmt.Errorf("the engine answered with status %d", status)
	}
	return &engineStatus{api: openai.EngineError(status, doc), retry: resp.Header.Get("Retry-After")}
}

// stream is an engine's answer as events, with a deadline for the first and
// between two.
type stream struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	resp   *http.Response
	events *openai.EventReader
	first  *time.Timer // runs until the first event
	idle   *time.Timer // runs while a later one is awaited; nil before
	limit  time.Duration
	begun  bool // the first event was there
	reply  *reply
}

var errNotEvents = errors.New("the answer is no event stream")

// isEvents reports whether an answer is an event stream.
func isEvents(resp *http.Response) bool {
	t, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	return err == nil && t == "text/event-stream"
}

// begin sends a request whose answer may be streamed. The caller closes the
// stream, also after an error; what comes may be no event stream (isEvents).
func (x *exchange) begin(n *node, path string, body []byte) (*stream, error) {
	t := x.p.cfg.Timeouts
	s := &stream{limit: t.DecodeIdle, reply: x.reply}
	s.ctx, s.cancel = context.WithCancelCause(x.ctx)
	s.first = time.AfterFunc(t.DecodeStart, func() {
		s.cancel(&stepTimeout{"the decode engine's first event", t.DecodeStart})
	})
	var err error
	if s.resp, err = x.p.client.do(s.ctx, http.MethodPost, n, path, x.header, body); err != nil {
		return s, err
	}
	s.events = openai.NewEventReader(s.resp.Body, x.p.cfg.MaxEvent)
	s.events.BeforeRead = s.wait
	return s, nil
}

// next returns the next event. Time counts only while the engine is waited for. A
// stream that ends without the caller's having seen [DONE] was cut:
// io.ErrUnexpectedEOF.
func (s *stream) next() (openai.Event, error) {
	e, err := s.events.Next()
	if !s.begun {
		s.begun = true
		s.first.Stop()
	}
	if s.idle != nil {
		s.idle.Stop()
	}
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return e, err
}

// wait is called before the engine is waited for: the client gets all that came
// so far, and after that time counts. So events that come at once go out at once,
// none is held back for another, and a slow client is not taken for a slow engine.
func (s *stream) wait() error {
	if s.idle != nil {
		s.idle.Stop()
	}
	if err := s.reply.flush(); err != nil {
		return &untaken{err}
	}
	switch {
	case !s.begun:
	case s.idle != nil:
		s.idle.Reset(s.limit)
	default:
		s.idle = time.AfterFunc(s.limit, func() {
			s.cancel(&stepTimeout{"the decode engine's next event", s.limit})
		})
	}
	return nil
}

// untaken is the error of a write to the client, which came while an engine was
// read.
type untaken struct{ error }

func (e *untaken) Unwrap() error { return e.error }

// drain reads what follows [DONE], which is nothing, so that the connection can
// be kept. An engine that does not end its answer at once loses it.
func (s *stream) drain() {
	const soon, little = 100 * time.Millisecond, 4096
	t := time.AfterFunc(soon, func() { s.cancel(nil) })
	defer t.Stop()
	io.Copy(io.Discard, io.LimitReader(s.resp.Body, little)) // nothing depends on it
}

// close drops the connection unless its answer was read to the end.
func (s *stream) close() {
	s.first.Stop()
	if s.idle != nil {
		s.idle.Stop()
	}
	s.cancel(nil)
	if s.resp != nil {
		s.resp.Body.Close()
	}
}
