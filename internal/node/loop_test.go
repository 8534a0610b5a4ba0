package node

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

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
	go r.recvEnd.begin(r.recv, 1, &localapi.Status{}) // it steps itself
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

// TestLent: who puts a message steps it, and what comes meanwhile, alone; a
// wake-up that it brings forward is the loop's; and its goroutine is not kept.
func TestLent(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	mail := newMailbox(1000)
	start := time.Now()
	clock := func() kv.Instant { return kv.Instant(time.Since(start)) }
	due, ticked := kv.Never, make(chan struct{})
	var order []any
	depth, flood := 0, 0
	goOn, over := make(chan struct{}), make(chan struct{})
	l := loop{ctx: ctx, mail: mail, clock: clock, next: func() kv.Instant { return due }, woke: func(int) {},
		tick: func(now kv.Instant) bool {
			if due > now {
				return false
			}
			due = kv.Never
			close(ticked)
			return true
		},
		dispatch: func(ev any) {
			if depth++; depth > 1 {
				t.Error("an event is stepped within another")
			}
			switch order = append(order, ev); ev {
			case "first":
				mail.putFrom(1, 1, "meanwhile")
			case "timer":
				due = clock() + kv.Instant(time.Millisecond)
			case "flood":
				switch flood++; flood {
				case lentEvents + 1: // the loop's own goroutine
					<-goOn
				case 2 * lentEvents:
					close(over)
				}
				if flood < 2*lentEvents {
					mail.post("flood")
				}
			}
			depth--
		},
	}
	mail.step = l.lent
	mail.putFrom(1, 1, "first")
	if want := []any{"first", "meanwhile"}; !slices.Equal(order, want) {
		t.Fatalf("order %v, want %v", order, want)
	}
	ended := make(chan struct{})
	go func() { defer close(ended); l.run() }()
	mail.putFrom(1, 1, "timer")
	await(t, ticked, "the wake-up")
	mail.putFrom(1, 1, "flood")
	close(goOn)
	await(t, over, "the end of the flood")
	cancel()
	await(t, ended, "the loop's end")
	if mail.begin() {
		t.Error("somebody else may step after the loop's end")
	}
}
