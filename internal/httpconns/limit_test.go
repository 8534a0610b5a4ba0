package httpconns

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds every wait; no passing test needs it.
const patience = 20 * time.Second

type client struct {
	net.Conn
	r *bufio.Reader
}

// served starts a server of so many connections. A request for /slow is answered
// once release is closed.
func served(t *testing.T, most int) (addr string, slow <-chan struct{}, release chan struct{}, refused, evicted *atomic.Int64) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	came := make(chan struct{}, 100)
	release, refused, evicted = make(chan struct{}), &atomic.Int64{}, &atomic.Int64{}
	srv := &http.Server{ReadHeaderTimeout: time.Hour, IdleTimeout: time.Hour, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			came <- struct{}{}
			<-release
		}
		fmt.Fprintln(w, r.URL.Path)
	})}
	limit(srv, most, 100*time.Millisecond, func(r bool) {
		if r {
			refused.Add(1)
		} else {
			evicted.Add(1)
		}
	})
	done := make(chan struct{})
	go func() { srv.Serve(l); close(done) }()
	t.Cleanup(func() { srv.Close(); <-done })
	return l.Addr().String(), came, release, refused, evicted
}

func dial(t *testing.T, addr string) *client {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(patience))
	return &client{c, bufio.NewReader(c)}
}

func (c *client) send(path string) {
	fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", path) // an error is that of answer
}

// answer reads an answer's body, an error where the connection was closed.
func (c *client) answer() (string, error) {
	resp, err := http.ReadResponse(c.r, nil)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return string(b), err
}

// comes is a newcomer that tries until it is answered.
func comes(t *testing.T, addr string) *client {
	t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); {
		c := dial(t, addr)
		c.send("/")
		if _, err := c.answer(); err == nil {
			return c
		}
		c.Close()
	}
	t.Fatalf("a newcomer was not answered for %v", patience)
	return nil
}

// Connections that ask for nothing, before their first request, in the middle of a
// header or after an answer, keep nobody out; one that is being answered stays.
func TestLimit(t *testing.T) {
	const most = 8
	addr, slow, release, refused, evicted := served(t, most)
	busy := dial(t, addr)
	busy.send("/slow")
	select {
	case <-slow:
	case <-time.After(patience):
		t.Fatal("the slow request did not come")
	}
	var idle []*client
	for i := range most - 1 {
		c := dial(t, addr)
		switch i % 3 {
		case 0:
			c.send("/")
			if _, err := c.answer(); err != nil {
				t.Fatal(err)
			}
		case 1:
			io.WriteString(c, "GET / HTTP/1.1\r\nHost: ")
		}
		idle = append(idle, c)
	}
	for range 3 * most {
		comes(t, addr)
	}
	for i, c := range idle {
		if _, err := c.answer(); err == nil {
			t.Errorf("idle connection %d was answered", i)
		}
	}
	close(release)
	if got, err := busy.answer(); err != nil || got != "/slow\n" {
		t.Errorf("the busy connection: %q, %v", got, err)
	}
	if n := evicted.Load(); n < 3*most-1 {
		t.Errorf("%d connections made room, for %d newcomers (%d refused)", n, 3*most, refused.Load())
	}
}

// Where every connection is being answered, a newcomer is closed.
func TestLimit_all_busy(t *testing.T) {
	addr, slow, release, refused, evicted := served(t, 2)
	var all []*client
	for range 2 {
		c := dial(t, addr)
		c.send("/slow")
		all = append(all, c)
		select {
		case <-slow:
		case <-time.After(patience):
			t.Fatal("a slow request did not come")
		}
	}
	late := dial(t, addr)
	late.send("/")
	if got, err := late.answer(); err == nil {
		t.Errorf("a third connection was answered: %q", got)
	}
	close(release)
	for _, c := range all {
		if got, err := c.answer(); err != nil || got != "/slow\n" {
			t.Errorf("a busy connection: %q, %v", got, err)
		}
	}
	if refused.Load() != 1 || evicted.Load() != 0 {
		t.Errorf("%d refused, %d evicted", refused.Load(), evicted.Load())
	}
	comes(t, addr)
}

// A process with few descriptors has fewer connections than it was told.
func TestPlaces(t *testing.T) {
	for _, c := range []struct {
		most        int
		descriptors uint64
		want        int
	}{{16384, 1 << 20, 16384}, {16384, 20000, 10000}, {1024, 64, 32}, {10, 1, 1}, {10, 0, 1}, {10, 1<<64 - 1, 10}} {
		if got := places(c.most, c.descriptors); got != c.want {
			t.Errorf("%d with %d descriptors: %d, want %d", c.most, c.descriptors, got, c.want)
		}
	}
}
