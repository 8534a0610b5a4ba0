package node

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/watch"
)

func (r *rig) watcher() *Watcher {
	w := NewWatcher(WatcherConfig{Dialer: r.wires, DialTimeout: limit,
		Watch: watch.Config{Node: "proxy", Incarnation: kv.Incarnation{5}, Secret: kv.Secret{6}, ConnectTimeout: 15 * kv.Second, Idle: 60 * kv.Second, Deadline: 60 * kv.Second,
			EarlyTTL: 10 * kv.Second, MaxPeers: 10, MaxWatches: 10, MaxEarly: 10}})
	r.t.Cleanup(w.Close)
	return w
}

// TestWatcher: a watch is accepted by the receiver and hears of the ending; one
// that its owner cancels takes the request's room back.
func TestWatcher(t *testing.T) {
	r := newRig(t, options{})
	w := r.watcher()
	r.attachBoth()
	peer := []watch.Peer{{Host: "h", AllocPort: 1}}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	good, err := w.Watch(ctx, "good", peer, limit)
	if err != nil {
		t.Fatal(err)
	}
	if err := good.Accepted(ctx); err != nil {
		t.Fatal(err)
	}
	r.begin("good", 2)
	r.granted("good")
	r.submit("good", 2)
	if res, err := good.Result(ctx); err != nil || res.Ending != msg.EndReady {
		t.Errorf("%+v, %v", res, err)
	}
	good.Release()
	r.receive("good", 2)

	bad, err := w.Watch(ctx, "bad", peer, limit)
	if err != nil {
		t.Fatal(err)
	}
	if err := bad.Accepted(ctx); err != nil {
		t.Fatal(err)
	}
	r.begin("bad", slots)
	r.granted("bad")
	bad.Cancel(fault.Cancelled, "the client left")
	if e := r.ended("bad"); e.Ending != msg.EndCancelled {
		t.Errorf("%+v", e)
	}
	until(t, r.recv, "free", idle)
	w.Notified(1, []byte("garbage")) // costs nothing
}

// TestWatcher_close: Close ends what waits, with an error, and what is asked
// later too; the second is harmless.
func TestWatcher_close(t *testing.T) {
	r := newRig(t, options{})
	w := r.watcher()
	r.wires.set(func() {
		r.wires.instead = func(ctx context.Context, _ DialEvents) (ControlConn, error) { <-ctx.Done(); return nil, ctx.Err() }
	})
	wt, err := w.Watch(t.Context(), "x", []watch.Peer{{Host: "h", AllocPort: 1}}, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 2)
	go func() { ended <- wt.Accepted(context.Background()) }()
	go func() { _, err := wt.Result(context.Background()); ended <- err }()
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := wt.Result(gone); !errors.Is(err, context.Canceled) {
		t.Errorf("a wait that was given up: %v", err)
	}
	w.Close()
	w.Close()
	for range 2 {
		select {
		case err := <-ended:
			if fault.CodeOf(err) != fault.Cancelled {
				t.Errorf("a wait ended with %v", err)
			}
		case <-time.After(limit):
			t.Fatal("a wait outlives Close")
		}
	}
	if _, err := w.Watch(t.Context(), "y", nil, time.Hour); err == nil {
		t.Error("a closed watcher watches")
	}
	wt.Cancel(fault.Cancelled, "")
	wt.Release()
}
