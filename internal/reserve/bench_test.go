package reserve

import (
	"fmt"
	"math/rand"
	"testing"
)

const benchCapacity = 1 << 14

// waitingLedger has n requests waiting, in as many lines as there are senders,
// for a full pool. Request i needs needs[i%n].
func waitingLedger(n, senders int, mixed bool) (l *Ledger, needs []int64) {
	rng := rand.New(rand.NewSource(1))
	l = New(Config{Capacity: benchCapacity, Bypass: benchCapacity, MaxWaiting: n + 1})
	l.Request(uint64(n), Sender(senders), benchCapacity)
	needs = make([]int64, n)
	for i := range needs {
		needs[i] = 32
		if mixed {
			needs[i] = 1 + rng.Int63n(64)
		}
		l.Request(uint64(i), Sender(i%senders), needs[i])
	}
	return l, needs
}

// BenchmarkAdmit is the life of one request in a ledger where n wait: it comes
// and waits, room is returned, it goes. An operation is one admission: a Request,
// the Next that admits it and, as often as room must be returned first, a Next
// that finds nobody; ns/call is the time for each of those.
func BenchmarkAdmit(b *testing.B) {
	for _, mixed := range []bool{false, true} {
		for _, senders := range []int{1, 16, 1000} {
			for _, n := range []int{1_000, 100_000, 1_000_000} {
				b.Run(fmt.Sprintf("mixed=%v/senders=%d/waiting=%d", mixed, senders, n), func(b *testing.B) {
					benchmarkAdmit(b, n, senders, mixed)
				})
			}
		}
	}
}

func benchmarkAdmit(b *testing.B, n, senders int, mixed bool) {
	l, needs := waitingLedger(n, senders, mixed)
	var out [2 * benchCapacity]int64 // a ring: what is out, oldest first
	out[0] = benchCapacity
	first, end, newcomer := 0, 1, uint64(n+1)
	leave := func(id uint64) {
		out[end%len(out)] = needs[id%uint64(n)]
		end++
	}
	b.ReportAllocs()
	calls := 0
	for b.Loop() {
		id, ok := l.Next()
		for calls++; !ok; calls++ {
			l.Return(out[first%len(out)])
			first++
			id, ok = l.Next()
		}
		leave(id)
		for waits := false; !waits; newcomer++ {
			calls++
			ok, _ := l.Request(newcomer, Sender(newcomer%uint64(senders)), needs[newcomer%uint64(n)])
			if waits = !ok; ok {
				leave(newcomer)
			}
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(calls), "ns/call")
}

// BenchmarkFirstFit passes many that do not fit, in the middle of their lines.
func BenchmarkFirstFit(b *testing.B) {
	for _, n := range []int{1_000, 100_000, 1_000_000} {
		b.Run(fmt.Sprintf("waiting=%d", n), func(b *testing.B) {
			l := New(Config{Capacity: benchCapacity, Bypass: 1 << 60, MaxWaiting: n + 1})
			l.Request(uint64(n), 99, benchCapacity)
			small := uint64(n / 2)
			for i := range uint64(n) {
				need := int64(2)
				if i == small {
					need = 1
				}
				l.Request(i, Sender(i%16), need)
			}
			b.ReportAllocs()
			for b.Loop() {
				l.Return(1)
				id, ok := l.Next()
				if !ok || id != small {
					b.Fatalf("Next() = %d, %v", id, ok)
				}
				l.Request(id, Sender(id%16), 1)
			}
		})
	}
}

// BenchmarkRemove cancels in the middle of a line, and asks again: any of those
// that wait, or (near) always of the same thousand, so that caches hold whatever
// is touched. What grows with the first and not with the second is memory's time.
func BenchmarkRemove(b *testing.B) {
	const near = 1_000
	run := func(name string, n, window int) {
		b.Run(name, func(b *testing.B) {
			l, needs := waitingLedger(n, 16, true)
			rng := rand.New(rand.NewSource(2))
			b.ReportAllocs()
			for b.Loop() {
				id := uint64((n-window)/2 + rng.Intn(window))
				l.Remove(id)
				l.Request(id, Sender(id%16), needs[id])
			}
		})
	}
	for _, n := range []int{1_000, 100_000, 1_000_000} {
		run(fmt.Sprintf("waiting=%d", n), n, n)
		run(fmt.Sprintf("waiting=%d,near", n), n, near)
	}
}

// BenchmarkRequestAtOnce is the life of a request that need not wait.
func BenchmarkRequestAtOnce(b *testing.B) {
	l := New(Config{Capacity: 64, Bypass: 64, MaxWaiting: 10})
	b.ReportAllocs()
	for b.Loop() {
		l.Request(1, 1, 64)
		l.Return(64)
	}
}

// TestNoAllocations: in steady state nothing is allocated, whatever happens.
func TestNoAllocations(t *testing.T) {
	const n = 2_000
	l, needs := waitingLedger(n, 16, true)
	rng := rand.New(rand.NewSource(3))
	out := []int64{benchCapacity}
	step := func() {
		if i := rng.Intn(len(out)); rng.Intn(3) > 0 {
			l.Return(out[i])
			out[i] = out[len(out)-1]
			out = out[:len(out)-1]
		}
		id := uint64(rng.Intn(n))
		l.Remove(id)
		for id, ok := l.Next(); ok; id, ok = l.Next() {
			out = append(out, needs[id])
		}
		for i := id; i < id+8; i++ {
			if ok, err := l.Request(i%n, Sender(i%16), needs[i%n]); err != nil {
				t.Fatal(err)
			} else if ok {
				out = append(out, needs[i%n])
			}
		}
		if len(out) == 0 {
			out = append(out, 0)
		}
		l.SetBlocked(min(rng.Int63n(benchCapacity), benchCapacity-l.Free()), 0)
		l.SetBlocked(0, 0)
	}
	for range 20_000 {
		step()
	}
	out = append(make([]int64, 0, 1<<16), out...)
	if allocs := testing.AllocsPerRun(2_000, step); allocs != 0 {
		t.Errorf("%v allocations a step", allocs)
	}
	if err := l.Check(); err != nil {
		t.Fatal(err)
	}
}
