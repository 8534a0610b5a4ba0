package outbound

import (
	"slices"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
)

// engineConn is one connection of an engine.
type engineConn struct {
	id     string // engine_id
	staged int    // slots that this connection staged and nobody returned
}

func notAttached() *fault.Error {
	return fault.New(fault.HelloRequired, "no engine is attached on this connection")
}

func (c *Core) engineAttached(ev EngineAttached) {
	if c.engines[ev.Engine] == nil {
		c.engines[ev.Engine] = &engineConn{id: ev.EngineID}
	}
	if ev.TokensKey != "" {
		c.tokensKey = ev.TokensKey
	}
}

// staged counts the slots that an engine holds over all its connections.
func (c *Core) staged(engineID string) int {
	n := 0
	for _, e := range c.engines {
		if e.id == engineID {
			n += e.staged
		}
	}
	return n
}

// conn returns the connection on which to tell the engine of a request: the
// one it began on, or the oldest of that engine's.
func (c *Core) conn(r *request) (kv.ConnID, bool) {
	if c.engines[r.engine] != nil {
		return r.engine, true
	}
	found := kv.ConnID(0)
	for id, e := range c.engines {
		if e.id == r.engineID && (found == 0 || id < found) {
			found = id
		}
	}
	return found, found != 0
}

// engineLost: what the connection had staged may still be written by its
// process, so it is nobody's until that is fenced.
func (c *Core) engineLost(now kv.Instant, ev EngineLost) {
	e := c.engines[ev.Engine]
	if e == nil {
		return
	}
	c.dropWaits(func(w *stageWait) bool { return w.engine == ev.Engine }, nil)
	n := 0
	if e.staged > 0 {
		for id := range c.pool.slots {
			if s := &c.pool.slots[id]; s.state == slotStaged && s.engine == ev.Engine {
				c.pool.quarantine(kv.SlotID(id))
				n++
			}
		}
	}
	delete(c.engines, ev.Engine)
	if n > 0 {
		c.emit(Note{Kind: NoteQuarantined, Count: int64(n), Text: "the engine's connection was lost"})
	}
	if !ev.Last {
		return
	}
	for _, p := range c.sortedPeers() {
		for r := p.reqs.first; r != nil; {
			next := r.next
			if r.engineID == e.id && !r.whole() {
				c.fail(now, r, fault.Cancelled, "the engine is lost")
			}
			r = next
		}
	}
}

func (c *Core) engineFenced(ev EngineFenced) {
	n := 0
	for id := range c.pool.slots {
		if s := &c.pool.slots[id]; s.state == slotQuarantined && s.engine == ev.Engine {
			c.pool.put(kv.SlotID(id), slotQuarantined)
			n++
		}
	}
	if ev.Trusted && n > 0 {
		c.emit(Note{Kind: NoteTrusted, Count: int64(n), Text: "an engine is trusted to be gone"})
	}
}

// hangup forgets a caller; what it asked for goes on, but a stage that waits
// takes nothing.
func (c *Core) hangup(ev Hangup) {
	if r := c.callers[ev.Call]; r != nil {
		delete(c.callers, ev.Call)
		r.callers = slices.DeleteFunc(r.callers, func(call kv.CallID) bool { return call == ev.Call })
		return
	}
	c.dropWaits(func(w *stageWait) bool { return w.call == ev.Call }, nil)
}
