package zmtp

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berthkv/berth/internal/testenv"
)

// Against real libzmq, through pyzmq, in both directions. testdata/peer.py is the other side; it sends PINGs every 50 ms.

func startPeer(t testing.TB, args ...string) *process {
	t.Helper()
	return startProcess(t, exec.Command(testenv.Python(t), append([]string{"testdata/peer.py"}, args...)...))
}

// often makes our side send many PINGs too.
var often = Options{HeartbeatInterval: 20 * time.Millisecond}

// interopMessages are MESSAGES of peer.py.
func interopMessages() [][][]byte {
	var out [][][]byte
	for i, n := range []int{0, 1, 254, 255, 256, 600, 8192, 65_535, 65_536, 100_000, 3_000_000} {
		out = append(out, [][]byte{bytes.Repeat([]byte{byte(i)}, n)})
	}
	return append(out, frames("a", "", string(bytes.Repeat([]byte("b"), 300)), "", "c"), make([][]byte, 10))
}

// startEcho is a Router that sends every message back.
func startEcho(t testing.TB, addr string, rec *recorder, opts Options) *Router {
	t.Helper()
	var router atomic.Pointer[Router]
	ready := make(chan struct{})
	rec.then = func(e Event) {
		<-ready
		if e.Kind == Message {
			if err := router.Load().SendWait(testContext(t), e.Conn, e.Frames...); err != nil {
				t.Error(err)
			}
		}
	}
	r, err := ListenRouter(testContext(t), addr, rec.handle, opts)
	if err != nil {
		t.Fatal(err)
	}
	router.Store(r)
	close(ready)
	return r
}

func port(r interface{ String() string }) string {
	_, p, _ := net.SplitHostPort(r.String())
	return p
}

func TestLibzmqConnects(t *testing.T) {
	t.Run("DEALER to our Router", func(t *testing.T) {
		leakCheck(t)
		rec := &recorder{}
		r := startEcho(t, "127.0.0.1:0", rec, often)
		defer func() { _ = r.Close() }()
		p := startPeer(t, "connect", "DEALER", port(r.Addr()), "10.0.0.5-to-10.0.0.77300")
		if got := p.line(t); got != "ok" {
			t.Fatal(got)
		}
		e := rec.kind(t, Connected, 0)
		if e.Identity != "10.0.0.5-to-10.0.0.77300" {
			t.Errorf("identity %q", e.Identity)
		}
		// It answers PING, with our context.
		if !r.conn(e.Conn).probe(testContext(t), patience) {
			t.Error("no PONG")
		}
		_ = p.in.Close()
		rec.kind(t, Disconnected, 0)
	})
	t.Run("REQ to our Router", func(t *testing.T) {
		leakCheck(t)
		rec := &recorder{}
		r := startEcho(t, "127.0.0.1:0", rec, often)
		defer func() { _ = r.Close() }()
		if got := startPeer(t, "connect", "REQ", port(r.Addr())).line(t); got != "ok" {
			t.Fatal(got)
		}
		if e := rec.kind(t, Connected, 0); e.Identity != generatedIdentity(e.Conn) {
			t.Errorf("identity %q", e.Identity)
		}
	})
	for _, typ := range []string{"REQ", "DEALER"} {
		t.Run(typ+" to our Rep", func(t *testing.T) {
			leakCheck(t)
			rep := startRep(t, func(_ context.Context, r Request) [][]byte { return r.Frames })
			if got := startPeer(t, "connect", typ, port(rep.Addr())).line(t); got != "ok" {
				t.Fatal(got)
			}
		})
	}
	t.Run("PUSH to our Pull", func(t *testing.T) {
		leakCheck(t)
		rec := &recorder{}
		pull := startPull(t, rec.handle, often)
		if got := startPeer(t, "connect", "PUSH", port(pull.Addr())).line(t); got != "ok" {
			t.Fatal(got)
		}
		for i, want := range interopMessages() {
			if e := rec.kind(t, Message, i); !equalFrames(e.Frames, want) {
				t.Errorf("message %d differs", i)
			}
		}
	})
}

func equalFrames(a, b [][]byte) bool {
	return len(a) == len(b) && bytes.Equal(appendMessage(nil, a), appendMessage(nil, b))
}

func TestLibzmqListens(t *testing.T) {
	t.Run("our Dealer to ROUTER", func(t *testing.T) {
		leakCheck(t)
		p := startPeer(t, "bind", "ROUTER", "0")
		d, err := DialDealer(testContext(t), "127.0.0.1:"+p.line(t), nil, often)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = d.Close() }()
		for _, m := range interopMessages() {
			if err := d.SendWait(testContext(t), m...); err != nil {
				t.Fatal(err)
			}
		}
		for i, want := range interopMessages() {
			if got, err := d.Recv(testContext(t)); err != nil || !equalFrames(got, want) {
				t.Fatalf("message %d differs, or %v", i, err)
			}
		}
		if !d.c.probe(testContext(t), patience) {
			t.Error("no PONG")
		}
	})
	for _, typ := range []string{"REP", "ROUTER"} {
		t.Run("our Req to "+typ, func(t *testing.T) {
			leakCheck(t)
			p := startPeer(t, "bind", typ, "0")
			r, err := DialReq(testContext(t), "127.0.0.1:"+p.line(t), often)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = r.Close() }()
			for i, m := range interopMessages() {
				if got, err := r.Do(testContext(t), m...); err != nil || !equalFrames(got, m) {
					t.Fatalf("message %d differs, or %v", i, err)
				}
			}
		})
	}
	t.Run("our Push to two PULLs", func(t *testing.T) {
		leakCheck(t)
		rec := &recorder{}
		push, err := NewPush(rec.handle, often)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = push.Close() }()
		var peers []*process
		for i := range 2 {
			p := startPeer(t, "bind", "PULL", "0")
			peers = append(peers, p)
			if err := push.Connect("127.0.0.1:" + p.line(t)); err != nil {
				t.Fatal(err)
			}
			rec.kind(t, Connected, i)
		}
		messages := interopMessages()
		for _, m := range messages {
			if err := push.Send(m...); err != nil {
				t.Fatal(err)
			}
		}
		for i, m := range messages {
			want := fmt.Sprintf("%d %x", len(m), sha256.Sum256(bytes.Join(m, []byte("|"))))
			if got := peers[i%2].line(t); got != want {
				t.Errorf("message %d: %s, want %s", i, got, want)
			}
		}
	})
	t.Run("our Pull type to ROUTER does not fit", func(t *testing.T) {
		leakCheck(t)
		p := startPeer(t, "bind", "ROUTER", "0")
		if _, err := DialPush(testContext(t), "127.0.0.1:"+p.line(t), nil, Options{}); !errors.Is(err, ErrIncompatible) {
			t.Error(err)
		}
	})
}

// libzmq comes back, with the same identity, to a Router that was gone and is there again.
func TestLibzmqReconnects(t *testing.T) {
	leakCheck(t)
	rec := &recorder{}
	r := startEcho(t, freeAddr(t), rec, Options{})
	addr := r.Addr().String()
	p := startPeer(t, "reconnect", port(r.Addr()), "peer")
	say := func(s string) {
		t.Helper()
		p.tell(t, "%s", s)
		if got := p.line(t); got != s {
			t.Fatalf("%q came back as %q", s, got)
		}
	}
	say("one")
	r.CloseConn(rec.kind(t, Connected, 0).Conn)
	if e := rec.kind(t, Connected, 1); !e.Again || e.Identity != "peer" {
		t.Errorf("%+v", e)
	}
	say("two")
	_ = r.Close()
	rec = &recorder{}
	r = startEcho(t, addr, rec, Options{})
	defer func() { _ = r.Close() }()
	rec.kind(t, Connected, 0)
	say("three")
}

// A second libzmq peer with a taken identity waits, and loses no message, until the first has gone.
func TestLibzmqSameIdentity(t *testing.T) {
	leakCheck(t)
	r := startEcho(t, "127.0.0.1:0", &recorder{}, Options{})
	defer func() { _ = r.Close() }()
	if got := startPeer(t, "same-identity", port(r.Addr())).line(t); got != "ok" {
		t.Fatal(got)
	}
}

// Our Redialer comes back to a libzmq ROUTER that was killed and started again, and is heard, for its identity is fresh.
func TestRedialerToLibzmq(t *testing.T) {
	leakCheck(t)
	p := startPeer(t, "bind", "ROUTER", "0")
	number := p.line(t)
	if _, err := strconv.Atoi(number); err != nil {
		t.Fatal(err)
	}
	rec := &recorder{}
	d, err := RedialDealer("127.0.0.1:"+number, func(n uint64) []byte { return fmt.Appendf(nil, "me#%d", n) }, rec.handle, Options{ReconnectMin: time.Millisecond, ReconnectMax: 20 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = d.Close() }()
	echoed := func(n int) {
		t.Helper()
		if err := d.Send(rec.kind(t, Connected, n).Conn, fmt.Append(nil, n)); err != nil {
			t.Fatal(err)
		}
		rec.kind(t, Message, n)
	}
	echoed(0)
	d.CloseConn(rec.kind(t, Connected, 0).Conn) // the same ROUTER, another identity
	echoed(1)
	_ = p.in.Close()
	rec.kind(t, Disconnected, 1)
	again := startPeer(t, "bind", "ROUTER", number)
	if got := again.line(t); got != number {
		t.Fatal(got)
	}
	echoed(2)
}
