package explore

import (
	"bytes"
	"fmt"
	"slices"
	"testing"
)

// TestReduction checks what reduce.go says, in every state of whole graphs: who
// is alone stays so whatever others do, can do the same, and comes to the same
// state whether it moves before the others or after them. And the states of rest
// are those of the reduced search.
func TestReduction(t *testing.T) {
	plan := []bounds{{budget: 0, systems: "uneven wide hasty trio three ranks ranksqueue order limits"}, {budget: 1, systems: "one queue cold"}}
	switch *flagProof {
	case "ci":
		plan = append(plan, bounds{budget: 1, systems: "pair/nixl"})
	case "full":
		plan = append(plan, bounds{budget: 1, systems: "pair uneven limits"})
	}
	for _, s := range plan {
		for _, name := range names(s.systems) {
			t.Run(fmt.Sprintf("%s/budget=%d", name, s.budget), func(t *testing.T) {
				few, err := build(name, s.budget, "", "")
				if err != nil {
					t.Fatal(err)
				}
				all, _ := build(name, s.budget, "", "")
				x := &commuting{system: all.(*system)}
				whole, reduced := search(x, limits{workers: 1}), search(few, limits{reduced: true})
				if whole.bad != "" {
					t.Fatalf("%s\n%s----\n", whole.bad, script(x, whole.moves))
				}
				if whole.goals != reduced.goals || reduced.bad != "" || (whole.excepted == "") != (reduced.excepted == "") {
					t.Errorf("the whole graph has %d states of rest, the reduced one %d: %q %q %q", whole.goals, reduced.goals, reduced.bad, whole.excepted, reduced.excepted)
				}
				t.Logf("%d of %d states, %d of %d steps; %d pairs of moves commute", reduced.states, whole.states, reduced.steps, whole.steps, x.pairs)
			})
		}
	}
}

// commuting is a system that checks the moves of who is alone.
type commuting struct {
	*system
	pairs int
}

func (x *commuting) moves(state []byte) ([]uint32, bool, string) {
	all, goal, bad := x.system.moves(state)
	w := x.decode(state)
	if goal || bad != "" || int(w.spent) < x.budget {
		return all, goal, bad
	}
	for e := range w.engs {
		own := w.movesOf(e)
		if !w.alone(e) || len(own) == 0 {
			continue
		}
		for _, o := range all {
			if slices.Contains(own, unpack(o)) {
				continue
			}
			if bad := x.commutes(state, e, own, o); bad != "" {
				return nil, false, fmt.Sprintf("engine %d is alone, and %s: %s", e, x.text(state, o), bad)
			}
		}
	}
	return all, false, ""
}

func (x *commuting) commutes(state []byte, e int, own []move, o uint32) string {
	after, bad, _ := x.move(state, o, nil)
	if bad != "" {
		return bad
	}
	w := x.decode(after)
	if !w.alone(e) || !slices.Equal(w.movesOf(e), own) {
		return fmt.Sprintf("then it is alone: %t, and its moves are %v, which were %v", w.alone(e), w.movesOf(e), own)
	}
	for _, m := range own {
		x.pairs++
		one, bad1, _ := x.move(after, pack(m), nil)
		mine, bad2, _ := x.move(state, pack(m), nil)
		if bad1 != bad2 {
			return fmt.Sprintf("%s breaks %q after it, %q before", x.text(state, pack(m)), bad1, bad2)
		}
		if bad1 != "" {
			continue
		}
		if all, _, _ := x.system.moves(mine); !slices.Contains(all, o) {
			return "it cannot be after " + x.text(state, pack(m))
		}
		other, bad, _ := x.move(mine, o, nil)
		if bad != "" || !bytes.Equal(one, other) {
			return fmt.Sprintf("it makes a difference to be before %s %s", x.text(state, pack(m)), bad)
		}
	}
	return ""
}
