// Package watch is all that a proxy decides about receivers: sessions with
// them, watches on names, cancels, the words of LMCache's senders. It is pure:
// Step(now, event) → actions.
package watch

import (
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// Event is one thing that happened.
type Event interface{ event() }

// Peer is a receiver's control address.
type Peer struct {
	Host      string
	AllocPort int
}

// Watch: tell how ReqID ends at each of Peers (one for each rank). Accepted is
// reported once every receiver has the watch (Berth) or is known to be
// LMCache's, or Result with the failure; then Result once, ready when all
// ranks are. The core keeps the watch until exactly one of Cancel and Release
// comes for its call, also after the Result.
type Watch struct {
	Call     kv.CallID
	ReqID    string
	Peers    []Peer
	Deadline kv.Duration
}

// Cancel ends a watched name at all its receivers (also after it was ready:
// what no engine has claimed is freed), and the watch. No Result comes after it.
type Cancel struct {
	Call   kv.CallID // of the Watch
	Reason fault.Code
	Text   string
}

// Release ends the watch of a transfer that was ready and used, or that ended
// badly. Nothing is sent.
type Release struct{ Call kv.CallID }

// Connected, Disconnected, Received: control connections that the core dialled.
type Connected struct{ Conn kv.ConnID }
type Disconnected struct {
	Conn kv.ConnID
	Text string
}
type Received struct {
	Conn kv.ConnID
	Msg  msg.Message
}

// Malformed: a payload that could not be decoded.
type Malformed struct {
	Conn kv.ConnID
	Text string
}

// Notified: a ProxyNotif or EndingNotice came on a PUSH connection.
type Notified struct {
	Conn kv.ConnID
	Msg  msg.Message
}

// Tick: time has passed.
type Tick struct{}

// Action is one thing for the shell to do, in order.
type Action interface{ action() }

// Dial, Close, Send: control connections, numbered by the core.
type Dial struct {
	Conn kv.ConnID
	Peer Peer
}
type Close struct{ Conn kv.ConnID }
type Send struct {
	Conn kv.ConnID
	Msg  msg.Message
}

// Accepted: the prefill may start.
type Accepted struct{ Call kv.CallID }

// Result ends a Watch: ready on all ranks, or the first bad ending.
type Result struct {
	Call   kv.CallID
	Ending msg.Ending
	Reason fault.Code
	Text   string
	Rank   int // of the bad ending
}

// Wake: send a Tick at that time; replaces the one before.
type Wake struct{ At kv.Instant }

func (Watch) event()        {}
func (Cancel) event()       {}
func (Release) event()      {}
func (Connected) event()    {}
func (Disconnected) event() {}
func (Received) event()     {}
func (Malformed) event()    {}
func (Notified) event()     {}
func (Tick) event()         {}

func (Dial) action()     {}
func (Close) action()    {}
func (Send) action()     {}
func (Accepted) action() {}
func (Result) action()   {}
func (Wake) action()     {}
