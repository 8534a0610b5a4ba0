package zmtp

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"
)

// TestBudget: who has been stuck the longest goes, the one that asks never does,
// and one alone gets what it needs.
func TestBudget(t *testing.T) {
	b := newBudget(10)
	var gone []string
	newShare := func(name string) *share {
		s := &share{b: b}
		s.evict = func() { gone = append(gone, name); s.drop() }
		return s
	}
	first, second, third := newShare("first"), newShare("second"), newShare("third")
	take := func(s *share, n int64, want bool, wantGone ...string) {
		t.Helper()
		gone = nil
		if got := s.take(n, nil); got != want || fmt.Sprint(gone) != fmt.Sprint(wantGone) {
			t.Fatalf("took %d: %v, gone %v; want %v, %v", n, got, gone, want, wantGone)
		}
		sum := int64(0)
		for _, s := range []*share{first, second, third} {
			sum += s.held
		}
		if b.used != sum || b.used > 10 && b.used != s.held {
			t.Fatalf("%d bytes are used, %d are held", b.used, sum)
		}
	}
	take(first, 99, true) // alone
	first.drop()
	take(first, 4, true)
	take(second, 4, true)
	take(third, 2, true)
	take(third, 1, true, "first")
	take(first, 3, true)
	second.give(1) // it gets on
	take(second, 2, true, "third")
	take(second, 3, true, "first")
	second.drop()
	take(first, 6, true)
	first.pin(true)
	take(second, 4, true)
	take(third, 5, false, "second") // the pinned one stays, and there is still no room
	first.drop()
	first.pin(false)
	take(third, 10, true)
	third.drop()
	if b.used != 0 || b.first != nil || b.last != nil {
		t.Fatalf("%d bytes are left, or shares: %v, %v", b.used, b.first, b.last)
	}
}

// TestBudgetWaits: with many at once the limit holds at every moment, and nobody
// waits for ever.
func TestBudgetWaits(t *testing.T) {
	leakCheck(t)
	b := newBudget(1000)
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			connect := func() (*share, chan struct{}) {
				stop, once := make(chan struct{}), sync.Once{}
				return &share{b: b, evict: func() { once.Do(func() { close(stop) }) }}, stop
			}
			s, stop := connect()
			for n := range 500 {
				if !s.take(int64(1+(i*n)%300), stop) {
					s.drop() // as a reader does when its connection is closed
					s, stop = connect()
					continue
				}
				b.mu.Lock()
				if b.used > 1000 && b.used != s.held {
					t.Errorf("%d bytes of 1000", b.used)
				}
				b.mu.Unlock()
				if n%3 == 0 {
					s.drop()
				}
			}
			s.drop()
		})
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	closed(t, "the end of all", done)
	if b.used != 0 {
		t.Errorf("%d bytes are left", b.used)
	}
}

// Peers that begin large messages and never end them lose their connections as
// soon as one who does needs the room.
func TestStuckPeersMakeRoom(t *testing.T) {
	leakCheck(t)
	rec := &recorder{}
	const most = 1 << 20
	r := startRouter(t, rec.handle, Options{RecvTotal: most})
	var stuck []*rawPeer
	for i := range 20 {
		tcp := dialRaw(t, r.Addr())
		stuck = append(stuck, &rawPeer{TCPConn: tcp})
		b := appendHeader(hello(typeDealer, fmt.Sprint("stuck-", i)), 0, most/2)
		if _, err := tcp.Write(append(b, make([]byte, most/4)...)); err != nil {
			t.Fatal(err)
		}
	}
	d := startDealer(t, r.Addr(), nil, Options{})
	for range 5 {
		if err := d.Send(make([]byte, most/2)); err != nil {
			t.Fatal(err)
		}
	}
	for n := range 5 {
		if e := rec.kind(t, Message, n); len(e.Frames[0]) != most/2 {
			t.Fatalf("%d bytes came", len(e.Frames[0]))
		}
	}
	for i := range len(stuck) - 4 { // four fit
		e := rec.wait(t, i, "crowded connection", func(e Event) bool { return e.Kind == Disconnected && errors.Is(e.Err, ErrCrowded) })
		if e.Identity[:5] != "stuck" {
			t.Errorf("%s had to go", e.Identity)
		}
	}
	r.recv.mu.Lock()
	defer r.recv.mu.Unlock()
	if r.recv.used > most {
		t.Errorf("%d bytes are held, at most %d may be", r.recv.used, most)
	}
}

// Peers that never read lose their connections when what waits for them is too
// much for all together; who reads keeps its own.
func TestSilentReadersMakeRoom(t *testing.T) {
	leakCheck(t)
	rec := &recorder{}
	const most, piece = 8 << 20, 1 << 20
	r := startRouter(t, rec.handle, Options{SendTotal: most})
	d := startDealer(t, r.Addr(), nil, Options{})
	reader := rec.kind(t, Connected, 0).Conn
	got := make(chan struct{})
	go func() {
		defer close(got)
		for range 40 {
			if _, err := d.Recv(t.Context()); err != nil {
				t.Error(err)
				return
			}
		}
	}()
	for i := range 4 {
		startRawPeerNamed(t, r, fmt.Sprint("mute-", i))
		mute := rec.kind(t, Connected, i+1).Conn
		for n := range 10 {
			if err := r.Send(mute, make([]byte, piece)); err != nil {
				t.Fatalf("piece %d for %d: %v", n, mute, err)
			}
			if err := r.SendWait(testContext(t), reader, make([]byte, 1000)); err != nil {
				t.Fatal(err)
			}
			r.toSend.mu.Lock()
			if r.toSend.used > most && r.toSend.first != r.toSend.last {
				t.Errorf("%d bytes wait, at most %d may", r.toSend.used, most)
			}
			r.toSend.mu.Unlock()
		}
	}
	closed(t, "the reading", got)
	e := rec.wait(t, 0, "crowded connection", func(e Event) bool { return e.Kind == Disconnected && errors.Is(e.Err, ErrCrowded) })
	if e.Conn == reader {
		t.Error("the one that reads had to go")
	}
	if r.conn(reader) == nil {
		t.Error("the one that reads is gone")
	}
}

// startRawPeerNamed is a peer that says hello and then nothing, and reads nothing.
func startRawPeerNamed(t *testing.T, r *Router, identity string) {
	t.Helper()
	tcp := dialRaw(t, r.Addr())
	if _, err := tcp.Write(hello(typeDealer, identity)); err != nil {
		t.Fatal(err)
	}
}

// At MaxConns a peer that speaks gets the place of one that does not.
func TestIdleConnsMakeRoom(t *testing.T) {
	leakCheck(t)
	rec := &recorder{}
	r := startRouter(t, rec.handle, Options{MaxConns: 3})
	talker := startDealer(t, r.Addr(), nil, Options{})
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				_ = talker.Send([]byte("still here"))
			}
		}
	}()
	for i := range 2 {
		startRawPeerNamed(t, r, fmt.Sprint("idle-", i))
		rec.wait(t, 0, "connection", func(e Event) bool { return e.Identity == fmt.Sprint("idle-", i) })
	}
	for i := range 2 {
		client := &recorder{}
		d, err := RedialDealer(r.Addr().String(), nil, client.handle, Options{ReconnectMin: time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = d.Close() }()
		client.kind(t, Connected, 0)
		e := rec.wait(t, i, "idle connection", func(e Event) bool { return e.Kind == Disconnected && errors.Is(e.Err, ErrIdle) })
		if e.Identity != fmt.Sprint("idle-", i) {
			t.Errorf("%q had to go, want idle-%d", e.Identity, i)
		}
	}
	if s := r.Stats(); s.MadeRoom != 2 || s.Conns != 3 {
		t.Errorf("%+v", s)
	}
}
