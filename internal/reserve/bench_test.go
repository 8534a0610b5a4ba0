package reserve

import (
	"fmt"
	"math/rand"
	"testing"
)

// waitingLedger has n requests waiting, in as many lines, for a full pool.
func waitingLedger(n, senders int) (l *Ledger, needs []int64) {
	const capacity = 1 << 14
	rng := rand.New(rand.NewSource(1))
	l = New(Config{Capacity: capacity, Bypass: capacity, MaxWaiting: n + 1})
	l.Request(uint64(n), Sender(senders), capacity)
	needs = make([]int64, n)
	for i := range needs {
		needs[i] = 1 + rng.Int63n(64)
		l.Request(uint64(i), Sender(i%senders), needs[i])
	}
	return l, needs
}

// BenchmarkAdmit is the life of one request in a ledger where n wait: it comes
// and waits, room is returned, it goes. An operation is one admission.
func BenchmarkAdmit(b *testing.B) {
	for _, senders := range []int{1, 16, 1000} {
		for _, n := range []int{1_000, 100_000, 1_000_000} {
			b.Run(fmt.Sprintf("senders=%d/waiting=%d", senders, n), func(b *testing.B) {
				l, needs := waitingLedger(n, senders)
				const mask = 1<<15 - 1
				var out [mask + 1]int64 // a ring: what is out, oldest first
				out[0] = 1 << 14
				first, end, next := 0, 1, uint64(n+1)
				b.ReportAllocs()
				leave := func(id uint64) {
					out[end&mask] = needs[id%uint64(n)]
					end++
				}
				for b.Loop() {
					id, ok := l.Next()
					for !ok {
						l.Return(out[first&mask])
						first++
						id, ok = l.Next()
					}
					leave(id)
					for waits := false; !waits; next++ {
						ok, _ := l.Request(next, Sender(next%uint64(senders)), needs[next%uint64(n)])
						if waits = !ok; ok {
							leave(next)
						}
					}
				}
			})
		}
	}
}

// BenchmarkFirstFit passes many that do not fit, in the middle of their lines.
func BenchmarkFirstFit(b *testing.B) {
	for _, n := range []int{1_000, 100_000, 1_000_000} {
		b.Run(fmt.Sprintf("waiting=%d", n), func(b *testing.B) {
			const capacity = 1 << 14
			l := New(Config{Capacity: capacity, Bypass: 1 << 60, MaxWaiting: n + 1})
			l.Request(uint64(n), 99, capacity)
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

// BenchmarkRemove cancels in the middle of a line, and asks again.
func BenchmarkRemove(b *testing.B) {
	for _, n := range []int{1_000, 100_000, 1_000_000} {
		b.Run(fmt.Sprintf("waiting=%d", n), func(b *testing.B) {
			l, needs := waitingLedger(n, 16)
			rng := rand.New(rand.NewSource(2))
			b.ReportAllocs()
			for b.Loop() {
				id := uint64(rng.Intn(n))
				l.Remove(id)
				l.Request(id, Sender(id%16), needs[id])
			}
		})
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
	l, needs := waitingLedger(n, 16)
	rng := rand.New(rand.NewSource(3))
	out := []int64{1 << 14}
	var encoded []byte
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
		blocked := rng.Int63n(1 << 14)
		l.SetBlocked(min(blocked, (1<<14)-l.Free()), 0)
		l.SetBlocked(0, 0)
	}
	for range 20_000 {
		step()
	}
	encoded = l.Encode(encoded, nil, nil)
	if len(encoded) == 0 {
		t.Fatal("nothing encoded")
	}
	out = append(make([]int64, 0, 1<<16), out...)
	if allocs := testing.AllocsPerRun(2_000, step); allocs != 0 {
		t.Errorf("%v allocations a step", allocs)
	}
	if err := l.Check(); err != nil {
		t.Fatal(err)
	}
}
