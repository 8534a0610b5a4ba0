package gate

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/berthkv/berth/internal/kv"
)

var (
	alice = kv.Incarnation{1}
	bob   = kv.Incarnation{2}
)

type filler struct{ interrupts int }

func (f *filler) Interrupt() { f.interrupts++ }

// in brings slot 0 of a new gate into a state, for alice under generation 5.
func in(t *testing.T, s state) (*Gate, *filler) {
	t.Helper()
	g, f := New(1), &filler{}
	if s != closed {
		g.Open(alice, 5, []kv.SlotID{0})
	}
	if s == filling || s == landed || s == revoked {
		g.Enter(alice, 5, 0, f)
	}
	if s == landed {
		g.Leave(0, true)
	}
	if s == revoked {
		g.Revoke(5, []kv.SlotID{0})
	}
	if g.slots[0].state != s {
		t.Fatalf("slot is %v, want %v", g.slots[0].state, s)
	}
	f.interrupts = 0
	return g, f
}

const impossible = "panic"

// Every call in every state, legal and illegal.
func TestTransitions(t *testing.T) {
	verdicts := map[Verdict]string{Entered: "entered", Closed: "closed", Landed: "landed", Busy: "busy"}
	outcomes := map[Outcome]string{Full: "full", Empty: "empty", Fenced: "fenced"}
	calls := []struct {
		name string
		call func(*Gate) string
	}{
		{"open", func(g *Gate) string { g.Open(bob, 6, []kv.SlotID{0}); return "" }},
		{"enter", func(g *Gate) string { return verdicts[g.Enter(alice, 5, 0, &filler{})] }},
		{"enter stale", func(g *Gate) string { return verdicts[g.Enter(alice, 4, 0, &filler{})] }},
		{"enter as bob", func(g *Gate) string { return verdicts[g.Enter(bob, 5, 0, &filler{})] }},
		{"ask", func(g *Gate) string { return verdicts[g.Ask(alice, 5, 0)] }},
		{"leave full", func(g *Gate) string { return outcomes[g.Leave(0, true)] }},
		{"leave", func(g *Gate) string { return outcomes[g.Leave(0, false)] }},
		{"revoke", func(g *Gate) string { return map[int]string{0: "", 1: "fenced"}[len(g.Revoke(5, []kv.SlotID{0}))] }},
		{"revoke stale", func(g *Gate) string { return map[int]string{0: "", 1: "fenced"}[len(g.Revoke(4, []kv.SlotID{0}))] }},
	}
	type want struct {
		answer string
		then   state
	}
	for s, wants := range map[state][]want{
		closed: {{"", open}, {"closed", closed}, {"closed", closed}, {"closed", closed}, {"closed", closed},
			{impossible, closed}, {impossible, closed}, {"", closed}, {"", closed}},
		open: {{impossible, open}, {"entered", filling}, {"closed", open}, {"closed", open}, {"entered", open},
			{impossible, open}, {impossible, open}, {"fenced", closed}, {"", open}},
		filling: {{impossible, filling}, {"busy", filling}, {"closed", filling}, {"closed", filling}, {"busy", filling},
			{"full", landed}, {"empty", open}, {"", revoked}, {"", filling}},
		landed: {{impossible, landed}, {"landed", landed}, {"closed", landed}, {"closed", landed}, {"landed", landed},
			{impossible, landed}, {impossible, landed}, {"fenced", closed}, {"", landed}},
		revoked: {{impossible, revoked}, {"closed", revoked}, {"closed", revoked}, {"closed", revoked}, {"closed", revoked},
			{"fenced", closed}, {"fenced", closed}, {"", revoked}, {"", revoked}},
	} {
		for i, c := range calls {
			t.Run(s.String()+"/"+c.name, func(t *testing.T) {
				g, f := in(t, s)
				got := impossible
				func() {
					defer func() { recover() }()
					got = c.call(g)
				}()
				if then := g.slots[0].state; got != wants[i].answer || then != wants[i].then {
					t.Errorf("%q, then %v; want %q, then %v", got, then, wants[i].answer, wants[i].then)
				}
				if n := map[bool]int{true: 1}[s == filling && c.name == "revoke"]; f.interrupts != n {
					t.Errorf("the filler was interrupted %d times, want %d", f.interrupts, n)
				}
				check(t, g)
			})
		}
	}
}

// check verifies the invariants in the package comment.
func check(t *testing.T, g *Gate) {
	t.Helper()
	for i, s := range g.slots {
		if (s.grant != nil) != (s.state != closed) {
			t.Errorf("1: slot %d is %v with grant %v", i, s.state, s.grant)
		}
		if _, ok := g.fills[kv.SlotID(i)]; ok != (s.state == filling || s.state == revoked) {
			t.Errorf("2: slot %d is %v, has a filler: %v", i, s.state, ok)
		}
	}
}

func TestInterrupt(t *testing.T) {
	g, _ := in(t, open)
	if g.Interrupt(0) != nil {
		t.Error("nobody was there to interrupt")
	}
	g, f := in(t, filling)
	a, b := g.Interrupt(0), g.Interrupt(0)
	select {
	case <-a:
		t.Error("told that the filler has left while it is there")
	default:
	}
	g.Leave(0, false)
	<-a // both wait for the same
	<-b
	if f.interrupts != 2 {
		t.Errorf("interrupted %d times", f.interrupts)
	}
}

// Random histories: each slot that was opened is fenced exactly once, and only
// when nobody fills it.
func TestFencedOnce(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	left := 100_000
	fencedOnce(t, rng.IntN, func() bool { left--; return left >= 0 })
}

// FuzzSteps lets a fuzzer choose the history.
func FuzzSteps(f *testing.F) {
	f.Add([]byte("open, enter, leave, revoke; and every other order"))
	for seed := range byte(6) {
		b := make([]byte, 200)
		for i := range b {
			b[i] = byte(i*int(2*seed+3)) ^ byte(i>>2)*seed
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		pick := func(n int) int {
			if len(b) == 0 {
				return 0
			}
			x := int(b[0]) % n
			b = b[1:]
			return x
		}
		fencedOnce(t, pick, func() bool { return len(b) > 0 })
	})
}

func fencedOnce(t *testing.T, pick func(int) int, more func() bool) {
	const slots = 4
	g := New(slots)
	gens := make([]kv.Generation, slots) // 0: not opened, or revoked
	inside := map[kv.SlotID]kv.Generation{}
	full := map[kv.SlotID]bool{}
	due := map[kv.SlotID]kv.Generation{} // revoked with a filler inside
	next := kv.Generation(0)
	for more() {
		s := kv.SlotID(pick(slots))
		switch pick(4) {
		case 0:
			if _, waits := due[s]; gens[s] == 0 && !waits {
				next++
				gens[s] = next
				g.Open(alice, next, []kv.SlotID{s})
			}
		case 1:
			gen, who := gens[s], alice
			switch pick(8) {
			case 0:
				gen++ // nobody's
			case 1:
				who = bob
			}
			_, filled := inside[s]
			want := Entered
			switch {
			case gen == 0 || gen != gens[s] || who != alice:
				want = Closed
			case full[s]:
				want = Landed
			case filled:
				want = Busy
			}
			if asked, v := g.Ask(who, gen, s), g.Enter(who, gen, s, &filler{}); v != want || asked != want {
				t.Fatalf("slot %d asked under %d: %v, entered: %v, want %v; opened under %d, inside %v", s, gen, asked, v, want, gens[s], inside)
			}
			if want == Entered {
				inside[s] = gen
			}
		case 2:
			if _, ok := inside[s]; ok {
				delete(inside, s)
				_, want := due[s]
				filled := pick(2) == 0
				if got := g.Leave(s, filled); (got == Fenced) != want {
					t.Fatalf("slot %d was left as %v, revoked: %v", s, got, want)
				}
				full[s] = filled && !want
				delete(due, s)
			}
		case 3:
			fenced := slices.Contains(g.Revoke(gens[s], []kv.SlotID{s}), s)
			_, filled := inside[s]
			if want := gens[s] != 0 && !filled; fenced != want {
				t.Fatalf("slot %d fenced: %v, want %v", s, fenced, want)
			}
			if gens[s] != 0 && filled {
				due[s] = gens[s]
			}
			gens[s] = 0
			full[s] = false
		}
		check(t, g)
		if t.Failed() {
			t.FailNow()
		}
	}
}

func BenchmarkFrame(b *testing.B) {
	g, f := New(1024), &filler{}
	slots := []kv.SlotID{0}
	b.ReportAllocs()
	for i := range b.N {
		slots[0] = kv.SlotID(i % 1024)
		gen := kv.Generation(i + 1)
		g.Open(alice, gen, slots)
		g.Enter(alice, gen, slots[0], f)
		g.Leave(slots[0], true)
		g.Revoke(gen, slots)
	}
}
