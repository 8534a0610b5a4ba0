package sim

import (
	"slices"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/localapi"
	"github.com/berthkv/berth/internal/node"
)

// engine is an engine's process and its connection to its agent: what prefill
// and decode engines have in common. It is the agent's node.Local.
type engine struct {
	w     *world
	h     *host
	agent func() *node.Node
	r     stream
	role  string

	life     int // counts processes
	conn     kv.ConnID
	attached bool
	tried    [2]int // lives of the engine and the agent that were to be connected last
	lastCall kv.CallID
	calls    map[kv.CallID]func(localapi.Answer, *fault.Error)
	last     kv.Instant // what goes to the agent stays in order
	lastBack kv.Instant // and what comes back

	event func(localapi.Event)
	ready func() // attached: go on
}

func (e *engine) init(w *world, h *host, role string, agent func() *node.Node) {
	e.w, e.h, e.role, e.agent = w, h, role, agent
	e.r = stream{w.random("engine", h.name)}
	e.calls = map[kv.CallID]func(localapi.Answer, *fault.Error){}
	e.life = 1
}

// hop is how long a word between an engine and its agent takes.
const hop = 30_000

// attach connects the engine's process to its agent's.
func (e *engine) attach() {
	life, agent := e.life, e.h.life
	e.tried = [2]int{life, agent}
	e.conn++
	conn := e.conn
	e.toAgent(func() {
		if e.life != life || e.h.life != agent || e.conn != conn {
			return
		}
		e.agent().LocalEvents().Connected(conn, localapi.Cred{PID: e.life, Process: e.life})
	})
	facts := layout
	e.call(&localapi.Hello{Version: localapi.Version, Part: localapi.Scheduler, EngineID: e.h.name + e.role + "." + digits(e.life), Layout: &facts, Shape: chunkShape},
		func(_ localapi.Answer, err *fault.Error) {
			if err == nil {
				e.attached = true
				e.ready()
				return
			}
			// Another engine's connections are not known to be gone yet.
			e.w.after(e.r.take(50e6), func() {
				if e.life == life && e.h.life == agent && e.h.up && e.conn == conn && !e.attached {
					e.attach()
				}
			})
		})
}

// toAgent does something at the agent, in order.
func (e *engine) toAgent(do func()) {
	agent := e.h.life
	e.last = max(e.last+1, e.w.now.Add(e.r.take(hop)))
	e.w.at(e.last, func() { e.h.deliver(agent, do) })
}

// fromAgent does something at the engine, in order.
func (e *engine) fromAgent(do func()) {
	life := e.life
	e.lastBack = max(e.lastBack+1, e.w.now.Add(e.r.take(hop)))
	e.w.at(e.lastBack, func() {
		if e.life == life {
			do()
		}
	})
}

// call asks the agent something. then is not called when the engine dies; when
// the agent does it is given peer_lost.
func (e *engine) call(req localapi.Request, then func(localapi.Answer, *fault.Error)) {
	e.lastCall++
	call, conn := e.lastCall, e.conn
	e.calls[call] = then
	e.toAgent(func() {
		e.w.hash.add(uint64(call))
		if e.w.tracing() {
			e.w.say("%s's engine: %s", e.h.name, showRequest(req))
		}
		e.agent().LocalEvents().Request(conn, call, req)
	})
}

// agentLost ends every call: the agent's process is gone.
func (e *engine) agentLost() {
	e.attached = false
	calls := e.calls
	e.calls = map[kv.CallID]func(localapi.Answer, *fault.Error){}
	e.lastBack = e.w.now
	var ids []kv.CallID
	for id := range calls {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	for _, id := range ids {
		e.fromAgent(func() { calls[id](nil, fault.New(fault.PeerLost, "the agent is gone")) })
	}
}

// die kills the engine's process: the agent loses its connection at once, and
// hears later that the process is gone, which until then may still touch what it
// had.
func (e *engine) die(gone func()) {
	conn, pid, agent := e.conn, e.life, e.h.life
	e.life++
	e.conn++ // what is said on the old one is heard by nobody
	e.attached = false
	clear(e.calls)
	e.toAgent(func() { e.agent().LocalEvents().Disconnected(conn) })
	e.w.after(e.r.take(e.w.sc.Lease/5), func() {
		gone()
		if e.h.life == agent {
			e.h.deliver(agent, func() { e.agent().LocalEvents().ProcessGone(pid) })
		}
	})
	life := e.life
	e.w.after(e.r.take(100e6), func() {
		if e.life == life && e.h.up && e.tried != [2]int{life, e.h.life} {
			e.attach()
		}
	})
}

func (e *engine) done(call kv.CallID, a localapi.Answer, err *fault.Error) {
	then := e.calls[call]
	if then == nil {
		return // of a process that is gone
	}
	delete(e.calls, call)
	e.w.hash.add(uint64(call))
	e.fromAgent(func() { then(a, err) })
}

// Answer and the rest are called by the agent. What they are given is the
// agent's again when they return.
func (e *engine) Answer(call kv.CallID, a localapi.Answer) {
	if s, ok := a.(*localapi.Slots); ok {
		a = &localapi.Slots{Slots: slices.Clone(s.Slots)}
	}
	e.done(call, a, nil)
}

func (e *engine) Fail(call kv.CallID, err *fault.Error) {
	c := *err
	e.done(call, nil, &c)
}

func (e *engine) SendPools(call kv.CallID, a *localapi.HelloAnswer, _ []int) { e.done(call, a, nil) }

func (e *engine) Emit(conn kv.ConnID, ev localapi.Event) {
	if conn != e.conn {
		return // of a process that is gone
	}
	if g, ok := ev.(*localapi.Granted); ok {
		ev = &localapi.Granted{Req: g.Req, Slots: slices.Clone(g.Slots)}
	}
	e.fromAgent(func() {
		if e.w.tracing() {
			e.w.say("%s's engine hears: %s", e.h.name, showEvent(ev))
		}
		e.event(ev)
	})
}

// CloseConn is the end of a refused hello's connection.
func (e *engine) CloseConn(kv.ConnID) {}
