package zmtp

import (
	"fmt"
	"log/slog"
	"net/netip"
	"time"
)

// Options of a socket. The zero value of each field means its default; a negative value is refused, except where it is said
// to mean "never". Besides its send queue and the message that is coming in, a connection holds at most 192 KiB of buffers.
type Options struct {
	// Identity is announced by DialDealer and DialReq: at most 255 bytes, the first not 0; empty lets the peer pick one.
	Identity []byte

	// HeartbeatInterval is the time between PINGs (3 s; negative: send none). A peer that announces ZMTP 3.0 gets none:
	// PING came with 3.1. A peer's own PINGs are always answered, and the TTL in them is honoured; the end that was accepted
	// sends none while they come.
	HeartbeatInterval time.Duration
	// HeartbeatTimeout is how long after an unanswered PING a connection is closed if nothing at all comes (10 s). Interval and
	// timeout together are announced to the peer as TTL; each is at most 3276 s.
	HeartbeatTimeout time.Duration
	// HandshakeTimeout bounds the handshake; for a dial, TCP connect and handshake together (10 s).
	HandshakeTimeout time.Duration
	// TakeoverTimeout is how long a connection has to answer a PING when a newcomer comes with its identity (1 s).
	TakeoverTimeout time.Duration
	// WriteTimeout is how long a peer may take no byte while some are to be sent; then it is closed (30 s).
	WriteTimeout time.Duration
	// Linger bounds how long a close waits for queued frames to be sent and the peer to hang up (1 s).
	Linger time.Duration
	// ReconnectMin and ReconnectMax bound the pause before a redial (100 ms, 5 s): it doubles with each failure, and half
	// of it is random.
	ReconnectMin, ReconnectMax time.Duration

	// SendQueue and SendQueueBytes are the high-water mark of each connection: messages and encoded bytes that wait to be
	// given to TCP (1000, 64 MiB). One message always fits an empty queue.
	SendQueue, SendQueueBytes int
	// RecvQueue is how many messages wait for Recv, where no handler is given, before reading stops (64).
	RecvQueue int

	// MaxFrame and MaxMessage bound one frame's body and the sum of a message's bodies, in both directions
	// (16 MiB + 64 KiB); MaxFrames the frames of a message (64).
	MaxFrame, MaxMessage int64
	MaxFrames            int

	// MaxConns is how many connections a listening socket has (4096). For one more, the connection goes that has sent no
	// message for the longest time, if that is a second at least; with KeepIdle, or else, the new one is refused.
	MaxConns int
	KeepIdle bool
	// RecvTotal and SendTotal bound all connections of a listening socket together: bytes of messages that are coming in or
	// being handled (64 MiB; messages up to 4 KiB do not count), and bytes that wait to be given to TCP (128 MiB). Where one
	// more is too much, the connection that has been stuck the longest is closed. One message always fits.
	RecvTotal, SendTotal int64
	// MaxHandshakes is how many accepted connections may be in handshake (1024). At the limit the oldest is closed once it
	// is a second old, and nothing is accepted until then.
	MaxHandshakes int

	// Allow is asked at accept for the peer's address (IPv4 in IPv6 is unwrapped, the zone removed); nil allows all. A refused peer is closed.
	Allow func(netip.Addr) bool

	// Log gets warnings about peers that were refused or broke a rule, at most one a second for each reason; nil: none.
	Log *slog.Logger
}

// withDefaults fills in defaults and checks the rest; the error names the field and both numbers.
func (o Options) withDefaults() (Options, error) {
	for _, d := range []struct {
		name     string
		v        *time.Duration
		def, max time.Duration
		never    bool
	}{
		{"HeartbeatInterval", &o.HeartbeatInterval, 3 * time.Second, 3276 * time.Second, true},
		{"HeartbeatTimeout", &o.HeartbeatTimeout, 10 * time.Second, 3276 * time.Second, false},
		{"HandshakeTimeout", &o.HandshakeTimeout, 10 * time.Second, 0, false},
		{"TakeoverTimeout", &o.TakeoverTimeout, time.Second, 0, false},
		{"WriteTimeout", &o.WriteTimeout, 30 * time.Second, 0, false},
		{"Linger", &o.Linger, time.Second, 0, false},
		{"ReconnectMin", &o.ReconnectMin, 100 * time.Millisecond, 0, false},
		{"ReconnectMax", &o.ReconnectMax, max(5*time.Second, o.ReconnectMin), 0, false},
	} {
		switch {
		case *d.v == 0:
			*d.v = d.def
		case *d.v < 0 && !d.never:
			return o, fmt.Errorf("zmtp: %s = %v is negative", d.name, *d.v)
		case d.max > 0 && *d.v > d.max:
			return o, fmt.Errorf("zmtp: %s = %v is above %v", d.name, *d.v, d.max)
		}
	}
	for _, n := range []struct {
		name string
		v    *int
		def  int
	}{
		{"SendQueue", &o.SendQueue, 1000},
		{"SendQueueBytes", &o.SendQueueBytes, 64 << 20},
		{"RecvQueue", &o.RecvQueue, 64},
		{"MaxFrames", &o.MaxFrames, 64},
		{"MaxConns", &o.MaxConns, 4096},
		{"MaxHandshakes", &o.MaxHandshakes, 1024},
	} {
		if *n.v < 0 {
			return o, fmt.Errorf("zmtp: %s = %d is negative", n.name, *n.v)
		}
		if *n.v == 0 {
			*n.v = n.def
		}
	}
	for _, n := range []struct {
		name string
		v    *int64
		def  int64
	}{
		{"MaxFrame", &o.MaxFrame, 16<<20 + 64<<10}, {"MaxMessage", &o.MaxMessage, 16<<20 + 64<<10},
		{"RecvTotal", &o.RecvTotal, 64 << 20}, {"SendTotal", &o.SendTotal, 128 << 20},
	} {
		if *n.v < 0 {
			return o, fmt.Errorf("zmtp: %s = %d is negative", n.name, *n.v)
		}
		if *n.v == 0 {
			*n.v = n.def
		}
	}
	if o.ReconnectMax < o.ReconnectMin {
		return o, fmt.Errorf("zmtp: ReconnectMax = %v is below ReconnectMin = %v", o.ReconnectMax, o.ReconnectMin)
	}
	if err := checkIdentity(o.Identity); err != nil {
		return o, err
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o, nil
}

func checkIdentity(id []byte) error {
	if len(id) > maxIdentity {
		return &LimitError{Option: "Identity length", Got: int64(len(id)), Max: maxIdentity}
	}
	if len(id) > 0 && id[0] == 0 {
		return protocolErrorf("identity starts with a zero byte")
	}
	return nil
}
