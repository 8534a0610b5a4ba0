package reserve

import "math"

// forest holds ordered sequences, each a treap, in one slab of nodes. Links are
// indices, so a forest is copied by copying one slice, and nodes that are used
// again cost no allocation. Index 0 is "none".
//
// A node carries the needs that it stands for (lo to hi) and a weight. They are
// summed up over subtrees, so that the first node with a small enough need, and
// the weight from a node to the end, are found on one path. A node keeps the sums
// of its children rather than its own: it is one cache line, and a path touches
// no other.
type forest struct{ nodes []node }

type node struct {
	left, right, up int32
	rank            uint32 // heap order: a node's is at least its children's
	lo, hi          int32  // smallest and largest need
	weight          int64
	before, after   summary // of the left and the right subtree
}

// summary of a subtree.
type summary struct {
	min, max int32 // needs
	sum      int64 // weights
}

var nothing = summary{min: math.MaxInt32, max: -1}

// sequence is one of the sequences of a forest; the zero value is empty.
type sequence struct{ root, head, tail int32 }

func newForest() forest {
	return forest{nodes: []node{{lo: math.MaxInt32, hi: -1, before: nothing, after: nothing}}}
}

// grow adds a node that is in no sequence and returns its index. The rank
// scatters the index, which makes trees as good as random ones.
func (f *forest) grow() int32 {
	i := len(f.nodes)
	f.nodes = append(f.nodes, node{rank: uint32(scatter(uint64(i)))})
	return int32(i)
}

// scatter is the finalizer of splitmix64.
func scatter(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// reset prepares a node for insert, with no weight.
func (f *forest) reset(i int32, lo, hi int32) {
	n := &f.nodes[i]
	n.left, n.right, n.up = 0, 0, 0
	n.lo, n.hi, n.weight = lo, hi, 0
	n.before, n.after = nothing, nothing
}

// all sums up the subtree of node i; that of node 0 is nothing.
func (f *forest) all(i int32) summary { return f.nodes[i].all() }

func (n *node) all() summary {
	return summary{
		min: min(n.lo, n.before.min, n.after.min),
		max: max(n.hi, n.before.max, n.after.max),
		sum: n.weight + n.before.sum + n.after.sum,
	}
}

// tell tells the nodes above node i what is in their subtrees, up to the first to
// which that is no news.
func (f *forest) tell(i int32) {
	ns := f.nodes
	s := ns[i].all()
	for p := ns[i].up; p != 0; i, p = p, ns[p].up {
		n := &ns[p]
		side := &n.after
		if n.left == i {
			side = &n.before
		}
		if *side == s {
			return
		}
		*side = s
		s = n.all()
	}
}

// insert puts node i before node at, or at the end when at is 0.
func (f *forest) insert(q *sequence, at, i int32) {
	ns := f.nodes
	switch {
	case q.root == 0:
		q.root = i
	case at == 0:
		ns[q.tail].right, ns[i].up = i, q.tail
	case ns[at].left == 0:
		ns[at].left, ns[i].up = i, at
	default:
		p := f.prev(at)
		ns[p].right, ns[i].up = i, p
	}
	if at == q.head {
		q.head = i
	}
	if at == 0 {
		q.tail = i
	}
	for p := ns[i].up; p != 0 && ns[p].rank < ns[i].rank; p = ns[i].up {
		f.raise(q, i)
	}
	f.tell(i)
}

// raise rotates a node above its parent; the parent above must still be told.
func (f *forest) raise(q *sequence, i int32) {
	ns := f.nodes
	p := ns[i].up
	f.replace(q, p, i)
	c := int32(0)
	if ns[p].left == i {
		c = ns[i].right
		ns[p].left, ns[p].before = c, ns[i].after
		ns[i].right, ns[p].up = p, i
		ns[i].after = ns[p].all()
	} else {
		c = ns[i].left
		ns[p].right, ns[p].after = c, ns[i].before
		ns[i].left, ns[p].up = p, i
		ns[i].before = ns[p].all()
	}
	if c != 0 {
		ns[c].up = p
	}
}

// replace hangs node i where node p hangs.
func (f *forest) replace(q *sequence, p, i int32) {
	ns := f.nodes
	g := ns[p].up
	switch {
	case g == 0:
		q.root = i
	case ns[g].left == p:
		ns[g].left = i
	default:
		ns[g].right = i
	}
	if i != 0 {
		ns[i].up = g
	}
}

// remove takes node i out of its sequence; its weight goes to the node before it,
// so that no other's suffix changes.
func (f *forest) remove(q *sequence, i int32) {
	ns := f.nodes
	f.pass(i, ns[i].weight)
	if i == q.head {
		q.head = f.next(i)
	}
	if i == q.tail {
		q.tail = f.prev(i)
	}
	c, p := f.join(ns[i].left, ns[i].right), ns[i].up
	side := &ns[p].after
	if ns[p].left == i {
		side = &ns[p].before
	}
	f.replace(q, i, c)
	if s := ns[c].all(); p != 0 && s != *side {
		*side = s
		f.tell(p)
	}
}

// join makes one tree of two, a before b, and returns its root.
func (f *forest) join(a, b int32) int32 {
	ns := f.nodes
	switch {
	case a == 0:
		return b
	case b == 0:
		return a
	case ns[a].rank > ns[b].rank:
		c := f.join(ns[a].right, b)
		ns[a].right, ns[a].after, ns[c].up = c, ns[c].all(), a
		return a
	default:
		c := f.join(a, ns[b].left)
		ns[b].left, ns[b].before, ns[c].up = c, ns[c].all(), b
		return b
	}
}

// first returns the first node with a need of at most limit.
func (f *forest) first(q sequence, limit int64) int32 {
	ns := f.nodes
	if int64(ns[q.head].lo) <= limit {
		return q.head // most often
	}
	for i := q.root; i != 0; {
		switch n := &ns[i]; {
		case int64(n.before.min) <= limit:
			i = n.left
		case int64(n.lo) <= limit:
			return i
		case int64(n.after.min) <= limit:
			i = n.right
		default:
			return 0
		}
	}
	return 0
}

// firstBelow returns the first node with a suffix sum below v, and that sum, in
// a sequence without negative weights.
func (f *forest) firstBelow(q sequence, v int64) (found int32, sum int64) {
	ns := f.nodes
	if ns[q.tail].weight >= v {
		return 0, 0
	}
	after := int64(0)
	for i := q.root; i != 0; {
		n := &ns[i]
		if s := after + n.weight + n.after.sum; s < v {
			found, sum, after, i = i, s, s, n.left
		} else {
			i = n.right
		}
	}
	return found, sum
}

// suffix returns the sum of the weights of node i of q and all after it.
func (f *forest) suffix(q sequence, i int32) int64 {
	if i == q.head {
		return f.all(q.root).sum
	}
	ns := f.nodes
	s := ns[i].weight + ns[i].after.sum
	for p := ns[i].up; p != 0; i, p = p, ns[p].up {
		if n := &ns[p]; n.left == i {
			s += n.weight + n.after.sum
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
	ns := f.nodes
	ns[i].weight += d
	for p := ns[i].up; p != 0; i, p = p, ns[p].up {
		if n := &ns[p]; n.left == i {
			n.before.sum += d
		} else {
			n.after.sum += d
		}
	}
}

// pass moves d of the weight of node i to the node before it: of all suffixes only
// the one that begins at i becomes d less. The first node's goes nowhere.
func (f *forest) pass(i int32, d int64) {
	if d == 0 {
		return
	}
	ns := f.nodes
	n := &ns[i]
	n.weight -= d
	if p := n.left; p != 0 { // the one before is the last of the left subtree
		n.before.sum += d
		for ; ns[p].right != 0; p = ns[p].right {
			ns[p].after.sum += d
		}
		ns[p].weight += d
		return
	}
	for p := n.up; p != 0; i, p = p, ns[p].up {
		if n = &ns[p]; n.right == i { // it is this one
			n.after.sum -= d
			n.weight += d
			return
		}
		n.before.sum -= d
	}
}

// setNeeds changes the needs of a node in place.
func (f *forest) setNeeds(i int32, lo, hi int32) {
	if n := &f.nodes[i]; n.lo != lo || n.hi != hi {
		n.lo, n.hi = lo, hi
		f.tell(i)
	}
}

// prev returns the node before i, 0 for the first.
func (f *forest) prev(i int32) int32 {
	ns := f.nodes
	p := ns[i].left
	if p != 0 {
		for ns[p].right != 0 {
			p = ns[p].right
		}
		return p
	}
	p = ns[i].up
	for p != 0 && ns[p].left == i {
		i, p = p, ns[p].up
	}
	return p
}

// next returns the node after i, 0 for the last.
func (f *forest) next(i int32) int32 {
	ns := f.nodes
	p := ns[i].right
	if p != 0 {
		for ns[p].left != 0 {
			p = ns[p].left
		}
		return p
	}
	p = ns[i].up
	for p != 0 && ns[p].right == i {
		i, p = p, ns[p].up
	}
	return p
}

// appendAbove appends to out, in order, the nodes of a subtree with a need above
// limit.
func (f *forest) appendAbove(out []int32, i int32, limit int64) []int32 {
	n := &f.nodes[i]
	if int64(n.before.max) > limit {
		out = f.appendAbove(out, n.left, limit)
	}
	if int64(n.hi) > limit {
		out = append(out, i)
	}
	if int64(n.after.max) > limit {
		out = f.appendAbove(out, n.right, limit)
	}
	return out
}
