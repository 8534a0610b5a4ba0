package openai

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
)

func readAll(r io.Reader, max int) (events []string, err error) {
	er := NewEventReader(r, max)
	for {
		e, err := er.Next()
		if err != nil {
			return events, err
		}
		events = append(events, e.Name+"|"+string(e.Data))
	}
}

func TestEventReader(t *testing.T) {
	const max = 16
	for _, c := range []struct {
		name, in string
		want     []string
		err      error
	}{
		{"plain", "data: a\n\ndata: b\n\n", []string{"|a", "|b"}, io.EOF},
		{"line ends", "data: a\r\n\r\ndata: b\r\rdata: c\n\r\n", []string{"|a", "|b", "|c"}, io.EOF},
		{"several lines", "data: a\ndata:b\ndata\ndata:  c\n\n", []string{"|a\nb\n\n c"}, io.EOF},
		{"names", "event: error\ndata: a\n\ndata: b\n\n", []string{"error|a", "|b"}, io.EOF},
		{"a name without data names nothing", "event: x\n\ndata: b\n\n", []string{"|b"}, io.EOF},
		{"comments and other fields", ": hi\n\nid: 7\nretry: 1\ndata: a\n\n", []string{"|a"}, io.EOF},
		{"byte order mark", "\xef\xbb\xbfdata: a\n\n", []string{"|a"}, io.EOF},
		{"empty stream", "", nil, io.EOF},
		{"only blank lines", "\n\n\r\n", nil, io.EOF},
		{"cut in a line", "data: a\n\ndata: b", []string{"|a"}, io.ErrUnexpectedEOF},
		{"cut before the blank line", "data: a\n", nil, io.ErrUnexpectedEOF},
		{"a line at the limit", "data: 0123456789\n\n", []string{"|0123456789"}, io.EOF},
		{"a line above it", "data: 01234567890\n\n", nil, ErrEventTooLarge},
		{"an event at the limit", "data: 01234567\ndata: 0123456\n\n", []string{"|01234567\n0123456"}, io.EOF},
		{"an event above it", "data: 01234567\ndata: 01234567\n\n", nil, ErrEventTooLarge},
		{"a comment above it", ": 0123456789abcdefghi\n\n", nil, ErrEventTooLarge},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, r := range []io.Reader{strings.NewReader(c.in), iotest.OneByteReader(strings.NewReader(c.in))} {
				got, err := readAll(r, max)
				if diff := cmp.Diff(c.want, got); diff != "" || !errors.Is(err, c.err) {
					t.Errorf("%q: err %v, want %v; %s", c.in, err, c.err, diff)
				}
			}
		})
	}
}

// An event is returned once its last line is in: the reader asks for nothing
// beyond it.
func TestEventReaderDoesNotWait(t *testing.T) {
	stop := errors.New("read too far")
	for _, in := range []string{"data: a\n\n", "data: a\r\n\r", "data: a\r\r"} {
		r := NewEventReader(io.MultiReader(strings.NewReader(in), iotest.ErrReader(stop)), 64)
		if e, err := r.Next(); err != nil || string(e.Data) != "a" {
			t.Errorf("%q: %q, %v", in, e.Data, err)
		}
		if _, err := r.Next(); err != stop {
			t.Errorf("%q: the stream's error came out as %v", in, err)
		}
	}
}

// simpleEvents is the second implementation: it has the whole stream at once.
func simpleEvents(in string) (events []string, err error) {
	in = strings.ReplaceAll(strings.ReplaceAll(in, "\r\n", "\n"), "\r", "\n")
	lines := strings.Split(in, "\n")
	rest := lines[len(lines)-1]
	if len(lines) > 1 {
		lines[0] = strings.TrimPrefix(lines[0], "\xef\xbb\xbf")
	}
	var data []string
	name := ""
	for _, line := range lines[:len(lines)-1] {
		if line == "" {
			if data != nil {
				events = append(events, name+"|"+strings.Join(data, "\n"))
			}
			data, name = nil, ""
			continue
		}
		field, value, _ := strings.Cut(line, ":")
		value = strings.TrimPrefix(value, " ")
		switch field {
		case "data":
			data = append(data, value)
		case "event":
			name = value
		}
	}
	if rest != "" || data != nil {
		return events, io.ErrUnexpectedEOF
	}
	return events, io.EOF
}

func FuzzEventReader(f *testing.F) {
	for _, s := range []string{
		"data: a\n\ndata: [DONE]\n\n", "event: e\r\ndata: a\r\ndata: b\r\n\r\n", "data\r\rdata:x\n\n", ": c\n\n", "\xef\xbb\xbfdata: a\n\n",
		"data: {\"choices\":[]}\n", "event: x\n\ndata: y\n\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		want, wantErr := simpleEvents(string(in))
		for _, r := range []io.Reader{bytes.NewReader(in), iotest.OneByteReader(bytes.NewReader(in))} {
			got, err := readAll(r, len(in)+1)
			if diff := cmp.Diff(want, got); diff != "" || err != wantErr {
				t.Fatalf("%q: err %v, want %v; %s", in, err, wantErr, diff)
			}
		}
		var out []byte
		er := NewEventReader(bytes.NewReader(in), len(in)+1)
		for {
			e, err := er.Next()
			if err != nil {
				break
			}
			out = AppendEvent(out, e)
		}
		if again, _ := simpleEvents(string(out)); !cmp.Equal(again, want) {
			t.Fatalf("%q was written as %q", in, out)
		}
	})
}

// piecewise is a stream that comes in pieces.
type piecewise []string

func (p *piecewise) Read(b []byte) (int, error) {
	if len(*p) == 0 {
		return 0, io.EOF
	}
	n := copy(b, (*p)[0])
	*p = (*p)[1:]
	return n, nil
}

// TestBeforeRead: it is called whenever nothing is left of what was read, also in
// the middle of an event, and its error ends the reading.
func TestBeforeRead(t *testing.T) {
	broken := errors.New("broken")
	var log []string
	r := NewEventReader(&piecewise{"data: a\n\ndata: b\n\nda", "ta: c\n\n", "data: d\n\n", "data: e\n\n"}, 100)
	r.BeforeRead = func() error {
		if len(log) > 0 && log[len(log)-1] == "d" {
			return broken
		}
		log = append(log, "read")
		return nil
	}
	e, err := r.Next()
	for ; err == nil; e, err = r.Next() {
		log = append(log, string(e.Data))
	}
	if diff := cmp.Diff([]string{"read", "a", "b", "read", "c", "read", "d"}, log); diff != "" || err != broken {
		t.Errorf("%v; %s", err, diff)
	}
}
