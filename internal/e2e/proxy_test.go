package e2e

import (
	"testing"

	"github.com/berthkv/berth"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// watcher is a proxy's side of the control plane, by hand.
func watcher(t *testing.T, r *agent, name string) *dealer {
	t.Helper()
	d := dial(t, r.port(), name)
	inc := kv.Incarnation{}
	copy(inc[:], name)
	d.send(&msg.Hello{Seq: 1, Min: 1, Max: 1, Role: msg.RoleProxy, Node: name, Incarnation: inc, Secret: kv.Secret{1}})
	if _, ok := d.recv().(*msg.HelloReply); !ok {
		t.Fatal("no HelloReply")
	}
	return d
}

// Fault 13, design 4.4: a proxy dies. What it watched and nobody has claimed is
// cancelled with its lease, long before unclaimed_ttl_sec; what is claimed stays
// with the engine; and a later begin of a cancelled name is answered with it.
func TestLoss_proxy_gone(t *testing.T) {
	r := startAgent(t, receiving(t, 20))
	s := startAgent(t, sending(20))
	sender, receiver := s.engine(t), r.engine(t)
	d := watcher(t, r, "proxy-1")
	for i, req := range []string{"claimed", "ready", "waits"} {
		d.send(&msg.Watch{Seq: uint64(2 + i), ReqID: req, DeadlineMS: 60_000})
	}
	for _, req := range []string{"claimed", "ready"} {
		tr := begin(t, sender, req, 3, r.port())
		granted(t, tr)
		send(t, sender, tr, 3)
		if e := ended(t, tr); e.Err() != nil {
			t.Fatal(e)
		}
		if m, ok := d.recv().(*msg.Ended); !ok || m.Ending != msg.EndReady {
			t.Fatalf("the proxy heard %+v", m)
		}
	}
	waits := begin(t, sender, "waits", 4, r.port())
	granted(t, waits)
	claimAndCompare(t, receiver, "claimed", 3)
	d.conn.Close()
	if e := ended(t, waits); e.Ending != "cancelled" {
		t.Errorf("the unfinished one ended %+v, want cancelled", e)
	}
	r.until(t, "left with what is claimed", func(s berth.Status) bool { return s.Pool.Claimed == 3 && s.Pool.Free == 17 })
	again := begin(t, sender, "waits", 4, r.port())
	if e := ended(t, again); e.Ending != "cancelled" {
		t.Errorf("a later begin of that name ended %+v, want cancelled", e)
	}
	if err := receiver.Release(ctxFor(t), "by-claimed", "claimed"); err != nil {
		t.Fatal(err)
	}
	r.until(t, "free", allFree)
}

// A proxy cancels when its client has left: in every state the room is free
// again, and the sender's engine hears it (faults 2, 3; r75, r91).
func TestProxy_cancels(t *testing.T) {
	r := startAgent(t, receiving(t, 10))
	s := startAgent(t, sending(20))
	sender, receiver := s.engine(t), r.engine(t)
	d := watcher(t, r, "proxy-1")
	seq := uint64(1)
	cancel := func(req string) *msg.Ended {
		t.Helper()
		seq++
		d.send(&msg.Cancel{Seq: seq, ReqID: req, Reason: "cancelled"})
		m, ok := d.recv().(*msg.Ended)
		if !ok {
			t.Fatalf("cancel of %s was answered with something else", req)
		}
		return m
	}
	// Waiting.
	first := begin(t, sender, "first", 8, r.port())
	granted(t, first)
	second := begin(t, sender, "second", 8, r.port())
	r.until(t, "waiting", func(s berth.Status) bool { return s.Waiting == 1 })
	cancel("second")
	if e := ended(t, second); e.Ending != "cancelled" {
		t.Errorf("waiting: %+v", e)
	}
	// Granted, with chunks staged and submitted.
	if err := first.Submit(ctxFor(t), stage(t, sender, first, 0, 4), -1); err != nil {
		t.Fatal(err)
	}
	cancel("first")
	if e := ended(t, first); e.Ending != "cancelled" {
		t.Errorf("granted: %+v", e)
	}
	// Ready and unclaimed: the ending stays ready, the slots are freed.
	third := begin(t, sender, "third", 5, r.port())
	granted(t, third)
	send(t, sender, third, 5)
	ended(t, third)
	if m := cancel("third"); m.Ending != msg.EndReady {
		t.Errorf("cancel after ready: %+v", m)
	}
	r.until(t, "free", allFree)
	// Claimed: freed at release.
	fourth := begin(t, sender, "fourth", 5, r.port())
	granted(t, fourth)
	send(t, sender, fourth, 5)
	ended(t, fourth)
	claimAndCompare(t, receiver, "fourth", 5)
	cancel("fourth")
	if st := r.status(t); st.Pool.Claimed != 5 {
		t.Errorf("claimed: %+v", *st.Pool)
	}
	if err := receiver.Release(ctxFor(t), "by-fourth", "fourth"); err != nil {
		t.Fatal(err)
	}
	cancel("never heard of")
	r.until(t, "free", allFree)
	s.until(t, "free", allFree)
}
