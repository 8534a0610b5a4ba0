package zmtp

import (
	"context"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/berthkv/berth/internal/freeport"
)

// patience bounds every wait of a test; none depends on it while the code is right.
const patience = 20 * time.Second

func TestMain(m *testing.M) {
	if os.Getenv(benchServerEnv) != "" {
		runBenchServer()
		return
	}
	goleak.VerifyTestMain(m)
}

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// leakCheck fails the test if it leaves goroutines or descriptors behind. Call it first.
func leakCheck(t testing.TB) {
	t.Helper()
	freeAddr(t) // from the first on the process holds its block of ports
	goroutines, before := goleak.IgnoreCurrent(), openSockets(t)
	t.Cleanup(func() {
		goleak.VerifyNone(t, goroutines)
		if after := openSockets(t); after > before {
			t.Errorf("%d sockets are open, %d were before", after, before)
		}
	})
}

// freeAddr is an address to listen on, again too, that nobody else takes meanwhile.
func freeAddr(t testing.TB) string {
	t.Helper()
	ports, err := freeport.Take(1)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprint("127.0.0.1:", ports[0])
}

// openSockets counts this process's sockets.
func openSockets(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, e := range entries {
		if target, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && strings.HasPrefix(target, "socket:") {
			n++
		}
	}
	return n
}

// recorder is a handler that keeps events and lets tests wait for them.
type recorder struct {
	mu     sync.Mutex
	events []Event
	more   gate
	then   Handler // called after recording, if set
}

func (r *recorder) handle(e Event) {
	r.mu.Lock()
	r.events = append(r.events, e)
	r.mu.Unlock()
	r.more.open()
	if r.then != nil {
		r.then(e)
	}
}

func (r *recorder) all() []Event {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.events)
}

// wait returns the n-th event (from 0) that matches.
func (r *recorder) wait(t testing.TB, n int, what string, match func(Event) bool) Event {
	t.Helper()
	deadline := time.After(patience)
	for {
		changed := r.more.wait()
		seen := 0
		for _, e := range r.all() {
			if match(e) {
				if seen == n {
					return e
				}
				seen++
			}
		}
		select {
		case <-changed:
		case <-deadline:
			t.Fatalf("no %s number %d among %d events: %v", what, n, len(r.all()), kinds(r.all()))
		}
	}
}

func (r *recorder) kind(t testing.TB, k Kind, n int) Event {
	t.Helper()
	return r.wait(t, n, k.String(), func(e Event) bool { return e.Kind == k })
}

func kinds(events []Event) []string {
	out := make([]string, 0, len(events))
	for _, e := range events[:min(len(events), 50)] {
		out = append(out, fmt.Sprintf("%v %d %q %v", e.Kind, e.Conn, e.Identity, e.Err))
	}
	return out
}

// startRouter is a Router on a free loopback port that is closed with the test.
func startRouter(t testing.TB, h Handler, opts Options) *Router {
	t.Helper()
	r, err := ListenRouter(testContext(t), "127.0.0.1:0", h, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	return r
}

func startDealer(t testing.TB, addr fmt.Stringer, h Handler, opts Options) *Conn {
	t.Helper()
	d, err := DialDealer(testContext(t), addr.String(), h, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	return d
}

// dialRaw is a bare TCP connection.
func dialRaw(t testing.TB, addr fmt.Stringer) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp", addr.String())
	if err != nil {
		t.Fatal(err)
	}
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c.(*net.TCPConn)
}

// hello is all that a peer sends before its first message.
func hello(typ socketType, identity string) []byte {
	return appendReady(appendGreeting(nil, len(identity)), typ, []byte(identity))
}

func frames(parts ...string) [][]byte {
	out := make([][]byte, len(parts))
	for i, p := range parts {
		out[i] = []byte(p)
	}
	return out
}

func text(fs [][]byte) string { return fmt.Sprintf("%q", fs) }

func closed(t testing.TB, what string, ch <-chan struct{}) {
	t.Helper()
	select {
	case <-ch:
	case <-time.After(patience):
		t.Fatalf("%s did not happen", what)
	}
}
