package bench

import (
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/wire"
)

// TestStencils: a message with numbers written into it is what its values encode to.
func TestStencils(t *testing.T) {
	alloc, cancel, err := stencils(3)
	if err != nil {
		t.Fatal(err)
	}
	for _, pair := range []int{0, 1, 0xa5a5a5a5, 999_999} {
		for _, s := range []stencil{alloc, cancel} {
			s.number(pair)
			got, err := wire.Decode(s.b[11:])
			if err != nil {
				t.Fatal(err)
			}
			var req string
			var keys []string
			switch m := got.(type) {
			case *msg.AllocRequest:
				req, keys = m.ReqID, m.Keys
				if m.TotalChunks != 3 {
					t.Errorf("total chunks %d", m.TotalChunks)
				}
			case *msg.CancelNotif:
				req, keys = m.ReqID, m.Keys
			}
			if want := fmt.Sprintf("b%016x", pair<<12); req != want {
				t.Errorf("request %q, not %q", req, want)
			}
			for j, k := range keys {
				if want := fmt.Sprintf("m@1@0@%016x@bfloat16", pair<<12+j+1); k != want {
					t.Errorf("key %q, not %q", k, want)
				}
			}
		}
	}
}

// TestAnswer: an answer is taken when it is whole, in whatever pieces it comes, and what is none is an error.
func TestAnswer(t *testing.T) {
	payload, err := wire.Append(nil, &msg.AllocResponse{RemoteIndexes: []int64{3, 700}})
	if err != nil {
		t.Fatal(err)
	}
	short := append([]byte{1, 0, 0, byte(len(payload))}, payload...)
	long := append([]byte{1, 0, 2, 0, 0, 0, 0, 0, 0, 0, byte(len(payload))}, payload...)
	for _, frames := range [][]byte{short, long} {
		for cut := range len(frames) {
			a, peer := askerPair(t)
			if cut > 0 {
				unix.Write(peer, frames[:cut])
				if got, err := a.answer(); got != nil || err != nil {
					t.Fatalf("of %d bytes it makes %v, %v", cut, got, err)
				}
			}
			unix.Write(peer, frames[cut:])
			got, err := a.answer()
			if err != nil || fmt.Sprint(got.RemoteIndexes) != "[3 700]" {
				t.Fatalf("in pieces of %d and %d bytes: %v, %v", cut, len(frames)-cut, got, err)
			}
			if err := granted(got, 2); err != nil {
				t.Error(err)
			}
		}
	}
	request, err := wire.Append(nil, &msg.ProxyNotif{ReqID: "r"})
	if err != nil {
		t.Fatal(err)
	}
	for what, b := range map[string][]byte{
		"that nobody asked for": append(append([]byte{}, short...), 1, 0),
		"is no answer":          append([]byte{0, byte(len(request))}, request...),
		"unexpected EOF":        nil,
	} {
		a, peer := askerPair(t)
		if unix.Write(peer, b); b == nil {
			unix.Shutdown(peer, unix.SHUT_WR)
		}
		if got, err := a.answer(); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%x: %v, %v, not %q", b, got, err, what)
		}
	}
	for _, slots := range [][]int64{{1}, {1, -1}, {1, 2, 3}} {
		if granted(&msg.AllocResponse{RemoteIndexes: slots}, 2) == nil {
			t.Errorf("%v is taken for 2 keys", slots)
		}
	}
}

func askerPair(t *testing.T) (*asker, int) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		unix.Close(fds[0])
		unix.Close(fds[1])
	})
	return &asker{fd: fds[0]}, fds[1]
}
