package explore

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/intake"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/outbound"
)

// event is the encoding of an event, by which a step is found again.
type event struct {
	b      []byte
	repeat bool // a message: stepped twice, the second time must change nothing
}

// ev encodes an event by its kind and numbers.
func ev(kind byte, nums ...uint64) event {
	b := []byte{kind}
	for _, n := range nums {
		b = binary.AppendUvarint(b, n)
	}
	return event{b: b}
}

// do is the kind of an act.
type do uint8

const (
	doSend do = iota
	doClose
	doAllow
	doDisallow
	doOpen
	doPull
	doRevoke
	doAnswer
	doNote
	doDial
	doConnect
	doDisconnect
	doWrite
	doAbort
	doSettle
	doRaise
	doNotify
	doGranted
	doEnded
)

// act is an action of either core, copied, with its message numbered.
type act struct {
	do     do
	conn   kv.ConnID
	msg    msgID
	link   outbound.LinkID
	name   string
	gen    kv.Generation
	slots  []kv.SlotID
	ids    []uint64
	writes []outbound.WriteItem
	raise  []outbound.StagedSlot
	pulls  []intake.PullItem
	owner  kv.Incarnation
	call   kv.CallID
	code   fault.Code // of an error or a bad ending
	err    bool
	text   string
	req    string
	ending msg.Ending
	note   intake.NoteKind
	count  int64
	claim  *intake.ClaimReply
	found  *intake.Found
}

// intakeActs copies a receiver's actions; its wake-up goes to its state.
func (m *memo) intakeActs(c *coreState, in []intake.Action) []act {
	var out []act
	for _, a := range in {
		switch a := a.(type) {
		case intake.Send:
			if v := m.plant.Sent(a.Msg); v != nil {
				out = append(out, act{do: doSend, conn: a.Conn, msg: m.number(v)})
			}
		case intake.Close:
			out = append(out, act{do: doClose, conn: a.Conn})
		case intake.Wake:
			if !m.plant.is(PlantNoWake) {
				c.wake = a.At
			}
		case intake.Allow:
			out = append(out, act{do: doAllow, owner: a.Owner})
		case intake.Disallow:
			out = append(out, act{do: doDisallow, owner: a.Owner})
		case intake.Open:
			out = append(out, act{do: doOpen, owner: a.Owner, name: a.Link, gen: a.Generation, slots: slices.Clone(a.Slots)})
		case intake.Pull:
			out = append(out, act{do: doPull, owner: a.Owner, gen: a.Generation, pulls: slices.Clone(a.Items)})
		case intake.Revoke:
			out = append(out, act{do: doRevoke, name: a.Link, gen: a.Generation, slots: slices.Clone(a.Slots)})
		case intake.Answer:
			out = append(out, answerAct(a))
		case intake.Note:
			switch a.Kind {
			case intake.NoteWaiting, intake.NoteAdmitted, intake.NoteRefused, intake.NoteEnded, intake.NoteTrusted:
				out = append(out, act{do: doNote, note: a.Kind, req: a.ReqID, ending: a.Ending, code: a.Reason, text: a.Text, count: a.Count})
			}
		}
	}
	return out
}

func answerAct(a intake.Answer) act {
	o := act{do: doAnswer, call: a.Call}
	switch {
	case a.Err != nil:
		o.err, o.code, o.text = true, a.Err.Code, a.Err.Text
	case a.Ending != nil:
		o.req, o.ending, o.code, o.text = a.Ending.ReqID, a.Ending.Ending, a.Ending.Reason, a.Ending.Text
	case a.Claim != nil:
		o.claim = &intake.ClaimReply{Chunks: slices.Clone(a.Claim.Chunks)}
	case a.Found != nil:
		f := *a.Found
		o.found = &f
	}
	return o
}

// outboundActs copies a sender's actions.
func (m *memo) outboundActs(c *coreState, in []outbound.Action) []act {
	var out []act
	for _, a := range in {
		switch a := a.(type) {
		case outbound.Dial:
			out = append(out, act{do: doDial, conn: a.Conn})
		case outbound.Close:
			out = append(out, act{do: doClose, conn: a.Conn})
		case outbound.Send:
			out = append(out, act{do: doSend, conn: a.Conn, msg: m.number(a.Msg)})
		case outbound.Connect:
			out = append(out, act{do: doConnect, link: a.Link, name: a.Name, owner: a.Incarnation})
		case outbound.Disconnect:
			out = append(out, act{do: doDisconnect, link: a.Link})
		case outbound.Write:
			out = append(out, act{do: doWrite, link: a.Link, writes: slices.Clone(a.Writes)})
		case outbound.Abort:
			out = append(out, act{do: doAbort, link: a.Link, ids: slices.Clone(a.Writes)})
		case outbound.Settle:
			out = append(out, act{do: doSettle, link: a.Link, ids: slices.Clone(a.Writes)})
		case outbound.Raise:
			out = append(out, act{do: doRaise, raise: slices.Clone(a.Slots)})
		case outbound.Notify:
			out = append(out, act{do: doNotify, msg: m.number(a.Msg)})
		case outbound.Wake:
			c.wake = a.At
		case outbound.Answer:
			o := act{do: doAnswer, call: a.Call, slots: slices.Clone(a.Slots)}
			if a.Err != nil {
				o.err, o.code, o.text = true, a.Err.Code, a.Err.Text
			}
			if a.Ending != nil {
				o.req, o.ending, o.code, o.text = a.Ending.ReqID, a.Ending.Ending, a.Ending.Reason, a.Ending.Text
			}
			out = append(out, o)
		case outbound.Granted:
			out = append(out, act{do: doGranted, req: a.ReqID, slots: slices.Clone(a.Slots)})
		case outbound.Ended:
			out = append(out, act{do: doEnded, req: a.Ending.ReqID, ending: a.Ending.Ending, code: a.Ending.Reason, text: a.Ending.Text})
		}
	}
	return out
}

// show prints an act for a trace; "" for what says nothing to a reader.
func (m *memo) show(a *act) string {
	switch a.do {
	case doSend:
		return "sends " + ShowMsg(m.message(a.msg))
	case doClose:
		return "closes the connection"
	case doOpen:
		return fmt.Sprintf("opens %v under generation %d", a.slots, a.gen)
	case doPull:
		var b strings.Builder
		for _, p := range a.pulls {
			fmt.Fprintf(&b, " %d<%d:%d", p.Slot, p.Src, p.SrcGen)
		}
		return fmt.Sprintf("pulls%s under generation %d", b.String(), a.gen)
	case doRevoke:
		return fmt.Sprintf("revokes %v under generation %d", a.slots, a.gen)
	case doDial:
		return "dials"
	case doConnect:
		return "connects link " + a.name
	case doDisconnect:
		return fmt.Sprintf("disconnects link %d", a.link)
	case doWrite:
		var b strings.Builder
		for _, w := range a.writes {
			fmt.Fprintf(&b, " %d>%d", w.Src, w.Dst)
		}
		return fmt.Sprintf("writes%s under generation %d", b.String(), a.writes[0].Generation)
	case doAbort:
		return fmt.Sprintf("aborts writes %v", a.ids)
	case doSettle:
		return fmt.Sprintf("settles writes %v", a.ids)
	case doRaise:
		var b strings.Builder
		for _, s := range a.raise {
			fmt.Fprintf(&b, " %d:%d", s.Slot, s.Generation)
		}
		return "hands out staging" + b.String()
	case doNotify:
		return "tells the proxy " + ShowMsg(m.message(a.msg))
	case doGranted:
		return fmt.Sprintf("tells its engine: %s is granted, staging %v", a.req, a.slots)
	case doEnded:
		return fmt.Sprintf("tells its engine: %s is %s%s", a.req, a.ending, because(a.code, a.text))
	case doAnswer:
		switch {
		case a.err:
			return fmt.Sprintf("answers an error%s", because(a.code, a.text))
		case a.ending != "":
			return fmt.Sprintf("answers: %s is %s%s", a.req, a.ending, because(a.code, a.text))
		case a.claim != nil:
			return fmt.Sprintf("gives %d chunks to be read", len(a.claim.Chunks))
		case len(a.slots) > 0:
			return fmt.Sprintf("answers staging %v", a.slots)
		case a.found != nil:
			return fmt.Sprintf("finds %q", a.found.ReqID)
		}
	case doNote:
		return ShowNote(intake.Note{Kind: a.note, ReqID: a.req, Ending: a.ending, Reason: a.code, Text: a.text})
	}
	return ""
}

// ShowNote prints what a receiver notes of a request; "" for the rest.
func ShowNote(n intake.Note) string {
	names := map[intake.NoteKind]string{intake.NoteWaiting: "waits", intake.NoteAdmitted: "is admitted", intake.NoteRefused: "is refused",
		intake.NoteEnded: "has ended", intake.NoteTrusted: "has its writer trusted to be gone"}
	if names[n.Kind] == "" {
		return ""
	}
	return strings.TrimRight(fmt.Sprintf("%s %s %s", n.ReqID, names[n.Kind], n.Ending), " ") + because(n.Reason, n.Text)
}

func because(code fault.Code, text string) string {
	switch {
	case code == "":
		return ""
	case text == "":
		return " (" + string(code) + ")"
	}
	return fmt.Sprintf(" (%s: %s)", code, text)
}

// ShowMsg prints a message on one line.
func ShowMsg(v msg.Message) string {
	switch v := v.(type) {
	case *msg.Hello:
		return fmt.Sprintf("Hello seq=%d resume=%t", v.Seq, v.Resume)
	case *msg.HelloReply:
		return fmt.Sprintf("HelloReply resumed=%t", v.Resumed)
	case *msg.Begin:
		return fmt.Sprintf("Begin %d %s total=%d", v.Begin, v.ReqID, v.TotalChunks)
	case *msg.Granted:
		return fmt.Sprintf("Granted %d %v generation=%d", v.Begin, v.Slots, v.Generation)
	case *msg.Commit:
		var b strings.Builder
		for _, k := range v.Chunks {
			fmt.Fprintf(&b, " %d", k.Index)
			if k.Src != nil {
				fmt.Fprintf(&b, "<%d:%d", k.Src.Slot, k.Src.Generation)
			}
		}
		if v.HasEnd {
			fmt.Fprintf(&b, " end=%d", v.End)
		}
		return fmt.Sprintf("Commit %d%s", v.Begin, b.String())
	case *msg.CommitReply:
		return fmt.Sprintf("CommitReply %d complete=%t", v.Begin, v.Complete)
	case *msg.Cancel:
		return fmt.Sprintf("Cancel %d%s", v.Begin, because(v.Reason, v.Text))
	case *msg.Ended:
		if v.Seq != 0 {
			return fmt.Sprintf("Ended seq=%d %d %s%s", v.Seq, v.Begin, v.Ending, because(v.Reason, v.Text))
		}
		return fmt.Sprintf("Ended %d %s%s", v.Begin, v.Ending, because(v.Reason, v.Text))
	case *msg.Drained:
		return fmt.Sprintf("Drained %d", v.Begin)
	case *msg.Heartbeat:
		return fmt.Sprintf("Heartbeat seq=%d", v.Seq)
	case *msg.HeartbeatReply:
		return fmt.Sprintf("HeartbeatReply re=%d", v.Re)
	case *msg.Error:
		return fmt.Sprintf("Error re=%d%s", v.Re, because(v.Code, v.Text))
	case *msg.ProxyNotif:
		return "ProxyNotif " + v.ReqID
	case *msg.EndingNotice:
		return fmt.Sprintf("Ending %s %s%s", v.ReqID, v.Ending, because(v.Reason, v.Text))
	case *msg.AllocRequest:
		return fmt.Sprintf("AllocRequest %s keys=%v last=%t total=%d", v.ReqID, v.Keys, v.IsLastBatch, v.TotalChunks)
	case *msg.AllocResponse:
		return fmt.Sprintf("AllocResponse %v", v.RemoteIndexes)
	case *msg.CancelNotif:
		return "CancelNotif " + v.ReqID
	}
	return fmt.Sprintf("%T", v)
}
