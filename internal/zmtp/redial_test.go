package zmtp

import (
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"time"
)

func TestBackoff(t *testing.T) {
	b := backoff{min: 100, max: 1000}
	for i, want := range []time.Duration{100, 200, 400, 800, 1000, 1000} {
		if got := b.next(0); got != want {
			t.Errorf("pause %d is %d, want %d", i, got, want)
		}
	}
	if got := b.next(0.999); got < 500 || got > 510 {
		t.Errorf("the shortest pause is %d, want half", got)
	}
	b.reset()
	if got := b.next(0); got != 100 {
		t.Errorf("after reset %d", got)
	}
}

// Each connection has a fresh identity and id, what is sent names one of them, and the listener sees them come and go.
func TestRedialer(t *testing.T) {
	leakCheck(t)
	server, client := &recorder{}, &recorder{}
	r := startRouter(t, server.handle, Options{})
	d, err := RedialDealer(r.Addr().String(), func(n uint64) []byte { return fmt.Appendf(nil, "node/1-to-x#%d", n) }, client.handle, Options{ReconnectMin: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = d.Close() }()
	first := client.kind(t, Connected, 0)
	r.CloseConn(server.kind(t, Connected, 0).Conn)
	client.kind(t, Disconnected, 0)
	second := client.kind(t, Connected, 1)
	if first.Identity != "node/1-to-x#1" || first.Again || second.Identity != "node/1-to-x#2" || !second.Again || first.Conn == second.Conn {
		t.Errorf("%+v, %+v", first, second)
	}
	if err := d.Send(first.Conn, []byte("old")); !errors.Is(err, ErrGone) {
		t.Errorf("a send to the first connection: %v", err)
	}
	if err := d.SendWait(testContext(t), second.Conn, []byte("new")); err != nil {
		t.Error(err)
	}
	if e := server.kind(t, Message, 0); e.Identity != second.Identity || text(e.Frames) != `["new"]` {
		t.Errorf("%+v", e)
	}
	d.CloseConn(second.Conn)
	client.kind(t, Connected, 2)
}

// An address where nobody listens is tried again and again, each attempt reported, until somebody does.
func TestRedialerUnreachable(t *testing.T) {
	leakCheck(t)
	addr := freeAddr(t)
	client := &recorder{}
	d, err := RedialDealer(addr, nil, client.handle, Options{ReconnectMin: time.Millisecond, ReconnectMax: 5 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = d.Close() }()
	if e := client.kind(t, Unreachable, 3); e.Err == nil || e.Conn == 0 {
		t.Errorf("%+v", e)
	}
	r, err := ListenRouter(testContext(t), addr, func(Event) {}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	client.kind(t, Connected, 0)
}

// Close ends an attempt that hangs, and a pause.
func TestRedialerClose(t *testing.T) {
	leakCheck(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0") // says nothing
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	client := &recorder{}
	hanging, err := RedialPush(ln.Addr().String(), client.handle, Options{HandshakeTimeout: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	tcp, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tcp.Close() }()
	pausing, err := RedialDealer("127.0.0.1:1", func(uint64) []byte { return []byte("\x00bad") }, client.handle, Options{ReconnectMin: time.Hour, ReconnectMax: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	client.kind(t, Unreachable, 0)
	done := make(chan struct{})
	go func() { _ = hanging.Close(); _ = pausing.Close(); _ = pausing.Close(); close(done) }()
	closed(t, "Close", done)
	if n := len(client.all()); n != 1 {
		t.Errorf("events: %v", kinds(client.all()))
	}
}

func startPull(t testing.TB, h Handler, opts Options) *Pull {
	t.Helper()
	p, err := ListenPull(testContext(t), "127.0.0.1:0", h, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}

// Messages go to the peers in turn; a full or lost one is passed over; with none the sender is told.
func TestPushIsFair(t *testing.T) {
	leakCheck(t)
	events := &recorder{}
	push, err := NewPush(events.handle, Options{SendQueueBytes: 1 << 20, HeartbeatInterval: -1, ReconnectMin: time.Hour, ReconnectMax: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = push.Close() }()
	if err := push.Send([]byte("x")); !errors.Is(err, ErrNoPeer) {
		t.Errorf("without peers: %v", err)
	}
	early := make(chan error, 1)
	go func() { early <- push.SendWait(testContext(t), []byte("waits for a peer")) }()
	release := make(chan struct{})
	var stuck atomic.Bool
	recs := make([]*recorder, 3)
	pulls := make([]*Pull, 3)
	for i := range recs {
		recs[i] = &recorder{then: func(e Event) {
			if i == 0 && stuck.Load() && e.Kind == Message {
				<-release
			}
		}}
		pulls[i] = startPull(t, recs[i].handle, Options{HeartbeatInterval: -1})
		for range 2 { // twice is once
			if err := push.Connect(pulls[i].Addr().String()); err != nil {
				t.Fatal(err)
			}
		}
		events.kind(t, Connected, i)
		if i == 0 {
			if err := <-early; err != nil {
				t.Error(err)
			}
		}
	}
	const each = 100
	for range 3 * each {
		if err := push.Send([]byte("fair")); err != nil {
			t.Fatal(err)
		}
	}
	fair := func(e Event) bool { return e.Kind == Message && string(e.Frames[0]) == "fair" }
	for _, rec := range recs { // 300 in all, so none has more
		rec.wait(t, each-1, "message", fair)
	}

	// Peer 0 stops reading: the others get everything that is not in its queue.
	stuck.Store(true)
	piece := make([]byte, 128<<10)
	for range 600 {
		if err := push.SendWait(testContext(t), piece); err != nil {
			t.Fatal(err)
		}
	}
	recs[1].kind(t, Message, each+199)
	recs[2].kind(t, Message, each+199)
	close(release)

	// One is lost, and then all.
	push.Disconnect(pulls[0].Addr().String())
	_ = pulls[1].Close()
	events.kind(t, Disconnected, 1)
	n := len(recs[2].all())
	for range 10 {
		if err := push.SendWait(testContext(t), []byte("last")); err != nil {
			t.Fatal(err)
		}
	}
	recs[2].wait(t, n+9-1, "message", func(e Event) bool { return e.Kind == Message })
	_ = pulls[2].Close()
	events.kind(t, Disconnected, 2)
	if err := push.Send([]byte("x")); !errors.Is(err, ErrNoPeer) {
		t.Errorf("after the last peer: %v", err)
	}
	result := make(chan error, 1)
	go func() { result <- push.SendWait(testContext(t), []byte("x")) }()
	_ = push.Close()
	if err := <-result; !errors.Is(err, ErrClosed) {
		t.Errorf("SendWait when closed: %v", err)
	}
	if err := push.Connect("127.0.0.1:1"); !errors.Is(err, ErrClosed) {
		t.Errorf("Connect when closed: %v", err)
	}
}

// A PUSH socket has nothing to receive: a peer that sends to it breaks the protocol.
func TestPushReceivesNothing(t *testing.T) {
	leakCheck(t)
	rec := &recorder{}
	pull := startPull(t, rec.handle, Options{})
	d, err := DialPush(testContext(t), pull.Addr().String(), nil, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = d.Close() }()
	if err := pull.send(rec.kind(t, Connected, 0).Conn, frames("no")); err != nil {
		t.Fatal(err)
	}
	var pe *ProtocolError
	if _, err := d.Recv(testContext(t)); !errors.As(err, &pe) {
		t.Errorf("got %v", err)
	}
}
