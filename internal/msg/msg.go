// Package msg holds the control messages as plain values, in both dialects.
// Cores step on them and answer with them; package wire turns them into bytes
// and back. PROTOCOL.md has the tables. Nothing here is checked: a decoded
// message has the right types and lengths within the limits, no more.
package msg

import (
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
)

// Message is one control message.
type Message interface{ message() }

// ---- LMCache dialect: the fields and their order are LMCache's ----

// AllocRequest asks for slots for the chunks named by Keys. Integers above
// 2^63-1 on the wire saturate; no limit of ours admits such a number.
type AllocRequest struct {
	Keys          []string
	Fmt           kv.Format
	Shape         []int64 // of every chunk; the last key's token dimension is LastChunkToks
	DType         kv.DType
	LastChunkToks int64
	ReqID         string
	IsLastBatch   bool
	TotalChunks   int64
}

// AllocResponse answers AllocRequest and CancelNotif. RemoteIndexes has one
// entry for each key not named in AlreadySent (positions in Keys), in key
// order; -1 refuses.
type AllocResponse struct {
	RemoteIndexes []int64
	AlreadySent   []int64
}

// ProxyNotif tells a proxy that a rank's KV is there.
type ProxyNotif struct{ ReqID string }

// CancelNotif ends a request; answered by an empty AllocResponse.
type CancelNotif struct {
	ReqID string
	Keys  []string
}

// ---- Berth dialect ----
// A request carries Seq (from 1) and a reply Re, never both.

// Role says what a peer that says Hello is.
type Role string

const (
	RoleSender Role = "sender"
	RoleProxy  Role = "proxy"
	RoleTool   Role = "tool"
)

// Version is the protocol version this build speaks, the only one so far.
const Version = 1

// Hello opens a session on a connection.
type Hello struct {
	Seq         uint64
	Min, Max    uint64 // protocol versions
	Role        Role
	Node        string // for logs and status
	Incarnation kv.Incarnation
	Secret      kv.Secret
	Resume      bool
	Session     uint64    // with Resume: the seq of the Hello that opened the session to go on
	Facts       *kv.Facts // senders only
}

// HelloReply accepts a Hello.
type HelloReply struct {
	Re          uint64
	Version     uint64
	Incarnation kv.Incarnation // the receiver's
	Resumed     bool
	Capacity    int64 // slots of the receive pool
	LeaseMS     int64
	Links       []LinkOffer // in the receiver's order
}

// LinkOffer is a data link that a receiver offers, with its address: host:port
// for tcp, a unix path for shm.
type LinkOffer struct {
	Name string
	Addr string
}

// Begin asks for a request to be admitted.
type Begin struct {
	Seq         uint64
	Begin       uint64 // numbered per receiver by the sender, from 1
	ReqID       string
	Link        string
	TotalChunks int64
	DeadlineMS  int64  // relative, 0: none given
	TokensKey   string // key of the fixed token list; "" if not known
}

// Granted admits: all slots of the request, under one generation. Slot i is
// for chunk i.
type Granted struct {
	Re         uint64
	Begin      uint64
	Generation kv.Generation
	Slots      []kv.SlotID
}

// Commit names chunks whose bytes were, or are being, moved.
type Commit struct {
	Seq    uint64
	Begin  uint64
	Chunks []Chunk
	Fmt    kv.Format
	DType  kv.DType
	Shape  []int64 // of a full chunk
	HasEnd bool
	End    int64 // the final number of chunks
}

// Chunk is one chunk of a Commit.
type Chunk struct {
	Index       int64
	Key         string
	Tokens      int64
	HasChecksum bool
	Checksum    uint32  // CRC32C of the chunk's bytes
	Src         *Source // shm: where the receiver copies it from
}

// Source is a staging slot under the generation in which it holds the chunk.
type Source struct {
	Slot       kv.SlotID
	Generation kv.Generation
}

// CommitReply says that the Commit's chunks are committed; Complete that the
// request is ready.
type CommitReply struct {
	Re       uint64
	Begin    uint64
	Complete bool
}

// Cancel ends a request: by Begin from its sender, by ReqID (all of that name)
// from a proxy or tool.
type Cancel struct {
	Seq    uint64
	Begin  uint64     // 0 when by name
	ReqID  string     // "" when by Begin
	Reason fault.Code // fault.Cancelled, or why it failed
	Text   string
}

// Ending is how a request ended.
type Ending string

const (
	EndReady     Ending = "ready"
	EndFailed    Ending = "failed"
	EndCancelled Ending = "cancelled"
)

// Ended tells an ending. As a reply (Re) it answers Cancel, Watch or Ready; as
// a request (Seq) it goes from receiver to sender and is answered by Drained.
type Ended struct {
	Seq    uint64
	Re     uint64
	Begin  uint64
	ReqID  string
	Ending Ending
	Reason fault.Code // unless ready
	Text   string
}

// Drained answers Ended: none of the sender's writes for it is in flight.
type Drained struct {
	Re    uint64
	Begin uint64
}

// Watch asks a receiver to tell how a request of that name ends.
type Watch struct {
	Seq        uint64
	ReqID      string
	DeadlineMS int64
}

// Ready says that ProxyNotif for a legacy request is in from all ranks.
type Ready struct {
	Seq   uint64
	ReqID string
}

// Heartbeat renews a lease.
type Heartbeat struct{ Seq uint64 }

// HeartbeatReply answers Heartbeat.
type HeartbeatReply struct{ Re uint64 }

// Error answers any request that cannot be served.
type Error struct {
	Re      uint64
	Code    fault.Code
	Text    string
	RetryMS int64 // with busy
}

// EndingNotice goes from a sender to a Berth proxy's notify port, for failures
// that no receiver can know. Its wire name is "Ending".
type EndingNotice struct {
	ReqID  string
	Rank   int64
	Ending Ending
	Reason fault.Code
	Text   string
}

func (*AllocRequest) message()   {}
func (*AllocResponse) message()  {}
func (*ProxyNotif) message()     {}
func (*CancelNotif) message()    {}
func (*Hello) message()          {}
func (*HelloReply) message()     {}
func (*Begin) message()          {}
func (*Granted) message()        {}
func (*Commit) message()         {}
func (*CommitReply) message()    {}
func (*Cancel) message()         {}
func (*Ended) message()          {}
func (*Drained) message()        {}
func (*Watch) message()          {}
func (*Ready) message()          {}
func (*Heartbeat) message()      {}
func (*HeartbeatReply) message() {}
func (*Error) message()          {}
func (*EndingNotice) message()   {}
