package linktest

import (
	"bytes"
	"hash/crc32"
	"strings"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
)

var cases = []testCase{
	{name: "moves_bytes", run: movesBytes},
	{name: "whole_pool_at_once", run: wholePool},
	{name: "checksum", needs: []need{reportsLanding}, opts: options{checksum: true}, run: checksum},
	{name: "stale_generation", needs: []need{reportsLanding}, run: staleGeneration},
	{name: "slot_in_every_state", needs: []need{reportsLanding, exact}, run: slotStates},
	{name: "commit_before_the_data", needs: []need{streams}, run: commitBeforeData},
	{name: "commit_long_after_the_data", needs: []need{reportsLanding}, run: commitAfterData},
	{name: "one_slot_twice", needs: []need{streams}, run: oneSlotTwice},
	{name: "source_reused", needs: []need{pulls}, run: sourceReused},
	{name: "source_reused_after_settle", needs: []need{writes}, run: reusedAfterSettle},
	{name: "another_owner", needs: []need{reportsLanding}, run: anotherOwner},
	{name: "abort", needs: []need{writes}, run: abort},
	{name: "settle", needs: []need{writes}, run: settle},
	{name: "too_many_writes", needs: []need{writes, bare}, run: tooManyWrites},
	{name: "open_twice", run: openTwice},
	{name: "wrong_secret", opts: options{alone: true}, run: wrongSecret},
	{name: "wrong_incarnation", opts: options{alone: true}, run: wrongIncarnation},
	{name: "disallow", run: disallow},
	{name: "receiver_closed", run: receiverClosed},
	{name: "close_while_writing", needs: []need{writes}, run: closeWhileWriting},
	{name: "close_while_pulling", needs: []need{pulls}, run: closeWhilePulling},
	{name: "revoke_in_mid_frame", needs: []need{streams, exact, between}, run: revokeMidFrame},
	{name: "settle_in_mid_frame", needs: []need{streams, between}, opts: options{slotBytes: 16 << 20, single: true}, run: settleMidFrame},
	{name: "abort_in_mid_frame", needs: []need{streams, between}, opts: options{slotBytes: 16 << 20, single: true}, run: abortMidFrame},
	{name: "data_cut", needs: []need{streams, between}, run: dataCut},
	{name: "data_cut_in_mid_frame", needs: []need{streams, between}, run: dataCutMidFrame},
	{name: "data_cut_for_good", needs: []need{streams, between}, run: dataCutForGood},
	{name: "sender_killed", needs: []need{processes}, run: senderKilled},
	{name: "receiver_killed", needs: []need{processes}, run: receiverKilled},
	{name: "random", needs: []need{reportsLanding, exact}, opts: options{slots: 16, slotBytes: 4 << 10}, run: random},
}

func movesBytes(r *rig) {
	max := r.opts.slotBytes
	for i, n := range []int64{1, 2, 7, 4095, 4096, 4097, max - 1, max} {
		dst := kv.SlotID(i % r.opts.slots)
		gen := r.open(dst)
		r.arrive(r.move(gen, dst, n))
		r.revoke(gen, dst)
	}
}

// r102: many chunks in one call.
func wholePool(r *rig) {
	for range 3 {
		var slots []kv.SlotID
		for i := range r.opts.slots {
			slots = append(slots, kv.SlotID(i))
		}
		gen := r.open(slots...)
		var cs []*chunk
		for _, s := range slots {
			cs = append(cs, r.move(gen, s, r.opts.slotBytes))
		}
		for _, c := range cs {
			r.arrive(c)
		}
		r.revoke(gen, slots...)
	}
}

func checksum(r *rig) {
	gen := r.open(3)
	c := r.move(gen, 3, 1000)
	r.arrive(c)
	r.look(func(e *log) {
		want := crc32.Checksum(c.data, crc32.MakeTable(crc32.Castagnoli))
		if l := e.landed[at{3, gen}][0]; !l.HasSum || l.Sum != want {
			r.t.Fatalf("landed with sum %08x (%v), want %08x", l.Sum, l.HasSum, want)
		}
	})
}

// refuse starts a chunk that must not reach slot dst, and checks that it did
// not, and that the link still works.
func (r *rig) refuse(gen kv.Generation, dst kv.SlotID) {
	r.t.Helper()
	before := bytes.Clone(r.slot(dst))
	landed := 0
	r.look(func(e *log) { landed = len(e.landed[at{dst, gen}]) })
	c := r.move(gen, dst, 100)
	if r.h.Caps.Mode == link.Pull {
		r.await("the pull to fail", func(e *log) bool { return e.failed[at{dst, gen}] != "" })
		r.look(func(e *log) { delete(e.failed, at{dst, gen}) })
	} else {
		r.await("the frame to be discarded", func(e *log) bool { return e.late[at{dst, gen}] > 0 })
		r.look(func(e *log) { delete(e.late, at{dst, gen}) })
	}
	r.settle(c)
	r.look(func(e *log) {
		if len(e.landed[at{dst, gen}]) != landed {
			r.t.Fatalf("slot %d landed under generation %d", dst, gen)
		}
	})
	if !bytes.Equal(before, r.slot(dst)) {
		r.t.Fatalf("slot %d was written under generation %d", dst, gen)
	}
}

func staleGeneration(r *rig) {
	old := r.open(2)
	r.arrive(r.move(old, 2, 500))
	r.revoke(old, 2)
	now := r.open(2)
	r.refuse(old, 2)   // of the former use
	r.refuse(now+1, 2) // of none so far
	r.arrive(r.move(now, 2, 600))
}

func slotStates(r *rig) {
	r.refuse(1, 5) // closed, never opened
	gen := r.open(5, 6)
	r.recv.Revoke(gen+1, []kv.SlotID{5, 6}) // another generation's: no effect
	r.arrive(r.move(gen, 5, 10))
	r.refuse(gen, 5)    // landed
	r.revoke(gen, 5, 6) // landed, and open and empty
	r.refuse(gen, 5)    // closed again
	r.refuse(gen, 6)
	r.recv.Revoke(gen, []kv.SlotID{5, 6}) // closed: no effect
	next := r.open(5)
	r.refuse(gen, 5)
	r.arrive(r.move(next, 5, 20))
	r.look(func(e *log) {
		for k, n := range e.fenced {
			if n != 1 {
				r.t.Errorf("slot %d was fenced %d times under generation %d", k.slot, n, k.gen)
			}
		}
	})
}

// The data overtakes the word that opens the slot: it is discarded, and the
// sender, who heard nothing, writes it again.
func commitBeforeData(r *rig) {
	gen := r.nextGen + 1
	r.refuse(gen, 1)
	if got := r.open(1); got != gen {
		r.t.Fatalf("opened under %d", got)
	}
	r.arrive(r.move(gen, 1, 300))
}

// Nothing that happens to other slots meanwhile harms a chunk that waits for
// its Commit, or the staging slot it came from.
func commitAfterData(r *rig) {
	gen := r.open(0)
	c := r.move(gen, 0, 300)
	r.arrive(c)
	for range 3 * r.opts.slots {
		g := r.open(1)
		r.arrive(r.move(g, 1, 200))
		r.revoke(g, 1)
	}
	if !bytes.Equal(c.data, r.slot(0)[:300]) {
		r.t.Fatal("the landed chunk changed")
	}
}

// Two writes to one slot: one lands, the other is discarded; never a mixture.
func oneSlotTwice(r *rig) {
	for range 50 {
		gen := r.open(4)
		a, b := r.stage(r.opts.slotBytes), r.stage(r.opts.slotBytes)
		r.start(gen, 4, a)
		r.start(gen, 4, b)
		r.await("a landing", func(e *log) bool { return len(e.landed[at{4, gen}]) > 0 })
		r.await("both writes", func(e *log) bool { return e.sent[a.id]+e.sent[b.id] == 2 })
		r.revoke(gen, 4)
		if got := r.slot(4); !bytes.Equal(got, a.data) && !bytes.Equal(got, b.data) {
			r.t.Fatal("the slot holds neither chunk")
		}
		r.look(func(e *log) {
			if n := len(e.landed[at{4, gen}]); n != 1 {
				r.t.Fatalf("landed %d times", n)
			}
		})
		r.settle(a, b)
	}
}

// The staging slot was handed out anew before the receiver copied.
func sourceReused(r *rig) {
	gen := r.open(0)
	c := r.stage(100)
	r.gens.Store(c.src, c.word+1000)
	r.start(gen, 0, c)
	r.await("the pull to fail", func(e *log) bool { return e.failed[at{0, gen}] != "" })
	r.look(func(e *log) {
		if s := e.failed[at{0, gen}]; !strings.HasPrefix(s, string(fault.StaleGeneration)) || !strings.Contains(s, "1001") || !strings.HasSuffix(s, " 1") {
			r.t.Errorf("the failure is not stale_generation with both generations: %q", s)
		}
	})
	r.arrive(r.move(gen, 0, 100)) // the slot is open as before
}

// r67: the staging slot is free when Settle returns.
func reusedAfterSettle(r *rig) {
	var slots []kv.SlotID
	for i := range r.opts.slots {
		slots = append(slots, kv.SlotID(i))
	}
	gen := r.open(slots...)
	for _, s := range slots {
		c := r.move(gen, s, r.opts.slotBytes)
		r.arrive(c)
		clear(poolOf(r.spool).Slot(c.src))
		if !bytes.Equal(r.slot(s), c.data) {
			r.t.Fatal("a settled chunk changed with its staging slot")
		}
	}
}

// A slot that is open to one owner is not open to another, generation or not.
func anotherOwner(r *rig) {
	r.nextGen++
	r.recv.Open(kv.Incarnation{9}, r.nextGen, []kv.SlotID{3})
	r.refuse(r.nextGen, 3)
}

func abort(r *rig) {
	gen := r.open(0)
	c := r.move(gen, 0, 100)
	r.await("the write to be sent", func(e *log) bool { return e.sent[c.id] > 0 })
	r.conn.Abort([]link.WriteID{c.id, 999}) // 999 is not known
	r.await("the write to be lost", func(e *log) bool { return e.lost[c.id] == 1 })
	r.conn.Abort([]link.WriteID{c.id})
	r.look(func(e *log) {
		if e.lost[c.id] != 1 || e.lost[999] != 0 {
			r.t.Errorf("lost: %v", e.lost)
		}
	})
}

func settle(r *rig) {
	gen := r.open(0)
	c := r.move(gen, 0, 100)
	r.arrive(c)
	r.conn.Settle([]link.WriteID{c.id, 999})
	r.conn.Abort([]link.WriteID{c.id})
	r.must(r.conn.Close())
	r.look(func(e *log) {
		if len(e.lost) != 0 {
			r.t.Errorf("lost after it was settled: %v", e.lost)
		}
	})
}

func panics(f func()) (p any) {
	defer func() { p = recover() }()
	f()
	return nil
}

// At the bound of unsettled writes, and one past it.
func tooManyWrites(r *rig) {
	var cs []*chunk
	for range r.opts.slots {
		cs = append(cs, r.move(77, 0, 10))
	}
	if panics(func() { r.move(77, 0, 10) }) == nil {
		r.t.Error("one write more than there are staging slots was taken")
	}
	if panics(func() {
		r.settle(cs...)
		r.conn.Write([]link.Write{{ID: 5000, Src: kv.SlotID(r.opts.slots), Bytes: 1}})
	}) == nil {
		r.t.Error("r100: a write from outside the pool was taken")
	}
}

func openTwice(r *rig) {
	r.open(0)
	if panics(func() { r.open(0) }) == nil {
		r.t.Error("an open slot was opened")
	}
}

func wrongSecret(r *rig) {
	if _, err := r.tryConnect(r.peer); err == nil {
		r.t.Error("an owner that is not allowed was let in")
	}
	r.recv.Allow(r.peer.Self, r.peer.Secret)
	p := r.peer
	p.Secret[15]++
	if _, err := r.tryConnect(p); err == nil {
		r.t.Error("a wrong secret was let in")
	} else if strings.Contains(err.Error(), "0303") {
		r.t.Errorf("the error shows a secret: %v", err)
	}
	p = r.peer
	p.Self[0]++
	if _, err := r.tryConnect(p); err == nil {
		r.t.Error("another owner was let in with this one's secret")
	}
	r.must(r.connect(r.peer).Close())
}

// r55: the wrong peer is named, with the right one.
func wrongIncarnation(r *rig) {
	r.recv.Allow(r.peer.Self, r.peer.Secret)
	p := r.peer
	p.Incarnation[0]++
	_, err := r.tryConnect(p)
	if err == nil {
		r.t.Fatal("connected to another incarnation")
	}
	for _, want := range []string{p.Incarnation.String(), r.peer.Incarnation.String()} {
		if !strings.Contains(err.Error(), want) {
			r.t.Errorf("%q does not name %s", err, want)
		}
	}
}

func disallow(r *rig) {
	gen := r.open(0)
	r.arrive(r.move(gen, 0, 100))
	r.recv.Disallow(r.peer.Self)
	r.await("the link to be down", func(e *log) bool { return len(e.down) == 1 })
	if _, err := r.tryConnect(r.peer); err == nil {
		r.t.Error("connected after Disallow")
	}
	r.recv.Disallow(r.peer.Self)
	r.recv.Allow(r.peer.Self, r.peer.Secret)
	r.must(r.conn.Close())
	r.conn = r.connect(r.peer)
	next := r.open(1)
	r.arrive(r.move(next, 1, 100))
	r.look(func(e *log) {
		if len(e.ownerLost) > 0 {
			r.t.Errorf("reported as lost, though it was disallowed: %v", e.ownerLost)
		}
	})
}

func receiverClosed(r *rig) {
	gen := r.open(0)
	r.move(gen, 0, 100)
	r.must(r.recv.Close())
	r.await("the link to be down", func(e *log) bool { return len(e.down) == 1 })
	n := 0
	r.look(func(e *log) { n = len(e.landed) })
	if r.h.Caps.Mode != link.Pull {
		c := r.move(gen, 0, 100)
		r.await("a write to a link that is down to be lost", func(e *log) bool { return e.lost[c.id] == 1 })
	}
	r.must(r.conn.Close())
	r.must(r.recv.Close())
	r.look(func(e *log) {
		if len(e.landed) != n || len(e.down) != 1 {
			r.t.Errorf("events after Close: %+v", *e)
		}
	})
}

// Every write that is not settled is lost when Close has returned, and nothing
// comes after it.
func closeWhileWriting(r *rig) {
	gen := r.open(0, 1, 2, 3)
	var cs []*chunk
	for i := range 4 {
		cs = append(cs, r.move(gen, kv.SlotID(i), r.opts.slotBytes))
	}
	r.must(r.conn.Close())
	var before string
	r.look(func(e *log) {
		for _, c := range cs {
			if e.lost[c.id] != 1 {
				r.t.Errorf("write %d was lost %d times", c.id, e.lost[c.id])
			}
		}
	})
	r.look(func(e *log) { before = countSender(e) })
	r.must(r.conn.Close())
	r.must(r.send.Close())
	if _, err := r.tryConnect(r.peer); err == nil {
		r.t.Error("a closed sender connected")
	}
	r.revoke(gen, 0, 1, 2, 3)
	r.look(func(e *log) {
		if now := countSender(e); now != before {
			r.t.Errorf("sender's events after Close: %s, before %s", now, before)
		}
	})
}

func closeWhilePulling(r *rig) {
	gen := r.open(0, 1, 2, 3)
	for i := range 4 {
		r.move(gen, kv.SlotID(i), r.opts.slotBytes)
	}
	r.must(r.recv.Close())
	n := 0
	r.look(func(e *log) { n = len(e.landed) + len(e.failed) })
	r.must(r.send.Close())
	r.look(func(e *log) {
		if now := len(e.landed) + len(e.failed); now != n {
			r.t.Errorf("%d events at the receiver after Close", now-n)
		}
	})
}
