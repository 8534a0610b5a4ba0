package localapi

import (
	"io"
	"net"
	"path/filepath"
	"testing"

	"github.com/berthkv/berth/internal/kv"
)

// answering is a Handler that answers every stage at once.
type answering struct{ s *Server }

func (a *answering) Connected(kv.ConnID, Cred) {}
func (a *answering) Hangup(kv.CallID)          {}
func (a *answering) Disconnected(kv.ConnID)    {}
func (a *answering) ProcessGone(int)           {}
func (a *answering) Request(_ kv.ConnID, call kv.CallID, req Request) {
	if r, ok := req.(*Stage); ok {
		a.s.Answer(call, &Slots{Slots: stagedSlots[:r.N]})
	}
}

var stagedSlots = []kv.SlotID{1, 2, 3, 4, 5, 6, 7, 8}

// BenchmarkCall is a call of a client over the socket and its answer, as bytes;
// the server decodes the one and encodes the other.
func BenchmarkCall(b *testing.B) {
	var h answering
	s, err := Listen(Config{Path: filepath.Join(b.TempDir(), "a.sock"), Handler: &h})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	h.s = s
	c, err := net.Dial("unix", s.Path())
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	frame, err := appendFrame(nil, func(b []byte) ([]byte, error) { return AppendRequest(b, 1, &Stage{Req: "cmpl-0123456789abcdef", N: 8}) })
	if err != nil {
		b.Fatal(err)
	}
	want, err := appendFrame(nil, func(b []byte) ([]byte, error) { return AppendAnswer(b, 1, &Slots{Slots: stagedSlots}) })
	if err != nil {
		b.Fatal(err)
	}
	got := make([]byte, len(want))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := c.Write(frame); err != nil {
			b.Fatal(err)
		}
		if _, err := io.ReadFull(c, got); err != nil {
			b.Fatal(err)
		}
	}
	if string(got) != string(want) {
		b.Fatalf("%x, want %x", got, want)
	}
}
