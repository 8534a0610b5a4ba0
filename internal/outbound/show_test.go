package outbound

import (
	"fmt"
	"strings"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// show prints an action on one line.
func show(a Action) string {
	switch a := a.(type) {
	case Dial:
		return fmt.Sprintf("dial %s to %s", showConn(a.Conn), a.Peer.name())
	case Close:
		return "close " + showConn(a.Conn)
	case Send:
		return fmt.Sprintf("send %s %s", showConn(a.Conn), showMsg(a.Msg))
	case Connect:
		return fmt.Sprintf("connect link %d %s at %s", a.Link, a.Name, a.Addr)
	case Disconnect:
		return fmt.Sprintf("disconnect link %d", a.Link)
	case Write:
		var b strings.Builder
		fmt.Fprintf(&b, "write link %d", a.Link)
		for _, w := range a.Writes {
			fmt.Fprintf(&b, " %d:%d>%d", w.ID, w.Src, w.Dst)
		}
		fmt.Fprintf(&b, " gen=%d", a.Writes[0].Generation)
		return b.String()
	case Abort:
		return fmt.Sprintf("abort link %d %v", a.Link, a.Writes)
	case Settle:
		return fmt.Sprintf("settle link %d %v", a.Link, a.Writes)
	case Sum:
		var b strings.Builder
		fmt.Fprintf(&b, "sum %d:", a.Batch)
		for _, i := range a.Items {
			fmt.Fprintf(&b, " %d", i.Slot)
		}
		return b.String()
	case Raise:
		var b strings.Builder
		b.WriteString("raise")
		for _, s := range a.Slots {
			fmt.Fprintf(&b, " %d:%d", s.Slot, s.Generation)
		}
		return b.String()
	case Notify:
		return "notify " + showMsg(a.Msg)
	case Answer:
		switch {
		case a.Err != nil:
			return fmt.Sprintf("answer %d: %v", a.Call, a.Err)
		case a.Ending != nil:
			return fmt.Sprintf("answer %d: %s", a.Call, showEnding(*a.Ending))
		case a.Slots != nil:
			return fmt.Sprintf("answer %d: slots %v", a.Call, a.Slots)
		}
		return fmt.Sprintf("answer %d: ok", a.Call)
	case Granted:
		return fmt.Sprintf("emit %d granted %s %v", a.Engine, a.ReqID, a.Slots)
	case Ended:
		return fmt.Sprintf("emit %d ended %s", a.Engine, showEnding(a.Ending))
	case Note:
		return "note " + showNote(a)
	}
	return fmt.Sprintf("%T", a)
}

func showConn(c kv.ConnID) string { return fmt.Sprintf("%d.%d", c>>32, uint32(c)) }

func showEnding(e Ending) string {
	return fmt.Sprintf("%s %s%s", e.ReqID, e.Ending, because(e.Reason, e.Text))
}

func because(code fault.Code, text string) string {
	if code == "" {
		return quoted(text)
	}
	return " " + string(code) + quoted(text)
}

func quoted(text string) string {
	if text == "" {
		return ""
	}
	return fmt.Sprintf(" %q", text)
}

var noteNames = map[NoteKind]string{NoteBegun: "begun", NoteGranted: "granted", NoteEnded: "ended", NoteSession: "session", NotePeerLost: "peer-lost",
	NoteRetry: "retry", NoteLinkUp: "link-up", NoteLinkDown: "link-down", NoteQuarantined: "quarantined", NoteTrusted: "trusted", NoteViolation: "violation"}

func showNote(n Note) string {
	var b strings.Builder
	b.WriteString(noteNames[n.Kind])
	for _, p := range []string{n.ReqID, n.Peer, n.Link} {
		if p != "" {
			b.WriteString(" " + p)
		}
	}
	if n.Ending != "" {
		b.WriteString(" " + string(n.Ending))
	}
	if n.Count != 0 {
		fmt.Fprintf(&b, " count=%d", n.Count)
	}
	if n.Bytes != 0 {
		fmt.Fprintf(&b, " bytes=%d", n.Bytes)
	}
	b.WriteString(because(n.Reason, n.Text))
	return b.String()
}

func showMsg(m msg.Message) string {
	switch m := m.(type) {
	case *msg.Hello:
		return fmt.Sprintf("hello seq=%d resume=%v", m.Seq, m.Resume)
	case *msg.Begin:
		return fmt.Sprintf("begin seq=%d begin=%d %s link=%s total=%d deadline=%dms", m.Seq, m.Begin, m.ReqID, m.Link, m.TotalChunks, m.DeadlineMS)
	case *msg.Commit:
		var b strings.Builder
		fmt.Fprintf(&b, "commit seq=%d begin=%d", m.Seq, m.Begin)
		for _, k := range m.Chunks {
			fmt.Fprintf(&b, " %d", k.Index)
			if k.Src != nil {
				fmt.Fprintf(&b, "<%d:%d", k.Src.Slot, k.Src.Generation)
			}
			if k.HasChecksum {
				fmt.Fprintf(&b, "#%d", k.Checksum)
			}
		}
		if m.HasEnd {
			fmt.Fprintf(&b, " end=%d", m.End)
		}
		return b.String()
	case *msg.Cancel:
		return fmt.Sprintf("cancel seq=%d begin=%d%s", m.Seq, m.Begin, because(m.Reason, m.Text))
	case *msg.Drained:
		return fmt.Sprintf("drained re=%d begin=%d", m.Re, m.Begin)
	case *msg.Heartbeat:
		return fmt.Sprintf("heartbeat seq=%d", m.Seq)
	case *msg.ProxyNotif:
		return "proxy-notif " + m.ReqID
	case *msg.EndingNotice:
		return fmt.Sprintf("ending-notice %s %s%s", m.ReqID, m.Ending, because(m.Reason, m.Text))
	case *msg.AllocRequest:
		return fmt.Sprintf("alloc %s keys=%v last-toks=%d last=%v total=%d", m.ReqID, m.Keys, m.LastChunkToks, m.IsLastBatch, m.TotalChunks)
	case *msg.CancelNotif:
		return fmt.Sprintf("cancel-notif %s keys=%v", m.ReqID, m.Keys)
	}
	return fmt.Sprintf("%T", m)
}
