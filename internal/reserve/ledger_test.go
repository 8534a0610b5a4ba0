package reserve

import (
	"fmt"
	"math"
	"math/rand"
	"strings"
	"testing"
)

// TestFairShares measures what the package comment promises: over any time in
// which two senders wait, and what is theirs fits when it is their turn, they are
// given the same number of chunks, give or take the largest need.
//
// The bound: a front is a front for at most its need, M, rounds, in which each of
// the n-1 others is given at most M + M chunks; so with a bypass of 2nM no
// allowance runs out. A line's turn then lies between now and M rounds ahead, and
// now is where its chunks are summed up to, less what it has saved, at most M.
func TestFairShares(t *testing.T) {
	const senders, largest, grants = 7, 8, 10_000
	for seed := range int64(6) {
		rng := rand.New(rand.NewSource(seed))
		l := New(Config{Capacity: largest, Bypass: 2 * senders * largest, MaxWaiting: 10_000})
		needs, senderOf := map[uint64]int64{}, map[uint64]int{}
		ids, given := uint64(0), [senders]int64{}
		ask := func(s int) {
			ids++
			// Some send large requests, some small ones, some both.
			need := 1 + rng.Int63n(largest)
			switch s % 3 {
			case 0:
				need = largest
			case 1:
				need = 1 + rng.Int63n(2)
			}
			needs[ids], senderOf[ids] = need, s
			if ok, err := l.Request(ids, Sender(s), need); ok || err != nil {
				t.Fatalf("Request = %v, %v; nothing is free", ok, err)
			}
		}
		l.Request(0, senders, largest)
		for s := range senders {
			for range 1 + s*s*s { // long lines and short ones: the last has 217 waiting, the first one
				ask(s)
			}
		}
		widest := int64(0)
		for range grants {
			l.Return(largest - l.Free())
			id, ok := l.Next()
			if !ok {
				t.Fatal("nobody was admitted although all is free")
			}
			s := senderOf[id]
			given[s] += needs[id]
			l.Request(0, senders, l.Free()) // keep the rest, so that newcomers wait
			ask(s)                          // before the next turn
			low, high := given[0], given[0]
			for _, g := range given {
				low, high = min(low, g), max(high, g)
			}
			widest = max(widest, high-low)
		}
		if widest > largest {
			t.Errorf("seed %d: one sender was %d chunks ahead of another, the bound is %d", seed, widest, largest)
		}
		if widest < largest/2 {
			t.Errorf("seed %d: at most %d chunks apart: this history tests nothing", seed, widest)
		}
	}
}

// TestLongLineDefaultBypass is what a bypass of one capacity leaves of the
// shares: a sender with 1,000 waiting gets no more than one that comes later.
func TestLongLineDefaultBypass(t *testing.T) {
	l := New(Config{Capacity: 64, Bypass: 64, MaxWaiting: 10_000})
	l.Request(0, 0, 64)
	for i := range uint64(1_000) {
		l.Request(1+i, 1, 8)
	}
	for i := range uint64(100) {
		l.Request(10_000+i, 2, 8)
	}
	given := map[bool]int{}
	for range 100 {
		l.Return(8)
		id, ok := l.Next()
		if !ok {
			t.Fatal("nobody was admitted")
		}
		given[id >= 10_000]++
	}
	if d := given[true] - given[false]; d < -1 || d > 1 {
		t.Errorf("the later sender was given %d of 100 requests", given[true])
	}
}

func TestMisusePanics(t *testing.T) {
	for name, f := range map[string]func(l *Ledger){
		"negative need":        func(l *Ledger) { l.Request(1, 1, -1) },
		"returned but not out": func(l *Ledger) { l.Request(1, 1, 3); l.Return(4) },
		"negative return":      func(l *Ledger) { l.Return(-1) },
		"negative quarantine":  func(l *Ledger) { l.SetBlocked(-1, 0) },
		"negative lock-step":   func(l *Ledger) { l.SetBlocked(0, -1) },
		"no capacity":          func(*Ledger) { New(Config{}) },
		"capacity above limit": func(*Ledger) { New(Config{Capacity: 1<<20 + 1}) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			f(New(Config{Capacity: 10, Bypass: 10, MaxWaiting: 10}))
		})
	}
}

// TestCheckCanFail breaks each invariant once and sees Check name it.
func TestCheckCanFail(t *testing.T) {
	for _, c := range []struct {
		number string
		damage func(l *Ledger)
	}{
		{"1", func(l *Ledger) { l.free += 10 }},
		{"1", func(l *Ledger) { l.quarantined = -1 }},
		{"2", func(l *Ledger) { l.waiting++ }},
		{"2", func(l *Ledger) { l.infos[l.ids.get(2)].arrival = 99 }},
		{"2", func(l *Ledger) { l.ids.remove(l.ids.get(3)) }},
		{"2", func(l *Ledger) { l.known.remove(l.known.get(2)) }},
		{"3", func(l *Ledger) { l.reqs.nodes[l.lines[1].queue.root].before.sum++ }},
		{"3", func(l *Ledger) { l.turns.nodes[l.turns.seq.root].up = 7 }},
		{"3", func(l *Ledger) { l.lines[1].chunks++ }},
		{"4", func(l *Ledger) { l.lines[1].front = l.ids.get(3) }},
		{"4", func(l *Ledger) { l.fronts.remove(&l.fronts.seq, l.fronts.seq.root) }},
		{"5", func(l *Ledger) { l.reqs.add(l.ids.get(2), -9) }},
		{"5", func(l *Ledger) { l.fronts.add(l.fronts.seq.root, 99) }},
		{"6", func(l *Ledger) { l.round -= 99 }},
		{"6", func(l *Ledger) { l.lines[l.turns.seq.tail].turn -= 9 }},
	} {
		l := New(Config{Capacity: 10, Bypass: 5, MaxWaiting: 10})
		l.Request(1, 1, 8)
		l.Request(2, 1, 9)
		l.Request(3, 1, 3)
		l.Request(4, 2, 5)
		l.Request(5, 2, 1)
		if err := l.Check(); err != nil {
			t.Fatal(err)
		}
		c.damage(l)
		if err := l.Check(); err == nil || !strings.HasPrefix(err.Error(), c.number+":") {
			t.Errorf("Check() = %v, should name invariant %s", err, c.number)
		}
	}
}

// TestTable compares the hash table with a map, in a small range of keys so that
// chains are long.
func TestTable(t *testing.T) {
	rng := rand.New(rand.NewSource(1))
	var tab table
	var free []int32
	for i := range 24 {
		free = append(free, int32(i+1))
	}
	want := map[uint64]int32{}
	for range 50_000 {
		key := uint64(rng.Intn(90))
		switch _, ok := want[key]; {
		case !ok && len(want) < 24:
			n := rng.Intn(len(free))
			want[key] = free[n]
			tab.put(key, free[n])
			free = append(free[:n], free[n+1:]...)
		case ok:
			tab.remove(want[key])
			free = append(free, want[key])
			delete(want, key)
		}
		key = uint64(rng.Intn(90))
		if tab.get(key) != want[key] || tab.used != len(want) {
			t.Fatalf("get(%d) = %d of %d, should be %d of %d", key, tab.get(key), tab.used, want[key], len(want))
		}
	}
}

// TestForest compares a sequence with a slice.
func TestForest(t *testing.T) {
	rng := rand.New(rand.NewSource(2))
	f, q := newForest(), sequence{}
	var list, spare []int32
	weights := map[int32]int64{}
	for step := range 5_000 {
		if n := rng.Intn(len(list) + 1); n == len(list) || rng.Intn(64) > len(list) {
			if len(spare) == 0 {
				spare = append(spare, f.grow())
			}
			i := spare[len(spare)-1]
			spare = spare[:len(spare)-1]
			f.reset(i, rng.Int31n(50), 50+rng.Int31n(50))
			at := int32(0)
			if n < len(list) {
				at = list[n]
			}
			f.insert(&q, at, i)
			weights[i] = 0
			list = append(list[:n], append([]int32{i}, list[n:]...)...)
		} else {
			w := f.nodes[list[n]].weight
			f.remove(&q, list[n])
			if n > 0 {
				weights[list[n-1]] += w
			}
			spare = append(spare, list[n])
			list = append(list[:n], list[n+1:]...)
		}
		if len(list) > 0 {
			i := list[rng.Intn(len(list))]
			d := rng.Int63n(3)
			f.add(i, d)
			weights[i] += d
			n := rng.Intn(len(list))
			d = rng.Int63n(1 + weights[list[n]])
			f.pass(list[n], d)
			weights[list[n]] -= d
			if n > 0 {
				weights[list[n-1]] += d
			}
			f.setNeeds(list[rng.Intn(len(list))], rng.Int31n(50), 50+rng.Int31n(50))
		}
		if err := compareForest(&f, q, list, weights, rng.Int63n(100), rng.Int63n(200)); err != nil {
			t.Fatalf("step %d: %v", step, err)
		}
	}
}

func compareForest(f *forest, q sequence, list []int32, weights map[int32]int64, limit, v int64) error {
	if err := f.check(q); err != nil {
		return err
	}
	var above []int32
	first, below, sum, suffix := int32(0), int32(0), int64(0), int64(0)
	prev := int32(0)
	for _, i := range list {
		if first == 0 && int64(f.nodes[i].lo) <= limit {
			first = i
		}
		if int64(f.nodes[i].hi) > limit {
			above = append(above, i)
		}
		if f.prev(i) != prev || prev != 0 && f.next(prev) != i {
			return fmt.Errorf("node %d is not after %d", i, prev)
		}
		prev = i
	}
	if q.tail != prev || prev != 0 && f.next(prev) != 0 {
		return fmt.Errorf("node %d is not the last", prev)
	}
	for n := len(list) - 1; n >= 0; n-- {
		suffix += weights[list[n]]
		if got := f.suffix(q, list[n]); got != suffix {
			return fmt.Errorf("suffix of node %d is %d, should be %d", list[n], got, suffix)
		}
		if suffix < v {
			below, sum = list[n], suffix
		}
	}
	if got := f.first(q, limit); got != first {
		return fmt.Errorf("first(%d) = %d, should be %d", limit, got, first)
	}
	if got, s := f.firstBelow(q, v); got != below || s != sum {
		return fmt.Errorf("firstBelow(%d) = %d, %d; should be %d, %d", v, got, s, below, sum)
	}
	if got := f.appendAbove(nil, q.root, limit); fmt.Sprint(got) != fmt.Sprint(above) {
		return fmt.Errorf("appendAbove(%d) = %d, should be %d", limit, got, above)
	}
	return nil
}

// TestBeyondReach: while a caller is half-way through telling what happened
// (slots are back in free that it still counts as quarantined), nothing is
// admitted that is blocked.
func TestBeyondReach(t *testing.T) {
	l := New(Config{Capacity: 10, Bypass: 10, MaxWaiting: 10})
	l.Request(1, 1, 10)
	l.SetBlocked(4, 0)
	l.Return(10)
	if ok, err := l.Request(2, 1, 7); ok || err != nil {
		t.Errorf("Request of 7 = %v, %v; the reach is %d", ok, err, l.Reach())
	}
	if id, ok := l.Next(); ok {
		t.Errorf("Next admitted %d", id)
	}
	l.SetBlocked(0, 0)
	if id, ok := l.Next(); !ok || id != 2 {
		t.Errorf("Next() = %d, %v", id, ok)
	}
}

// TestGrowth counts the steps that an operation may take. Each walks one path
// between a node and its root, or the edges of the subtrees below it, and looks
// at one chain of a table: so many steps as trees are deep and chains long. With a
// thousand times as many waiting, a path is a few nodes longer.
func TestGrowth(t *testing.T) {
	const senders = 16
	for _, n := range []int{1_000, 10_000, 100_000, 1_000_000} {
		if n > 100_000 && (raced || testing.Short()) {
			continue
		}
		l, needs := waitingLedger(n, senders, true)
		rng := rand.New(rand.NewSource(2))
		for range min(n, 100_000) { // the trees are not those that insertion at the end leaves
			id := uint64(rng.Intn(n))
			l.Remove(id)
			l.Request(id, Sender(id%senders), needs[id])
		}
		depths, deepest, chain := 0, 0, 0
		var walk func(i int32, depth int)
		walk = func(i int32, depth int) {
			if i != 0 {
				depths, deepest = depths+depth, max(deepest, depth)
				walk(l.reqs.nodes[i].left, depth+1)
				walk(l.reqs.nodes[i].right, depth+1)
			}
		}
		for ln := l.turns.seq.head; ln != 0; ln = l.turns.next(ln) {
			walk(l.lines[ln].queue.root, 1)
		}
		for _, i := range l.ids.heads {
			length := 0
			for ; i != 0; i = l.ids.links[i].next {
				length++
			}
			chain = max(chain, length)
		}
		mean, log := float64(depths)/float64(n), math.Log2(float64(n))
		t.Logf("%d wait: nodes from a request to its root %.1f, at most %d (log2: %.1f); the longest chain has %d", n, mean, deepest, log, chain)
		if mean > 1.5*log || float64(deepest) > 3*log || float64(chain) > 3*log {
			t.Errorf("%d wait: mean depth %.1f, at most %d, chains of up to %d; log2 is %.1f", n, mean, deepest, chain, log)
		}
	}
}
