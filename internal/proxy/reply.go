package proxy

import (
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/berthkv/berth/internal/openai"
)

const (
	jsonType  = "application/json"
	eventType = "text/event-stream; charset=utf-8"
	maxPiece  = 64 << 10 // bytes of a document in one write
)

// reply is the answer to one client. Events are written by flush, several at once
// if they came at once, at the latest when they are maxPiece. A write that the
// client does not take within timeout fails.
type reply struct {
	w       http.ResponseWriter
	ctl     *http.ResponseController
	timeout time.Duration
	buf     []byte // events to be written

	started bool // a byte of the answer is out: errors must be events now
	stream  bool // the answer is an event stream
}

func newReply(w http.ResponseWriter, timeout time.Duration) *reply {
	return &reply{w: w, ctl: http.NewResponseController(w), timeout: timeout}
}

func (o *reply) write(b []byte) error {
	if err := o.ctl.SetWriteDeadline(time.Now().Add(o.timeout)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return err
	}
	if _, err := o.w.Write(b); err != nil {
		return err
	}
	if err := o.ctl.Flush(); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return err
	}
	return nil
}

// event takes one event, and before the first one sets the head of the answer.
func (o *reply) event(e openai.Event) error {
	if !o.started {
		h := o.w.Header()
		h.Set("Content-Type", eventType)
		h.Set("Cache-Control", "no-cache")
		h.Set("X-Accel-Buffering", "no")
		o.w.WriteHeader(http.StatusOK)
		o.started, o.stream = true, true
	}
	o.buf = openai.AppendEvent(o.buf, e)
	if len(o.buf) < maxPiece {
		return nil
	}
	return o.flush()
}

// flush writes the events that were taken.
func (o *reply) flush() error {
	if len(o.buf) == 0 {
		return nil
	}
	b := o.buf
	o.buf = o.buf[:0]
	return o.write(b)
}

// events takes the data of several.
func (o *reply) events(data [][]byte) error {
	for _, d := range data {
		if err := o.event(openai.Event{Data: d}); err != nil {
			return err
		}
	}
	return nil
}

// done ends a good stream.
func (o *reply) done() error {
	if err := o.event(openai.Event{Data: []byte("[DONE]")}); err != nil {
		return err
	}
	return o.flush()
}

// document sends a whole answer.
func (o *reply) document(status int, body []byte) error {
	h := o.w.Header()
	if h.Get("Content-Type") == "" {
		h.Set("Content-Type", jsonType)
	}
	h.Set("Content-Length", strconv.Itoa(len(body)))
	o.w.WriteHeader(status)
	o.started = true
	// In pieces, so that the deadline asks for progress, not for all at once.
	for len(body) > maxPiece {
		if err := o.write(body[:maxPiece]); err != nil {
			return err
		}
		body = body[maxPiece:]
	}
	return o.write(body)
}

// fail tells the client of an error: by status before the first byte, by an
// event after it. An error event is the last one: no [DONE] follows.
func (o *reply) fail(e *openai.Error, retry string) error {
	if o.stream {
		if err := o.event(openai.Event{Data: e.Body()}); err != nil {
			return err
		}
		return o.flush()
	}
	if o.started {
		return nil // a document goes out whole or breaks off
	}
	if retry != "" {
		o.w.Header().Set("Retry-After", retry)
	}
	return o.document(e.Status, e.Body())
}
