package linktest

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berthkv/berth/internal/arena"
	"github.com/berthkv/berth/internal/fault"
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

// Raw prepares the best that the machine can do with the slots of two pools;
// the function it returns moves n chunks.
type Raw func(b *testing.B, dst, src [][]byte) (run func(n int))

// Bench measures a link and beside it, with the same memory, what is best. The
// figures "of-best" (rate) and "cpu-of-best" are medians of short runs of the two
// in turn, so that what else the machine does meanwhile weighs on both.
func Bench(b *testing.B, name string, newHarness func() *Harness, best string, raw Raw) {
	for _, size := range benchSizes {
		// One alone makes no batches: what it allocates does not depend on timing.
		for _, inflight := range []int{1, benchInflight} {
			b.Run(fmt.Sprintf("%s/%s/inflight=%d", name, size.name, inflight), func(b *testing.B) {
				rpool, spool := benchPool(b, size.bytes, false), benchPool(b, size.bytes, true)
				measure(b, size.bytes, benchLink(b, newHarness(), rpool, spool, inflight))
			})
		}
		b.Run(fmt.Sprintf("%s/%s", best, size.name), func(b *testing.B) {
			rpool, spool := benchPool(b, size.bytes, false), benchPool(b, size.bytes, true)
			measure(b, size.bytes, raw(b, slotsOf(rpool), slotsOf(spool)))
		})
		b.Run(fmt.Sprintf("%s:%s/%s", name, best, size.name), func(b *testing.B) {
			rpool, spool := benchPool(b, size.bytes, false), benchPool(b, size.bytes, true)
			ours, theirs := benchLink(b, newHarness(), rpool, spool, benchInflight), raw(b, slotsOf(rpool), slotsOf(spool))
			theirs(rpool.Slots())
			n := rpool.Slots() / 4
			var rates, cpu []float64
			b.ResetTimer()
			for range b.N {
				start, spent := time.Now(), cpuTime(b)
				ours(n)
				middle, then := time.Now(), cpuTime(b)
				theirs(n)
				rates = append(rates, float64(time.Since(middle))/float64(middle.Sub(start)))
				cpu = append(cpu, float64(then-spent)/float64(cpuTime(b)-then))
			}
			b.StopTimer()
			b.ReportMetric(median(rates), "of-best")
			b.ReportMetric(median(cpu), "cpu-of-best")
		})
	}
}

func median(v []float64) float64 {
	slices.Sort(v)
	return v[len(v)/2]
}

// cpuTime is what this process has spent.
func cpuTime(b *testing.B) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func measure(b *testing.B, bytes int64, run func(n int)) {
	b.SetBytes(bytes)
	b.ReportAllocs()
	b.ResetTimer()
	run(b.N)
	b.StopTimer()
}

func slotsOf(p *arena.Pool) (s [][]byte) {
	for i := range p.Slots() {
		s = append(s, poolOf(p).Slot(kv.SlotID(i)))
	}
	return s
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

// benchLink connects a link and returns what moves n chunks over it, with
// inflight of them under way.
func benchLink(b *testing.B, h *Harness, rpool, spool *arena.Pool, inflight int) (run func(n int)) {
	slotBytes := rpool.SlotBytes()
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
		Failed: func(_ kv.SlotID, _ kv.Generation, err *fault.Error) { fail(err.Text) },
		Fenced: func(_ kv.Generation, s []kv.SlotID) {
			for _, i := range s {
				fenced <- i
			}
		},
		Lost: func(_ kv.Incarnation, err error) { fail(err.Error()) },
		Late: func(s kv.SlotID, g kv.Generation) { fail("late") },
	})
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
	gen := kv.Generation(0)
	start := func() {
		s := <-free
		gen++
		recv.Open(peer.Self, gen, []kv.SlotID{s})
		if h.Caps.Mode == link.Pull {
			recv.Pull(peer.Self, gen, []link.PullItem{{Slot: s, Src: s, Bytes: slotBytes}})
		} else {
			conn.Write([]link.Write{{ID: link.WriteID(s), Src: s, Dst: s, Generation: gen, Bytes: slotBytes}})
		}
	}
	run = func(n int) {
		started := min(n, inflight)
		for range started {
			start()
		}
		for done := 0; done < n; {
			for _, l := range <-landed {
				done++
				conn.Settle([]link.WriteID{link.WriteID(l.Slot)})
				recv.Revoke(l.Generation, []kv.SlotID{l.Slot})
				free <- <-fenced
				if started < n {
					started++
					start()
				}
			}
		}
	}
	run(2 * rpool.Slots()) // connections are up, mappings are faulted in
	b.Cleanup(func() {
		over.Store(true)
		conn.Close()
		send.Close()
		recv.Close()
	})
	return run
}
