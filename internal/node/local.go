package node

import (
	"github.com/berthkv/berth/internal/attach"
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/intake"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/localapi"
	"github.com/berthkv/berth/internal/outbound"
)

// Local is the agent's end of the local API.
type Local interface {
	Answer(call kv.CallID, a localapi.Answer)
	Fail(call kv.CallID, err *fault.Error)
	SendPools(call kv.CallID, a *localapi.HelloAnswer, fds []int)
	Emit(conn kv.ConnID, ev localapi.Event)
	CloseConn(conn kv.ConnID)
}

// LocalEvents is the node as the local API's handler.
type LocalEvents struct{ n *Node }

// LocalEvents returns the handler for the local API's server.
func (n *Node) LocalEvents() LocalEvents { return LocalEvents{n} }

// What LocalEvents put into the mailbox.
type (
	localConn struct {
		conn    kv.ConnID
		process int
	}
	localCall struct {
		conn kv.ConnID
		call kv.CallID
		req  localapi.Request
	}
	localHangup struct{ call kv.CallID }
	localGone   struct{ conn kv.ConnID }
)

func (l LocalEvents) Connected(conn kv.ConnID, cred localapi.Cred) {
	l.n.mail.put(localConn{conn, cred.Process})
}

func (l LocalEvents) Request(conn kv.ConnID, call kv.CallID, req localapi.Request) {
	l.n.mail.putCall(localCall{conn, call, req})
}

func (l LocalEvents) Hangup(call kv.CallID)       { l.n.mail.put(localHangup{call}) }
func (l LocalEvents) Disconnected(conn kv.ConnID) { l.n.mail.put(localGone{conn}) }
func (l LocalEvents) ProcessGone(process int)     { l.n.mail.put(attach.ProcessGone{Process: process}) }
func (n *Node) onLocalConn(c localConn)           { n.processes[c.conn] = c.process }
func (n *Node) onLocalGone(now kv.Instant, conn kv.ConnID) {
	delete(n.processes, conn)
	n.stepAttach(now, attach.ConnLost{Conn: conn})
}

// onHangup tells the cores that nobody waits for the call any more, and ends
// it; after an answer both are no-ops.
func (n *Node) onHangup(now kv.Instant, call kv.CallID) {
	if n.intake != nil {
		n.stepIntake(now, intake.Hangup{Call: call})
	}
	if n.outbound != nil {
		n.stepOutbound(now, outbound.Hangup{Call: call})
	}
	n.fail(call, fault.Cancelled, "the caller gave up")
}

// onCall turns a request of the local API into an event of the core that it is
// for.
func (n *Node) onCall(now kv.Instant, c localCall) {
	if h, ok := c.req.(*localapi.Hello); ok {
		n.onHello(now, c, h)
		return
	}
	part := n.attach.Part(c.conn)
	switch c.req.(type) {
	case *localapi.Status, *localapi.Cancel:
		if part == "" {
			n.fail(c.call, fault.HelloRequired, "hello is the first request")
			return
		}
	case *localapi.Drain:
		if part != attach.PartTool {
			n.fail(c.call, fault.Unsupported, "drain is for part tool; this connection is %q", part)
			return
		}
	default:
		switch part {
		case "":
			n.fail(c.call, fault.HelloRequired, "hello is the first request")
			return
		case attach.PartTool:
			n.fail(c.call, fault.Unsupported, "a tool may use status, cancel and drain only")
			return
		}
	}
	switch r := c.req.(type) {
	case *localapi.Begin, *localapi.Stage, *localapi.Unstage, *localapi.Submit:
		if n.outbound == nil {
			n.fail(c.call, fault.Unsupported, "this agent has no staging pool: its role is receiver")
			return
		}
		n.stepOutbound(now, sendEvent(c, r))
	case *localapi.Wait, *localapi.Find, *localapi.Claim, *localapi.Release:
		if n.intake == nil {
			n.fail(c.call, fault.Unsupported, "this agent has no receive pool: its role is sender")
			return
		}
		n.stepIntake(now, receiveEvent(c, r))
	case *localapi.Cancel:
		n.onCancel(now, c, r, part)
	case *localapi.Status:
		n.deps.Local.Answer(c.call, &localapi.StatusAnswer{Status: n.statusJSON(now)})
	case *localapi.Drain:
		n.deps.Local.Answer(c.call, &localapi.Done{})
		n.onDrain(now)
	default:
		n.fail(c.call, fault.UnknownMessage, "%T", r)
	}
}

func sendEvent(c localCall, r localapi.Request) outbound.Event {
	switch r := r.(type) {
	case *localapi.Begin:
		return outbound.Begin{Engine: c.conn, Call: c.call, ReqID: r.Req, Total: r.TotalChunks,
			Peer:     outbound.Peer{Host: r.Host, AllocPort: int(r.AllocPort), InitPort: int(r.InitPort)},
			Deadline: kv.FromMillis(r.DeadlineMS), Stage: r.Stage, BerthProxy: r.BerthProxy}
	case *localapi.Stage:
		return outbound.Stage{Engine: c.conn, Call: c.call, ReqID: r.Req, N: r.N, Deadline: kv.FromMillis(r.DeadlineMS), NonBlocking: r.NonBlocking}
	case *localapi.Unstage:
		return outbound.Unstage{Engine: c.conn, Call: c.call, ReqID: r.Req, Slots: r.Slots}
	case *localapi.Submit:
		chunks := make([]outbound.Chunk, len(r.Chunks))
		for i, s := range r.Chunks {
			chunks[i] = outbound.Chunk{Index: s.Index, Key: s.Key, Slot: s.Slot, Tokens: s.Tokens}
		}
		return outbound.Submit{Engine: c.conn, Call: c.call, ReqID: r.Req, Chunks: chunks, HasEnd: r.HasEnd, End: r.End}
	}
	return nil
}

func receiveEvent(c localCall, r localapi.Request) intake.Event {
	switch r := r.(type) {
	case *localapi.Wait:
		return intake.Wait{Engine: c.conn, Call: c.call, ReqID: r.Req, Deadline: kv.FromMillis(r.DeadlineMS)}
	case *localapi.Find:
		return intake.Find{Engine: c.conn, Call: c.call, By: r.By, Keys: r.Keys}
	case *localapi.Claim:
		return intake.Claim{Engine: c.conn, Call: c.call, By: r.By, ReqID: r.Req}
	case *localapi.Release:
		return intake.Release{Engine: c.conn, Call: c.call, By: r.By, ReqID: r.Req, Chunks: r.Chunks}
	}
	return nil
}

// onCancel: an engine cancels what it sends, a tool both sides' requests of
// that name. With one pool there is one side.
func (n *Node) onCancel(now kv.Instant, c localCall, r *localapi.Cancel, part attach.Part) {
	reason := r.Reason
	if reason == "" {
		reason = fault.Cancelled
	}
	call := c.call
	if n.outbound != nil {
		n.stepOutbound(now, outbound.Cancel{Engine: c.conn, Call: call, ReqID: r.Req, Reason: reason, Text: r.Text})
		if part != attach.PartTool {
			return
		}
		call = 0 // answered once
	}
	if n.intake != nil {
		n.stepIntake(now, intake.CancelByName{Engine: c.conn, Call: call, ReqID: r.Req, Reason: reason, Text: r.Text})
	}
}

func (n *Node) onHello(now kv.Instant, c localCall, h *localapi.Hello) {
	ev := attach.Hello{Conn: c.conn, Call: c.call, Version: h.Version, EngineID: h.EngineID, Part: attach.Part(h.Part), Rank: h.Rank,
		Shape: h.Shape, TokensKey: h.TokensKey, Process: n.processes[c.conn]}
	if h.Layout != nil {
		ev.Facts = *h.Layout
	}
	n.stepAttach(now, ev)
}

// onAccept answers a hello with what the agent is, and its memory; the cores
// hear of an engine first, so that its next call finds it known.
func (n *Node) onAccept(now kv.Instant, a attach.Accept) {
	h := n.hellos[a.Conn]
	delete(n.hellos, a.Conn)
	ans := &localapi.HelloAnswer{Version: localapi.Version, Incarnation: n.cfg.Incarnation, SlotBytes: n.cores.Attach.Facts.SlotBytes}
	if n.outbound != nil {
		ans.StagingCapacity, ans.MaxStage = int64(n.cores.Outbound.Staging), int64(n.cores.Outbound.MaxStage)
	}
	if n.intake != nil {
		ans.ReceiveCapacity = int64(n.cores.Intake.Capacity)
	}
	if h.Part == attach.PartTool {
		n.deps.Local.Answer(a.Call, ans)
		return
	}
	if n.intake != nil {
		n.stepIntake(now, intake.EngineAttached{Engine: a.Conn, EngineID: h.EngineID, TokensKey: h.TokensKey})
	}
	if n.outbound != nil {
		n.stepOutbound(now, outbound.EngineAttached{Engine: a.Conn, EngineID: h.EngineID, TokensKey: h.TokensKey})
	}
	n.log.Info("engine attached", "engine", h.EngineID, "part", h.Part)
	if !a.WithPools {
		n.deps.Local.Answer(a.Call, ans)
		return
	}
	ans.Pools = n.deps.PoolNames
	n.deps.Local.SendPools(a.Call, ans, n.deps.Pools)
}

func (n *Node) answerIntake(a intake.Answer) {
	switch {
	case a.Call == 0:
	case a.Err != nil:
		n.deps.Local.Fail(a.Call, a.Err)
	case a.Ending != nil:
		n.deps.Local.Answer(a.Call, &localapi.Ending{Ending: a.Ending.Ending, Reason: a.Ending.Reason, Text: a.Ending.Text})
	case a.Found != nil:
		n.deps.Local.Answer(a.Call, &localapi.Found{Req: a.Found.ReqID, Matched: a.Found.Matched})
	case a.Claim != nil:
		c := &localapi.Claimed{Chunks: make([]localapi.Chunk, len(a.Claim.Chunks)), Fmt: a.Claim.Fmt, DType: a.Claim.DType, Shape: a.Claim.Shape}
		for i, ch := range a.Claim.Chunks {
			c.Chunks[i] = localapi.Chunk{Index: ch.Index, Slot: ch.Slot, Tokens: ch.Tokens, Bytes: ch.Bytes, Key: ch.Key}
		}
		n.deps.Local.Answer(a.Call, c)
	default:
		n.deps.Local.Answer(a.Call, &localapi.Done{})
	}
}

func (n *Node) answerOutbound(a outbound.Answer) {
	switch {
	case a.Call == 0:
	case a.Err != nil:
		n.deps.Local.Fail(a.Call, a.Err)
	case a.Ending != nil:
		n.deps.Local.Answer(a.Call, &localapi.Ending{Ending: a.Ending.Ending, Reason: a.Ending.Reason, Text: a.Ending.Text})
	case a.Slots != nil:
		n.deps.Local.Answer(a.Call, &localapi.Slots{Slots: a.Slots})
	default:
		n.deps.Local.Answer(a.Call, &localapi.Done{})
	}
}

func (n *Node) emitGranted(a outbound.Granted) {
	n.deps.Local.Emit(a.Engine, &localapi.Granted{Req: a.ReqID, Slots: a.Slots})
}

func (n *Node) emitEnded(a outbound.Ended) {
	n.deps.Local.Emit(a.Engine, &localapi.Ended{Req: a.Ending.ReqID, Ending: a.Ending.Ending, Reason: a.Ending.Reason, Text: a.Ending.Text})
}
