package zmtp

import "net/netip"

// ConnID names one connection for the life of its socket; it is never 0 and never used again.
type ConnID uint64

// Kind of an Event.
type Kind uint8

// The kinds of events. Append only.
const (
	// Connected: the handshake is through. Sends to Event.Conn are possible from now on.
	Connected Kind = iota + 1
	// Message: Event.Frames is one message, as the peer sent it (without an identity frame).
	Message
	// Disconnected: the last event of its connection; Event.Err says why (never nil).
	Disconnected
	// Unreachable: only from a Redialer or Push; an attempt to connect has failed with Event.Err. Event.Conn names the
	// attempt; no other event has it.
	Unreachable
)

func (k Kind) String() string {
	switch k {
	case Connected:
		return "connected"
	case Message:
		return "message"
	case Disconnected:
		return "disconnected"
	case Unreachable:
		return "unreachable"
	}
	return "unknown"
}

// Event is what happens on one connection. See the package comment for order, goroutines and ownership.
type Event struct {
	Kind Kind
	Conn ConnID
	// Identity names the connection. At a Router it is what the peer announced or, where it announced nothing, a generated
	// one that starts with a zero byte, as always at a Pull or Rep; at a dialled socket it is our own.
	Identity string
	// Again, in Connected: a connection with this identity was there before. A listening socket remembers the last
	// 8,192 identities for this.
	Again bool
	// Remote is the peer's address; in Unreachable it is zero.
	Remote netip.AddrPort
	// Frames of a Message: at least one, each not nil. They belong to the handler.
	Frames [][]byte
	Err    error
}

// Handler gets the events of a socket.
type Handler func(Event)
