package node

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/localapi"
)

// TestLoop: all that waits is stepped before a wake-up that is due, also what
// comes meanwhile; a wake-up comes by itself; the loop ends with its context.
func TestLoop(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	mail := newMailbox(10)
	due := kv.Instant(5)
	var order []any
	woke := 0
	l := loop{ctx: ctx, mail: mail, clock: func() kv.Instant { return 10 },
		dispatch: func(ev any) {
			if order = append(order, ev); ev == "second" {
				mail.post("third")
			}
		},
		tick: func(now kv.Instant) bool {
			if due > now {
				return false
			}
			if order = append(order, "timer"); len(order) > 4 {
				due = kv.Never
				cancel()
				return true
			}
			due = now // and again, at once
			return true
		},
		next: func() kv.Instant { return due },
		woke: func(n int) { woke += n },
	}
	mail.post("first")
	mail.post("second")
	l.run()
	if want := []any{"first", "second", "third", "timer", "timer"}; !slices.Equal(order, want) || woke != 3 {
		t.Errorf("order %v, %d events; want %v", order, woke, want)
	}
}

// TestMailbox: peers' events wait when it is full, the loop's own never do, and
// close lets everybody go.
func TestMailbox(t *testing.T) {
	m := newMailbox(2)
	for i := range 2 {
		if !m.put(i) {
			t.Fatal("refused")
		}
	}
	put := make(chan bool, 2)
	go func() { put <- m.put("third") }()
	if !m.post("own") { // never waits, above the limit too
		t.Fatal("refused")
	}
	select {
	case <-put:
		t.Fatal("a put has gone beyond the limit")
	default:
	}
	<-m.ready
	if got := m.take(nil); len(got) < 3 || got[0] != 0 || got[1] != 1 {
		t.Errorf("took %v", got)
	}
	if !<-put {
		t.Error("a put that waited was refused")
	}
	for len(m.queue) < 2 { // no other goroutine uses m now
		m.put("fill")
	}
	go func() { put <- m.put("fourth") }()
	m.close()
	if <-put {
		t.Error("a put after close was taken")
	}
	if m.put(1) || m.post(1) {
		t.Error("closed, and takes events")
	}
}

// TestMailbox_bound: readers of a loop that is stopped wait, and Close frees
// them.
func TestMailbox_bound(t *testing.T) {
	r := newRig(t, options{})
	r.attachBoth()
	stopped, goOn := make(chan struct{}), make(chan struct{})
	var once sync.Once
	r.recvEnd.set(func() {
		r.recvEnd.block = func(kv.CallID) { once.Do(func() { close(stopped); <-goOn }) }
	})
	r.recvEnd.begin(r.recv, 1, &localapi.Status{})
	await(t, stopped, "the stop")
	const extra = 100
	var through atomic.Int64
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range mailboxLimit + extra {
			r.recv.RouterEvents().Disconnected(12345)
			through.Add(1)
		}
	}()
	eventually(t, "full", func() bool { return through.Load() == mailboxLimit })
	closed := make(chan struct{})
	go func() { defer close(closed); r.recv.Close() }()
	await(t, done, "the reader's end") // Close lets it go, while the loop still stands
	close(goOn)
	await(t, closed, "Close")
}
