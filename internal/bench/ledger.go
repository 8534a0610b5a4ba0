package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"time"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/reserve"
	"github.com/berthkv/berth/internal/slot"
)

// Ledger is `berth bench ledger`: what an admission decision costs when many
// requests wait, and the life of a slot.
type Ledger struct {
	Options
	Waiting []int         // how many requests wait; the first is what the others are compared with
	Senders int           // in whose lines they stand
	Time    time.Duration // of each measurement
}

const (
	maxWaiting     = 10_000_000
	ledgerCapacity = 1 << 14
	maxNeed        = 64 // chunks of a request, where needs are mixed; else half of it
)

// Run measures.
func (l Ledger) Run(ctx context.Context) (*Report, error) {
	bounds := []bound{{"senders", int64(l.Senders), 1 << 20}, {"time", int64(l.Time), int64(time.Minute)}}
	for _, n := range l.Waiting {
		bounds = append(bounds, bound{"waiting", int64(n), maxWaiting})
	}
	if err := check(bounds); err != nil {
		return nil, err
	}
	r, err := l.begin(ctx, "ledger")
	if err != nil {
		return nil, err
	}
	return r.end(l.measure(r))
}

// operation prepares a ledger in which n requests wait and returns one step of
// the life that it is named after.
type operation struct {
	name string
	make func(n, senders int, mixed bool) func()
}

var operations = []operation{
	{"admit (one comes, room is returned, the next is admitted)", admit},
	{"first that fits, half-way down the lines", firstFit},
	{"cancel in mid-line and ask again", cancelAgain},
	{"admitted at once and returned", atOnce},
}

func (l Ledger) measure(r *run) error {
	const checks = "admission rules on; a ledger has no bytes"
	for _, op := range operations {
		for _, mixed := range []bool{false, true} {
			needs := "equal"
			if mixed {
				needs = "mixed"
			}
			var first []float64
			for i, n := range l.Waiting {
				if err := r.ctx.Err(); err != nil {
					return err
				}
				ns, allocs := l.repeat(op.make(n, l.Senders, mixed))
				what := fmt.Sprintf("%s, %s needs, %d waiting", op.name, needs, n)
				if i == 0 {
					first = ns
					r.add(what+": time", "ns CPU", checks, "", ns, nil)
				} else {
					r.add(what+": time", "ns CPU", checks, fmt.Sprintf("%d waiting", l.Waiting[0]), ns, first)
				}
				r.add(what+": allocations", "each", checks, "", allocs, nil)
				r.say("%s: %s ns, %s allocations", what, figure(mean(ns)), figure(mean(allocs)))
			}
		}
	}
	ns, allocs := l.repeat(slotLife())
	const what = "life of a slot (reserve, grant, land, commit, claim, let go, release)"
	r.add(what+": time", "ns CPU", "generations on", "", ns, nil)
	r.add(what+": allocations", "each", "generations on", "", allocs, nil)
	return nil
}

// repeat returns the nanoseconds and allocations of one step, for each turn,
// after a warm-up. Nothing else runs in this process meanwhile; its CPU time is
// taken, which a busy machine spoils least.
func (l Ledger) repeat(step func()) (ns, allocs []float64) {
	const batch = 1024
	var before, after runtime.MemStats
	for turn := range l.Repeat + 1 {
		runtime.GC()
		runtime.ReadMemStats(&before)
		n, start := 0, cpuTime()
		for cpuTime()-start < l.Time {
			for range batch {
				step()
			}
			n += batch
		}
		elapsed := cpuTime() - start
		runtime.ReadMemStats(&after)
		if turn > 0 {
			ns = append(ns, float64(elapsed)/float64(n))
			// Rounded down, as testing.B does: the runtime itself makes a few.
			allocs = append(allocs, float64((after.Mallocs-before.Mallocs)/uint64(n)))
		}
	}
	return ns, allocs
}

// waiting is a ledger that is full, and n requests that wait in it; request i
// needs needs[i%n].
func waiting(n, senders int, mixed bool) (l *reserve.Ledger, needs []int64) {
	rng := rand.New(rand.NewPCG(1, 1))
	l = reserve.New(reserve.Config{Capacity: ledgerCapacity, Bypass: ledgerCapacity, MaxWaiting: n + 1})
	l.Request(uint64(n), reserve.Sender(senders), ledgerCapacity)
	needs = make([]int64, n)
	for i := range needs {
		needs[i] = maxNeed / 2
		if mixed {
			needs[i] = 1 + rng.Int64N(maxNeed)
		}
		l.Request(uint64(i), reserve.Sender(i%senders), needs[i])
	}
	return l, needs
}

func admit(n, senders int, mixed bool) func() {
	l, needs := waiting(n, senders, mixed)
	var out [2 * ledgerCapacity]int64 // a ring: what is out, oldest first
	out[0] = ledgerCapacity
	first, end, newcomer := 0, 1, uint64(n+1)
	leave := func(id uint64) {
		out[end%len(out)] = needs[id%uint64(n)]
		end++
	}
	return func() {
		id, ok := l.Next()
		for !ok {
			l.Return(out[first%len(out)])
			first++
			id, ok = l.Next()
		}
		leave(id)
		for waits := false; !waits; newcomer++ {
			ok, _ := l.Request(newcomer, reserve.Sender(newcomer%uint64(senders)), needs[newcomer%uint64(n)])
			if waits = !ok; ok {
				leave(newcomer)
			}
		}
	}
}

// firstFit has one slot returned, which only a request in the middle can use.
func firstFit(n, senders int, mixed bool) func() {
	rng := rand.New(rand.NewPCG(1, 1))
	l := reserve.New(reserve.Config{Capacity: ledgerCapacity, Bypass: 1 << 60, MaxWaiting: n + 1})
	l.Request(uint64(n), reserve.Sender(senders), ledgerCapacity)
	small := uint64(n / 2)
	for i := range uint64(n) {
		need := int64(2)
		if mixed {
			need += rng.Int64N(maxNeed)
		}
		if i == small {
			need = 1
		}
		l.Request(i, reserve.Sender(i%uint64(senders)), need)
	}
	return func() {
		l.Return(1)
		id, ok := l.Next()
		if !ok || id != small {
			panic(fmt.Sprintf("the ledger admits %d (%v), not the one that fits", id, ok))
		}
		l.Request(id, reserve.Sender(id%uint64(senders)), 1)
	}
}

func cancelAgain(n, senders int, mixed bool) func() {
	l, needs := waiting(n, senders, mixed)
	rng := rand.New(rand.NewPCG(2, 2))
	return func() {
		id := rng.Uint64N(uint64(n))
		l.Remove(id)
		l.Request(id, reserve.Sender(id%uint64(senders)), needs[id])
	}
}

// atOnce has n wait for more than there is room while small ones pass: as many
// as the bypass allows, which here is all.
func atOnce(n, senders int, mixed bool) func() {
	rng := rand.New(rand.NewPCG(1, 1))
	l := reserve.New(reserve.Config{Capacity: ledgerCapacity, Bypass: 1 << 60, MaxWaiting: n + 1})
	l.Request(uint64(n), reserve.Sender(senders), ledgerCapacity-1)
	for i := range uint64(n) {
		need := int64(2)
		if mixed {
			need += rng.Int64N(maxNeed)
		}
		l.Request(i, reserve.Sender(i%uint64(senders)), need)
	}
	newcomer := uint64(n + 1)
	return func() {
		if ok, err := l.Request(newcomer, reserve.Sender(senders+1), 1); !ok {
			panic(fmt.Sprintf("the ledger does not admit one that fits: %v", err))
		}
		l.Return(1)
		newcomer++
	}
}

func slotLife() func() {
	p := slot.New(ledgerCapacity)
	gen := kv.Generation(0)
	return func() {
		gen++
		err := p.Reserve(1)
		s, err2 := p.Grant(gen, 0)
		for _, e := range []error{err, err2, p.Land(s, gen), p.Commit(s, gen), p.Claim(s, gen), p.LetGo(s, gen, slot.Writer), p.Release(s, gen)} {
			if e != nil {
				panic(e)
			}
		}
	}
}
