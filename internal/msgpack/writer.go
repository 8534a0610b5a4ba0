package msgpack

import (
	"fmt"

	"github.com/tinylib/msgp/msgp"
)

// Writer appends values to a buffer, integers in their smallest form. Its
// first error sticks, as Reader's does.
type Writer struct {
	b   []byte
	err *Error
}

// NewWriter returns a writer that appends to b.
func NewWriter(b []byte) *Writer { return &Writer{b: b} }

// Bytes returns the buffer, or the first error, an *Error.
func (w *Writer) Bytes() ([]byte, error) {
	if w.err != nil {
		return nil, w.err
	}
	return w.b, nil
}

// Fail records an error, if it is the first.
func (w *Writer) Fail(format string, args ...any) {
	if w.err == nil {
		w.err = &Error{Text: fmt.Sprintf(format, args...)}
	}
}

// Map writes the header of a map of n entries.
func (w *Writer) Map(n int) { w.b = msgp.AppendMapHeader(w.b, uint32(n)) }

// Array writes the header of an array of n elements, at most max.
func (w *Writer) Array(n, max int) {
	if n > max {
		w.Fail("%d elements, at most %d", n, max)
		return
	}
	w.b = msgp.AppendArrayHeader(w.b, uint32(n))
}

// Key writes the key of a map's entry.
func (w *Writer) Key(name string) { w.str(name) }

// str writes the two short forms itself, in place: most are short.
func (w *Writer) str(s string) {
	switch n := len(s); {
	case n < 32:
		w.b = append(w.b, 0xa0|byte(n))
	case n < 256:
		w.b = append(w.b, 0xd9, byte(n))
	default:
		w.b = msgp.AppendString(w.b, s)
		return
	}
	w.b = append(w.b, s...)
}

// Raw writes values that are encoded already.
func (w *Writer) Raw(b []byte) { w.b = append(w.b, b...) }

// Str writes a string of at most max bytes.
func (w *Writer) Str(s string, max int) {
	switch {
	case len(s) > max:
		w.Fail("%d bytes, at most %d", len(s), max)
	default:
		if w.str(s); !validUTF8(w.b[len(w.b)-len(s):]) {
			w.Fail("invalid UTF-8")
		}
	}
}

// Text writes a string for people: cut at a character to max bytes, invalid
// bytes replaced.
func (w *Writer) Text(s string, max int) { w.str(Cut(s, max)) }

// Bin writes a bin of at most max bytes.
func (w *Writer) Bin(v []byte, max int) {
	if len(v) > max {
		w.Fail("%d bytes, at most %d", len(v), max)
		return
	}
	w.b = msgp.AppendBytes(w.b, v)
}

// binHeader writes the header of a bin of n bytes.
func (w *Writer) binHeader(n int) { w.b = msgp.AppendBytesHeader(w.b, uint32(n)) }

// Int writes an integer.
func (w *Writer) Int(v int64) {
	if v >= 0 {
		w.b = msgp.AppendUint64(w.b, uint64(v))
		return
	}
	w.b = msgp.AppendInt64(w.b, v)
}

// Uint writes an integer of at most max.
func (w *Writer) Uint(v, max uint64) {
	if v > max {
		w.Fail("%d, at most %d", v, max)
		return
	}
	w.b = msgp.AppendUint64(w.b, v)
}

// Bool writes a boolean.
func (w *Writer) Bool(v bool) { w.b = msgp.AppendBool(w.b, v) }

// Nil writes a nil.
func (w *Writer) Nil() { w.b = msgp.AppendNil(w.b) }
