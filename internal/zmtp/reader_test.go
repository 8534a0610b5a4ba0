package zmtp

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"
)

var testLimits = readLimits{maxFrame: 1000, maxMessage: 1500, maxFrames: 4}

// readAll renders what a reader makes of a stream.
func readAll(r *reader) string {
	var b strings.Builder
	for {
		message, command, err := r.next()
		switch {
		case err != nil:
			fmt.Fprintf(&b, "error %v", err)
			return b.String()
		case message != nil:
			fmt.Fprintf(&b, "message %x\n", message)
		default:
			fmt.Fprintf(&b, "command %x\n", command)
		}
	}
}

// parseAll is a second, simple implementation: it has the whole stream in memory.
func parseAll(b []byte, lim readLimits) string {
	var out strings.Builder
	var message [][]byte
	sum := int64(0)
	cut := func() string {
		if len(b) == 0 && message == nil {
			return out.String() + "error " + io.EOF.Error()
		}
		return out.String() + "error " + io.ErrUnexpectedEOF.Error()
	}
	for {
		h, ok, err := parseHeader(b)
		if err != nil {
			return out.String() + "error " + err.Error()
		}
		if !ok {
			return cut()
		}
		size := int64(h.size)
		if h.flags&flagCommand == 0 {
			switch {
			case size > lim.maxFrame:
				return out.String() + "error " + (&LimitError{"MaxFrame", size, lim.maxFrame}).Error()
			case sum+size > lim.maxMessage:
				return out.String() + "error " + (&LimitError{"MaxMessage", sum + size, lim.maxMessage}).Error()
			case len(message) == lim.maxFrames:
				return out.String() + "error " + (&LimitError{"MaxFrames", int64(len(message)) + 1, int64(lim.maxFrames)}).Error()
			}
		} else if size > maxCommand {
			return out.String() + "error " + protocolErrorf("command of %d bytes, at most %d", size, maxCommand).Error()
		}
		if int64(len(b)-h.len) < size {
			return cut()
		}
		body := b[h.len : h.len+int(size)]
		b = b[h.len+int(size):]
		if h.flags&flagCommand != 0 {
			fmt.Fprintf(&out, "command %x\n", body)
			continue
		}
		message, sum = append(message, body), sum+size
		if h.flags&flagMore == 0 {
			fmt.Fprintf(&out, "message %x\n", message)
			message, sum = nil, 0
		}
	}
}

// bigLimits let frames grow beyond the buffer.
var bigLimits = readLimits{maxFrame: 1 << 20, maxMessage: 1 << 20, maxFrames: 8}

func compareReaders(t *testing.T, stream []byte) {
	t.Helper()
	for _, lim := range []readLimits{testLimits, bigLimits} {
		want := parseAll(stream, lim)
		for name, src := range map[string]io.Reader{
			"whole":       bytes.NewReader(stream),
			"half":        iotest.HalfReader(bytes.NewReader(stream)),
			"end at once": iotest.DataErrReader(bytes.NewReader(stream)),
			"bytes":       iotest.OneByteReader(bytes.NewReader(stream)),
		} {
			if got := readAll(newReader(src, lim)); got != want {
				t.Fatalf("%s, limits %+v: got\n%.2000s\nwant\n%.2000s", name, lim, got, want)
			}
		}
	}
}

func TestReader(t *testing.T) {
	f := func(n int) string { return strings.Repeat("f", n) }
	for _, tc := range []struct {
		name   string
		stream []byte
		end    string // the last line of what the reader makes of it
	}{
		{"nothing", nil, "error EOF"},
		{"two messages", append(appendMessage(nil, frames("", "a")), appendMessage(nil, frames("b"))...), "error EOF"},
		{"a command between frames", append(append([]byte{1, 1, 'a'}, appendPing(nil, 1, nil)...), 0, 1, 'b'), "error EOF"},
		{"frame at the limit", appendMessage(nil, frames(f(1000))), "error EOF"},
		{"frame above", appendMessage(nil, frames(f(1001))), "error zmtp: 1001 is above MaxFrame = 1000"},
		{"message at the limit", appendMessage(nil, frames(f(1000), f(500))), "error EOF"},
		{"message above", appendMessage(nil, frames(f(1000), f(501))), "error zmtp: 1501 is above MaxMessage = 1500"},
		{"frames at the limit", appendMessage(nil, frames("", "", "", "")), "error EOF"},
		{"frames above", appendMessage(nil, frames("", "", "", "", "")), "error zmtp: 5 is above MaxFrames = 4"},
		{"command at the limit", appendCommand(nil, "X", make([]byte, maxCommand-2)), "error EOF"},
		{"command above", appendCommand(nil, "X", make([]byte, maxCommand-1)), "error zmtp: protocol error: command of 8193 bytes, at most 8192"},
		{"cut in a header", []byte{2, 0}, "error unexpected EOF"},
		{"cut in a body", []byte{0, 5, 'a'}, "error unexpected EOF"},
		{"cut between frames", []byte{1, 1, 'a'}, "error unexpected EOF"},
		{"many small ones", bytes.Repeat(appendMessage(nil, frames("", f(300))), 1000), "error EOF"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			compareReaders(t, tc.stream)
			got := readAll(newReader(bytes.NewReader(tc.stream), testLimits))
			if last := got[strings.LastIndex(got, "\n")+1:]; last != tc.end {
				t.Fatalf("ends with %q", last)
			}
		})
	}
	t.Run("frames larger than the buffer", func(t *testing.T) {
		for _, n := range []int{minReadBuffer, maxReadBuffer - 9, maxReadBuffer, firstBody + 1, 300_000, 1 << 20} {
			stream := appendMessage(nil, [][]byte{bytes.Repeat([]byte("big"), n/3)})
			compareReaders(t, append(stream, appendMessage(nil, frames("", "after"))...))
		}
	})
}

// A length that no bytes back costs no memory, however large the limits are.
func TestReaderAllocatesWhatCame(t *testing.T) {
	lim := readLimits{maxFrame: 1 << 50, maxMessage: 1 << 50, maxFrames: 1 << 30}
	stream := append([]byte{2, 0, 0, 1, 0, 0, 0, 0, 0}, "ten bytes."...) // 1 TiB
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, _, err := newReader(bytes.NewReader(stream), lim).next()
	runtime.ReadMemStats(&after)
	if !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Fatal(err)
	}
	if got := after.TotalAlloc - before.TotalAlloc; got > 1<<20 {
		t.Fatalf("%d bytes were allocated", got)
	}
}

// Messages own their memory: what comes later does not change them.
func TestReaderHandsOver(t *testing.T) {
	stream := append(appendMessage(nil, frames("", "first")), appendMessage(nil, frames("", "other"))...)
	r := newReader(bytes.NewReader(stream), testLimits)
	first, _, err := r.next()
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := r.next(); err != nil {
		t.Fatal(err)
	}
	if text(first) != text(frames("", "first")) {
		t.Fatalf("the first message became %q", first)
	}
}

func FuzzReader(f *testing.F) {
	for _, s := range loadVectors(f) {
		for _, h := range []string{s.ClientToServer, s.ServerToClient} {
			b, err := hex.DecodeString(h)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(b[greetingLen:])
		}
	}
	f.Add(append(append([]byte{1, 1, 'a'}, appendPing(nil, 1, nil)...), 0, 1, 'b'))
	f.Add(bytes.Repeat([]byte{1, 0}, 9))
	f.Fuzz(func(t *testing.T, stream []byte) {
		compareReaders(t, stream)
	})
}

// FuzzHandshake: whatever a peer sends, it is told from a good one without a panic, and a good one reads back the same.
func FuzzHandshake(f *testing.F) {
	f.Add(appendGreeting(nil, 3), appendReady(nil, typeDealer, []byte("abc"))[2:])
	f.Add([]byte("GET / HTTP/1.1\r\n"), []byte("\x05ERROR\x02no"))
	f.Fuzz(func(t *testing.T, greeting, body []byte) {
		for n := range min(len(greeting), greetingLen) + 1 {
			_, _ = parseGreeting(greeting[:n])
		}
		name, data, err := parseCommand(body)
		if err != nil {
			return
		}
		if name == "ERROR" && peerError(data) == nil {
			t.Fatal("an ERROR that is none")
		}
		_, _, _ = parsePing(data)
		typ, identity, err := parseReady(data)
		if err != nil || !typ.announcesIdentity() {
			return
		}
		typ2, identity2, err := parseReady(appendReady(nil, typ, identity)[2+len("\x05READY"):])
		if err == nil && (typ2 != typ || !bytes.Equal(identity, identity2)) {
			t.Fatalf("%q %q became %q %q", typ, identity, typ2, identity2)
		}
	})
}
