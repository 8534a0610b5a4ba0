package httpconns

import (
	"container/list"
	"time"
)

// table decides which connections a server has. A connection is busy while a
// request of it is answered, and quiet otherwise: before its first request, while
// the header of one comes in, and between two. It has no clock and no lock.
//
// Invariants: there are at most max connections; quiet has exactly those that are
// not busy, the longest quiet first.
type table[K comparable] struct {
	max   int
	grace time.Duration
	conns map[K]*entry
	quiet list.List // of *place[K]
}

type entry struct{ at *list.Element } // nil: busy

type place[K comparable] struct {
	conn  K
	since time.Duration
}

func newTable[K comparable](max int, grace time.Duration) *table[K] {
	return &table[K]{max: max, grace: grace, conns: map[K]*entry{}}
}

// open takes in a connection, quiet as yet. Where all places are taken, the one
// that has been quiet the longest goes for it, if it has been for as long as grace;
// else ok is false, and the newcomer has no place. Times come from one clock.
func (t *table[K]) open(now time.Duration, conn K) (goes K, evicted, ok bool) {
	if len(t.conns) >= t.max {
		first := t.quiet.Front()
		if first == nil || now-first.Value.(*place[K]).since < t.grace {
			return goes, false, false
		}
		goes, evicted = first.Value.(*place[K]).conn, true
		t.gone(goes)
	}
	e := &entry{}
	t.conns[conn] = e
	t.rest(now, conn, e)
	return goes, evicted, true
}

// busy and quieten say that a request of a connection is being answered, and is no
// more. One that has no place changes nothing.
func (t *table[K]) busy(conn K) {
	if e := t.conns[conn]; e != nil && e.at != nil {
		t.quiet.Remove(e.at)
		e.at = nil
	}
}

func (t *table[K]) quieten(now time.Duration, conn K) {
	if e := t.conns[conn]; e != nil && e.at == nil {
		t.rest(now, conn, e)
	}
}

func (t *table[K]) rest(now time.Duration, conn K, e *entry) {
	e.at = t.quiet.PushBack(&place[K]{conn, now})
}

// gone gives a connection's place back. The second call is harmless.
func (t *table[K]) gone(conn K) {
	t.busy(conn)
	delete(t.conns, conn)
}
