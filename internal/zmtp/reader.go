package zmtp

import (
	"errors"
	"io"
)

const (
	minReadBuffer = 4 << 10
	maxReadBuffer = 64 << 10
	// maxCommand bounds a command; READY with its properties is the only one that is not tiny.
	maxCommand = 8 << 10
	// firstBody is how much is allocated for a frame of which nothing has come yet; after that, as much again as has come.
	firstBody = 64 << 10
	// smallMessage need not ask for room.
	smallMessage = 4 << 10
)

// reader cuts a byte stream into messages and commands. Memory grows only with the bytes that have really come.
type reader struct {
	src io.Reader
	lim readLimits

	buf  []byte // buf[r:w] has been read and not yet parsed
	r, w int

	frames [][]byte // the message so far
	size   int64    // sum of its bodies

	// room is asked for memory for messages above smallMessage, before it is used; false ends the stream. nil: there is
	// always some. taken is what the message so far has got.
	room  func(n int64) bool
	taken int64
}

type readLimits struct {
	maxFrame, maxMessage int64
	maxFrames            int
}

func newReader(src io.Reader, lim readLimits) *reader {
	return &reader{src: src, lim: lim, buf: make([]byte, minReadBuffer)}
}

// fill reads until at least n bytes (n ≤ maxReadBuffer) are in the buffer. At the end of the stream it is io.EOF between
// messages and io.ErrUnexpectedEOF within one.
func (r *reader) fill(n int) error {
	if r.w-r.r >= n {
		return nil
	}
	if len(r.buf)-r.r < n {
		if n > len(r.buf) {
			grown := make([]byte, min(max(n, 2*len(r.buf)), maxReadBuffer))
			r.w = copy(grown, r.buf[r.r:r.w])
			r.buf = grown
		} else {
			r.w = copy(r.buf, r.buf[r.r:r.w])
		}
		r.r = 0
	}
	for r.w-r.r < n {
		if r.w == r.r {
			r.r, r.w = 0, 0
		}
		m, err := r.src.Read(r.buf[r.w:])
		r.w += m
		if r.w-r.r >= n {
			if r.r == 0 && r.w == len(r.buf) && len(r.buf) < maxReadBuffer {
				// The peer sends more than a buffer at a time: read more with each call from now on.
				r.buf = append(r.buf, make([]byte, len(r.buf))...)
			}
			return nil
		}
		if err != nil {
			if errors.Is(err, io.EOF) && (r.w > r.r || len(r.frames) > 0) {
				err = io.ErrUnexpectedEOF
			}
			return err
		}
	}
	return nil
}

// next returns either a message, which the caller then owns, or the body of a command, which is valid until the next call.
func (r *reader) next() (message [][]byte, command []byte, err error) {
	for {
		h, err := r.header()
		if err != nil {
			return nil, nil, err
		}
		if h.flags&flagCommand != 0 {
			if h.size > maxCommand {
				return nil, nil, protocolErrorf("command of %d bytes, at most %d", h.size, maxCommand)
			}
			n := h.len + int(h.size)
			if err := r.fill(n); err != nil {
				return nil, nil, err
			}
			command = r.buf[r.r+h.len : r.r+n]
			r.r += n
			return nil, command, nil
		}
		if err := r.admit(int64(h.size)); err != nil {
			return nil, nil, err
		}
		r.r += h.len
		body, err := r.body(int(h.size))
		if err != nil {
			return nil, nil, err
		}
		if r.frames == nil {
			r.frames = make([][]byte, 0, 2)
		}
		r.frames = append(r.frames, body)
		r.size += int64(len(body))
		if h.flags&flagMore == 0 {
			message, r.frames, r.size, r.taken = r.frames, nil, 0, 0
			return message, nil, nil
		}
	}
}

func (r *reader) header() (header, error) {
	for n := 1; ; {
		if err := r.fill(n); err != nil {
			return header{}, err
		}
		h, ok, err := parseHeader(r.buf[r.r:r.w])
		if ok || err != nil {
			return h, err
		}
		n = r.w - r.r + 1
	}
}

// admit checks a frame of the announced size against the limits, before anything of it is read.
func (r *reader) admit(size int64) error {
	if size > r.lim.maxFrame {
		return &LimitError{Option: "MaxFrame", Got: size, Max: r.lim.maxFrame}
	}
	if r.size+size > r.lim.maxMessage {
		return &LimitError{Option: "MaxMessage", Got: r.size + size, Max: r.lim.maxMessage}
	}
	if len(r.frames) >= r.lim.maxFrames {
		return &LimitError{Option: "MaxFrames", Got: int64(len(r.frames)) + 1, Max: int64(r.lim.maxFrames)}
	}
	return nil
}

// body returns the next size bytes in memory of their own.
func (r *reader) body(size int) ([]byte, error) {
	have := r.buf[r.r:min(r.w, r.r+size)]
	if len(have) == size {
		if err := r.ask(size); err != nil {
			return nil, err
		}
		b := make([]byte, size)
		copy(b, have)
		r.r += size
		return b, nil
	}
	// The rest goes straight from the source to where it belongs.
	first := min(size, max(firstBody, 2*len(have)))
	if err := r.ask(first); err != nil {
		return nil, err
	}
	b := make([]byte, first)
	got := copy(b, have)
	r.r += got
	for got < size {
		if got == len(b) {
			if err := r.ask(min(size, 2*len(b))); err != nil {
				return nil, err
			}
			grown := make([]byte, min(size, 2*len(b)))
			copy(grown, b)
			b = grown
		}
		n, err := r.src.Read(b[got:])
		got += n
		if err != nil && got < size {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
		}
	}
	return b, nil
}

// ask gets room for a body of n bytes besides those that the message has.
func (r *reader) ask(n int) error {
	more := r.size + int64(n) - r.taken
	if r.room == nil || r.size+int64(n) <= smallMessage || more <= 0 {
		return nil
	}
	if !r.room(more) {
		return ErrCrowded
	}
	r.taken += more
	return nil
}
