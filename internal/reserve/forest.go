package reserve

import "math"

// forest holds ordered sequences (each a treap, named by its root) in one slab
// of nodes. Links are indices, so a forest is copied by copying one slice, and
// nodes that are used again cost no allocation. Index 0 is "none".
//
// A node carries the needs that it stands for (lo to hi) and a weight. Needs
// are aggregated so that the first node with a small enough need is found in one
// descent, weights so that a suffix sum is.
type forest struct{ nodes []node }

type node struct {
	left, right, up int32
	rank            uint32 // heap order: a node's is at least its children's
	lo, hi          int32  // own smallest and largest need
	min, max        int32  // of the subtree
	weight, sum     int64  // own; of the subtree
}

func newForest() forest {
	return forest{nodes: []node{{min: math.MaxInt32, max: -1}}}
}

// grow adds a node that is in no sequence and returns its index. The rank
// spreads the index, which makes trees as good as random ones.
func (f *forest) grow() int32 {
	i := int32(len(f.nodes))
	f.nodes = append(f.nodes, node{rank: uint32(spread(uint64(i)))})
	return i
}

// reset prepares a node for insert.
func (f *forest) reset(i int32, lo, hi int32, weight int64) {
	n := &f.nodes[i]
	*n = node{rank: n.rank, lo: lo, hi: hi, weight: weight}
}

// pull recomputes the aggregates of a node from its children's.
func (f *forest) pull(i int32) {
	n := &f.nodes[i]
	l, r := &f.nodes[n.left], &f.nodes[n.right]
	n.min = min(n.lo, l.min, r.min)
	n.max = max(n.hi, l.max, r.max)
	n.sum = n.weight + l.sum + r.sum
}

func (f *forest) pullUp(i int32) {
	for ; i != 0; i = f.nodes[i].up {
		f.pull(i)
	}
}

// insert puts node i before node at, or at the end when at is 0.
func (f *forest) insert(root *int32, at, i int32) {
	ns := f.nodes
	switch {
	case *root == 0:
		*root = i
	case at != 0 && ns[at].left == 0:
		ns[at].left, ns[i].up = i, at
	default:
		p := *root
		if at != 0 {
			p = ns[at].left
		}
		p = f.last(p)
		ns[p].right, ns[i].up = i, p
	}
	f.pull(i)
	p := ns[i].up
	for p != 0 && ns[p].rank < ns[i].rank {
		f.raise(root, i)
		p = ns[i].up
	}
	f.pullUp(p)
}

// raise rotates a node above its parent.
func (f *forest) raise(root *int32, i int32) {
	ns := f.nodes
	p := ns[i].up
	f.replace(root, p, i)
	if ns[p].left == i {
		c := ns[i].right
		ns[p].left, ns[i].right = c, p
		if c != 0 {
			ns[c].up = p
		}
	} else {
		c := ns[i].left
		ns[p].right, ns[i].left = c, p
		if c != 0 {
			ns[c].up = p
		}
	}
	ns[p].up = i
	f.pull(p)
	f.pull(i)
}

// replace hangs node i where node p hangs.
func (f *forest) replace(root *int32, p, i int32) {
	ns := f.nodes
	g := ns[p].up
	switch {
	case g == 0:
		*root = i
	case ns[g].left == p:
		ns[g].left = i
	default:
		ns[g].right = i
	}
	if i != 0 {
		ns[i].up = g
	}
}

// remove takes node i out of its sequence; its weight goes with it.
func (f *forest) remove(root *int32, i int32) {
	ns := f.nodes
	a, b := ns[i].left, ns[i].right
	top, lowest := int32(0), ns[i].up
	link, leftward := int32(0), false // where the next piece of the merged subtrees hangs
	hang := func(c int32) {
		switch {
		case link == 0:
			top = c
		case leftward:
			ns[link].left = c
		default:
			ns[link].right = c
		}
		if c != 0 {
			ns[c].up = link
		}
	}
	for a != 0 && b != 0 {
		if ns[a].rank >= ns[b].rank {
			hang(a)
			link, leftward, a = a, false, ns[a].right
		} else {
			hang(b)
			link, leftward, b = b, true, ns[b].left
		}
		lowest = link
	}
	hang(a + b) // one of them is 0
	f.replace(root, i, top)
	ns[i].left, ns[i].right, ns[i].up = 0, 0, 0
	f.pullUp(lowest)
}

// first returns the first node with a need of at most limit.
func (f *forest) first(root int32, limit int64) int32 {
	ns := f.nodes
	i := root
	for i != 0 && int64(ns[i].min) <= limit {
		switch {
		case int64(ns[ns[i].left].min) <= limit:
			i = ns[i].left
		case int64(ns[i].lo) <= limit:
			return i
		default:
			i = ns[i].right
		}
	}
	return 0
}

// firstAbove returns the first node with a weight above w, in a sequence that is
// ordered by weight.
func (f *forest) firstAbove(root int32, w int64) (found int32) {
	ns := f.nodes
	for i := root; i != 0; {
		if ns[i].weight > w {
			found, i = i, ns[i].left
		} else {
			i = ns[i].right
		}
	}
	return found
}

// firstBelow returns the first node with a suffix sum below v, and that sum, in
// a sequence without negative weights.
func (f *forest) firstBelow(root int32, v int64) (found int32, sum int64) {
	ns := f.nodes
	after := int64(0)
	for i := root; i != 0; {
		s := after + ns[i].weight + ns[ns[i].right].sum
		if s < v {
			found, sum, after, i = i, s, s, ns[i].left
		} else {
			i = ns[i].right
		}
	}
	return found, sum
}

// suffix returns the sum of the weights of node i and all after it.
func (f *forest) suffix(i int32) int64 {
	ns := f.nodes
	s := ns[i].weight + ns[ns[i].right].sum
	for p := ns[i].up; p != 0; i, p = p, ns[p].up {
		if ns[p].left == i {
			s += ns[p].weight + ns[ns[p].right].sum
		}
	}
	return s
}

// add adds d to the weight of node i, and so to every suffix that contains it.
// Node 0 takes it and forgets it: there is nothing before the first.
func (f *forest) add(i int32, d int64) {
	if i == 0 || d == 0 {
		return
	}
	f.nodes[i].weight += d
	for ; i != 0; i = f.nodes[i].up {
		f.nodes[i].sum += d
	}
}

// setNeeds changes the needs of a node in place.
func (f *forest) setNeeds(i int32, lo, hi int32) {
	if n := &f.nodes[i]; n.lo != lo || n.hi != hi {
		n.lo, n.hi = lo, hi
		f.pullUp(i)
	}
}

func (f *forest) begin(root int32) int32 {
	for root != 0 && f.nodes[root].left != 0 {
		root = f.nodes[root].left
	}
	return root
}

func (f *forest) last(root int32) int32 {
	for f.nodes[root].right != 0 {
		root = f.nodes[root].right
	}
	return root
}

// prev returns the node before i, 0 for the first.
func (f *forest) prev(i int32) int32 {
	ns := f.nodes
	if ns[i].left != 0 {
		return f.last(ns[i].left)
	}
	p := ns[i].up
	for p != 0 && ns[p].left == i {
		i, p = p, ns[p].up
	}
	return p
}

// next returns the node after i, 0 for the last.
func (f *forest) next(i int32) int32 {
	ns := f.nodes
	if ns[i].right != 0 {
		return f.begin(ns[i].right)
	}
	p := ns[i].up
	for p != 0 && ns[p].right == i {
		i, p = p, ns[p].up
	}
	return p
}

// appendAbove appends to out, in order, the nodes with a need above limit.
func (f *forest) appendAbove(out []int32, i int32, limit int64) []int32 {
	if i == 0 || int64(f.nodes[i].max) <= limit {
		return out
	}
	out = f.appendAbove(out, f.nodes[i].left, limit)
	if int64(f.nodes[i].hi) > limit {
		out = append(out, i)
	}
	return f.appendAbove(out, f.nodes[i].right, limit)
}
