package intake

// links is an element's place in one list.
type links[T any] struct{ prev, next *T }

// list is a doubly linked list through a field of its elements, so that they
// leave it in one step and nothing is allocated. Its order is the order in
// which they came: that makes every walk over it deterministic.
type list[T any] struct {
	first, last *T
	n           int
	at          func(*T) *links[T]
}

func (l *list[T]) push(x *T) {
	l.at(x).prev, l.at(x).next = l.last, nil
	if l.last == nil {
		l.first = x
	} else {
		l.at(l.last).next = x
	}
	l.last = x
	l.n++
}

func (l *list[T]) remove(x *T) {
	k := l.at(x)
	if k.prev == nil {
		l.first = k.next
	} else {
		l.at(k.prev).next = k.next
	}
	if k.next == nil {
		l.last = k.prev
	} else {
		l.at(k.next).prev = k.prev
	}
	*k = links[T]{}
	l.n--
}

// all yields the elements; the one just yielded may be removed.
func (l *list[T]) all(yield func(*T) bool) {
	for x := l.first; x != nil; {
		next := l.at(x).next
		if !yield(x) {
			return
		}
		x = next
	}
}

// spares keeps records that are not in use, so that a steady state allocates
// none.
type spares[T any] struct{ free []*T }

// maxSpares bounds what is kept.
const maxSpares = 4096

// take returns a record as it was given back, or a new one.
func (s *spares[T]) take() *T {
	n := len(s.free)
	if n == 0 {
		return new(T)
	}
	x := s.free[n-1]
	s.free = s.free[:n-1]
	return x
}

func (s *spares[T]) give(x *T) {
	if len(s.free) < maxSpares {
		s.free = append(s.free, x)
	}
}
