package slot

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
)

// states of a slot that can be told apart, as Slot values under generation 7.
var shapes = map[string]Slot{
	"free":                   {},
	"granted":                {Generation: 7, State: Granted, Hands: Writer},
	"granted, landed":        {Generation: 7, State: Granted, Hands: Writer, Landed: true},
	"committed":              {Generation: 7, State: Committed, Hands: Writer, Landed: true},
	"committed, fenced":      {Generation: 7, State: Committed, Landed: true},
	"claimed":                {Generation: 7, State: Claimed, Hands: Writer | Reader, Landed: true},
	"claimed, fenced":        {Generation: 7, State: Claimed, Hands: Reader, Landed: true},
	"quarantined by writer":  {Generation: 7, State: Quarantined, Hands: Writer},
	"quarantined, landed":    {Generation: 7, State: Quarantined, Hands: Writer, Landed: true},
	"quarantined by reader":  {Generation: 7, State: Quarantined, Hands: Reader, Landed: true},
	"quarantined by both":    {Generation: 7, State: Quarantined, Hands: Writer | Reader, Landed: true},
	"another generation's":   {Generation: 8, State: Granted, Hands: Writer},
	"another's, quarantined": {Generation: 8, State: Quarantined, Hands: Writer},
}

var moves = map[string]func(*Pool, kv.SlotID, kv.Generation) error{
	"land":    (*Pool).Land,
	"commit":  (*Pool).Commit,
	"claim":   (*Pool).Claim,
	"release": (*Pool).Release,
	"revoke":  (*Pool).Revoke,
	"writer":  func(p *Pool, s kv.SlotID, g kv.Generation) error { return p.LetGo(s, g, Writer) },
	"reader":  func(p *Pool, s kv.SlotID, g kv.Generation) error { return p.LetGo(s, g, Reader) },
	"no hand": func(p *Pool, s kv.SlotID, g kv.Generation) error { return p.LetGo(s, g, 0) },
}

var moveNames = slices.Sorted(maps.Keys(moves))

// legal lists every legal move; all others must be refused and change nothing.
var legal = map[[2]string]string{
	{"granted", "land"}:                 "granted, landed",
	{"granted", "revoke"}:               "quarantined by writer",
	{"granted, landed", "commit"}:       "committed",
	{"granted, landed", "revoke"}:       "quarantined, landed",
	{"committed", "claim"}:              "claimed",
	{"committed", "revoke"}:             "quarantined, landed",
	{"committed", "writer"}:             "committed, fenced",
	{"committed, fenced", "claim"}:      "claimed, fenced",
	{"committed, fenced", "revoke"}:     "free",
	{"claimed", "release"}:              "quarantined, landed",
	{"claimed", "revoke"}:               "quarantined by both",
	{"claimed", "writer"}:               "claimed, fenced",
	{"claimed, fenced", "release"}:      "free",
	{"claimed, fenced", "revoke"}:       "quarantined by reader",
	{"quarantined by writer", "writer"}: "free",
	{"quarantined, landed", "writer"}:   "free",
	{"quarantined by reader", "reader"}: "free",
	{"quarantined by both", "writer"}:   "quarantined by reader",
	{"quarantined by both", "reader"}:   "quarantined, landed",
}

// with returns a pool of two slots whose first is s.
func with(s Slot) *Pool {
	p := New(2)
	if s.State != Free {
		p.slots[0] = s
		p.free.clear(0)
		p.count[Free]--
		p.count[s.State]++
	}
	return p
}

func TestEveryTransition(t *testing.T) {
	for from, s := range shapes {
		for name, move := range moves {
			t.Run(from+"/"+name, func(t *testing.T) {
				p := with(s)
				if err := p.Check(); err != nil {
					t.Fatal(err)
				}
				before := p.Encode(nil)
				err := move(p, 0, 7)
				if cerr := p.Check(); cerr != nil {
					t.Fatal(cerr)
				}
				want, ok := legal[[2]string{from, name}]
				if !ok {
					if err == nil {
						t.Fatalf("an illegal move was made: %+v", p.Slot(0))
					}
					if !bytes.Equal(before, p.Encode(nil)) {
						t.Fatal("a refused move changed the pool")
					}
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(shapes[want], p.Slot(0)); diff != "" {
					t.Fatal(diff)
				}
			})
		}
	}
}

func TestStaleGenerationNamesBoth(t *testing.T) {
	p := with(shapes["another generation's"])
	err := p.Land(0, 7)
	if !errors.Is(err, fault.New(fault.StaleGeneration, "")) || err.Error() != "stale_generation: slot 0 is under generation 8, not 7" {
		t.Fatal(err)
	}
	if err := p.Land(2, 7); fault.CodeOf(err) != fault.BadRequest {
		t.Fatalf("a slot outside the pool: %v", err)
	}
}

func TestReserve(t *testing.T) {
	p := New(3)
	steps := []struct {
		do   func() error
		ok   bool
		want Counts
	}{
		{func() error { return p.Reserve(4) }, false, Counts{Free: 3}},
		{func() error { return p.Reserve(-1) }, false, Counts{Free: 3}},
		{func() error { return p.Reserve(2) }, true, Counts{Free: 1, Reserved: 2}},
		{func() error { return p.Reserve(2) }, false, Counts{Free: 1, Reserved: 2}},
		{func() error { return p.Unreserve(3) }, false, Counts{Free: 1, Reserved: 2}},
		{func() error { return p.Unreserve(-1) }, false, Counts{Free: 1, Reserved: 2}},
		{func() error { return p.Unreserve(1) }, true, Counts{Free: 2, Reserved: 1}},
		{func() error { _, err := p.Grant(0, 0); return err }, false, Counts{Free: 2, Reserved: 1}},
		{func() error { _, err := p.Grant(1, 0); return err }, true, Counts{Free: 2, Granted: 1}},
		{func() error { _, err := p.Grant(1, 1); return err }, false, Counts{Free: 2, Granted: 1}},
	}
	for i, s := range steps {
		if err := s.do(); (err == nil) != s.ok {
			t.Fatalf("step %d: %v", i, err)
		}
		if diff := cmp.Diff(s.want, p.Counts()); diff != "" {
			t.Fatalf("step %d: %s", i, diff)
		}
		if err := p.Check(); err != nil {
			t.Fatalf("step %d: %v", i, err)
		}
	}
}

// TestLowestFirst: slots are touched lowest first, so the lowest free one is a
// touched one whenever there is any.
func TestLowestFirst(t *testing.T) {
	for _, n := range []int{1, 2, 63, 64, 65, 4096, 4097, 300_000} {
		p := New(n)
		if err := p.Reserve(n); err != nil {
			t.Fatal(err)
		}
		for i := range n {
			if s, err := p.Grant(1, 0); err != nil || s != kv.SlotID(i) {
				t.Fatalf("capacity %d: grant %d gave %d, %v", n, i, s, err)
			}
		}
	}
}

// model is the simple second implementation of the free list and the counts.
type model struct {
	slots    []Slot
	reserved int
}

func (m *model) lowest() int {
	return slices.IndexFunc(m.slots, func(s Slot) bool { return s.State == Free })
}

// after says what a move makes of a slot: the table above, and nothing else.
func (m *model) after(s kv.SlotID, gen kv.Generation, move string) (Slot, bool) {
	now := m.slots[s]
	if now.Generation != gen {
		return now, false
	}
	shape := now
	if shape.State != Free {
		shape.Generation = 7 // that of shapes
	}
	shape.Chunk = 0
	for name, from := range shapes {
		if from != shape {
			continue
		}
		to, ok := legal[[2]string{name, move}]
		if !ok {
			return now, false
		}
		then := shapes[to]
		if then.State != Free {
			then.Generation, then.Chunk = now.Generation, now.Chunk
		}
		return then, true
	}
	return now, false
}

func (m *model) counts() Counts {
	var n [states]int
	for _, s := range m.slots {
		n[s.State]++
	}
	return Counts{n[Free] - m.reserved, m.reserved, n[Granted], n[Committed], n[Claimed], n[Quarantined]}
}

func TestAgainstModel(t *testing.T) {
	for seed := range uint64(50_000) {
		length, slots := 30, 6 // many short ones, and some long ones of larger pools
		if seed < 200 {
			length, slots = 400, 100
		}
		rng := rand.New(rand.NewPCG(seed, 1))
		history(t, fmt.Sprint("seed ", seed), rng, 1+rng.IntN(slots), func(step int) bool { return step < length })
	}
}

// history makes moves on a pool and on the model while more says so.
func history(t *testing.T, name string, rng *rand.Rand, n int, more func(step int) bool) {
	t.Helper()
	p, m := New(n), &model{slots: make([]Slot, n)}
	for step := 0; more(step); step++ {
		s := kv.SlotID(rng.IntN(n))
		gen := m.slots[s].Generation
		switch rng.IntN(8) {
		case 0:
			k := rng.IntN(5)
			if ok := m.counts().Free >= k; (p.Reserve(k) == nil) != ok {
				t.Fatalf("%s: reserve", name)
			} else if ok {
				m.reserved += k
			}
		case 1:
			k := rng.IntN(3)
			if ok := m.reserved >= k; (p.Unreserve(k) == nil) != ok {
				t.Fatalf("%s: unreserve", name)
			} else if ok {
				m.reserved -= k
			}
		case 2, 3:
			given := kv.Generation(step + 1)
			got, err := p.Grant(given, uint32(s))
			if (err == nil) != (m.reserved > 0) {
				t.Fatalf("%s: grant: %v", name, err)
			}
			if err == nil {
				if int(got) != m.lowest() {
					t.Fatalf("%s: granted %d, the lowest is %d", name, got, m.lowest())
				}
				m.reserved--
				m.slots[got] = Slot{Generation: given, Chunk: uint32(s), State: Granted, Hands: Writer}
			}
		default:
			move := moveNames[rng.IntN(len(moveNames))]
			if rng.IntN(8) == 0 {
				gen++ // a stale one, or nobody's
			}
			want, legal := m.after(s, gen, move)
			if err := moves[move](p, s, gen); (err == nil) != legal {
				t.Fatalf("%s: %s of slot %d under %d, which is %+v: %v", name, move, s, gen, m.slots[s], err)
			}
			if legal {
				m.slots[s] = want
			}
		}
		for i, want := range m.slots {
			if got := p.Slot(kv.SlotID(i)); got != want {
				t.Fatalf("%s: slot %d is %+v, should be %+v", name, i, got, want)
			}
		}
		if got, want := p.Counts(), m.counts(); got != want {
			t.Fatalf("%s: %+v, want %+v", name, got, want)
		}
		if err := p.Check(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	q := p.Clone()
	if !bytes.Equal(p.Encode(nil), q.Encode(nil)) {
		t.Fatalf("%s: a clone differs", name)
	}
	q.reserved = 0
	if q.count[Free] > 0 && q.Reserve(1) == nil {
		if _, err := q.Grant(9999, 0); err != nil || bytes.Equal(p.Encode(nil), q.Encode(nil)) {
			t.Fatalf("%s: a clone is not independent: %v", name, err)
		}
	}
	if err := p.Check(); err != nil {
		t.Fatalf("%s: after its clone was changed: %v", name, err)
	}
}

// FuzzSteps lets a fuzzer choose the moves.
func FuzzSteps(f *testing.F) {
	f.Add([]byte("free, granted, committed, claimed, and free again"))
	for seed := range uint64(8) {
		rng := rand.New(rand.NewPCG(seed, 2))
		b := make([]byte, 300)
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		in := &bytesSource{b}
		rng := rand.New(in)
		history(t, "fuzz", rng, 1+rng.IntN(100), func(step int) bool { return len(in.b) > 0 && step < 1000 })
	})
}

// bytesSource makes a fuzzer's bytes choices, one byte each.
type bytesSource struct{ b []byte }

func (s *bytesSource) Uint64() uint64 {
	const rest = 0x005a5a5a_5a5a5a5a // IntN draws again when these bits are too low
	if len(s.b) == 0 {
		return rest
	}
	x := uint64(s.b[0])
	s.b = s.b[1:]
	return x<<56 | rest&^0xff | x // the high bits for most n, the low ones for powers of two
}

func TestCheckFindsEachBreach(t *testing.T) {
	for name, breakIt := range map[string]func(*Pool){
		"count":                 func(p *Pool) { p.count[Granted]++ },
		"reserved":              func(p *Pool) { p.reserved = 3 },
		"free list":             func(p *Pool) { p.free.clear(1) },
		"free with a hand":      func(p *Pool) { p.slots[1].Hands = Reader },
		"granted without hand":  func(p *Pool) { p.slots[0].Hands = 0 },
		"granted without gen":   func(p *Pool) { p.slots[0].Generation = 0 },
		"unknown state":         func(p *Pool) { p.slots[0].State = states },
		"committed, not landed": func(p *Pool) { p.move(&p.slots[0], Committed) },
		"claimed, no reader":    func(p *Pool) { p.move(&p.slots[0], Claimed); p.slots[0].Landed = true },
		"quarantined, no hand":  func(p *Pool) { p.move(&p.slots[0], Quarantined); p.slots[0].Hands = 0 },
	} {
		p := with(shapes["granted"])
		breakIt(p)
		if p.Check() == nil {
			t.Errorf("%s: not found", name)
		}
	}
}

func BenchmarkLife(b *testing.B) {
	for _, n := range []int{1000, 1_000_000} {
		b.Run(fmt.Sprintf("slots=%d", n), func(b *testing.B) {
			p := New(n)
			_ = p.Reserve(n / 2)
			for range n / 2 {
				_, _ = p.Grant(1, 0)
			}
			b.ReportAllocs()
			for b.Loop() {
				_ = p.Reserve(1)
				s, _ := p.Grant(7, 0)
				_ = p.Land(s, 7)
				_ = p.Commit(s, 7)
				_ = p.LetGo(s, 7, Writer)
				_ = p.Claim(s, 7)
				if err := p.Release(s, 7); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkMove is each move of one slot alone, round a whole pool.
func BenchmarkMove(b *testing.B) {
	const n = 100_000
	type move struct {
		name string
		do   func(p *Pool, s kv.SlotID) error
	}
	moves := []move{
		{"grant", func(p *Pool, _ kv.SlotID) error { _, err := p.Grant(7, 0); return err }},
		{"land", func(p *Pool, s kv.SlotID) error { return p.Land(s, 7) }},
		{"commit", func(p *Pool, s kv.SlotID) error { return p.Commit(s, 7) }},
		{"let go", func(p *Pool, s kv.SlotID) error { return p.LetGo(s, 7, Writer) }},
		{"claim", func(p *Pool, s kv.SlotID) error { return p.Claim(s, 7) }},
		{"release", func(p *Pool, s kv.SlotID) error { return p.Release(s, 7) }},
	}
	for i, m := range moves {
		b.Run(fmt.Sprintf("%s/slots=%d", m.name, n), func(b *testing.B) {
			p := New(n)
			all := func(moves []move) {
				for _, m := range moves {
					for s := range kv.SlotID(n) {
						if err := m.do(p, s); err != nil {
							b.Fatal(err)
						}
					}
				}
			}
			_ = p.Reserve(n)
			all(moves[:i])
			b.ReportAllocs()
			b.ResetTimer()
			for at := range b.N {
				s := kv.SlotID(at % n)
				if err := m.do(p, s); err != nil {
					b.Fatal(err)
				}
				if s == n-1 {
					b.StopTimer()
					all(moves[i+1:])
					_ = p.Reserve(n)
					all(moves[:i])
					b.StartTimer()
				}
			}
		})
	}
}
