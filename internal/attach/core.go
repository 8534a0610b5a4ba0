// Package attach decides which engine holds the agent: who may connect, and when
// what a lost connection staged or claimed is out of everybody's reach. It is
// pure: Step(now, event) → actions.
//
// An engine is named by its engine_id and lives while it has a connection. While
// it lives, another engine_id is refused; without one a new one is accepted at
// once, because what the old one's processes may still touch is quarantined slot
// by slot.
//
//	          Hello               ConnLost                  its processes gone,
//	(unknown) ─────► connected ─────────────► lost, unfenced ─────► (forgotten)
//	                                                         or quarantine_sec
//
// A connection that is lost is fenced when every process that got the pools under
// its engine_id before the loss has exited: a process that comes later knows
// nothing of what was handed out. One that is not known counts as alive, so
// that only quarantine_sec ends its fences.
package attach

import (
	"fmt"
	"slices"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
)

// Versions of the local API that this agent speaks.
const (
	MinVersion = 1
	MaxVersion = 1
)

// Limits; a Hello above one of them is refused with busy.
const (
	MaxConns       = 256  // connections, tools' included
	MaxEngineConns = 128  // connections of one engine
	MaxFences      = 4096 // lost connections that are not fenced yet
	MaxProcesses   = 1024 // processes that got the pools and have not exited
)

// Retry is what a Hello that is refused with busy is told to wait.
const Retry = kv.Second

// Config is what the agent is. All fields must be set.
type Config struct {
	Facts      kv.Facts
	Shape      []int64 // of a full chunk
	Rank       int64
	Quarantine kv.Duration // quarantine_sec
}

// Core is the state. Check verifies these invariants:
//
//  1. At most one engine has connections; each connection is known once, within
//     the limits, and names an engine that is known, or is a tool's.
//  2. Every engine that is known has a connection, an unfenced one, or a process.
//  3. Fences are in order of their end, and each waits for a process.
//  4. Processes of an engine are in order of their arrival and known once.
type Core struct {
	cfg     Config
	arrived uint64 // processes and losses so far: the order between them
	conns   []conn
	engines []*engine
	fences  []fence
	wake    kv.Instant
	actions []Action
}

// conn is an accepted connection.
type conn struct {
	id     kv.ConnID
	part   Part
	engine *engine // nil: a tool
}

// engine is an engine_id and what must be remembered of it.
type engine struct {
	id        string
	tokensKey string
	conns     int
	fences    int
	processes []process // by arrival
	unseen    uint64    // arrival of its first process that is unknown, 0: none
}

// process got the pools under its engine's id and has not exited.
type process struct {
	number  int
	arrival uint64
}

// fence is a lost connection that is not fenced yet.
type fence struct {
	conn    kv.ConnID
	engine  *engine
	arrival uint64 // of the loss: processes that came later do not count
	until   kv.Instant
}

// New returns a core to which nothing is connected.
func New(cfg Config, _ kv.Instant) *Core {
	return &Core{cfg: cfg, wake: kv.Never}
}

// Step takes one event and returns what to do, in order. The slice is the
// caller's until the next Step. Time must not go back.
func (c *Core) Step(now kv.Instant, ev Event) []Action {
	c.actions = c.actions[:0]
	switch ev := ev.(type) {
	case Hello:
		c.hello(ev)
	case ConnLost:
		c.lost(now, ev.Conn)
	case ProcessGone:
		c.gone(ev.Process)
	case Tick:
	}
	c.fence(now)
	c.forget()
	next := kv.Never
	if len(c.fences) > 0 {
		next = c.fences[0].until
	}
	if next != c.wake {
		c.wake = next
		c.actions = append(c.actions, Wake{At: next})
	}
	return c.actions
}

// Holder returns the engine_id that holds the agent, "" if none does.
func (c *Core) Holder() string {
	if e := c.holder(); e != nil {
		return e.id
	}
	return ""
}

// Part returns what an accepted connection is, "" for any other.
func (c *Core) Part(id kv.ConnID) Part {
	if i := c.find(id); i >= 0 {
		return c.conns[i].part
	}
	return ""
}

func (c *Core) holder() *engine {
	for _, e := range c.engines {
		if e.conns > 0 {
			return e
		}
	}
	return nil
}

func (c *Core) find(id kv.ConnID) int {
	return slices.IndexFunc(c.conns, func(x conn) bool { return x.id == id })
}

func (c *Core) hello(h Hello) {
	if i := c.find(h.Conn); i >= 0 {
		err := fault.New(fault.BadRequest, "a second hello on a connection of part %s", c.conns[i].part)
		c.actions = append(c.actions, Refuse{Conn: h.Conn, Call: h.Call, Err: err, Keep: true})
		return
	}
	if err := c.judge(h); err != nil {
		if err.Code == fault.Busy {
			err.Retry = Retry
		}
		c.actions = append(c.actions, Refuse{Conn: h.Conn, Call: h.Call, Err: err})
		return
	}
	if h.Part == PartTool {
		c.conns = append(c.conns, conn{id: h.Conn, part: h.Part})
		c.actions = append(c.actions, Accept{Conn: h.Conn, Call: h.Call})
		return
	}
	e := c.engine(h.EngineID)
	if e == nil {
		e = &engine{id: h.EngineID}
		c.engines = append(c.engines, e)
	}
	if e.conns == 0 || e.tokensKey == "" {
		e.tokensKey = h.TokensKey
	}
	e.conns++
	c.conns = append(c.conns, conn{id: h.Conn, part: h.Part, engine: e})
	c.arrived++
	switch {
	case h.Process == 0 && e.unseen == 0:
		e.unseen = c.arrived
	case h.Process != 0 && !e.has(h.Process):
		e.processes = append(e.processes, process{number: h.Process, arrival: c.arrived})
	}
	c.actions = append(c.actions, Accept{Conn: h.Conn, Call: h.Call, WithPools: true})
}

func (c *Core) engine(id string) *engine {
	for _, e := range c.engines {
		if e.id == id {
			return e
		}
	}
	return nil
}

func (e *engine) has(number int) bool {
	return slices.ContainsFunc(e.processes, func(p process) bool { return p.number == number })
}

func (c *Core) lost(now kv.Instant, id kv.ConnID) {
	i := c.find(id)
	if i < 0 {
		return
	}
	e := c.conns[i].engine
	c.conns = slices.Delete(c.conns, i, i+1)
	if e == nil {
		return
	}
	e.conns--
	e.fences++
	c.arrived++
	c.fences = append(c.fences, fence{conn: id, engine: e, arrival: c.arrived, until: now.Add(c.cfg.Quarantine)})
	c.actions = append(c.actions, Lost{Conn: id, EngineID: e.id, Last: e.conns == 0})
}

func (c *Core) gone(number int) {
	for _, e := range c.engines {
		e.processes = slices.DeleteFunc(e.processes, func(p process) bool { return p.number == number })
	}
}

// fence reports the lost connections that are fenced now. Proof goes before
// trust when both come at once.
func (c *Core) fence(now kv.Instant) {
	c.fences = slices.DeleteFunc(c.fences, func(f fence) bool {
		waits := f.waits()
		if waits && now < f.until {
			return false
		}
		f.engine.fences--
		c.actions = append(c.actions, Fenced{Conn: f.conn, Trusted: waits})
		return true
	})
}

// waits reports whether a process is left that can touch what the connection was
// given. The one that came first tells.
func (f *fence) waits() bool {
	p := f.engine.processes
	return f.unseen() || len(p) > 0 && p[0].arrival < f.arrival
}

// unseen reports whether one of them is unknown.
func (f *fence) unseen() bool {
	return f.engine.unseen != 0 && f.engine.unseen < f.arrival
}

// forget drops what has no further use. A process that is unknown is forgotten with
// the last connection and fence of its engine: by then quarantine_sec has passed
// since its own was lost.
func (c *Core) forget() {
	c.engines = slices.DeleteFunc(c.engines, func(e *engine) bool {
		if e.conns > 0 || e.fences > 0 {
			return false
		}
		e.unseen = 0
		return len(e.processes) == 0
	})
}

// judge returns why a Hello is refused, nil if it is not.
func (c *Core) judge(h Hello) *fault.Error {
	if h.Version < MinVersion || h.Version > MaxVersion {
		return fault.New(fault.Unsupported, "version is %d to %d at the engine, %d to %d at the agent", h.Version, h.Version, MinVersion, MaxVersion)
	}
	if len(c.conns) >= MaxConns {
		return fault.New(fault.Busy, "%d connections, at most %d", len(c.conns), MaxConns)
	}
	switch h.Part {
	case PartTool:
		if h.EngineID != "" {
			return fault.New(fault.BadRequest, "engine_id is %.64q; part tool has none", h.EngineID)
		}
		return nil
	case PartScheduler, PartWorker:
	default:
		return fault.New(fault.BadRequest, "part is %.64q; it must be %s, %s or %s", string(h.Part), PartScheduler, PartWorker, PartTool)
	}
	switch n := len(h.EngineID); {
	case n == 0:
		return fault.New(fault.BadRequest, "engine_id is missing; part %s needs one", h.Part)
	case n > kv.MaxEngineID:
		return fault.New(fault.BadRequest, "engine_id has %d bytes, at most %d", n, kv.MaxEngineID)
	case len(h.TokensKey) > kv.MaxKey:
		return fault.New(fault.BadRequest, "tokens_key has %d bytes, at most %d", len(h.TokensKey), kv.MaxKey)
	case h.Process < 0:
		return fault.New(fault.BadRequest, "process is %d", h.Process)
	}
	if err := c.judgeLayout(h); err != nil {
		return err
	}
	return c.judgeEngine(h)
}

// judgeLayout compares what the engine is with what the agent is.
func (c *Core) judgeLayout(h Hello) *fault.Error {
	differs := func(name string, agent, engine any) *fault.Error {
		return fault.New(fault.LayoutMismatch, "%s is %.64s at the agent, %.64s at the engine", name, fmt.Sprint(agent), fmt.Sprint(engine))
	}
	if h.Rank != c.cfg.Rank {
		return differs("rank", c.cfg.Rank, h.Rank)
	}
	if name, agent, engine := c.cfg.Facts.Differs(h.Facts); name != "" {
		return differs(name, agent, engine)
	}
	if len(h.Shape) > kv.MaxDims {
		return fault.New(fault.LayoutMismatch, "shape has %d dimensions at the engine, %d at the agent", len(h.Shape), len(c.cfg.Shape))
	}
	if !slices.Equal(h.Shape, c.cfg.Shape) {
		return differs("shape", c.cfg.Shape, h.Shape)
	}
	return nil
}

// judgeEngine compares the engine with the one that holds the agent.
func (c *Core) judgeEngine(h Hello) *fault.Error {
	if e := c.holder(); e != nil {
		switch {
		case e.id != h.EngineID:
			return fault.New(fault.Busy, "engine_id %q holds this agent, %q must wait until it has no connection", e.id, h.EngineID)
		case e.tokensKey != "" && h.TokensKey != "" && e.tokensKey != h.TokensKey:
			return fault.New(fault.LayoutMismatch, "tokens_key is %.64q at one connection of engine_id %q, %.64q at another", e.tokensKey, e.id, h.TokensKey)
		case e.conns >= MaxEngineConns:
			return fault.New(fault.Busy, "%d connections of engine_id %q, at most %d", e.conns, e.id, MaxEngineConns)
		}
	}
	if len(c.fences) >= MaxFences {
		return fault.New(fault.Busy, "%d lost connections are not fenced yet, at most %d", len(c.fences), MaxFences)
	}
	processes := 0
	for _, e := range c.engines {
		processes += len(e.processes)
		if e.id == h.EngineID && e.has(h.Process) {
			return nil
		}
	}
	if h.Process != 0 && processes >= MaxProcesses {
		return fault.New(fault.Busy, "%d processes that got the pools have not exited, at most %d", processes, MaxProcesses)
	}
	return nil
}
