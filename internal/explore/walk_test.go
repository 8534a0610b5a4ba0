package explore

import (
	"fmt"
	"math/rand"
	"strings"
	"testing"
)

// walk goes one random way twice: through a system in which a search has been,
// so that its steps are remembered, those of other ways too, and through a fresh
// one, whose cores have no other past than this way.
func walk(t *testing.T, name string, seed int64) {
	t.Helper()
	old := remembering(t, name)
	fresh, err := build(name, 2, "", "")
	if err != nil {
		t.Fatal(err)
	}
	rnd := rand.New(rand.NewSource(seed))
	a, b := old.start(), fresh.start()
	for n := range 300 {
		moves, goal, bad := old.moves(a)
		again, goal2, bad2 := fresh.moves(b)
		if goal != goal2 || bad != bad2 || fmt.Sprint(moves) != fmt.Sprint(again) {
			t.Fatalf("%s seed %d: after %d moves %v or %v can happen", name, seed, n, moves, again)
		}
		if len(moves) == 0 {
			return
		}
		m := moves[rnd.Intn(len(moves))]
		var said [2]strings.Builder
		if x, y := old.text(a, m), fresh.text(b, m); x != y {
			t.Fatalf("%s seed %d: %q or %q", name, seed, x, y)
		}
		a, _, _ = old.move(a, m, func(f string, args ...any) { fmt.Fprintf(&said[0], f+"\n", args...) })
		b, _, _ = fresh.move(b, m, func(f string, args ...any) { fmt.Fprintf(&said[1], f+"\n", args...) })
		if said[0].String() != said[1].String() {
			t.Fatalf("%s seed %d: a remembered step says\n%s\na fresh one\n%s", name, seed, &said[0], &said[1])
		}
		if a == nil || b == nil {
			t.Fatalf("%s seed %d: %s", name, seed, said[0].String())
		}
	}
}

var remembered = map[string]model{}

func remembering(t *testing.T, name string) model {
	if m := remembered[name]; m != nil {
		return m
	}
	m, err := build(name, 2, "", "")
	if err != nil {
		t.Fatal(err)
	}
	search(m, limits{states: 3000})
	remembered[name] = m
	return m
}
