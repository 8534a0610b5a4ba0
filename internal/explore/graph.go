package explore

import "sync"

// graph is the states visited, by hash, how each was first reached, and every
// step between them that is no fault.
type graph struct {
	shards [64]struct {
		sync.Mutex
		ids map[[2]uint64]uint32
	}
	mu     sync.Mutex
	parent []edgeTo
	edges  []edge
	goals  []uint32
	steps  int // faults included
}

// edgeTo is how a state was first reached.
type edgeTo struct{ from, move uint32 }

type edge struct{ from, to uint32 }

// none is before the first state.
const none = ^uint32(0)

func newGraph() *graph {
	g := &graph{}
	for i := range g.shards {
		g.shards[i].ids = map[[2]uint64]uint32{}
	}
	return g
}

func (g *graph) len() int { return len(g.parent) }

// add numbers a state; fresh says that it was not there.
func (g *graph) add(h [2]uint64, from, move uint32) (id uint32, fresh bool) {
	s := &g.shards[h[0]%uint64(len(g.shards))]
	s.Lock()
	defer s.Unlock()
	if id, ok := s.ids[h]; ok {
		return id, false
	}
	g.mu.Lock()
	id = uint32(len(g.parent))
	g.parent = append(g.parent, edgeTo{from, move})
	g.mu.Unlock()
	s.ids[h] = id
	return id, true
}

// path is the moves by which a state was first reached.
func (g *graph) path(id uint32) []uint32 {
	var moves []uint32
	for g.parent[id].from != none {
		moves = append(moves, g.parent[id].move)
		id = g.parent[id].from
	}
	for i, j := 0, len(moves)-1; i < j; i, j = i+1, j-1 {
		moves[i], moves[j] = moves[j], moves[i]
	}
	return moves
}

// stuck returns the first state, in the order of the search, from which no goal
// can be reached.
func (g *graph) stuck() (uint32, bool) {
	n := len(g.parent)
	start := make([]uint32, n+1) // the steps into each state, as one list
	for _, e := range g.edges {
		start[e.to+1]++
	}
	for i := range n {
		start[i+1] += start[i]
	}
	into := make([]uint32, len(g.edges))
	at := append([]uint32(nil), start[:n]...)
	for _, e := range g.edges {
		into[at[e.to]] = e.from
		at[e.to]++
	}
	reaches := make([]bool, n)
	queue := append([]uint32(nil), g.goals...)
	for _, id := range queue {
		reaches[id] = true
	}
	for len(queue) > 0 {
		id := queue[len(queue)-1]
		queue = queue[:len(queue)-1]
		for _, from := range into[start[id]:start[id+1]] {
			if !reaches[from] {
				reaches[from] = true
				queue = append(queue, from)
			}
		}
	}
	for id, ok := range reaches {
		if !ok {
			return uint32(id), true
		}
	}
	return 0, false
}
