package intake

import (
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// Event is one thing that happened to the receiver. The shell decodes it and
// steps the core with it; it decides nothing.
type Event interface{ event() }

// ---- control plane ----

// Connected: a control connection finished its handshake.
type Connected struct {
	Conn     kv.ConnID
	Identity string // ZeroMQ identity: the owner of a legacy sender's requests
	Remote   string // for logs and status
}

// Disconnected: the connection is gone.
type Disconnected struct{ Conn kv.ConnID }

// Received: one decoded message.
type Received struct {
	Conn kv.ConnID
	Msg  msg.Message
}

// Malformed: a payload that could not be decoded, or is of a type that is not
// known. It must be answered all the same.
type Malformed struct {
	Conn    kv.ConnID
	Seq     uint64 // 0: it has none, or none could be read: LMCache's dialect
	Unknown bool   // well formed, of an unknown type
	Keys    int    // of a malformed LMCache message, when they could be read
	Text    string
}

// Handshaken: an LMCache sender made its data handshake on the init port.
type Handshaken struct{ LocalID string }

// ---- data plane ----

// Landed: the bytes of a chunk are in its slot and visible.
type Landed struct {
	Slot       kv.SlotID
	Generation kv.Generation
	Bytes      int64
	HasSum     bool
	Sum        uint32
}

// Failed: the transfer under way into a slot failed at this end. The code says
// whose doing it is: link.ReceiverEvents.
type Failed struct {
	Slot       kv.SlotID
	Generation kv.Generation
	Err        *fault.Error
}

// Fenced: nobody writes these slots under that generation any more.
type Fenced struct {
	Generation kv.Generation
	Slots      []kv.SlotID
}

// LinkLost: the owner's data path over that link is gone.
type LinkLost struct {
	Owner kv.Incarnation
	Link  string
	Text  string
}

// PeerGone: the process of that owner is known to be gone (same host).
type PeerGone struct{ Owner kv.Incarnation }

// ---- the engine; its connections are admitted by package attach ----

// EngineAttached: a connection of that engine was accepted. What is claimed
// belongs to the engine_id; any of its connections may release it.
type EngineAttached struct {
	Engine    kv.ConnID
	EngineID  string
	TokensKey string // key of the fixed token list by its hash; "": not said
}

// Wait: answer with the ending of that name.
type Wait struct {
	Engine   kv.ConnID
	Call     kv.CallID
	ReqID    string
	Deadline kv.Duration
}

// Find: answer with the unclaimed request that holds the longest prefix of Keys.
type Find struct {
	Engine kv.ConnID
	Call   kv.CallID
	By     string
	Keys   []string
}

// Claim: take a ready request to be read.
type Claim struct {
	Engine kv.ConnID
	Call   kv.CallID
	By     string
	ReqID  string
}

// Release: Chunks (all when nil) have been read.
type Release struct {
	Engine kv.ConnID
	Call   kv.CallID
	By     string
	ReqID  string
	Chunks []int64
}

// CancelByName: an operator's or an engine's cancel of every request of that name.
type CancelByName struct {
	Engine kv.ConnID
	Call   kv.CallID
	ReqID  string
	Reason fault.Code
	Text   string
}

// Hangup: the caller of Call no longer waits (its connection is gone or it gave up).
type Hangup struct{ Call kv.CallID }

// EngineLost: an engine's connection is gone; what it claimed is quarantined.
type EngineLost struct{ Engine kv.ConnID }

// EngineFenced: the processes that could read through that lost connection are
// gone, or are trusted to be after quarantine_sec (Trusted).
type EngineFenced struct {
	Engine  kv.ConnID
	Trusted bool
}

// ---- the rest ----

// Drain: admit nothing new. What waits, and every Begin and first batch from now
// on, gets busy (-1); what is admitted goes on. Status says what is left.
type Drain struct{}

// Tick: time has passed. The shell sends it at the time asked for by Wake.
type Tick struct{}

// ---- actions ----

// Action is one thing for the shell to do. Actions of a Step are carried out in
// order; the slice and what it holds are the caller's until the next Step.
type Action interface{ action() }

// Send a message on a connection. A connection that is gone is no error.
type Send struct {
	Conn kv.ConnID
	Msg  msg.Message
}

// Close a connection after what was sent on it.
type Close struct{ Conn kv.ConnID }

// Wake: send a Tick at that time; replaces the wake-up before it.
type Wake struct{ At kv.Instant }

// Allow an owner's data connections; Disallow closes them.
type Allow struct {
	Owner  kv.Incarnation
	Secret kv.Secret
}
type Disallow struct{ Owner kv.Incarnation }

// Open slots for writing. Precedes the Granted that names them.
type Open struct {
	Owner      kv.Incarnation
	Link       string
	Generation kv.Generation
	Slots      []kv.SlotID
}

// Pull chunks out of the owner's staging pool (link in mode Pull).
type Pull struct {
	Owner      kv.Incarnation
	Link       string
	Generation kv.Generation
	Items      []PullItem
}

// PullItem mirrors link.PullItem.
type PullItem struct {
	Slot   kv.SlotID
	Src    kv.SlotID
	SrcGen kv.Generation
	Bytes  int64
}

// Revoke slots that were opened. Answered by Fenced where the fence is exact.
type Revoke struct {
	Link       string
	Generation kv.Generation
	Slots      []kv.SlotID
}

// Answer a call. Exactly one of the results is set with a nil Err; all nil is
// plain success (Release).
type Answer struct {
	Call   kv.CallID
	Err    *fault.Error
	Ending *Ending     // Wait, CancelByName
	Found  *Found      // Find
	Claim  *ClaimReply // Claim
}

// Ending is how a request ended.
type Ending struct {
	ReqID  string
	Ending msg.Ending
	Reason fault.Code
	Text   string
}

// Found is the answer to Find; ReqID "" means none.
type Found struct {
	ReqID   string
	Matched int64
}

// ClaimReply names what was claimed, in chunk order.
type ClaimReply struct {
	Chunks []ClaimedChunk
	Fmt    kv.Format
	DType  kv.DType
	Shape  []int64 // of a full chunk
}

// ClaimedChunk is one chunk, readable in its slot until released.
type ClaimedChunk struct {
	Index  int64
	Key    string
	Slot   kv.SlotID
	Tokens int64
	Bytes  int64
}

// Note is something an operator should see: the shell logs and counts it. It
// has no effect on the protocol.
type Note struct {
	Kind     NoteKind
	Owner    string
	ReqID    string
	Ending   msg.Ending
	Reason   fault.Code
	Text     string
	Count    int64       // chunks or slots concerned
	Wait     kv.Duration // Admitted: time waited; Ended: time from first arrival
	Bytes    int64       // Ended ready: bytes committed
	Transfer kv.Duration // Ended ready: time from admission to ready
	Link     string
}

// NoteKind is what a Note tells. The list is a contract with package metrics.
type NoteKind uint8

const (
	NoteWaiting       NoteKind = iota // a request waits for admission
	NoteAdmitted                      // a request was admitted
	NoteRefused                       // a request was refused at its first message
	NoteEnded                         // a request ended
	NoteReleased                      // a ready request's last slot was given back
	NoteUnclaimed                     // unclaimed_ttl ran out
	NoteLeaseExpired                  // a peer's lease ran out
	NoteSession                       // a session began, resumed or was superseded
	NotePeerRefused                   // a Hello was refused
	NoteQuarantined                   // slots went to quarantine
	NoteTrusted                       // quarantine ended by time, not by proof
	NoteViolation                     // a peer broke the protocol
	NoteChecksum                      // a chunk's checksum differed
	NoteEndingEvicted                 // an ending was forgotten for lack of room
)

func (Connected) event()      {}
func (Disconnected) event()   {}
func (Received) event()       {}
func (Malformed) event()      {}
func (Handshaken) event()     {}
func (Landed) event()         {}
func (Failed) event()         {}
func (Fenced) event()         {}
func (LinkLost) event()       {}
func (PeerGone) event()       {}
func (EngineAttached) event() {}
func (Wait) event()           {}
func (Find) event()           {}
func (Claim) event()          {}
func (Release) event()        {}
func (CancelByName) event()   {}
func (Hangup) event()         {}
func (EngineLost) event()     {}
func (EngineFenced) event()   {}
func (Drain) event()          {}
func (Tick) event()           {}

func (Send) action()     {}
func (Close) action()    {}
func (Wake) action()     {}
func (Allow) action()    {}
func (Disallow) action() {}
func (Open) action()     {}
func (Pull) action()     {}
func (Revoke) action()   {}
func (Answer) action()   {}
func (Note) action()     {}
