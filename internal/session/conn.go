package session

import (
	"fmt"
	"strings"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// Want says whether the owner has a use for the session. Wanted, it is opened
// and kept; unwanted, it is closed after Config.Idle, or at once when it is not
// up and nothing is unanswered.
func (s *Session[T]) Want(now kv.Instant, want bool) {
	if want == s.wanted {
		return
	}
	s.wanted = want
	switch {
	case want:
		s.idleAt = kv.Never
		if !s.opened && s.state != foreign {
			s.since = now
		}
		if s.state == idle {
			s.dialSoon(now, s.dialAt)
		}
	case s.state == up || s.state == foreign:
		s.idleAt = now.Add(s.cfg.Idle)
	case !s.needed():
		s.rest()
	}
}

// needed reports whether a connection is worth making: somebody wants it, or
// something has to be sent again.
func (s *Session[T]) needed() bool { return s.wanted || (s.opened && s.calls.first != nil) }

// rest gives the session up without a word; the next one is a new one.
func (s *Session[T]) rest() {
	s.drop()
	s.end()
	s.state, s.since, s.idleAt = idle, kv.Never, kv.Never
}

// Quit closes the session at once, whatever is unanswered.
func (s *Session[T]) Quit() {
	s.wanted = false
	s.rest()
}

// dialSoon dials at the given time, or now when that has passed.
func (s *Session[T]) dialSoon(now, at kv.Instant) {
	s.state, s.dialAt = waiting, at
	if at <= now {
		s.dial()
	}
}

func (s *Session[T]) dial() {
	s.conns++
	s.conn = kv.ConnID(s.cfg.ID)<<32 | kv.ConnID(s.conns)
	s.state = dialing
	s.actions = append(s.actions, Action{Do: Dial, Conn: s.conn})
}

// retry drops the connection and dials again after the back-off, at least wait
// from now, or rests when nobody wants the session.
func (s *Session[T]) retry(now kv.Instant, wait kv.Duration, text string) {
	s.drop()
	s.err = text
	if s.state == foreign && s.wanted {
		s.since = now
	}
	if (s.state == up || s.state == foreign) && now.Sub(s.upAt) >= LastBackoff {
		s.backoff = 0
	} else {
		s.backoff = min(max(2*s.backoff, FirstBackoff), LastBackoff)
	}
	at := now.Add(max(wait, s.backoff))
	if !s.needed() {
		s.rest()
		s.dialAt = at
		return
	}
	s.dialSoon(now, at)
}

// Connected: the connection is there. The hello is its first message.
func (s *Session[T]) Connected(now kv.Instant, conn kv.ConnID) {
	if conn != s.conn || s.state != dialing {
		return
	}
	s.state = greeting
	s.helloSeq, s.helloAt = s.calls.next(), now
	h := &msg.Hello{
		Seq: s.helloSeq, Min: msg.Version, Max: msg.Version, Role: s.cfg.Role, Node: s.cfg.Node,
		Incarnation: s.cfg.Incarnation, Secret: s.cfg.Secret, Resume: s.opened, Facts: s.cfg.Facts,
	}
	if s.opened {
		h.Session = s.opener
	}
	s.send(h)
}

// Disconnected: the connection could not be made, or is gone.
func (s *Session[T]) Disconnected(now kv.Instant, conn kv.ConnID, text string) Notice[T] {
	if conn != s.conn || conn == 0 {
		return Notice[T]{}
	}
	s.conn = 0
	s.retry(now, 0, text)
	return Notice[T]{Kind: Closed, Text: text}
}

// Malformed: something that cannot be read came. What it answered is not
// known, so only a new connection helps.
func (s *Session[T]) Malformed(now kv.Instant, conn kv.ConnID, text string) Notice[T] {
	if conn != s.conn || conn == 0 {
		return Notice[T]{}
	}
	s.retry(now, 0, text)
	return Notice[T]{Kind: Closed, Text: text}
}

// Received: one message of the receiver.
func (s *Session[T]) Received(now kv.Instant, conn kv.ConnID, m msg.Message) Notice[T] {
	if conn != s.conn || conn == 0 {
		return Notice[T]{}
	}
	switch s.state {
	case greeting:
		return s.greeted(now, m)
	case up:
		s.lease.heard = now
		return s.heard(now, m)
	}
	return Notice[T]{}
}

// greeted handles the answer to Hello.
func (s *Session[T]) greeted(now kv.Instant, m msg.Message) Notice[T] {
	switch m := m.(type) {
	case *msg.AllocResponse: // LMCache's receivers answer what they do not know with -1
		s.end()
		s.state, s.since, s.upAt, s.err = foreign, kv.Never, now, ""
		if !s.wanted {
			s.idleAt = now.Add(s.cfg.Idle)
		}
		return Notice[T]{Kind: Legacy, Text: "the receiver speaks LMCache's dialect"}
	case *msg.HelloReply:
		if m.Re == s.helloSeq {
			return s.open(now, m)
		}
	case *msg.Error:
		if m.Re != s.helloSeq {
			break
		}
		if m.Code == fault.Busy {
			s.retry(now, kv.Duration(m.RetryMS)*kv.Millisecond, m.Text)
			return Notice[T]{Kind: Closed, Text: m.Text}
		}
		return s.refuse(now, m.Code, m.Text)
	}
	return Notice[T]{Kind: Violation, Text: fmt.Sprintf("%T before the answer to Hello", m)}
}

func (s *Session[T]) refuse(now kv.Instant, code fault.Code, text string) Notice[T] {
	s.rest()
	s.err, s.dialAt, s.wanted = text, now.Add(LastBackoff), false
	return Notice[T]{Kind: Refused, Code: code, Text: text}
}

// open takes a HelloReply: the session is new or goes on.
func (s *Session[T]) open(now kv.Instant, m *msg.HelloReply) Notice[T] {
	if m.Version != msg.Version {
		return s.refuse(now, fault.Unsupported, fmt.Sprintf("the receiver chose version %d of %d to %d", m.Version, msg.Version, msg.Version))
	}
	length := kv.FromMillis(m.LeaseMS)
	if length < kv.MinLease || length == kv.Forever {
		return s.refuse(now, fault.BadRequest, fmt.Sprintf("lease_ms is %d; it must be at least %d", m.LeaseMS, kv.MinLease.Millis()))
	}
	resumed := s.opened && m.Resumed && m.Incarnation == s.peer
	if !resumed {
		s.end()
		s.opener = s.helloSeq
	}
	s.state, s.opened, s.since, s.err = up, true, kv.Never, ""
	s.upAt, s.peer, s.reply = now, m.Incarnation, *m
	s.lease = lease{length: length, proof: s.helloAt, heard: now, beatAt: now.Add(length / 3)}
	if !s.wanted {
		s.idleAt = now.Add(s.cfg.Idle)
	}
	if !resumed {
		return Notice[T]{Kind: Up}
	}
	for e := s.calls.first; e != nil; e = e.next {
		s.send(e.msg)
	}
	return Notice[T]{Kind: Resumed}
}

// heard handles a message of an open session.
func (s *Session[T]) heard(now kv.Instant, m msg.Message) Notice[T] {
	if e, ok := m.(*msg.Ended); ok && e.Re == 0 {
		return Notice[T]{Kind: Asked, Msg: m}
	}
	seq := re(m)
	if e, ok := m.(*msg.Error); ok && e.Code == fault.HelloRequired {
		return s.lose(now, strings.TrimSuffix("the receiver requires a new hello: "+e.Text, ": "))
	}
	switch {
	case seq == 0 || seq > s.calls.seq:
		return Notice[T]{Kind: Violation, Text: fmt.Sprintf("%T answers %d; the last request was %d", m, seq, s.calls.seq)}
	case s.lease.answered(seq):
		return Notice[T]{Kind: Proved, Seq: seq}
	}
	if ref, ok := s.calls.answered(seq); ok {
		return Notice[T]{Kind: Reply, Ref: ref, Msg: m}
	}
	return Notice[T]{} // a repeat
}

// lose gives the verdict: the session is over. The next Hello goes over a new
// connection and resumes nothing.
func (s *Session[T]) lose(now kv.Instant, text string) Notice[T] {
	s.end()
	if s.wanted {
		s.since = now
	}
	s.retry(now, FirstBackoff, text) // the owner may have no more use for one
	return Notice[T]{Kind: Lost, Code: fault.PeerLost, Text: text}
}

// Next is when Tick has something to do; Never when it has not.
func (s *Session[T]) Next() kv.Instant {
	at := kv.Never
	switch s.state {
	case waiting:
		at = s.dialAt
	case greeting:
		at = s.helloAt.Add(s.cfg.Connect)
	case up:
		at = min(s.lease.beatAt, s.idleAt)
	case foreign:
		at = s.idleAt
	}
	if s.opened {
		at = min(at, s.lease.lostAt())
	} else if s.since != kv.Never {
		at = min(at, s.since.Add(s.cfg.Connect))
	}
	return at
}

// Tick: time has passed. At most one Notice comes of it; the caller ticks
// again while Next is not later than now.
func (s *Session[T]) Tick(now kv.Instant) Notice[T] {
	switch {
	case s.opened && now >= s.lease.lostAt():
		return s.lose(now, fmt.Sprintf("nothing was heard for %v s%s", s.lease.length.Seconds(), s.because()))
	case !s.opened && s.since != kv.Never && now >= s.since.Add(s.cfg.Connect):
		return s.lose(now, fmt.Sprintf("no session within %v s%s", s.cfg.Connect.Seconds(), s.because()))
	case s.state == waiting && now >= s.dialAt:
		s.dial()
	case s.state == greeting && now >= s.helloAt.Add(s.cfg.Connect):
		text := fmt.Sprintf("no answer to Hello within %v s", s.cfg.Connect.Seconds())
		s.retry(now, 0, text)
		return Notice[T]{Kind: Closed, Text: text}
	case (s.state == up || s.state == foreign) && now >= s.idleAt:
		s.rest()
	case s.state == up && now >= s.lease.beatAt:
		s.Prove(now)
	}
	return Notice[T]{}
}

func (s *Session[T]) because() string {
	if s.err == "" {
		return ""
	}
	return ": " + s.err
}
