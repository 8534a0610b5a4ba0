package session

import (
	"fmt"

	"github.com/berthkv/berth/internal/msg"
)

// calls are the unanswered requests, by seq and in order. Entries are reused.
type calls[T any] struct {
	seq         uint64 // last number given out
	bySeq       map[uint64]*call[T]
	first, last *call[T]
	spare       *call[T] // linked by next
}

type call[T any] struct {
	seq        uint64
	msg        msg.Message
	ref        T
	prev, next *call[T]
}

func (c *calls[T]) init(floor uint64) {
	c.seq = floor
	c.bySeq = make(map[uint64]*call[T])
}

func (c *calls[T]) next() uint64 {
	c.seq++
	return c.seq
}

func (c *calls[T]) add(m msg.Message, ref T) {
	setSeq(m, c.next())
	e := c.spare
	if e == nil {
		e = new(call[T])
	} else {
		c.spare = e.next
	}
	*e = call[T]{seq: c.seq, msg: m, ref: ref}
	c.link(e)
}

// link appends an entry.
func (c *calls[T]) link(e *call[T]) {
	e.prev = c.last
	if c.last == nil {
		c.first = e
	} else {
		c.last.next = e
	}
	c.last = e
	c.bySeq[e.seq] = e
}

// answered removes a request and returns its ref; ok is false when it is not
// there: a repeated answer, or one to nothing.
func (c *calls[T]) answered(seq uint64) (ref T, ok bool) {
	e := c.bySeq[seq]
	if e == nil {
		return ref, false
	}
	delete(c.bySeq, seq)
	if e.prev == nil {
		c.first = e.next
	} else {
		e.prev.next = e.next
	}
	if e.next == nil {
		c.last = e.prev
	} else {
		e.next.prev = e.prev
	}
	ref = e.ref
	c.free(e)
	return ref, true
}

func (c *calls[T]) free(e *call[T]) {
	*e = call[T]{next: c.spare}
	c.spare = e
}

func (c *calls[T]) clear() {
	for e := c.first; e != nil; {
		next := e.next
		c.free(e)
		e = next
	}
	c.first, c.last = nil, nil
	clear(c.bySeq)
}

// setSeq numbers a request.
func setSeq(m msg.Message, seq uint64) {
	switch m := m.(type) {
	case *msg.Hello:
		m.Seq = seq
	case *msg.Begin:
		m.Seq = seq
	case *msg.Commit:
		m.Seq = seq
	case *msg.Cancel:
		m.Seq = seq
	case *msg.Watch:
		m.Seq = seq
	case *msg.Ready:
		m.Seq = seq
	case *msg.Heartbeat:
		m.Seq = seq
	default:
		panic(fmt.Sprintf("session: %T is no request", m))
	}
}

// re returns the seq that a reply answers, 0 for what is no reply.
func re(m msg.Message) uint64 {
	switch m := m.(type) {
	case *msg.HelloReply:
		return m.Re
	case *msg.Granted:
		return m.Re
	case *msg.CommitReply:
		return m.Re
	case *msg.Ended:
		return m.Re
	case *msg.HeartbeatReply:
		return m.Re
	case *msg.Error:
		return m.Re
	}
	return 0
}
