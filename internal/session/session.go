// Package session is the client half of a Berth session with one receiver:
// hello, sequence numbers, what is unanswered and is resent after a reconnect,
// heartbeats, and the verdict that the peer is lost. It is pure, and is
// composed by outbound (senders) and watch (proxies).
//
//	        Want            Connected         HelloReply
//	idle ─────────► dialing ─────────► greeting ─────────► up
//	  ▲                ▲  └── back-off ◄───┘ │ ▲             │
//	  │                └─────────────────────┼─┴─────────────┘ loss: resume
//	  │                                      └───► foreign: LMCache's dialect; the
//	  └── nothing wanted, refused                  connection is kept to see it go
//
// Every call is one event. It returns at most one Notice for the owner, and
// leaves what the transport shall do in Actions, to be taken before the next
// call. A session outlives its connections: Opened stays true while a reconnect
// may resume it. Each connection is a fresh one with a number of its own.
package session

import (
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// Config is what a session is told at start. All fields but Facts must be set.
type Config struct {
	// ID is the upper half of the numbers of this session's connections; two
	// sessions of one owner have different ones. See Owner.
	ID          uint32
	Role        msg.Role
	Node        string
	Incarnation kv.Incarnation
	Secret      kv.Secret
	Facts       *kv.Facts // senders only

	// Connect bounds the time without a session, from when one is wanted, until
	// the verdict that there is none to be had. It bounds each hello too.
	Connect kv.Duration
	// Idle is how long a session that nobody wants is kept.
	Idle kv.Duration
}

// Back-off between two dials: doubled from the first to the last. A connection
// that did not last that long does not reset it.
const (
	FirstBackoff = 50 * kv.Millisecond
	LastBackoff  = 2 * kv.Second
)

// Owner returns the Config.ID of the session that numbered a connection.
func Owner(conn kv.ConnID) uint32 { return uint32(conn >> 32) }

// Kind is what a Notice tells.
type Kind uint8

const (
	None Kind = iota
	// Up: a new session is open. What was begun in an earlier one has ended as
	// peer_lost; nothing of it is kept.
	Up
	// Resumed: the session goes on over a new connection; what was unanswered
	// has been sent again.
	Resumed
	// Lost: the session is over, or none could be opened in time. What was
	// begun in it has ended as peer_lost; nothing of it is kept.
	Lost
	// Refused: the receiver answered Hello with an error. As Lost otherwise.
	Refused
	// Legacy: the receiver speaks LMCache's dialect. That is known for as long
	// as the connection lasts: Closed ends it, and the next one asks again.
	Legacy
	// Reply: the answer to a request, with the Ref it was made with.
	Reply
	// Asked: a request of the receiver's own, to be answered with Answer.
	Asked
	// Violation: a reply that answers nothing we asked, or a message that has
	// no place here; it was ignored.
	Violation
	// Closed: the connection is gone; the session tries to resume.
	Closed
	// Proved: a heartbeat was answered: what was sent before it has arrived,
	// and writing may go on.
	Proved
)

// Notice is what a call means for the owner of the session.
type Notice[T any] struct {
	Kind Kind
	Ref  T           // Reply
	Msg  msg.Message // Reply, Asked
	Code fault.Code  // Lost, Refused
	Text string      // Lost, Refused, Violation, Closed
	Seq  uint64      // Proved: of the heartbeat
}

// Action is one thing for the transport to do.
type Action struct {
	Do   Do
	Conn kv.ConnID
	Msg  msg.Message // Send
}

// Do is the kind of an Action.
type Do uint8

const (
	Dial Do = iota
	Close
	Send
)

type state uint8

const (
	idle     state = iota // no connection, none asked for
	waiting               // for dialAt
	dialing               // conn is being made
	greeting              // Hello is out on conn
	up                    // HelloReply came on conn
	foreign               // LMCache's refusal came on conn
)

// Session is the client half of a session with one receiver. T is what the
// owner wants back with the answer to a request.
//
// Invariants, verified by Check:
//  1. conn is set exactly in dialing, greeting, up and foreign.
//  2. up implies opened; unanswered requests imply opened.
//  3. unanswered requests are in ascending order of seq, none above the last.
//  4. wanted and neither opened nor foreign implies that the verdict is timed.
type Session[T any] struct {
	cfg     Config
	state   state
	wanted  bool
	opened  bool      // a session exists that can be resumed
	conn    kv.ConnID // the connection now used
	conns   uint32    // connections asked for so far
	dialAt  kv.Instant
	backoff kv.Duration
	since   kv.Instant // no session since, and one is wanted; Never otherwise
	upAt    kv.Instant
	idleAt  kv.Instant
	err     string // why the last attempt failed

	helloSeq uint64
	opener   uint64 // seq of the hello that opened the session
	helloAt  kv.Instant

	peer  kv.Incarnation
	reply msg.HelloReply
	lease lease
	calls calls[T]

	actions []Action
}

// New returns an idle session. Sequence numbers start above seqFloor.
func New[T any](cfg Config, seqFloor uint64) Session[T] {
	s := Session[T]{cfg: cfg, since: kv.Never, idleAt: kv.Never, dialAt: 0}
	s.calls.init(seqFloor)
	return s
}

// Actions returns what the transport shall do, in order, and forgets it. The
// slice is valid until the next call.
func (s *Session[T]) Actions() []Action {
	a := s.actions
	s.actions = s.actions[:0]
	return a
}

// Up reports whether a connection is up: requests go out at once.
func (s *Session[T]) Up() bool { return s.state == up }

// Opened reports whether there is a session, up or to be resumed. Only then
// may requests be made.
func (s *Session[T]) Opened() bool { return s.opened }

// Foreign reports whether the receiver is known to speak LMCache's dialect.
func (s *Session[T]) Foreign() bool { return s.state == foreign }

// Idle reports whether the session has no connection and asks for none.
func (s *Session[T]) Idle() bool { return s.state == idle }

// Receiver is the reply that opened or resumed the session last; zero before.
func (s *Session[T]) Receiver() *msg.HelloReply { return &s.reply }

// Err is why the last connection failed, "" when it did not.
func (s *Session[T]) Err() string { return s.err }

// LastSeq is the highest sequence number given out.
func (s *Session[T]) LastSeq() uint64 { return s.calls.seq }

// Unanswered is the number of requests without an answer.
func (s *Session[T]) Unanswered() int { return len(s.calls.bySeq) }

// Prove sends a heartbeat now and returns its number; 0 without a connection.
// The Proved with that number says that what was sent before it has arrived.
func (s *Session[T]) Prove(now kv.Instant) uint64 {
	if s.state != up {
		return 0
	}
	seq := s.calls.next()
	s.lease.sent(seq, now)
	s.send(&msg.Heartbeat{Seq: seq})
	return seq
}

// Request numbers a request and sends it, at once or on resume. The session
// must be Opened. The message is the session's until its answer, or until the
// session is lost.
func (s *Session[T]) Request(m msg.Message, ref T) {
	if !s.opened {
		panic("session: request without a session")
	}
	s.calls.add(m, ref)
	if s.state == up {
		s.send(m)
	}
}

// Answer sends the reply to a request of the receiver's. When the connection
// is gone it is dropped: the receiver asks again.
func (s *Session[T]) Answer(m msg.Message) {
	if s.state == up {
		s.send(m)
	}
}

func (s *Session[T]) send(m msg.Message) {
	s.actions = append(s.actions, Action{Do: Send, Conn: s.conn, Msg: m})
}

// drop closes the connection, if there is one; what still comes on it is
// ignored.
func (s *Session[T]) drop() {
	if s.conn != 0 {
		s.actions = append(s.actions, Action{Do: Close, Conn: s.conn})
		s.conn = 0
	}
}

// end forgets the session and all that is unanswered.
func (s *Session[T]) end() {
	s.opened = false
	s.calls.clear()
	s.lease = lease{}
}
