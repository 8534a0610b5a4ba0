package zmtp

import (
	"errors"
	"fmt"
)

// What a caller can tell apart with errors.Is.
var (
	// ErrWouldBlock: the connection's send queue is at its high-water mark; nothing was queued.
	ErrWouldBlock = errors.New("zmtp: send queue is full")
	// ErrGone: no such connection, or it is closing; nothing was queued.
	ErrGone = errors.New("zmtp: connection is gone")
	// ErrClosed: this side closed the connection or the socket.
	ErrClosed = errors.New("zmtp: closed")
	// ErrHeartbeat: the peer was silent for longer than the heartbeat timeout, or than the TTL it announced.
	ErrHeartbeat = errors.New("zmtp: heartbeat timeout")
	// ErrStalled: the peer took no bytes for WriteTimeout although there were some to send.
	ErrStalled = errors.New("zmtp: peer takes no bytes")
	// ErrHandshake: the handshake was not complete within HandshakeTimeout.
	ErrHandshake = errors.New("zmtp: handshake timeout")
	// ErrIncompatible: the peer's socket type does not fit ours.
	ErrIncompatible = errors.New("zmtp: incompatible socket types")
	// ErrIdentityTaken: a live connection has the identity of this newcomer.
	ErrIdentityTaken = errors.New("zmtp: identity is taken")
	// ErrReplaced: the connection did not answer a PING in time when a newcomer came with its identity.
	ErrReplaced = errors.New("zmtp: replaced by a new connection with the same identity")
	// ErrTooMany: MaxConns connections are open.
	ErrTooMany = errors.New("zmtp: too many connections")
	// ErrCrowded: the connection was stuck, and others needed the memory that it held.
	ErrCrowded = errors.New("zmtp: stuck, closed to make room for others")
	// ErrIdle: the connection was silent, and another one needed its place.
	ErrIdle = errors.New("zmtp: silent, closed to make room for others")
	// ErrNoPeer: a Push has no connected peer now.
	ErrNoPeer = errors.New("zmtp: no peer is connected")
)

// ProtocolError says that the peer does not speak ZMTP 3 with NULL, or broke its rules.
type ProtocolError struct {
	Reason string
}

func (e *ProtocolError) Error() string { return "zmtp: protocol error: " + e.Reason }

func protocolErrorf(format string, args ...any) error {
	return &ProtocolError{Reason: fmt.Sprintf(format, args...)}
}

// LimitError says that a message, ours or the peer's, is beyond a limit of Options.
type LimitError struct {
	Option string // the name of the field of Options
	Got    int64  // as announced; a lower bound for MaxMessage and MaxFrames
	Max    int64
}

func (e *LimitError) Error() string {
	return fmt.Sprintf("zmtp: %d is above %s = %d", e.Got, e.Option, e.Max)
}
