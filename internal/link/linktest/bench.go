package linktest

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/berthkv/berth/internal/arena"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
)

// benchSizes are the chunk sizes that the figures are given for.
var benchSizes = []struct {
	name  string
	bytes int64
}{{"64KiB", 64 << 10}, {"1MiB", 1 << 20}, {"16MiB", 16 << 20}}

const (
	benchInflight = 16
	// benchMemory is the least size of a pool: far more than any cache holds,
	// as with real pools.
	benchMemory = 256 << 20
)

// Bench measures a link, name, and beside it what the machine can do at best
// with the same memory: raw is called with the slots of both pools and moves n
// chunks.
func Bench(b *testing.B, name string, newHarness func() *Harness, rawName string, raw func(b *testing.B, dst, src [][]byte, n int)) {
	for _, size := range benchSizes {
		b.Run(fmt.Sprintf("%s/%s/inflight=%d", name, size.name, benchInflight), func(b *testing.B) {
			benchLink(b, newHarness(), size.bytes)
		})
		b.Run(fmt.Sprintf("%s/%s", rawName, size.name), func(b *testing.B) {
			rpool, spool := benchPool(b, size.bytes, false), benchPool(b, size.bytes, true)
			var dst, src [][]byte
			for i := range rpool.Slots() {
				dst = append(dst, poolOf(rpool).Slot(kv.SlotID(i)))
				src = append(src, poolOf(spool).Slot(kv.SlotID(i)))
			}
			b.SetBytes(size.bytes)
			b.ReportAllocs()
			b.ResetTimer()
			raw(b, dst, src, b.N)
		})
	}
}

// benchPool returns a pool that is touched and written, and warm.
func benchPool(b *testing.B, slotBytes int64, writable bool) *arena.Pool {
	done := make(chan struct{})
	var once sync.Once
	count := max(benchInflight, int(benchMemory/slotBytes))
	p, err := arena.New(arena.Config{Name: "benchmark pool", Slots: count, SlotBytes: slotBytes, Writable: writable,
		Progress: func(slots int, err error) {
			if slots == count || err != nil {
				once.Do(func() { close(done) })
			}
		}})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { p.Close() })
	<-done
	m := p.Bytes()
	for i := range m {
		m[i] = byte(i)
	}
	return p
}

func benchLink(b *testing.B, h *Harness, slotBytes int64) {
	rpool, spool := benchPool(b, slotBytes, false), benchPool(b, slotBytes, true)
	gens, err := arena.NewGenerations(spool.Slots())
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { gens.Close() })
	landed := make(chan []link.Landing, benchInflight)
	fenced := make(chan kv.SlotID, benchInflight)
	var over atomic.Bool
	fail := func(what string) {
		if !over.Load() {
			panic("benchmark: " + what)
		}
	}
	peer := link.Peer{Incarnation: kv.Incarnation{1}, Self: kv.Incarnation{2}, Secret: kv.Secret{3}}
	recv := h.NewReceiver(b, ReceiverConfig{Incarnation: peer.Incarnation, Pool: poolOf(rpool)}, link.ReceiverEvents{
		Landed: func(l []link.Landing) { landed <- l },
		Failed: func(_ kv.SlotID, _ kv.Generation, text string) { fail(text) },
		Fenced: func(_ kv.Generation, s []kv.SlotID) {
			for _, i := range s {
				fenced <- i
			}
		},
		Lost: func(_ kv.Incarnation, err error) { fail(err.Error()) },
		Late: func(s kv.SlotID, g kv.Generation) { fail("late") },
	})
	defer recv.Close()
	recv.Allow(peer.Self, peer.Secret)
	send := h.NewSender(b, SenderConfig{Pool: poolOf(spool), Staging: spool, Generations: gens})
	peer.Addr = recv.Offer()
	conn, err := send.Connect(context.Background(), peer, link.SenderEvents{
		Sent: func([]link.WriteID) {},
		Lost: func(_ []link.WriteID, err error) { fail(err.Error()) },
		Down: func(err error) { fail(err.Error()) },
	})
	if err != nil {
		b.Fatal(err)
	}

	free := make(chan kv.SlotID, rpool.Slots()) // used in turn, all of them
	for i := range rpool.Slots() {
		free <- kv.SlotID(i)
	}
	started := 0
	start := func() {
		s := <-free
		started++
		gen := kv.Generation(started)
		recv.Open(peer.Self, gen, []kv.SlotID{s})
		if h.Caps.Mode == link.Pull {
			recv.Pull(peer.Self, gen, []link.PullItem{{Slot: s, Src: s, Bytes: slotBytes}})
		} else {
			conn.Write([]link.Write{{ID: link.WriteID(s), Src: s, Dst: s, Generation: gen, Bytes: slotBytes}})
		}
	}
	run := func(n int) {
		started = 0
		for range min(n, benchInflight) {
			start()
		}
		for done := 0; done < n; {
			for _, l := range <-landed {
				done++
				conn.Settle([]link.WriteID{link.WriteID(l.Slot)})
				recv.Revoke(l.Generation, []kv.SlotID{l.Slot})
				free <- <-fenced
				if started < n {
					start()
				}
			}
		}
	}
	run(2 * rpool.Slots()) // connections are up, mappings are faulted in
	b.SetBytes(slotBytes)
	b.ReportAllocs()
	b.ResetTimer()
	run(b.N)
	b.StopTimer()
	over.Store(true)
	conn.Close()
	send.Close()
}
