package outbound

import (
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// Event is one thing that happened to the sender. Its slices and messages are
// the caller's again when Step returns; the core copies what it keeps.
type Event interface{ event() }

// ---- the engine; its connections are admitted by package attach ----

// EngineAttached: a connection of that engine was accepted. What is staged
// belongs to the engine_id; any of its connections may submit it.
type EngineAttached struct {
	Engine    kv.ConnID
	EngineID  string
	TokensKey string // key of the fixed token list by its hash; "": not said
}

// Begin: an engine begins a prompt's transfer to one rank. Answered at once;
// later Granted or Ended is emitted on the same connection (or another one of
// that engine when it is gone).
type Begin struct {
	Engine     kv.ConnID
	Call       kv.CallID
	ReqID      string
	Total      int64
	Peer       Peer
	Deadline   kv.Duration // Forever: request_timeout_sec
	Stage      int64       // staging slots wanted with Granted, if they are free
	BerthProxy bool        // the spec says berth_proxy: true
	TokensKey  string      // "": the one that an engine attached with
}

// Peer names a receiver: its control address, and its init port where an
// LMCache receiver needs the data handshake (0: not given).
type Peer struct {
	Host      string
	AllocPort int
	InitPort  int
}

// Stage: n staging slots for a granted request; blocks until they are there
// unless NonBlocking (then Busy). They are the engine's until it submits or
// unstages them, also when the request ends before that.
type Stage struct {
	Engine      kv.ConnID
	Call        kv.CallID
	ReqID       string
	N           int64
	Deadline    kv.Duration
	NonBlocking bool
}

// Unstage returns staged slots unused.
type Unstage struct {
	Engine kv.ConnID
	Call   kv.CallID
	ReqID  string
	Slots  []kv.SlotID
}

// Submit hands staged slots over as one batch. HasEnd: the request has End
// chunks in all. On a nil error the core owns the slots; on error the engine
// still does, and submits or unstages them.
type Submit struct {
	Engine kv.ConnID
	Call   kv.CallID
	ReqID  string
	Chunks []Chunk
	HasEnd bool
	End    int64
}

// Chunk is one chunk of a batch, in a staging slot.
type Chunk struct {
	Index  int64
	Key    string
	Slot   kv.SlotID
	Tokens int64
}

// Cancel: answered with the ending once none of its writes is in flight; at once
// when it has ended, or was never begun. An unknown name is kept as cancelled, so
// that a Begin which it overtook is answered with that.
type Cancel struct {
	Engine kv.ConnID // of a tool too
	Call   kv.CallID
	ReqID  string
	Reason fault.Code
	Text   string
}

// Hangup: the caller of Call no longer waits.
type Hangup struct{ Call kv.CallID }

// EngineLost: an engine's connection is gone; what it staged is quarantined.
// Last: none of its connections is left; requests not submitted whole are
// cancelled.
type EngineLost struct {
	Engine kv.ConnID
	Last   bool
}

// EngineFenced: nobody can write any more what that connection had staged.
type EngineFenced struct {
	Engine  kv.ConnID
	Trusted bool
}

// ---- control plane. The core numbers the connections it asks for. ----

// Connected: the dial succeeded and the ZMTP handshake is through.
type Connected struct{ Conn kv.ConnID }

// Disconnected: the dial failed or the connection is gone.
type Disconnected struct {
	Conn kv.ConnID
	Text string
}

// Received: one decoded message.
type Received struct {
	Conn kv.ConnID
	Msg  msg.Message
}

// Malformed: a payload that could not be decoded.
type Malformed struct {
	Conn kv.ConnID
	Text string
}

// ---- data plane ----

// LinkUp: the link asked for by Connect is usable. LinkDown: it could not be
// made, or is gone; every write over it has been reported Lost.
type LinkUp struct{ Link LinkID }
type LinkDown struct {
	Link LinkID
	Text string
}

// Sent and Lost mirror link.SenderEvents.
type Sent struct {
	Link   LinkID
	Writes []uint64
}
type Lost struct {
	Link   LinkID
	Writes []uint64
	Text   string
}

// Summed: the checksums asked for by Sum, in the order of its Items.
type Summed struct {
	Batch uint64
	Sums  []uint32
}

// Tick: time has passed.
type Tick struct{}

// Drain: begin nothing new (Busy); what is begun goes on.
type Drain struct{}

// LinkID names one connection of a data link, numbered by the core.
type LinkID uint64

// ---- actions ----

// Action is one thing for the shell to do, in order. What it holds, slices and
// messages, is the shell's to read until the next Step.
type Action interface{ action() }

// Dial a control connection to the peer; answered by Connected or Disconnected.
// The shell bounds the time by its own connect deadline.
type Dial struct {
	Conn kv.ConnID
	Peer Peer
}

// Close a control connection after what was sent on it; answered by
// Disconnected.
type Close struct{ Conn kv.ConnID }

// Send a message on a control connection.
type Send struct {
	Conn kv.ConnID
	Msg  msg.Message
}

// Connect a data link to the receiver; answered by LinkUp or LinkDown.
type Connect struct {
	Link        LinkID
	Name        string
	Addr        string
	Incarnation kv.Incarnation // the receiver's; zero: LMCache's, Addr is its init port
}

// Disconnect closes a data link; answered by Lost for every open write and
// LinkDown.
type Disconnect struct{ Link LinkID }

// Write chunks over a link; Abort gives writes up; Settle forgets those that
// the receiver has answered for. See package link.
type Write struct {
	Link   LinkID
	Writes []WriteItem
}
type Abort struct {
	Link   LinkID
	Writes []uint64
}
type Settle struct {
	Link   LinkID
	Writes []uint64
}

// WriteItem mirrors link.Write.
type WriteItem struct {
	ID         uint64
	Src        kv.SlotID
	Dst        kv.SlotID
	Generation kv.Generation
	Bytes      int64
}

// Sum computes CRC32C of staged chunks; answered by Summed. Only with
// Config.Checksum.
type Sum struct {
	Batch uint64
	Items []SumItem
}
type SumItem struct {
	Slot  kv.SlotID
	Bytes int64
}

// Raise sets the generation word of staging slots, before they are handed out.
type Raise struct{ Slots []StagedSlot }
type StagedSlot struct {
	Slot       kv.SlotID
	Generation kv.Generation
}

// Notify pushes a message (ProxyNotif or EndingNotice) to the proxy.
type Notify struct{ Msg msg.Message }

// Wake: send a Tick at that time; replaces the one before.
type Wake struct{ At kv.Instant }

// Answer a call.
type Answer struct {
	Call   kv.CallID
	Err    *fault.Error
	Slots  []kv.SlotID // Stage
	Ending *Ending     // Cancel
}

// Granted and Ended are emitted to the engine.
type Granted struct {
	Engine kv.ConnID
	ReqID  string
	Slots  []kv.SlotID // staged with the begin, maybe none
}
type Ended struct {
	Engine kv.ConnID
	Ending Ending
}

// Ending is how a request ended.
type Ending struct {
	ReqID  string
	Ending msg.Ending
	Reason fault.Code
	Text   string
}

// Note is something an operator should see: logged and counted.
type Note struct {
	Kind   NoteKind
	Peer   string
	ReqID  string
	Ending msg.Ending
	Reason fault.Code
	Text   string
	Count  int64
	Bytes  int64
	Link   string
	Wait   kv.Duration // Granted: begin to granted; Ended: begin to ended
}

// NoteKind is what a Note tells; a contract with package metrics.
type NoteKind uint8

const (
	NoteBegun       NoteKind = iota // a request was begun
	NoteGranted                     // the receiver granted it
	NoteEnded                       // it ended
	NoteSession                     // a session was opened, resumed or lost
	NotePeerLost                    // our own verdict: lease_sec without a word
	NoteRetry                       // chunks are written again
	NoteLinkUp                      // a data link is usable
	NoteLinkDown                    // a data link is gone
	NoteQuarantined                 // staging slots went to quarantine
	NoteTrusted                     // quarantine ended by time
	NoteViolation                   // a receiver broke the protocol
)

func (EngineAttached) event() {}
func (Begin) event()          {}
func (Stage) event()          {}
func (Unstage) event()        {}
func (Submit) event()         {}
func (Cancel) event()         {}
func (Hangup) event()         {}
func (EngineLost) event()     {}
func (EngineFenced) event()   {}
func (Connected) event()      {}
func (Disconnected) event()   {}
func (Received) event()       {}
func (Malformed) event()      {}
func (LinkUp) event()         {}
func (LinkDown) event()       {}
func (Sent) event()           {}
func (Lost) event()           {}
func (Summed) event()         {}
func (Tick) event()           {}
func (Drain) event()          {}

func (Dial) action()       {}
func (Close) action()      {}
func (Send) action()       {}
func (Connect) action()    {}
func (Disconnect) action() {}
func (Write) action()      {}
func (Abort) action()      {}
func (Settle) action()     {}
func (Sum) action()        {}
func (Raise) action()      {}
func (Notify) action()     {}
func (Wake) action()       {}
func (Answer) action()     {}
func (Granted) action()    {}
func (Ended) action()      {}
func (Note) action()       {}
