package explore

import (
	"flag"
	"fmt"
	"os"
	"runtime/debug"
	"strings"
	"testing"
	"time"
)

var (
	flagProof   = flag.String("proof", "short", "which searches TestProof makes: short, ci or full")
	flagSystem  = flag.String("system", "", "the one system that TestProof explores")
	flagBudget  = flag.Int("budget", 1, "the budget of faults, with -system")
	flagReduced = flag.Bool("reduced", false, "with -system: leave out orders of moves that cannot matter")
	flagStates  = flag.Int("states", 0, "end a search after so many states, 0: never; it fails then")
)

// TestMain lets garbage wait: a search makes much and frees little.
func TestMain(m *testing.M) {
	flag.Parse()
	debug.SetGCPercent(300)
	os.Exit(m.Run())
}

// bounds are systems, by name, and the budget of faults within which each is
// searched, with the reduction or without.
type bounds struct {
	budget  int
	systems string
	reduced bool
}

// searches are what TestProof does: systems and their budgets. docs/proof.md
// has the numbers of ci and full. CI runs ci, without the race detector; short,
// with it, leaves out systems whose parts are in smaller ones, since a race is
// in a part.
var searches = map[string][]bounds{
	"short": {
		{0, "one queue pair uneven wide cold hasty", false},
		{1, "one cold", false},
		{0, "order limits lockstep/small", false},
	},
	"ci": {
		{0, "trio three ranks ranksqueue lockstep/wide", false},
		{1, "pair uneven wide hasty order limits lockstep", false},
		{2, "one cold", false},
	},
	"full": {
		{2, "queue limits lockstep", false},
		{1, "trio three", false},
		{2, "pair uneven wide trio/nixl", true},
	},
}

// names expands a list of systems: one that is there for each link counts for
// all.
func names(list string) (out []string) {
	for _, n := range strings.Fields(list) {
		if _, err := build(n, 0, "", ""); err == nil {
			out = append(out, n)
			continue
		}
		for _, link := range []string{"tcp", "shm", "nixl"} {
			out = append(out, n+"/"+link)
		}
	}
	return out
}

// TestProof visits every state of the systems and finds no rule broken. R6's
// named exception is met where the link's fence is not exact, and nowhere else.
func TestProof(t *testing.T) {
	if *flagSystem != "" {
		prove(t, *flagSystem, *flagBudget, *flagReduced)
		return
	}
	plan, ok := searches[*flagProof]
	if !ok {
		t.Fatalf("-proof is short, ci or full, not %q", *flagProof)
	}
	for _, s := range plan {
		for _, name := range names(s.systems) {
			t.Run(fmt.Sprintf("%s/budget=%d", name, s.budget), func(t *testing.T) { prove(t, name, s.budget, s.reduced) })
		}
	}
}

func prove(t *testing.T, name string, budget int, reduced bool) {
	m, err := build(name, budget, "", "")
	if err != nil {
		t.Fatal(err)
	}
	said := time.Now()
	r := search(m, limits{states: *flagStates, reduced: reduced, progress: func(depth, states, fresh int) {
		if time.Since(said) > 10*time.Second {
			said = time.Now()
			fmt.Fprintf(os.Stderr, "%s: depth %d, %d states, %d of them to go on from\n", name, depth, states, fresh)
		}
	}})
	t.Log(r)
	if r.bad != "" {
		r, m = shortest(r, m, name, budget, "", "")
		t.Fatalf("%s\n%s\n%s----\n", r.bad, head(name, budget, "", ""), script(m, r.moves))
	}
	if !r.complete || r.goals == 0 {
		t.Fatalf("not every state was visited: %d, %d of them at rest", r.states, r.goals)
	}
	if r.excepted != "" && !strings.HasSuffix(name, "/nixl") {
		t.Fatalf("R6's exception, over a link with an exact fence: %s\n%s\n%s----\n", r.excepted, head(name, budget, "", ""), script(m, r.exceptMoves))
	}
}

// shortest searches the whole graph for a shortest way to what a reduced search
// has found, which may have gone a step or two more than it must.
func shortest(found *report, in model, name string, budget int, p Plant, blind string) (*report, model) {
	m, err := build(name, budget, p, blind)
	if err != nil {
		return found, in
	}
	if r := search(m, limits{states: 10_000_000}); r.bad != "" {
		return r, m
	}
	return found, in
}

// TestException shows the one trace of R6's named exception: a peer that cannot
// be asked or seen, over a link without an exact fence, is trusted to be gone.
func TestException(t *testing.T) {
	m, err := build("queue/nixl", 1, "", "")
	if err != nil {
		t.Fatal(err)
	}
	r := search(m, limits{})
	if r.excepted == "" {
		t.Fatal("the exception is not met")
	}
	out := run(m, strings.Split(strings.TrimSpace(script(m, r.exceptMoves)), "\n"))
	if !strings.Contains(out, "has its writer trusted to be gone") || !strings.Contains(out, "R6, the named exception") {
		t.Fatal(out)
	}
}

// TestLimitsOfSearch: a search that is cut short says so.
func TestLimitsOfSearch(t *testing.T) {
	for _, l := range []limits{{states: 10}, {elapsed: time.Nanosecond}} {
		m, err := build("one/tcp", 1, "", "")
		if err != nil {
			t.Fatal(err)
		}
		if r := search(m, l); r.complete || !strings.HasSuffix(r.String(), "(not complete)") {
			t.Fatal(r)
		}
	}
}

// TestPartsAreKept: no part of a state is changed after it was numbered, which
// would change every state that shares it. And one worker finds what two find.
func TestPartsAreKept(t *testing.T) {
	var states [2]int
	for i := range states {
		m, err := build("one/tcp", 1, "", "")
		if err != nil {
			t.Fatal(err)
		}
		r := search(m, limits{workers: i + 1})
		states[i] = r.states
		x := m.(*system)
		if !unchanged(x.recvParts) || !unchanged(x.sendParts) || !unchanged(x.attParts) || !unchanged(x.engParts) {
			t.Fatal("a part was changed")
		}
	}
	if states[0] != states[1] {
		t.Fatalf("one worker finds %d states, two find %d", states[0], states[1])
	}
}

// TestTwins: cores that have come to one encoding in several ways answer alike,
// so one of them may stand for all.
func TestTwins(t *testing.T) {
	plan := []bounds{{2, "one/nixl", false}, {1, "queue/tcp hasty/nixl", true}, {0, "ranks/shm order", true}}
	if *flagProof == "full" {
		plan = append(plan, bounds{2, "pair/nixl", true})
	}
	for _, s := range plan {
		for _, name := range names(s.systems) {
			m, err := build(name, s.budget, "", "")
			if err != nil {
				t.Fatal(err)
			}
			x := m.(*system)
			x.m.cores.twins = map[coreID][]*coreState{}
			if r := search(m, limits{reduced: s.reduced}); r.bad != "" {
				t.Errorf("%s: %s\n%s----\n", name, r.bad, script(m, r.moves))
			}
			if len(x.m.cores.twins) == 0 {
				t.Errorf("%s: no two cores came to one encoding", name)
			}
		}
	}
}

func unchanged[T any](p *parts[T]) bool {
	for id, v := range p.all {
		c := codec{}
		p.walk(&c, v)
		if p.ids[string(c.b)] != uint32(id) {
			return false
		}
	}
	return true
}

// TestWithoutMemory: the moves of random ways, made with a memory of steps and
// core states, and by cores that live on and are stepped each time, say the
// same. So a core's encoding tells all that its answers depend on.
func TestWithoutMemory(t *testing.T) {
	for _, name := range []string{"uneven/tcp", "uneven/shm", "uneven/nixl", "ranks/tcp"} {
		for seed := range int64(20) {
			walk(t, name, seed)
		}
	}
}
