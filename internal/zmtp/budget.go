package zmtp

import (
	"container/list"
	"sync"
)

// budget bounds what all connections of a socket hold together, in one direction. Where room is needed, the connection that
// has held some the longest without getting on is closed: one that is stuck or too slow, not one that has just come.
type budget struct {
	limit int64
	freed gate // opened when bytes come back

	mu    sync.Mutex // a leaf; guards the rest and the shares
	used  int64
	order list.List // of *share that may have to go, the longest first
}

func newBudget(limit int64) *budget { return &budget{limit: limit} }

// share is what one connection holds. Without a budget it counts nothing.
type share struct {
	b *budget
	// evict closes the connection. It is called without locks of this package; what was held comes back by drop.
	evict func()

	held   int64
	pinned bool // must not go: it is we who are slow
	place  *list.Element
}

// take adds n bytes, which may cost others their connection. If there is no room all the same it waits until stop is
// closed; with stop nil it is false at once. What one connection holds alone always fits.
func (s *share) take(n int64, stop <-chan struct{}) bool {
	if s.b == nil || n <= 0 {
		return true
	}
	for {
		freed := s.b.freed.wait()
		ok, victim := s.tryTake(n)
		switch {
		case ok:
			return true
		case victim != nil:
			victim.evict()
		case stop == nil:
			return false
		}
		if stop == nil {
			continue // an eviction has given its bytes back already
		}
		select {
		case <-freed:
		case <-stop:
			return false
		}
	}
}

// tryTake adds n bytes if they fit, or names who goes first.
func (s *share) tryTake(n int64) (ok bool, victim *share) {
	b := s.b
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.used+n <= b.limit || b.used == s.held {
		b.used += n
		s.held += n
		if s.place == nil && !s.pinned {
			s.place = b.order.PushBack(s)
		}
		return true, nil
	}
	for e := b.order.Front(); e != nil; e = e.Next() {
		if v := e.Value.(*share); v != s {
			v.leave()
			return false, v
		}
	}
	return false, nil
}

// give returns n bytes: the connection gets on.
func (s *share) give(n int64) {
	if s.b == nil {
		return
	}
	s.b.mu.Lock()
	n = min(n, s.held)
	s.held -= n
	s.b.used -= n
	switch {
	case s.place == nil:
	case s.held == 0:
		s.leave()
	default:
		s.b.order.MoveToBack(s.place)
	}
	s.b.mu.Unlock()
	if n > 0 {
		s.b.freed.open()
	}
}

// drop returns all.
func (s *share) drop() {
	if s.b == nil {
		return
	}
	s.b.mu.Lock()
	n := s.held
	s.b.mu.Unlock()
	s.give(n)
}

// pin says whether the share must not go.
func (s *share) pin(pinned bool) {
	if s.b == nil {
		return
	}
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	s.pinned = pinned
	if pinned {
		s.leave()
	}
}

// leave is called with b.mu held.
func (s *share) leave() {
	if s.place != nil {
		s.b.order.Remove(s.place)
		s.place = nil
	}
}
