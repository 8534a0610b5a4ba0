package watch

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// TestScripts runs the scenarios of testdata: one event a command, every action
// as output. Check runs after each step, and a copy of the core must encode as
// the core does. Rewrite with -rewrite and review the difference.
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata/scripts", func(t *testing.T, path string) {
		s := &script{}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string { return s.run(t, d) })
	})
}

type script struct {
	c   *Core
	now kv.Instant
	at  kv.Instant
	out strings.Builder
	// last is the seq sent last, by connection and kind of message: the script
	// answers with re=watch, say.
	last map[string]uint64
}

func (s *script) run(t *testing.T, d *datadriven.TestData) string {
	s.out.Reset()
	a := args{t, d, s}
	switch d.Cmd {
	case "new":
		s.now, s.at, s.last = 0, kv.Never, map[string]uint64{}
		s.c = New(Config{Node: "proxy", Incarnation: kv.Incarnation{1}, MaxWatches: int(a.num("max-watches", 0)), MaxPeers: int(a.num("max-peers", 0)),
			MaxEarly: int(a.num("max-early", 0))}, 0)
	case "wait":
		s.wait(t, kv.Duration(a.float("for"))*kv.Millisecond*1000)
	case "sleep": // the process is stopped
		s.now = s.now.Add(kv.Duration(a.float("for")) * kv.Second)
	case "open":
		s.step(t, Connected{Conn: a.conn()})
		s.step(t, Received{Conn: a.conn(), Msg: &msg.HelloReply{Re: a.s.last[show(Close{a.conn()})+" hello"], Version: 1, Incarnation: kv.Incarnation{byte(a.num("incarnation", 9))},
			Resumed: d.HasArg("resumed"), LeaseMS: 15000}})
	default:
		s.step(t, a.event())
	}
	if s.out.Len() == 0 {
		return "ok\n"
	}
	return s.out.String()
}

func (s *script) step(t *testing.T, ev Event) {
	twin := s.c.Clone()
	for _, act := range s.c.Step(s.now, ev) {
		if w, ok := act.(Wake); ok {
			s.at = w.At
			continue
		}
		fmt.Fprintln(&s.out, show(act))
		if send, ok := act.(Send); ok {
			var kind string
			var seq uint64
			fmt.Sscanf(strings.SplitN(show(act), " ", 3)[2], "%s seq=%d", &kind, &seq)
			s.last[show(Close{send.Conn})+" "+kind] = seq
		}
	}
	if err := s.c.Check(); err != nil {
		t.Fatalf("after %#v: %v", ev, err)
	}
	twin.Step(s.now, ev)
	if !bytes.Equal(s.c.Encode(nil, s.now), twin.Encode(nil, s.now)) {
		t.Fatalf("after %#v a copy encodes otherwise", ev)
	}
}

func (s *script) wait(t *testing.T, d kv.Duration) {
	end := s.now.Add(d)
	for n := 0; s.at <= end; n++ {
		if n > 1000 {
			t.Fatal("wakes for ever")
		}
		s.now = max(s.now, s.at)
		before := s.out.Len()
		s.step(t, Tick{})
		if s.out.Len() > before {
			text := s.out.String()
			s.out.Reset()
			fmt.Fprintf(&s.out, "%s@%v\n%s", text[:before], s.now.Sub(0).Seconds(), text[before:])
		}
	}
	s.now = end
}

type args struct {
	t *testing.T
	d *datadriven.TestData
	s *script
}

func (a args) strs(key string) []string {
	for _, arg := range a.d.CmdArgs {
		if arg.Key == key {
			return arg.Vals
		}
	}
	return nil
}

func (a args) str(key string) string {
	if v := a.strs(key); len(v) > 0 {
		return v[0]
	}
	return ""
}

func (a args) num(key string, otherwise int64) int64 {
	if a.str(key) == "" {
		return otherwise
	}
	n, err := strconv.ParseInt(a.str(key), 10, 64)
	if err != nil {
		a.d.Fatalf(a.t, "%s: %v", key, err)
	}
	return n
}

func (a args) float(key string) float64 {
	f, err := strconv.ParseFloat(a.str(key), 64)
	if err != nil {
		a.d.Fatalf(a.t, "%s: %v", key, err)
	}
	return f
}

func (a args) conn() kv.ConnID {
	text := a.str("conn")
	if text == "" {
		text = "1.1"
	}
	var hi, lo uint64
	if _, err := fmt.Sscanf(text, "%d.%d", &hi, &lo); err != nil {
		a.d.Fatalf(a.t, "conn %s: %v", text, err)
	}
	return kv.ConnID(hi<<32 | lo)
}

func (a args) event() Event {
	call := kv.CallID(a.num("call", 1))
	switch a.d.Cmd {
	case "watch":
		ev := Watch{Call: call, ReqID: a.str("req"), Deadline: kv.Duration(a.num("deadline", 600)) * kv.Second}
		for _, host := range a.strs("at") {
			ev.Peers = append(ev.Peers, Peer{Host: host, AllocPort: 9000})
		}
		return ev
	case "cancel":
		return Cancel{Call: call, Reason: fault.Code(a.str("reason")), Text: a.str("text")}
	case "release":
		return Release{Call: call}
	case "connected":
		return Connected{Conn: a.conn()}
	case "disconnected":
		return Disconnected{Conn: a.conn(), Text: "reset"}
	case "malformed":
		return Malformed{Conn: a.conn(), Text: "garbage"}
	case "notif":
		return Notified{Conn: kv.ConnID(a.num("conn", 1)), Msg: &msg.ProxyNotif{ReqID: a.str("req")}}
	case "ending":
		return Notified{Conn: kv.ConnID(a.num("conn", 1)), Msg: &msg.EndingNotice{ReqID: a.str("req"), Rank: a.num("rank", 0), Ending: msg.EndFailed,
			Reason: fault.Code(a.str("reason")), Text: a.str("text")}}
	case "tick":
		return Tick{}
	case "recv":
		re := a.s.last[show(Close{a.conn()})+" "+a.str("re")]
		if re == 0 {
			re = uint64(a.num("re", 0))
		}
		var m msg.Message
		switch a.str("is") {
		case "ended":
			m = &msg.Ended{Re: re, Ending: msg.Ending(a.str("ending")), Reason: fault.Code(a.str("reason")), Text: a.str("text")}
		case "error":
			m = &msg.Error{Re: re, Code: fault.Code(a.str("code")), Text: a.str("text")}
		case "beat":
			m = &msg.HeartbeatReply{Re: re}
		case "alloc":
			m = &msg.AllocResponse{RemoteIndexes: []int64{-1}}
		case "granted":
			m = &msg.Granted{Re: re}
		}
		return Received{Conn: a.conn(), Msg: m}
	}
	a.d.Fatalf(a.t, "unknown command %s", a.d.Cmd)
	return nil
}

func show(act Action) string {
	conn := func(c kv.ConnID) string { return fmt.Sprintf("%d.%d", c>>32, uint32(c)) }
	switch a := act.(type) {
	case Dial:
		return fmt.Sprintf("dial %s to %s", conn(a.Conn), a.Peer)
	case Close:
		return "close " + conn(a.Conn)
	case Send:
		switch m := a.Msg.(type) {
		case *msg.Hello:
			return fmt.Sprintf("send %s hello seq=%d role=%s resume=%v", conn(a.Conn), m.Seq, m.Role, m.Resume)
		case *msg.Watch:
			return fmt.Sprintf("send %s watch seq=%d %s deadline=%dms", conn(a.Conn), m.Seq, m.ReqID, m.DeadlineMS)
		case *msg.Ready:
			return fmt.Sprintf("send %s ready seq=%d %s", conn(a.Conn), m.Seq, m.ReqID)
		case *msg.Cancel:
			return fmt.Sprintf("send %s cancel seq=%d %s %s %q", conn(a.Conn), m.Seq, m.ReqID, m.Reason, m.Text)
		case *msg.Heartbeat:
			return fmt.Sprintf("send %s heartbeat seq=%d", conn(a.Conn), m.Seq)
		}
	case Accepted:
		return fmt.Sprintf("accepted %d", a.Call)
	case Result:
		return fmt.Sprintf("result %d: %s", a.Call, a)
	}
	return fmt.Sprintf("%T", act)
}
