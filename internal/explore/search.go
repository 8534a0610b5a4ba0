package explore

import (
	"cmp"
	"fmt"
	"hash/maphash"
	"runtime"
	"slices"
	"sync"
	"time"
)

// model is something to explore: states are bytes, moves are numbers.
type model interface {
	start() []byte
	// moves lists what can happen next. goal says that all is over and free, bad
	// which rule the state breaks; then nothing more is visited from it.
	moves(state []byte) (moves []uint32, goal bool, bad string)
	// move makes one; say, unless nil, is told what comes of it. bad is the rule
	// that is broken, excepted R6's named exception.
	move(state []byte, m uint32, say func(string, ...any)) (next []byte, bad, excepted string)
	// faulty says that a move is a fault, or may never happen.
	faulty(m uint32) bool
	text(state []byte, m uint32) string
}

// limits bound a search.
type limits struct {
	states  int           // at most; 0: no limit
	elapsed time.Duration // at most; 0: no limit
	workers int           // 0: one for each processor
	reduced bool          // orders of moves that cannot matter are left out: see reduce.go
	// progress, unless nil, is told after each depth how many states there are,
	// and how many of them are new.
	progress func(depth, states, fresh int)
}

// report is what a search found.
type report struct {
	states, steps int
	depth         int
	goals         int
	elapsed       time.Duration
	complete      bool     // every reachable state was visited
	bad           string   // the first violation, "" if none
	moves         []uint32 // a shortest way to it
	excepted      string   // R6's named exception, if it was met
	exceptMoves   []uint32
}

func (r *report) String() string {
	s := fmt.Sprintf("%d states, %d steps, depth %d, %d at rest, %.1f s", r.states, r.steps, r.depth, r.goals, r.elapsed.Seconds())
	if !r.complete {
		s += " (not complete)"
	}
	return s
}

// search visits every state that a model can reach, breadth first, and then
// checks that each can reach one in which all is over and free.
func search(m model, lim limits) *report {
	begin := time.Now()
	g := newGraph()
	if x, ok := m.(*system); ok {
		x.reduced = lim.reduced
	}
	rep := &report{complete: true}
	start := m.start()
	root, _ := g.add(hashOf(start), none, 0)
	frontier := []task{{root, start}}
	workers := lim.workers
	if workers == 0 {
		workers = runtime.GOMAXPROCS(0)
	}
	for len(frontier) > 0 && rep.bad == "" {
		if lim.states > 0 && g.len() >= lim.states || lim.elapsed > 0 && time.Since(begin) > lim.elapsed {
			rep.complete = false
			break
		}
		next, found := g.level(m, frontier, workers)
		slices.SortFunc(found, func(a, b finding) int { return cmp.Compare(a.text, b.text) })
		for _, f := range found {
			if f.excepted && rep.excepted == "" {
				rep.excepted, rep.exceptMoves = f.text, append(g.path(f.from), f.move...)
			}
			if !f.excepted && rep.bad == "" {
				rep.bad, rep.moves = f.text, append(g.path(f.from), f.move...)
			}
		}
		frontier = next
		if len(frontier) > 0 {
			rep.depth++
			if lim.progress != nil {
				lim.progress(rep.depth, g.len(), len(frontier))
			}
		}
	}
	rep.states, rep.steps, rep.goals = g.len(), g.steps, len(g.goals)
	if rep.bad == "" && rep.complete {
		if id, ok := g.stuck(); ok {
			rep.bad = "R12: from here no way, without a further fault, leads to a state in which all has ended and all is free"
			rep.moves = g.path(id)
		}
	}
	rep.elapsed = time.Since(begin)
	return rep
}

// task is a state to expand.
type task struct {
	id    uint32
	state []byte
}

// finding is a violation, or the named exception, after one more move.
type finding struct {
	from     uint32
	move     []uint32
	text     string
	excepted bool
}

// level expands a frontier and returns the next one.
func (g *graph) level(m model, frontier []task, workers int) (next []task, found []finding) {
	var wg sync.WaitGroup
	var mu sync.Mutex
	var at int
	const chunk = 64
	for range workers {
		wg.Add(1)
		go func() {
			defer wg.Done()
			var out []task
			var finds []finding
			var edges []edge
			var goals []uint32
			steps := 0
			for {
				mu.Lock()
				for _, e := range edges {
					g.edges.add(e)
				}
				edges = edges[:0]
				lo := at
				at = min(at+chunk, len(frontier))
				hi := at
				mu.Unlock()
				if lo == hi {
					break
				}
				for i := lo; i < hi; i++ {
					t := frontier[i]
					moves, goal, bad := m.moves(t.state)
					for _, mv := range moves {
						b, bad, excepted := m.move(t.state, mv, nil)
						if excepted != "" {
							finds = append(finds, finding{t.id, []uint32{mv}, excepted, true})
						}
						if bad != "" {
							finds = append(finds, finding{t.id, []uint32{mv}, bad, false})
							continue
						}
						id, fresh := g.add(hashOf(b), t.id, mv)
						steps++
						if !m.faulty(mv) {
							edges = append(edges, edge{t.id, id})
						}
						if fresh {
							out = append(out, task{id, b})
						}
					}
					if bad != "" {
						finds = append(finds, finding{t.id, nil, bad, false})
					}
					if goal {
						goals = append(goals, t.id)
					}
					frontier[i].state = nil
				}
			}
			mu.Lock()
			defer mu.Unlock()
			next = append(next, out...)
			found = append(found, finds...)
			g.goals = append(g.goals, goals...)
			g.steps += steps
		}()
	}
	wg.Wait()
	return next, found
}

var seeds = [2]maphash.Seed{maphash.MakeSeed(), maphash.MakeSeed()}

func hashOf(b []byte) hash {
	a := maphash.Bytes(seeds[0], b)
	return hash{uint32(a >> 32), uint32(a), uint32(maphash.Bytes(seeds[1], b))}
}
