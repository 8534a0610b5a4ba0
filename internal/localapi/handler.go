package localapi

import "github.com/berthkv/berth/internal/kv"

// Cred is who is at the other end of a connection, as the kernel says.
type Cred struct {
	PID int // 0: in a PID namespace that is not ours, or gone already
	UID uint32
	// Process numbers the process, for the life of the server and never again, as
	// a pid is. 0: unknown; it counts as alive.
	Process int
}

// Handler is told what happens on a server's connections. Its methods are
// called from the connections' goroutines, for one connection one after
// another in the order written here; they may block, which slows that
// connection's engine down.
type Handler interface {
	// Connected: a new connection. Its requests follow.
	Connected(conn kv.ConnID, cred Cred)
	// Request: req waits for Answer, Fail or SendPools of call. Nothing has
	// been checked but types and limits; whether Hello came first, neither.
	Request(conn kv.ConnID, call kv.CallID, req Request)
	// Hangup: the caller of call no longer waits. After an engine's own hangup
	// the call must still be answered (Fail with fault.Cancelled does it; an
	// answer given before makes that a no-op); with a lost connection, for
	// each of whose unanswered calls this is called, there is nobody to answer.
	Hangup(call kv.CallID)
	// Disconnected: the connection is gone; its last word.
	Disconnected(conn kv.ConnID)
	// ProcessGone: the process of that number, which was sent pools, has exited.
	// It may come before or after the Disconnected of its connections.
	ProcessGone(process int)
}
