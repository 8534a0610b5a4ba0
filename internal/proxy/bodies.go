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

// The memory that a body is read into: a small piece, which is most bodies' only
// one, and then larger ones, which are used again. A body that grew in one piece
// would be copied and its new memory cleared again and again, page fault by page
// fault: that took more time than all else, with clients that send large ones.
const (
	firstPiece = 4 << 10
	nextPiece  = 64 << 10
)

var pieces = sync.Pool{New: func() any { return new([nextPiece]byte) }}

// readAll reads a body to its end. Memory is counted before it is taken, and taken
// as the bytes come; one piece is made of it only when all of it is there.
func (b *body) readAll(r io.Reader) ([]byte, error) {
	var next []*[nextPiece]byte
	defer func() {
		for _, p := range next {
			pieces.Put(p)
		}
	}()
	if err := b.add(firstPiece); err != nil {
		return nil, err
	}
	first := make([]byte, firstPiece)
	n, err := fillPiece(r, first)
	size := n
	for err == nil {
		if err = b.add(nextPiece); err != nil {
			break
		}
		p := pieces.Get().(*[nextPiece]byte)
		next = append(next, p)
		n, err = fillPiece(r, p[:])
		size += n
	}
	if !errors.Is(err, io.EOF) {
		return nil, err
	}
	all := first[:min(size, firstPiece)]
	if size > firstPiece {
		all = append(make([]byte, 0, size), all...)
		for _, p := range next {
			all = append(all, p[:min(size-len(all), nextPiece)]...)
		}
	}
	return all, b.add(int64(size - firstPiece - len(next)*nextPiece))
}

// fillPiece reads until p is full or there is an error, io.EOF at the end.
func fillPiece(r io.Reader, p []byte) (n int, err error) {
	for n < len(p) && err == nil {
		var m int
		m, err = r.Read(p[n:])
		n += m
	}
	return n, err
}
