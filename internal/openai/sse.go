package openai

import (
	"bufio"
	"bytes"
	"errors"
	"io"
)

// ErrEventTooLarge is returned for a line or an event beyond the limit.
var ErrEventTooLarge = errors.New("server-sent event is larger than the limit")

// Event is one server-sent event.
type Event struct {
	Name string // "" for the default
	Data []byte // lines joined by \n; valid until the next call of Next
}

// Done reports whether the event is OpenAI's end of a stream.
func (e Event) Done() bool { return string(e.Data) == "[DONE]" }

// EventReader reads server-sent events as they arrive: an event is returned as
// soon as its last line is in, whatever ends the lines (\n, \r\n or \r).
type EventReader struct {
	// BeforeRead, if set, is called when nothing is left of what was read and more
	// is awaited. Its error ends the reading.
	BeforeRead func() error

	r      *bufio.Reader
	max    int
	line   []byte
	data   []byte
	name   string
	begun  bool // a data line was seen
	second bool // past the first line, which may begin with a BOM
	skipLF bool // the last line ended with \r: a \n that follows belongs to it
}

// NewEventReader returns a reader whose lines and events are at most max bytes.
func NewEventReader(r io.Reader, max int) *EventReader {
	return &EventReader{r: bufio.NewReaderSize(r, 4096), max: max}
}

// Next returns the next event that has data. It returns io.EOF at the end of the
// stream, io.ErrUnexpectedEOF when the end cuts an event or a line short,
// ErrEventTooLarge beyond the limit, and else the error of the stream.
func (r *EventReader) Next() (Event, error) {
	r.data, r.name, r.begun = r.data[:0], "", false
	for {
		if r.r.Buffered() == 0 && r.BeforeRead != nil {
			if err := r.BeforeRead(); err != nil {
				return Event{}, err
			}
		}
		if _, err := r.r.Peek(1); err != nil { // waits for more
			if err == io.EOF && (len(r.line) > 0 || r.begun) {
				err = io.ErrUnexpectedEOF
			}
			return Event{}, err
		}
		got, _ := r.r.Peek(r.r.Buffered())
		if r.skipLF && got[0] == '\n' {
			got = got[1:]
			r.discard(1)
		}
		r.skipLF = false
		end, part := bytes.IndexByte(got, '\n'), got
		if end >= 0 {
			part = got[:end]
		}
		if cr := bytes.IndexByte(part, '\r'); cr >= 0 {
			end, part = cr, got[:cr]
		}
		if len(r.line)+len(part) > r.max {
			return Event{}, ErrEventTooLarge
		}
		r.line = append(r.line, part...)
		if end < 0 {
			r.discard(len(got))
			continue
		}
		r.skipLF = got[end] == '\r'
		r.discard(end + 1)
		if r.endLine() {
			return Event{Name: r.name, Data: r.data}, nil
		}
		if len(r.data) > r.max {
			return Event{}, ErrEventTooLarge
		}
	}
}

// discard drops n bytes that are buffered, which cannot fail.
func (r *EventReader) discard(n int) { _, _ = r.r.Discard(n) }

// endLine takes the line that is complete; true when it ends an event with data.
func (r *EventReader) endLine() bool {
	line := r.line
	r.line = r.line[:0]
	if !r.second {
		line = bytes.TrimPrefix(line, []byte("\xef\xbb\xbf"))
		r.second = true
	}
	if len(line) == 0 {
		if !r.begun {
			r.name = ""
		}
		return r.begun
	}
	name, value, _ := bytes.Cut(line, []byte(":"))
	value = bytes.TrimPrefix(value, []byte(" "))
	switch string(name) {
	case "data":
		if r.begun {
			r.data = append(r.data, '\n')
		}
		r.begun = true
		r.data = append(r.data, value...)
	case "event":
		r.name = string(value)
	}
	return false
}

// AppendEvent appends one server-sent event to dst.
func AppendEvent(dst []byte, e Event) []byte {
	if e.Name != "" {
		dst = append(dst, "event: "...)
		dst = append(dst, e.Name...)
		dst = append(dst, '\n')
	}
	for line := range bytes.SplitSeq(e.Data, []byte("\n")) {
		dst = append(dst, "data: "...)
		dst = append(dst, line...)
		dst = append(dst, '\n')
	}
	return append(dst, '\n')
}
