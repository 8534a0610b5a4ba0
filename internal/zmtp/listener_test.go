package zmtp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// gone waits until the other side has closed a bare connection.
func gone(t testing.TB, tcp io.Reader) {
	t.Helper()
	_, err := io.Copy(io.Discard, tcp)
	if ne := net.Error(nil); errors.As(err, &ne) && ne.Timeout() {
		t.Fatal("the connection is still open")
	}
}

func TestRouterEventsInOrder(t *testing.T) {
	leakCheck(t)
	rec := &recorder{}
	r := startRouter(t, rec.handle, Options{})
	d := startDealer(t, r.Addr(), nil, Options{Identity: []byte("me")})
	for _, m := range []string{"a", "b"} {
		if err := d.Send(nil, []byte(m)); err != nil {
			t.Fatal(err)
		}
	}
	_ = d.Close()
	last := rec.kind(t, Disconnected, 0)
	if !errors.Is(last.Err, io.EOF) {
		t.Errorf("the end is %v, not EOF", last.Err)
	}
	var got []string
	for _, e := range rec.all() {
		got = append(got, fmt.Sprintf("%v %d %s %v %s", e.Kind, e.Conn, e.Identity, e.Remote.Addr(), text(e.Frames)))
	}
	want := []string{
		`connected 1 me 127.0.0.1 []`, `message 1 me 127.0.0.1 ["" "a"]`, `message 1 me 127.0.0.1 ["" "b"]`, `disconnected 1 me 127.0.0.1 []`,
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if err := r.Send(last.Conn, []byte("late")); !errors.Is(err, ErrGone) {
		t.Errorf("a send to a lost connection: %v", err)
	}
	// The same identity comes again, as another connection; one without gets a name of its own.
	startDealer(t, r.Addr(), nil, Options{Identity: []byte("me")})
	if e := rec.kind(t, Connected, 1); !e.Again || e.Conn == last.Conn {
		t.Errorf("came again: %+v", e)
	}
	startDealer(t, r.Addr(), nil, Options{})
	if e := rec.kind(t, Connected, 2); e.Again || e.Identity != generatedIdentity(e.Conn) {
		t.Errorf("without identity: %+v", e)
	}
}

func TestIPv6(t *testing.T) {
	leakCheck(t)
	for _, addr := range []string{"[::1]:0", "[::]:0"} {
		rec := &recorder{}
		r, err := ListenRouter(testContext(t), addr, rec.handle, Options{
			Allow: func(a netip.Addr) bool {
				return a == netip.MustParseAddr("::1") || a == netip.MustParseAddr("127.0.0.1")
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		hosts := []string{"[::1]"}
		if addr == "[::]:0" {
			hosts = append(hosts, "127.0.0.1") // seen as IPv4, although it came through an IPv6 socket
		}
		for i, host := range hosts {
			d, err := DialDealer(testContext(t), fmt.Sprintf("%s:%d", host, r.Addr().Port()), nil, Options{})
			if err != nil {
				t.Fatal(err)
			}
			if e := rec.kind(t, Connected, i); e.Remote.Addr() != netip.MustParseAddr(strings.Trim(host, "[]")) {
				t.Errorf("remote is %v", e.Remote)
			}
			if err := r.Send(rec.kind(t, Connected, i).Conn, []byte("hi")); err != nil {
				t.Error(err)
			}
			if m, err := d.Recv(testContext(t)); err != nil || text(m) != `["hi"]` {
				t.Error(m, err)
			}
			_ = d.Close()
		}
		_ = r.Close()
	}
}

func TestAllow(t *testing.T) {
	leakCheck(t)
	r := startRouter(t, func(Event) {}, Options{Allow: func(a netip.Addr) bool { return false }})
	gone(t, dialRaw(t, r.Addr()))
	if s := r.Stats(); s.NotAllowed != 1 || s.Conns+s.Handshakes != 0 {
		t.Errorf("%+v", s)
	}
}

// What is queued arrives before the connection closes, also when the peer is slow to read it.
func TestCloseConnFlushes(t *testing.T) {
	leakCheck(t)
	const n, size = 200, 64 << 10
	rec := &recorder{}
	var router atomic.Pointer[Router]
	rec.then = func(e Event) {
		if e.Kind == Message {
			for range n {
				if err := router.Load().Send(e.Conn, make([]byte, size)); err != nil {
					t.Error(err)
				}
			}
			router.Load().CloseConn(e.Conn)
			if err := router.Load().Send(e.Conn, nil); !errors.Is(err, ErrGone) {
				t.Errorf("a send after CloseConn: %v", err)
			}
		}
	}
	router.Store(startRouter(t, rec.handle, Options{Linger: patience}))
	d := startDealer(t, router.Load().Addr(), nil, Options{RecvQueue: 1})
	if err := d.Send(nil); err != nil {
		t.Fatal(err)
	}
	for i := range n {
		if m, err := d.Recv(testContext(t)); err != nil || len(m[0]) != size {
			t.Fatalf("message %d: %v", i, err)
		}
	}
	if _, err := d.Recv(testContext(t)); !errors.Is(err, io.EOF) {
		t.Errorf("then %v", err)
	}
	if e := rec.kind(t, Disconnected, 0); !errors.Is(e.Err, ErrClosed) {
		t.Errorf("the end is %v", e.Err)
	}
}

// What a peer still sends after CloseConn is dropped.
func TestCloseConnDropsWhatComes(t *testing.T) {
	leakCheck(t)
	rec := &recorder{}
	r := startRouter(t, rec.handle, Options{Linger: patience})
	p := startRawPeer(t, r, 1)
	r.CloseConn(rec.kind(t, Connected, 0).Conn)
	gone(t, p)
	if _, err := p.Write(appendMessage(nil, frames("", "late"))); err != nil {
		t.Fatal(err)
	}
	_ = p.Close()
	rec.kind(t, Disconnected, 0)
	if n := len(rec.all()); n != 2 {
		t.Errorf("events: %v", kinds(rec.all()))
	}
}

// A peer that neither reads nor hangs up holds up a close for no longer than Linger.
func TestCloseIsBounded(t *testing.T) {
	leakCheck(t)
	rec := &recorder{}
	r := startRouter(t, rec.handle, Options{Linger: 50 * time.Millisecond, SendQueueBytes: 4 << 20})
	tcp := dialRaw(t, r.Addr())
	if _, err := tcp.Write(hello(typeDealer, "mute")); err != nil {
		t.Fatal(err)
	}
	id := rec.kind(t, Connected, 0).Conn
	fill(t, func() error { return r.Send(id, make([]byte, 1<<20)) })
	dialRaw(t, r.Addr()) // and one that is still in handshake
	done := make(chan struct{})
	go func() { _ = r.Close(); _ = r.Close(); close(done) }()
	closed(t, "Close", done)
	if e := rec.kind(t, Disconnected, 0); !errors.Is(e.Err, ErrClosed) {
		t.Errorf("the end is %v", e.Err)
	}
}

// fill sends until the queue is full.
func fill(t testing.TB, send func() error) {
	t.Helper()
	for range 1 << 20 {
		if err := send(); errors.Is(err, ErrWouldBlock) {
			return
		} else if err != nil {
			t.Fatal(err)
		}
	}
	t.Fatal("the queue has no end")
}

func TestGarbageCostsItsOwnConnection(t *testing.T) {
	leakCheck(t)
	rec := &recorder{}
	r := startRouter(t, rec.handle, Options{MaxFrame: 1 << 20})
	d := startDealer(t, r.Addr(), nil, Options{})
	good := rec.kind(t, Connected, 0).Conn

	greeting := string(appendGreeting(nil, 0))
	mid := string(hello(typeDealer, ""))
	for name, garbage := range map[string]string{
		"HTTP":                      "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
		"TLS":                       "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
		"ZMTP 2":                    "\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x01\x05",
		"another mechanism":         strings.Replace(greeting, "NULL", "CURVE", 1),
		"message instead of READY":  greeting + "\x00\x01x",
		"command instead of READY":  greeting + "\x04\x05\x04PING",
		"READY of nothing":          greeting + "\x04\x06\x05READY",
		"READY cut off":             greeting + "\x04\x08\x05READY\x0b\x53",
		"error":                     greeting + "\x04\x09\x05ERROR\x02no",
		"huge command":              greeting + "\x06\x00\x00\x00\x00\x7f\xff\xff\xff",
		"identity of reserved kind": string(hello(typeDealer, "\x00x")),
		"incompatible type":         string(hello(typePush, "")),
		"unknown type":              string(hello("WHAT", "")),
		"reserved flags":            mid + "\xf0\x01x",
		"1 TiB":                     mid + "\x02\x00\x00\x01\x00\x00\x00\x00\x00",
		"malformed command":         mid + "\x04\x01\x07",
		"malformed PING":            mid + "\x04\x05\x04PING",
		"long PING context":         mid + "\x04\x18\x04PING\x00\x00" + strings.Repeat("c", 17),
		"ERROR":                     mid + "\x04\x09\x05ERROR\x02no",
	} {
		t.Run(name, func(t *testing.T) {
			tcp := dialRaw(t, r.Addr())
			if _, err := tcp.Write([]byte(garbage)); err != nil {
				t.Fatal(err)
			}
			gone(t, tcp)
		})
	}
	if err := r.Send(good, []byte("fine")); err != nil {
		t.Fatal(err)
	}
	if m, err := d.Recv(testContext(t)); err != nil || text(m) != `["fine"]` {
		t.Fatal(m, err)
	}
	for _, e := range rec.all() {
		var pe *ProtocolError
		var le *LimitError
		if e.Kind == Disconnected && !errors.As(e.Err, &pe) && !errors.As(e.Err, &le) {
			t.Errorf("the end of %q is %v", e.Identity, e.Err)
		}
	}
}

func TestIncompatibleTypes(t *testing.T) {
	leakCheck(t)
	pull, err := ListenPull(testContext(t), "127.0.0.1:0", func(Event) {}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = pull.Close() }()
	_, err = DialDealer(testContext(t), pull.Addr().String(), nil, Options{})
	if !errors.Is(err, ErrIncompatible) || !strings.Contains(err.Error(), "DEALER") || !strings.Contains(err.Error(), "PULL") {
		t.Fatal(err)
	}
}

// Silent TCP peers by the thousand do not keep others out, and are closed when their time is up.
func TestHalfOpenConnections(t *testing.T) {
	for _, tc := range []struct {
		name         string
		silent, most int
		timeout      time.Duration
	}{
		{"a thousand within the limit", 1000, 1024, time.Second},
		{"more than the limit", 100, 60, patience},
	} {
		t.Run(tc.name, func(t *testing.T) {
			leakCheck(t)
			rec := &recorder{}
			r := startRouter(t, rec.handle, Options{MaxHandshakes: tc.most, HandshakeTimeout: tc.timeout})
			silent := make([]net.Conn, tc.silent)
			for i := range silent {
				silent[i] = dialRaw(t, r.Addr())
			}
			d := startDealer(t, r.Addr(), nil, Options{HandshakeTimeout: patience})
			id := rec.kind(t, Connected, 0).Conn
			if err := r.Send(id, []byte("hi")); err != nil {
				t.Fatal(err)
			}
			if _, err := d.Recv(testContext(t)); err != nil {
				t.Fatal(err)
			}
			if n := r.Stats().Handshakes; n > tc.most {
				t.Errorf("%d in handshake, at most %d", n, tc.most)
			}
			gone(t, silent[0]) // the oldest: for its deadline, or to make room
			if tc.timeout < patience {
				for _, tcp := range silent {
					gone(t, tcp)
				}
			}
		})
	}
}

func TestMaxConns(t *testing.T) {
	leakCheck(t)
	rec := &recorder{}
	r := startRouter(t, rec.handle, Options{MaxConns: 2, KeepIdle: true})
	first := startDealer(t, r.Addr(), nil, Options{})
	startDealer(t, r.Addr(), nil, Options{})
	if _, err := DialDealer(testContext(t), r.Addr().String(), nil, Options{}); err == nil {
		t.Fatal("a third connection was taken")
	}
	_ = first.Close()
	rec.kind(t, Disconnected, 0)
	// The place is free once the handler has returned; until then a dial is refused.
	client := &recorder{}
	d, err := RedialDealer(r.Addr().String(), nil, client.handle, Options{ReconnectMin: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = d.Close() }()
	client.kind(t, Connected, 0)
}

// failingListener fails some accepts as the kernel does when no descriptor is left.
type failingListener struct {
	net.Listener
	left atomic.Int32
}

func (l *failingListener) Accept() (net.Conn, error) {
	if l.left.Add(-1) >= 0 {
		return nil, &net.OpError{Op: "accept", Net: "tcp", Err: syscall.EMFILE}
	}
	return l.Listener.Accept()
}

// startFailing starts a ROUTER whose first accepts fail.
func startFailing(t *testing.T, fail int32, handle func(Event)) (*Listener, *failingListener) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	opts, err := Options{}.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	f := &failingListener{Listener: ln}
	f.left.Store(fail)
	l := newListener(typeRouter, f, handle, opts)
	t.Cleanup(func() { _ = l.Close() })
	return l, f
}

func TestAcceptErrorsAreNotFatal(t *testing.T) {
	leakCheck(t)
	l, _ := startFailing(t, 3, func(Event) {})
	startDealer(t, l.Addr(), nil, Options{})
	if n := l.Stats().AcceptErrors; n != 3 {
		t.Errorf("%d accept errors", n)
	}
}

// Where no descriptor is left, what is silent makes room for newcomers, whether it is through with its handshake or not.
func TestNoDescriptorsLeft(t *testing.T) {
	leakCheck(t)
	rec := &recorder{}
	l, f := startFailing(t, 0, rec.handle)
	startDealer(t, l.Addr(), nil, Options{Identity: []byte("silent")})
	rec.kind(t, Connected, 0)
	mute := dialRaw(t, l.Addr()) // it says no greeting
	for ctx := testContext(t); l.Stats().Handshakes != 1; runtime.Gosched() {
		if ctx.Err() != nil {
			t.Fatal("the mute connection is not taken")
		}
	}
	f.left.Store(1 << 30) // it waits for a connection: the next one is taken, and no more
	dialRaw(t, l.Addr())
	if _, err := io.Copy(io.Discard, mute); err != nil && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the connection in handshake: %v", err)
	}
	if e := rec.kind(t, Disconnected, 0); e.Identity != "silent" || !errors.Is(e.Err, ErrIdle) {
		t.Errorf("%v went, with %v", e.Identity, e.Err)
	}
	f.left.Store(0)
	late := startDealer(t, l.Addr(), nil, Options{})
	if err := late.Send(nil, []byte("hi")); err != nil {
		t.Fatal(err)
	}
	rec.kind(t, Message, 0)
}

// r91: a storm of connections that are cut in every state leaves nothing behind, and each that came also went.
func TestDisconnectStorm(t *testing.T) {
	leakCheck(t)
	rec := &recorder{}
	r := startEcho(t, "127.0.0.1:0", rec, Options{})
	defer func() { _ = r.Close() }()
	whole := append(hello(typeDealer, ""), appendMessage(nil, frames("", strings.Repeat("m", 500)))...)
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			tcp := dialRaw(t, r.Addr())
			if _, err := tcp.Write(whole[:len(whole)*(i+1)/200]); err != nil {
				t.Error(err)
			}
			if i%2 == 0 {
				_ = tcp.SetLinger(0) // cut with a reset
			}
			_ = tcp.Close()
		})
	}
	wg.Wait()
	d := startDealer(t, r.Addr(), nil, Options{Identity: []byte("last")}) // accepted after all of them
	if err := d.Send(nil, []byte("hi")); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Recv(testContext(t)); err != nil {
		t.Fatal(err)
	}
	_ = d.Close()
	_ = r.Close()
	if s := r.Stats(); s.Conns+s.Handshakes != 0 || s.Accepted != 201 {
		t.Errorf("%+v", s)
	}
	balance := map[ConnID]int{}
	for _, e := range rec.all() {
		switch e.Kind {
		case Connected:
			balance[e.Conn]++
		case Disconnected:
			balance[e.Conn]--
		}
	}
	for id, n := range balance {
		if n != 0 {
			t.Errorf("connection %d: %d more Connected than Disconnected", id, n)
		}
	}
}

// The leak checks of these tests can fail.
func TestLeakCheckSeesLeaks(t *testing.T) {
	current, before := goleak.IgnoreCurrent(), openSockets(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() { <-stop; close(stopped) }()
	if openSockets(t) == before {
		t.Error("a leaked socket is not seen")
	}
	if goleak.Find(current) == nil {
		t.Error("a leaked goroutine is not seen")
	}
	_ = ln.Close()
	close(stop)
	<-stopped
}

func TestListenErrors(t *testing.T) {
	leakCheck(t)
	r := startRouter(t, func(Event) {}, Options{})
	if _, err := ListenRouter(testContext(t), r.Addr().String(), func(Event) {}, Options{}); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("a port that is taken: %v", err)
	}
	for name, o := range map[string]Options{
		"HeartbeatTimeout": {HeartbeatTimeout: -1},
		"MaxConns":         {MaxConns: -1},
		"MaxFrame":         {MaxFrame: -1},
		"ReconnectMax":     {ReconnectMin: 2, ReconnectMax: 1},
		"Identity length":  {Identity: make([]byte, 256)},
		"zero byte":        {Identity: []byte("\x00")},
		"is above":         {HeartbeatInterval: time.Hour},
	} {
		if _, err := ListenRouter(testContext(t), "127.0.0.1:0", func(Event) {}, o); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestDialIsBounded(t *testing.T) {
	leakCheck(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0") // takes connections and says nothing
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	_, err = DialDealer(testContext(t), ln.Addr().String(), nil, Options{HandshakeTimeout: 10 * time.Millisecond})
	if !errors.Is(err, ErrHandshake) {
		t.Errorf("by option: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_, err = DialDealer(ctx, ln.Addr().String(), nil, Options{})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("by context: %v", err)
	}
}
