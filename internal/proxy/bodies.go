package proxy

import (
	"errors"
	"io"
	"slices"
	"sync"
	"time"
)

// errBodies: the bodies of all requests in flight are as large as they may be.
var errBodies = errors.New("no room for the body")

// bodies counts the bytes of the bodies of all requests in flight. Where one more
// is too much, the body that is being read for the longest time goes: a client
// that withholds the end of a large one keeps no other out.
type bodies struct {
	max int64

	mu      sync.Mutex
	held    int64
	reading []*body // oldest first
}

// body is that of one request. Fields are guarded by bodies.mu.
type body struct {
	all       *bodies
	interrupt func(time.Time) error // sets a read deadline
	bytes     int64
	evicted   bool
}

// open begins to read a body. The caller calls read once it is through, and close
// when the request is over.
func (a *bodies) open(interrupt func(time.Time) error) *body {
	b := &body{all: a, interrupt: interrupt}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.reading = append(a.reading, b)
	return b
}

// read ends the reading; what was read stays counted. It reports whether the body
// had to go.
func (b *body) read() (evicted bool) {
	b.all.mu.Lock()
	defer b.all.mu.Unlock()
	b.unlistLocked()
	return b.evicted
}

func (b *body) close() {
	b.all.mu.Lock()
	defer b.all.mu.Unlock()
	b.unlistLocked()
	b.all.held -= b.bytes
	b.bytes = 0
}

func (b *body) unlistLocked() {
	if i := slices.Index(b.all.reading, b); i >= 0 {
		b.all.reading = slices.Delete(b.all.reading, i, i+1)
	}
}

// add counts n more bytes, for which others go if need be.
func (b *body) add(n int64) error {
	a := b.all
	a.mu.Lock()
	defer a.mu.Unlock()
	if b.evicted {
		return errBodies
	}
	b.bytes += n
	a.held += n
	for a.held > a.max {
		o := a.reading[0] // b itself is there
		o.unlistLocked()
		a.held -= o.bytes
		o.bytes, o.evicted = 0, true
		if o == b {
			return errBodies
		}
		_ = o.interrupt(time.Unix(1, 0)) // an error: it is gone already
	}
	return nil
}

// counted counts what it reads.
type counted struct {
	b *body
	r io.Reader
}

func (c counted) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	if e := c.b.add(int64(n)); e != nil {
		return n, e
	}
	return n, err
}
