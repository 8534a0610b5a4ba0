package explore

import (
	"math/bits"
	"sync"
)

// graph is the states visited, by hash, how each was first reached, and every
// step between them that is no fault. It is what bounds a search: it takes some
// 50 bytes for each state.
type graph struct {
	shards [64]table
	mu     sync.Mutex
	parent blocks[edgeTo]
	edges  blocks[edge]
	goals  []uint32
	steps  int // faults included
}

// edgeTo is how a state was first reached.
type edgeTo struct{ from, move uint32 }

type edge struct{ from, to uint32 }

// none is before the first state.
const none = ^uint32(0)

func newGraph() *graph { return &graph{} }

func (g *graph) len() int { return g.parent.n }

// hash is 96 bits of a state: that two of n states share them has a chance of
// about n²/2^97.
type hash [3]uint32

// table finds the number of a state: linear probing from where the hash points.
type table struct {
	sync.Mutex
	slots []numbered
	used  int
}

type numbered struct {
	hash hash
	id   uint32 // from 1; 0: free
}

// find returns the slot of a state, or the free one in which it belongs.
func (t *table) find(h hash) *numbered {
	n := uint64(len(t.slots))
	for i, _ := bits.Mul64(uint64(h[0])<<32|uint64(h[1]), n); ; i++ {
		if i == n {
			i = 0
		}
		if s := &t.slots[i]; s.id == 0 || s.hash == h {
			return s
		}
	}
}

// grow makes room before a table is so full that finding takes long. It grows by
// little, since what is free is what a search lacks.
func (t *table) grow() {
	if t.used < len(t.slots)/5*4 {
		return
	}
	old := t.slots
	t.slots = make([]numbered, len(old)/4*5+40)
	for _, s := range old {
		if s.id != 0 {
			*t.find(s.hash) = s
		}
	}
}

// add numbers a state; fresh says that it was not there.
func (g *graph) add(h hash, from, move uint32) (id uint32, fresh bool) {
	t := &g.shards[h[2]%uint32(len(g.shards))]
	t.Lock()
	defer t.Unlock()
	t.grow()
	s := t.find(h)
	if s.id != 0 {
		return s.id - 1, false
	}
	g.mu.Lock()
	id = uint32(g.parent.n)
	g.parent.add(edgeTo{from, move})
	g.mu.Unlock()
	*s = numbered{h, id + 1}
	t.used++
	return id, true
}

// path is the moves by which a state was first reached.
func (g *graph) path(id uint32) []uint32 {
	var moves []uint32
	for p := g.parent.at(int(id)); p.from != none; p = g.parent.at(int(p.from)) {
		moves = append(moves, p.move)
	}
	for i, j := 0, len(moves)-1; i < j; i, j = i+1, j-1 {
		moves[i], moves[j] = moves[j], moves[i]
	}
	return moves
}

// stuck returns the first state, in the order of the search, from which no goal
// can be reached. Steps are kept in the order of the search, and few lead back:
// so going over them backwards a few times finds all from which one can.
func (g *graph) stuck() (uint32, bool) {
	reaches := make([]bool, g.len())
	for _, id := range g.goals {
		reaches[id] = true
	}
	for again := true; again; {
		again = false
		for i := g.edges.n - 1; i >= 0; i-- {
			if e := g.edges.at(i); reaches[e.to] && !reaches[e.from] {
				reaches[e.from], again = true, true
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

// blocks is a list that grows without being copied.
type blocks[T any] struct {
	all []*[1 << blockBits]T
	n   int
}

const blockBits = 16

func (b *blocks[T]) add(v T) {
	if b.n>>blockBits == len(b.all) {
		b.all = append(b.all, new([1 << blockBits]T))
	}
	*b.at(b.n) = v
	b.n++
}

func (b *blocks[T]) at(i int) *T { return &b.all[i>>blockBits][i&(1<<blockBits-1)] }
