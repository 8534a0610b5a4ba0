package zmtp

import "sync"

// budget bounds what all connections of a socket hold together, in one direction. Where room is needed, the connection that
// has held some the longest without getting on is closed: one that is stuck or too slow, not one that has just come.
type budget struct {
	limit int64
	freed gate // opened when bytes come back

	mu          sync.Mutex // a leaf; guards the rest and the shares
	used        int64
	first, last *share // those that may have to go, linked, the longest first
}

func newBudget(limit int64) *budget { return &budget{limit: limit} }

// share is what one connection holds. Without a budget it counts nothing.
type share struct {
	b *budget
	// evict closes the connection. It is called without locks of this package; what was held comes back by drop.
	evict func()

	held   int64
	pinned bool // must not go: it is we who are slow

	placed     bool // in the order
	prev, next *share
}

// take adds n bytes, which may cost others their connection. If there is no room all the same it waits until stop is
// closed; with stop nil it is false at once. What one connection holds alone always fits.
func (s *share) take(n int64, stop <-chan struct{}) bool {
	if s.b == nil || n <= 0 {
		return true
	}
	s.b.mu.Lock()
	ok := s.add(n)
	s.b.mu.Unlock()
	if ok {
		return true // most often, and nothing is made to wait on
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
	if s.add(n) {
		return true, nil
	}
	for v := b.first; v != nil; v = v.next {
		if v != s {
			v.leave()
			return false, v
		}
	}
	return false, nil
}

// add adds n bytes if they fit. It is called with b.mu held.
func (s *share) add(n int64) bool {
	b := s.b
	if b.used+n > b.limit && b.used != s.held {
		return false
	}
	b.used += n
	s.held += n
	if !s.placed && !s.pinned {
		s.join()
	}
	return true
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
	case !s.placed:
	case s.held == 0:
		s.leave()
	default:
		s.leave()
		s.join()
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

// join puts the share last, and leave takes it out if it is there. Both are
// called with b.mu held.
func (s *share) join() {
	b := s.b
	s.placed, s.prev, s.next = true, b.last, nil
	if b.last == nil {
		b.first = s
	} else {
		b.last.next = s
	}
	b.last = s
}

func (s *share) leave() {
	if !s.placed {
		return
	}
	b := s.b
	if s.prev == nil {
		b.first = s.next
	} else {
		s.prev.next = s.next
	}
	if s.next == nil {
		b.last = s.prev
	} else {
		s.next.prev = s.prev
	}
	s.placed, s.prev, s.next = false, nil, nil
}
