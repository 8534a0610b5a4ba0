package zmtp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"
)

// heldOutbox holds everything back, as during a handshake.
func heldOutbox(t *testing.T, opts Options) *outbox {
	t.Helper()
	opts, err := opts.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	o, err := newOutbox(dialRaw(t, ln.Addr()), &opts, &gate{}, func(err error) { t.Error(err) })
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func TestHighWaterMark(t *testing.T) {
	small := make([]byte, 98) // 100 bytes encoded
	for _, tc := range []struct {
		name   string
		opts   Options
		first  []byte
		expect []error // of each send
	}{
		{"messages", Options{SendQueue: 3}, small, []error{nil, nil, nil, ErrWouldBlock, ErrWouldBlock}},
		{"bytes", Options{SendQueueBytes: 299}, small, []error{nil, nil, ErrWouldBlock}},
		{"bytes at the limit", Options{SendQueueBytes: 300}, small, []error{nil, nil, nil, ErrWouldBlock}},
		{"one message always fits", Options{SendQueueBytes: 1}, small, []error{nil, ErrWouldBlock}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			o := heldOutbox(t, tc.opts)
			for i, want := range tc.expect {
				if err := o.send([][]byte{small}); !errors.Is(err, want) {
					t.Fatalf("send %d: %v, want %v", i, err, want)
				}
			}
		})
	}
}

func TestSendLimits(t *testing.T) {
	o := heldOutbox(t, Options{MaxFrame: 1000, MaxMessage: 1500, MaxFrames: 3})
	f := strings.Repeat("f", 1000)
	for _, tc := range []struct {
		name   string
		frames [][]byte
		option string // of the LimitError
	}{
		{"frame at the limit", frames(f), ""},
		{"frame above", frames(f + "f"), "MaxFrame"},
		{"message at the limit", frames(f, f[:500]), ""},
		{"message above", frames(f, f[:501]), "MaxMessage"},
		{"frames at the limit", frames("", "", ""), ""},
		{"frames above", frames("", "", "", ""), "MaxFrames"},
	} {
		var le *LimitError
		err := o.send(tc.frames)
		if tc.option == "" && err != nil || tc.option != "" && (!errors.As(err, &le) || le.Option != tc.option) {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
	if err := o.send(nil); err == nil {
		t.Error("a message without frames was taken")
	}
}

// A flood of control frames is bounded.
func TestControlIsBounded(t *testing.T) {
	o := heldOutbox(t, Options{})
	for range 10 * maxControl {
		o.sendControl(func(b []byte) []byte { return appendPing(b, 0, nil) })
	}
	if want := maxControl * len(appendPing(nil, 0, nil)); len(o.control) != want {
		t.Errorf("%d bytes are queued, want %d", len(o.control), want)
	}
}

// Many senders and PINGs at once: whole messages, each sender's in order, with every way of writing mixed.
func TestConcurrentSends(t *testing.T) {
	leakCheck(t)
	const senders, each = 8, 300
	rec := &recorder{}
	r := startRouter(t, rec.handle, Options{HeartbeatInterval: time.Millisecond})
	d := startDealer(t, r.Addr(), nil, Options{RecvQueue: 1, HeartbeatInterval: time.Millisecond})
	id := rec.kind(t, Connected, 0).Conn
	var wg sync.WaitGroup
	for s := range senders {
		wg.Go(func() {
			for i := range each {
				body := strings.Repeat(fmt.Sprintf("%d/%d;", s, i), 1+(i*37)%2000)
				if err := r.SendWait(testContext(t), id, []byte{byte(s)}, []byte(body)); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	next := make([]int, senders)
	for range senders * each {
		m, err := d.Recv(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		s := int(m[0][0])
		i := next[s]
		if want := strings.Repeat(fmt.Sprintf("%d/%d;", s, i), 1+(i*37)%2000); string(m[1]) != want {
			t.Fatalf("sender %d, message %d is %.40q of %d bytes", s, i, m[1], len(m[1]))
		}
		next[s]++
	}
	wg.Wait()
}

// A peer that reads nothing fills its own queue; others do not notice, and it is closed after WriteTimeout.
func TestSlowConsumer(t *testing.T) {
	leakCheck(t)
	rec := &recorder{}
	r := startRouter(t, rec.handle, Options{WriteTimeout: time.Second, SendQueueBytes: 1 << 20, HeartbeatInterval: -1})
	startRawPeer(t, r, 1)
	slow := rec.kind(t, Connected, 0).Conn
	d := startDealer(t, r.Addr(), nil, Options{})
	good := rec.kind(t, Connected, 1).Conn
	fill(t, func() error { return r.Send(slow, make([]byte, 256<<10)) })
	for range 10 {
		if err := r.Send(good, []byte("hi")); err != nil {
			t.Fatal(err)
		}
		if _, err := d.Recv(testContext(t)); err != nil {
			t.Fatal(err)
		}
	}
	if e := rec.kind(t, Disconnected, 0); e.Conn != slow || !errors.Is(e.Err, ErrStalled) {
		t.Errorf("%v ended with %v", e.Conn, e.Err)
	}
}

// The deadline of a write that was slow but went through does not fail a later one.
func TestSlowWriteLeavesNoDeadline(t *testing.T) {
	leakCheck(t)
	rec := &recorder{}
	r := startRouter(t, rec.handle, Options{WriteTimeout: 500 * time.Millisecond, SendQueueBytes: 4 << 20, HeartbeatInterval: -1})
	p := startRawPeer(t, r, 1)
	id := rec.kind(t, Connected, 0).Conn
	fill(t, func() error { return r.Send(id, make([]byte, 1<<20)) })
	sent := make(chan error, 1)
	go func() { sent <- r.SendWait(testContext(t), id, []byte("drained")) }()
	if err := errors.Join(readUntil(p.in, "drained"), <-sent); err != nil {
		t.Fatal(err)
	}
	startSilentPeer(t, r)
	stuck := rec.kind(t, Connected, 1).Conn
	fill(t, func() error { return r.Send(stuck, make([]byte, 1<<20)) })
	rec.kind(t, Disconnected, 0) // a whole WriteTimeout after the last write to the first peer
	if err := r.Send(id, []byte("end")); err != nil {
		t.Fatal(err)
	}
	if err := readUntil(p.in, "end"); err != nil {
		t.Error(err)
	}
}

// readUntil reads messages up to one that is just the word.
func readUntil(in *reader, word string) error {
	for {
		if m, _, err := in.next(); err != nil || len(m) == 1 && string(m[0]) == word {
			return err
		}
	}
}

func TestSendWait(t *testing.T) {
	leakCheck(t)
	t.Run("until the context ends, or the connection", func(t *testing.T) {
		o := heldOutbox(t, Options{SendQueue: 1})
		if err := o.send(frames("fills the queue")); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
		defer cancel()
		if err := o.sendWait(ctx, frames("x")); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("without room: %v", err)
		}
		result := make(chan error, 1)
		go func() { result <- o.sendWait(testContext(t), frames("x")) }()
		o.kill()
		if err := <-result; !errors.Is(err, ErrGone) {
			t.Errorf("when the connection is lost: %v", err)
		}
	})
	t.Run("until the peer reads", func(t *testing.T) {
		rec := &recorder{}
		r := startRouter(t, rec.handle, Options{SendQueueBytes: 4 << 20})
		p := startRawPeer(t, r, 1)
		id := rec.kind(t, Connected, 0).Conn
		big := make([]byte, 1<<20)
		fill(t, func() error { return r.Send(id, big) })
		result := make(chan error, 1)
		go func() { result <- r.SendWait(testContext(t), id, []byte("end")) }()
		if err := errors.Join(readUntil(p.in, "end"), <-result); err != nil {
			t.Error(err)
		}
	})
}
