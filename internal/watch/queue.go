package watch

import "github.com/berthkv/berth/internal/kv"

// queue is a heap, for package container/heap: what is due first is in front.
// Each element knows its index.
type queue[T element[T]] []T

type element[T any] interface {
	when() kv.Instant
	before(T) bool
	index() *int
}

// next is when the first is due.
func (q queue[T]) next() kv.Instant {
	if len(q) == 0 {
		return kv.Never
	}
	return q[0].when()
}

// has reports whether an element is where it says, and not before its parent.
func (q queue[T]) has(e T) bool {
	i := *e.index()
	return i < len(q) && q[i].index() == e.index() && (i == 0 || !e.before(q[(i-1)/2]))
}

func (q queue[T]) Len() int           { return len(q) }
func (q queue[T]) Less(i, j int) bool { return q[i].before(q[j]) }

func (q queue[T]) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	*q[i].index(), *q[j].index() = i, j
}

// Push and Pop are for container/heap.
func (q *queue[T]) Push(e any) {
	*e.(T).index() = len(*q)
	*q = append(*q, e.(T))
}

func (q *queue[T]) Pop() any {
	last := len(*q) - 1
	e := (*q)[last]
	clear((*q)[last:])
	*q = (*q)[:last]
	return e
}
