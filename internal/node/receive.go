package node

import (
	"errors"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/intake"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/wire"
)

// Router is the receiver's control port. Send copies the payload, never
// blocks, and errs when the connection is gone or its queue is full.
type Router interface {
	Send(conn kv.ConnID, payload []byte) error
	CloseConn(conn kv.ConnID)
}

// RouterEvents are called by the control port, in order for each connection.
type RouterEvents struct{ n *Node }

// RouterEvents returns the sink for the control port's events.
func (n *Node) RouterEvents() RouterEvents { return RouterEvents{n} }

// Connected: a peer's handshake is through.
func (r RouterEvents) Connected(conn kv.ConnID, identity, remote string) {
	r.n.mail.put(intake.Connected{Conn: conn, Identity: identity, Remote: remote})
}

// Message: one payload, decoded here, in the connection's own goroutine.
func (r RouterEvents) Message(conn kv.ConnID, payload []byte) {
	r.n.stats.received(len(payload))
	m, err := wire.Decode(payload)
	if err != nil {
		r.n.mail.putFrom(conn, len(payload), malformed(conn, err))
		return
	}
	r.n.mail.putFrom(conn, len(payload), intake.Received{Conn: conn, Msg: m})
}

// Disconnected: the connection is gone.
func (r RouterEvents) Disconnected(conn kv.ConnID) {
	r.n.mail.put(intake.Disconnected{Conn: conn})
}

func malformed(conn kv.ConnID, err error) intake.Malformed {
	ev := intake.Malformed{Conn: conn, Text: err.Error()}
	var e *wire.Error
	if errors.As(err, &e) {
		ev.Seq, ev.Unknown, ev.Keys = e.Seq, e.Kind == wire.UnknownType, e.Keys
	}
	return ev
}

// Handshaken: an LMCache sender is known to the data plane.
func (n *Node) Handshaken(localID string) { n.mail.put(intake.Handshaken{LocalID: localID}) }

// ReceiverEvents returns the callbacks for the receiving half of a link.
func (n *Node) ReceiverEvents(name string) link.ReceiverEvents {
	return link.ReceiverEvents{
		Landed: func(ls []link.Landing) { n.mail.postCall(landed(ls)) },
		Failed: func(slot kv.SlotID, gen kv.Generation, err *fault.Error) {
			n.mail.post(intake.Failed{Slot: slot, Generation: gen, Err: err})
		},
		Fenced: func(gen kv.Generation, slots []kv.SlotID) {
			n.mail.post(intake.Fenced{Generation: gen, Slots: slots})
		},
		Lost: func(owner kv.Incarnation, err error) {
			n.mail.post(intake.LinkLost{Owner: owner, Link: name, Text: err.Error()})
		},
		Late: func(slot kv.SlotID, gen kv.Generation) { n.stats.late(name) },
	}
}

// landed is what a link reports at once.
type landed []link.Landing

func (n *Node) onLanded(now kv.Instant, ls landed) {
	for _, l := range ls {
		n.stepIntake(now, intake.Landed{Slot: l.Slot, Generation: l.Generation, Bytes: l.Bytes, HasSum: l.HasSum, Sum: l.Sum})
	}
}

// stepIntake steps the receiver's core and carries out its actions.
func (n *Node) stepIntake(now kv.Instant, ev intake.Event) {
	for _, a := range n.intake.Step(now, ev) {
		switch a := a.(type) {
		case intake.Send:
			n.routerSend(a.Conn, a.Msg)
		case intake.Close:
			n.deps.Router.CloseConn(a.Conn)
		case intake.Wake:
			n.wake[wakeIntake] = a.At
		case intake.Allow:
			for _, r := range n.deps.Receivers {
				r.Allow(a.Owner, a.Secret)
			}
		case intake.Disallow:
			for _, r := range n.deps.Receivers {
				r.Disallow(a.Owner)
			}
		case intake.Open:
			if r := n.deps.Receivers[a.Link]; r != nil {
				r.Open(a.Owner, a.Generation, a.Slots)
			}
		case intake.Pull:
			items := make([]link.PullItem, len(a.Items))
			for i, it := range a.Items {
				items[i] = link.PullItem(it)
			}
			n.deps.Receivers[a.Link].Pull(a.Owner, a.Generation, items)
		case intake.Revoke:
			if r := n.deps.Receivers[a.Link]; r != nil {
				r.Revoke(a.Generation, a.Slots)
			}
		case intake.Answer:
			n.answerIntake(a)
		case intake.Note:
			n.noteIntake(a)
		}
	}
}

// routerSend encodes and sends. A peer whose queue is full reads nothing: its
// connection is closed, and a Berth peer resends what was not answered.
func (n *Node) routerSend(conn kv.ConnID, m msg.Message) {
	b, err := wire.Append(n.encoded[:0], m)
	if err != nil {
		n.log.Error("message not encoded", "err", err)
		n.deps.Router.CloseConn(conn)
		return
	}
	n.encoded = b
	if err := n.deps.Router.Send(conn, b); err != nil {
		n.deps.Router.CloseConn(conn)
	}
	n.stats.sent(len(b))
}
