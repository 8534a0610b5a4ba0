package zmtp

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"
)

// A peer that answers PING keeps its identity; the newcomer is refused before it gets our READY.
func TestTakenIdentityOfALivePeer(t *testing.T) {
	leakCheck(t)
	rec := &recorder{}
	r := startRouter(t, rec.handle, Options{TakeoverTimeout: patience})
	old := startDealer(t, r.Addr(), nil, Options{Identity: []byte("x")})
	tcp := dialRaw(t, r.Addr())
	if _, err := tcp.Write(hello(typeDealer, "x")); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(tcp)
	if err != nil || !bytes.Equal(got, appendGreeting(nil, 0)) {
		t.Errorf("the newcomer got %x, %v", got, err)
	}
	if err := r.Send(rec.kind(t, Connected, 0).Conn, []byte("still")); err != nil {
		t.Fatal(err)
	}
	if m, err := old.Recv(testContext(t)); err != nil || text(m) != `["still"]` {
		t.Fatal(m, err)
	}
	if n := len(rec.all()); n != 1 {
		t.Errorf("events: %v", kinds(rec.all()))
	}
}

// A peer that does not answer loses it: its Disconnected comes before the newcomer's Connected.
func TestTakenIdentityOfADeadPeer(t *testing.T) {
	leakCheck(t)
	rec := &recorder{}
	r := startRouter(t, rec.handle, Options{TakeoverTimeout: 20 * time.Millisecond})
	tcp := dialRaw(t, r.Addr())
	if _, err := tcp.Write(hello(typeDealer, "x")); err != nil {
		t.Fatal(err)
	}
	rec.kind(t, Connected, 0)
	startDealer(t, r.Addr(), nil, Options{Identity: []byte("x")})
	e := rec.kind(t, Connected, 1)
	if !e.Again || e.Identity != "x" {
		t.Errorf("%+v", e)
	}
	events := rec.all()
	if events[1].Kind != Disconnected || !errors.Is(events[1].Err, ErrReplaced) || events[2].Kind != Connected {
		t.Errorf("events: %v", kinds(events))
	}
	gone(t, tcp)
}

// Of several newcomers one gets the identity, the others are refused.
func TestTakenIdentityManyNewcomers(t *testing.T) {
	leakCheck(t)
	rec := &recorder{}
	r := startRouter(t, rec.handle, Options{TakeoverTimeout: 200 * time.Millisecond})
	tcp := dialRaw(t, r.Addr())
	if _, err := tcp.Write(hello(typeDealer, "x")); err != nil {
		t.Fatal(err)
	}
	rec.kind(t, Connected, 0)
	results := make(chan error, 8)
	for range cap(results) {
		go func() {
			d, err := DialDealer(testContext(t), r.Addr().String(), nil, Options{Identity: []byte("x")})
			if err == nil {
				t.Cleanup(func() { _ = d.Close() })
			}
			results <- err
		}()
	}
	won := 0
	for range cap(results) {
		if <-results == nil {
			won++
		}
	}
	if won != 1 {
		t.Errorf("%d newcomers won", won)
	}
}

// An identity of a connection that ends while a newcomer waits is free at once.
func TestTakenIdentityThatIsLeft(t *testing.T) {
	leakCheck(t)
	rec := &recorder{}
	r := startRouter(t, rec.handle, Options{TakeoverTimeout: patience})
	tcp := dialRaw(t, r.Addr())
	if _, err := tcp.Write(hello(typeDealer, "x")); err != nil {
		t.Fatal(err)
	}
	rec.kind(t, Connected, 0)
	in := newReader(tcp, testLimits)
	if err := in.fill(greetingLen); err != nil {
		t.Fatal(err)
	}
	in.r += greetingLen
	done := make(chan error, 1)
	go func() {
		d, err := DialDealer(testContext(t), r.Addr().String(), nil, Options{Identity: []byte("x")})
		if err == nil {
			_ = d.Close()
		}
		done <- err
	}()
	for range 2 { // READY, then the PING of the probe
		if _, _, err := in.next(); err != nil {
			t.Fatal(err)
		}
	}
	_ = tcp.Close()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// While our handler runs the peer's answer cannot be heard: the newcomer is refused, not the peer.
func TestTakenIdentityWhileTheHandlerRuns(t *testing.T) {
	leakCheck(t)
	release := make(chan struct{})
	rec := &recorder{then: func(e Event) {
		if e.Kind == Message {
			<-release
		}
	}}
	r := startRouter(t, rec.handle, Options{TakeoverTimeout: 10 * time.Millisecond})
	old := startDealer(t, r.Addr(), nil, Options{Identity: []byte("x")})
	if err := old.Send([]byte("slow")); err != nil {
		t.Fatal(err)
	}
	rec.kind(t, Message, 0)
	if _, err := DialDealer(testContext(t), r.Addr().String(), nil, Options{Identity: []byte("x")}); err == nil {
		t.Error("the newcomer was taken")
	}
	close(release)
	if err := old.Send([]byte("again")); err != nil {
		t.Fatal(err)
	}
	rec.kind(t, Message, 1)
}

func TestIdentitySetIsBounded(t *testing.T) {
	s := newIdentitySet(3)
	for _, tc := range []struct {
		id    string
		again bool
	}{
		{"a", false}, {"b", false}, {"c", false}, {"a", true}, {"d", false}, // a, the oldest, goes
		{"a", false}, {"b", false}, {"d", true}, {"\x00g", false}, {"\x00g", false},
	} {
		if got := s.add(tc.id); got != tc.again {
			t.Errorf("%q: again = %v", tc.id, got)
		}
	}
	for i := range 100 {
		s.add(fmt.Sprint(i))
	}
	if len(s.in) != 3 || len(s.ring) != 3 {
		t.Errorf("%d and %d are kept", len(s.in), len(s.ring))
	}
}
