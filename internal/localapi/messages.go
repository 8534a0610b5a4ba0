// Package localapi is the API between an engine (or a tool) and its agent: a
// unix stream socket with length-prefixed msgpack maps, as PROTOCOL.md section
// 4 specifies it. This file has its vocabulary, codec.go the bytes, and Server
// the agent's end. It decides nothing: Server hands typed requests to a
// Handler and carries out what the handler's owner tells it.
package localapi

import (
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// Version is the version of the local API, the only one so far.
const Version = 1

// Limits of section 4.1, besides those of package wire.
const (
	MaxFrame   = 16 << 20 // bytes of a frame's map
	MaxConns   = 256      // connections of a server
	MaxCalls   = 4096     // unanswered calls of a connection
	MaxBacklog = 32 << 20 // bytes that wait for the other end to read
	MaxPools   = 2
)

// Part says what a connection is.
type Part string

const (
	Scheduler Part = "scheduler"
	Worker    Part = "worker"
	Tool      Part = "tool" // no engine_id, no memory: status, cancel, drain
)

// Names of the pools, as in HelloAnswer.Pools.
const (
	StagingPool = "staging"
	ReceivePool = "receive"
)

// Request is what an engine asks: *Hello, *Begin and so on.
type Request interface{ request() }

// Hello introduces a connection; answered by HelloAnswer.
type Hello struct {
	Version   uint64
	Part      Part
	EngineID  string // "" for a tool
	Rank      int64
	Layout    *kv.Facts // nil for a tool
	Shape     []int64   // of a full chunk
	TokensKey string    // key of the fixed token list, "" if not said
}

// Begin asks for room for a prompt; answered by Done at once, later Granted or
// Ended.
type Begin struct {
	Req         string
	TotalChunks int64
	Host        string // this rank's receiver
	AllocPort   int64
	InitPort    int64 // 0: not given
	DeadlineMS  int64 // from now to ready; 0: not given
	Stage       int64 // staging slots wanted with Granted
	BerthProxy  bool
}

// Stage asks for staging slots; answered by Slots.
type Stage struct {
	Req         string
	N           int64
	DeadlineMS  int64 // 0: not given
	NonBlocking bool
}

// Unstage gives staged slots back unused; answered by Done.
type Unstage struct {
	Req   string
	Slots []kv.SlotID
}

// Submit hands staged slots over as one batch; answered by Done at once.
type Submit struct {
	Req    string
	Chunks []Staged
	HasEnd bool
	End    int64 // the final number of chunks
}

// Staged is a chunk in a staging slot.
type Staged struct {
	Index  int64
	Key    string
	Slot   kv.SlotID
	Tokens int64
}

// Cancel ends a request; answered by Ending.
type Cancel struct {
	Req    string
	Reason fault.Code // "": fault.Cancelled
	Text   string
}

// Wait asks how a request at the receiver ends; answered by Ending.
type Wait struct {
	Req        string
	DeadlineMS int64
}

// Find asks for the request with the longest prefix of Keys; answered by Found.
type Find struct {
	By   string
	Keys []string
}

// Claim takes a ready request to be read; answered by Claimed.
type Claim struct {
	By  string
	Req string
}

// Release says that Chunks (all that are left when empty) have been read;
// answered by Done.
type Release struct {
	By     string
	Req    string
	Chunks []int64
}

// Status asks for the agent's state; answered by StatusAnswer.
type Status struct{}

// Drain asks the agent to take nothing new; answered by Done.
type Drain struct{}

// Hangup gives up an unanswered call; answered by Done. The server turns it
// into Handler.Hangup.
type Hangup struct {
	Call uint64 // id of the call
}

// Answer is the result of a request: *HelloAnswer, *Done and so on.
type Answer interface{ answer() }

// HelloAnswer describes the agent and the memory that comes along.
type HelloAnswer struct {
	Version         uint64
	Incarnation     kv.Incarnation
	SlotBytes       int64
	StagingCapacity int64 // slots
	ReceiveCapacity int64
	MaxStage        int64    // most slots of one Stage
	Pools           []string // names of the memfds, in order
}

// Done is plain success.
type Done struct{}

// Slots are staged.
type Slots struct{ Slots []kv.SlotID }

// Ending is how a request ended.
type Ending struct {
	Ending msg.Ending
	Reason fault.Code // unless ready
	Text   string
}

// Found names a request; Req is "" and Matched 0 if there is none.
type Found struct {
	Req     string
	Matched int64
}

// Claimed has the chunks by ascending index.
type Claimed struct {
	Chunks []Chunk
	Fmt    kv.Format
	DType  kv.DType
	Shape  []int64 // of a full chunk
}

// Chunk is a claimed chunk, readable in its slot until released.
type Chunk struct {
	Index  int64
	Slot   kv.SlotID
	Tokens int64
	Bytes  int64
	Key    string
}

// StatusAnswer carries the JSON of /v1/status.
type StatusAnswer struct{ Status string }

// Event is told to an engine without being asked: *Granted or *Ended.
type Event interface{ event() }

// Granted: the request has its room. Slots are staged with it, maybe none.
type Granted struct {
	Req   string
	Slots []kv.SlotID
}

// Ended: the request ended, exactly once.
type Ended struct {
	Req    string
	Ending msg.Ending
	Reason fault.Code // unless ready
	Text   string
}

func (*Hello) request()   {}
func (*Begin) request()   {}
func (*Stage) request()   {}
func (*Unstage) request() {}
func (*Submit) request()  {}
func (*Cancel) request()  {}
func (*Wait) request()    {}
func (*Find) request()    {}
func (*Claim) request()   {}
func (*Release) request() {}
func (*Status) request()  {}
func (*Drain) request()   {}
func (*Hangup) request()  {}

func (*HelloAnswer) answer()  {}
func (*Done) answer()         {}
func (*Slots) answer()        {}
func (*Ending) answer()       {}
func (*Found) answer()        {}
func (*Claimed) answer()      {}
func (*StatusAnswer) answer() {}

func (*Granted) event() {}
func (*Ended) event()   {}
