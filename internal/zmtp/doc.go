// Package zmtp is a ZeroMQ endpoint in pure Go: ZMTP 3.x with the NULL mechanism over TCP, IPv4 and IPv6.
//
// # Sockets
//
// [ListenRouter], [ListenPull] and [ListenRep] accept connections. [DialDealer], [DialPush] and [DialReq] make exactly one
// connection. [RedialDealer] and [RedialPush] keep making one, with a fresh identity each time, and [Push] spreads messages
// over several. There is no queue that outlives a connection: what a lost connection had not delivered is the caller's to
// send again, and each [ConnID] names one connection, so that nothing is ever sent on a later one by mistake.
//
// # Events
//
// A [Handler] gets Connected, then Messages, then Disconnected of each connection, in this order and one at a time, from the
// goroutine that reads the connection. Handlers of different connections run at the same time. While a handler runs, nothing
// more is read from its connection (TCP then slows the peer down; heartbeats do not count this as silence). A handler may call
// every Send and CloseConn; it must not call Close of its own socket, which waits for it.
//
// # Ownership
//
// Frames handed to a handler or returned by Recv belong to the receiver: they are never reused here. Frames given to a Send
// are copied before it returns.
//
// # Goroutines
//
// A connection has one reader (parallel over connections) and, only while its socket is not taking bytes as fast as they come,
// one writer. Send writes in the caller's goroutine when nothing is queued and it does not block; a burst is left to the
// writer, which sends all that has gathered with one call.
//
// # Errors
//
// Sends return [ErrWouldBlock], [ErrGone] or [*LimitError]. Disconnected carries [io.EOF] (the peer closed), [ErrClosed] (we
// did), [ErrHeartbeat], [ErrStalled], [ErrReplaced], [*ProtocolError], [*LimitError] or the error of the operating system. A
// dial returns these too, and [ErrIncompatible], a context error or [ErrHandshake].
//
// # Lock order
//
// Listener.mu, Redialer.mu, Push.mu, conn.beatMu, conn.probeMu: no other lock is taken under them. outbox.mu: then gate.mu.
// No callback, no blocking call and no channel send is made under any of them.
package zmtp
