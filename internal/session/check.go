package session

import (
	"fmt"

	"github.com/berthkv/berth/internal/kv"
)

// Check verifies the invariants of Session; nil when all hold.
func (s *Session[T]) Check() error {
	connected := s.state == dialing || s.state == greeting || s.state == up || s.state == foreign
	if connected != (s.conn != 0) {
		return fmt.Errorf("session: state %d with connection %d", s.state, s.conn)
	}
	if s.state == up && !s.opened {
		return fmt.Errorf("session: up, and not opened")
	}
	n, last := 0, uint64(0)
	for e := s.calls.first; e != nil; e = e.next {
		if e.seq <= last || e.seq > s.calls.seq || s.calls.bySeq[e.seq] != e {
			return fmt.Errorf("session: request %d after %d; the last is %d", e.seq, last, s.calls.seq)
		}
		n, last = n+1, e.seq
	}
	if n != len(s.calls.bySeq) || (n > 0 && !s.opened) {
		return fmt.Errorf("session: %d requests in order, %d by number, opened %v", n, len(s.calls.bySeq), s.opened)
	}
	if s.wanted && !s.opened && s.state != foreign && s.since == kv.Never {
		return fmt.Errorf("session: wanted, not opened, and no verdict is timed")
	}
	return nil
}
