package session

import "github.com/berthkv/berth/internal/kv"

// lease is the client's view of its lease at the receiver.
//
// proof is when it sent the hello or heartbeat that was answered last: from
// then on the receiver counts. Writing stops two thirds of the lease after it,
// so that nothing is on its way when the receiver gives up. heard is when
// anything came last: a whole lease of silence is our own verdict.
type lease struct {
	length kv.Duration // 0: none
	proof  kv.Instant
	heard  kv.Instant
	beatAt kv.Instant // when to send the next heartbeat
	beats  [maxBeats]beat
	n      int // of beats in use, oldest first
}

type beat struct {
	seq uint64
	at  kv.Instant
}

// maxBeats bounds the heartbeats without an answer that are remembered; there
// is one every third of the lease, so older ones prove nothing any more.
const maxBeats = 4

func (l *lease) third() kv.Duration { return l.length / 3 }

// stopAt is when no new write may be started.
func (l *lease) stopAt() kv.Instant { return l.proof.Add(l.length / 3 * 2) }

// lostAt is when silence becomes the verdict.
func (l *lease) lostAt() kv.Instant { return l.heard.Add(l.length) }

func (l *lease) sent(seq uint64, now kv.Instant) {
	if l.n == maxBeats {
		copy(l.beats[:], l.beats[1:])
		l.n--
	}
	l.beats[l.n] = beat{seq, now}
	l.n++
	l.beatAt = now.Add(l.third())
}

// answered takes the answer to a heartbeat; it reports whether it was one.
func (l *lease) answered(seq uint64) bool {
	for i := range l.beats[:l.n] {
		if l.beats[i].seq == seq {
			l.proof = max(l.proof, l.beats[i].at)
			l.n = copy(l.beats[:], l.beats[i+1:l.n])
			return true
		}
	}
	return false
}

// MayWrite reports whether a new write may be started now.
func (s *Session[T]) MayWrite(now kv.Instant) bool {
	return s.opened && now < s.lease.stopAt()
}

// Proved reports whether a heartbeat sent after that time, over the connection
// that is up now, was answered: so what was asked before it has arrived, and an
// answer that is given at once would have come.
func (s *Session[T]) Proved(since kv.Instant) bool {
	return s.state == up && s.lease.proof > max(since, s.upAt)
}

// Lease is the lease that the receiver gave, 0 without a session.
func (s *Session[T]) Lease() kv.Duration { return s.lease.length }

// Silent is the time since the receiver was heard last.
func (s *Session[T]) Silent(now kv.Instant) kv.Duration {
	if !s.opened {
		return 0
	}
	return now.Sub(s.lease.heard)
}

// Stopped tells that the owner was not stepped for more than two thirds of the
// lease: what came meanwhile is still queued, so the silence is counted anew.
// That the receiver may have given up is not forgotten: MayWrite stays as it is.
func (s *Session[T]) Stopped(now kv.Instant) {
	if s.opened {
		s.lease.heard = now
	}
}
