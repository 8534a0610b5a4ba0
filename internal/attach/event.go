package attach

import (
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
)

// Part says what a local connection is.
type Part string

const (
	PartScheduler Part = "scheduler"
	PartWorker    Part = "worker"
	PartTool      Part = "tool" // no engine_id, no memory: status, cancel, drain
)

// Event happens to the agent's local side.
type Event interface{ event() }

// Hello: a connection introduces itself. Of a tool only Version and Part count,
// and EngineID must be empty.
type Hello struct {
	Conn      kv.ConnID
	Call      kv.CallID
	Version   uint64
	EngineID  string
	Part      Part
	Rank      int64
	Facts     kv.Facts
	Shape     []int64 // of a full chunk
	TokensKey string  // key of the fixed token list; "" if the engine does not say
	Process   int     // numbers the process; 0: unknown PID namespace, counts as alive
}

// ConnLost: the connection is gone. One that is not known is no error.
type ConnLost struct{ Conn kv.ConnID }

// ProcessGone: that process has exited. One that is not known is no error.
type ProcessGone struct{ Process int }

// Tick: time has passed; the shell sends it at the time asked for by Wake.
type Tick struct{}

// Action is for the shell to carry out, in order.
type Action interface{ action() }

// Accept answers a Hello; WithPools says whether the memfds go along (to every
// engine, to no tool).
type Accept struct {
	Conn      kv.ConnID
	Call      kv.CallID
	WithPools bool
}

// Refuse answers a Hello with an error and closes the connection, unless Keep: it
// was a second hello, which does no harm to what was accepted.
type Refuse struct {
	Conn kv.ConnID
	Call kv.CallID
	Err  *fault.Error
	Keep bool
}

// Lost goes on to both cores: what Conn staged or claimed is quarantined. Last
// says that no connection of that engine is left. Exactly one Fenced follows.
type Lost struct {
	Conn     kv.ConnID
	EngineID string
	Last     bool
}

// Fenced goes on to both cores: nobody can touch what Conn staged or claimed
// any more, or (Trusted) is believed not to after quarantine_sec.
type Fenced struct {
	Conn    kv.ConnID
	Trusted bool
}

// Wake: send a Tick at that time; replaces the one before.
type Wake struct{ At kv.Instant }

func (Hello) event()       {}
func (ConnLost) event()    {}
func (ProcessGone) event() {}
func (Tick) event()        {}

func (Accept) action() {}
func (Refuse) action() {}
func (Lost) action()   {}
func (Fenced) action() {}
func (Wake) action()   {}
