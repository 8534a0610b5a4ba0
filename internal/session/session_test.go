package session

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// TestScripts runs the scenarios of testdata/scripts: one event a command, all notices
// and actions as output. Check runs after each, and a copy of the session must
// encode as the session does.
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata/scripts", func(t *testing.T, path string) {
		s := &script{s: New[string](testConfig(), 0)}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string { return s.run(t, d) })
	})
}

func testConfig() Config {
	return Config{ID: 3, Role: msg.RoleSender, Node: "n", Incarnation: kv.Incarnation{1}, Secret: kv.Secret{1},
		Connect: 15 * kv.Second, Idle: 60 * kv.Second}
}

type script struct {
	s   Session[string]
	now kv.Instant
	out strings.Builder
}

func (c *script) run(t *testing.T, d *datadriven.TestData) string {
	c.out.Reset()
	conn := kv.ConnID(3)<<32 | kv.ConnID(num(d, "conn", 1))
	switch d.Cmd {
	case "want":
		c.s.Want(c.now, true)
		c.show(Notice[string]{})
	case "unwant":
		c.s.Want(c.now, false)
		c.show(Notice[string]{})
	case "quit":
		c.s.Quit()
		c.show(Notice[string]{})
	case "connected":
		c.s.Connected(c.now, conn)
		c.show(Notice[string]{})
	case "disconnected":
		c.show(c.s.Disconnected(c.now, conn, "reset"))
	case "malformed":
		c.show(c.s.Malformed(c.now, conn, "garbage"))
	case "request":
		c.s.Request(&msg.Begin{ReqID: word(d, "ref")}, word(d, "ref"))
		c.show(Notice[string]{})
	case "answer":
		c.s.Answer(&msg.Drained{Re: uint64(num(d, "re", 0))})
		c.show(Notice[string]{})
	case "prove":
		fmt.Fprintf(&c.out, "heartbeat %d\n", c.s.Prove(c.now))
		c.show(Notice[string]{})
	case "stopped":
		c.now += kv.Instant(num(d, "for", 0)) * kv.Instant(kv.Second)
		c.s.Stopped(c.now)
	case "recv":
		c.show(c.s.Received(c.now, conn, message(t, d)))
	case "wait":
		c.wait(t, kv.Duration(num(d, "for", 0))*kv.Second)
	case "state":
		fmt.Fprintf(&c.out, "up=%v opened=%v foreign=%v idle=%v may-write=%v unanswered=%d silent=%vs err=%q\n", c.s.Up(), c.s.Opened(), c.s.Foreign(), c.s.Idle(),
			c.s.MayWrite(c.now), c.s.Unanswered(), c.s.Silent(c.now).Seconds(), c.s.Err())
	default:
		d.Fatalf(t, "unknown command %s", d.Cmd)
	}
	if err := c.s.Check(); err != nil {
		t.Fatal(err)
	}
	enc := func(s *Session[string]) string {
		return string(s.Encode(nil, c.now, func(b []byte, ref string) []byte { return AppendString(b, ref) }))
	}
	cp := c.s.Clone(func(ref string, m msg.Message) (string, msg.Message) { return ref, m })
	if enc(&c.s) != enc(&cp) {
		t.Fatal("a copy encodes otherwise")
	}
	if c.out.Len() == 0 {
		return "ok\n"
	}
	return c.out.String()
}

func (c *script) wait(t *testing.T, d kv.Duration) {
	end := c.now.Add(d)
	for n := 0; c.s.Next() <= end; n++ {
		if n > 1000 {
			t.Fatal("wakes for ever")
		}
		c.now = max(c.now, c.s.Next())
		before := c.out.Len()
		c.show(c.s.Tick(c.now))
		if c.out.Len() > before {
			text := c.out.String()
			c.out.Reset()
			fmt.Fprintf(&c.out, "%s@%v %s", text[:before], c.now.Sub(0).Seconds(), text[before:])
		}
	}
	c.now = end
}

var kinds = map[Kind]string{Up: "up", Resumed: "resumed", Lost: "lost", Refused: "refused", Legacy: "legacy", Reply: "reply", Asked: "asked",
	Violation: "violation", Closed: "closed", Proved: "proved"}

func (c *script) show(n Notice[string]) {
	for _, a := range c.s.Actions() {
		at := fmt.Sprintf("%d.%d", a.Conn>>32, uint32(a.Conn))
		switch a.Do {
		case Dial:
			fmt.Fprintf(&c.out, "dial %s\n", at)
		case Close:
			fmt.Fprintf(&c.out, "close %s\n", at)
		case Send:
			switch m := a.Msg.(type) {
			case *msg.Hello:
				fmt.Fprintf(&c.out, "send %s hello seq=%d resume=%v\n", at, m.Seq, m.Resume)
			case *msg.Begin:
				fmt.Fprintf(&c.out, "send %s begin seq=%d %s\n", at, m.Seq, m.ReqID)
			case *msg.Heartbeat:
				fmt.Fprintf(&c.out, "send %s heartbeat seq=%d\n", at, m.Seq)
			default:
				fmt.Fprintf(&c.out, "send %s %T\n", at, m)
			}
		}
	}
	if n.Kind == None {
		return
	}
	fmt.Fprintf(&c.out, "notice %s", kinds[n.Kind])
	if n.Ref != "" {
		fmt.Fprintf(&c.out, " %s", n.Ref)
	}
	if n.Msg != nil {
		fmt.Fprintf(&c.out, " %T", n.Msg)
	}
	if n.Code != "" {
		fmt.Fprintf(&c.out, " %s", n.Code)
	}
	if n.Text != "" {
		fmt.Fprintf(&c.out, " %q", n.Text)
	}
	c.out.WriteString("\n")
}

func message(t *testing.T, d *datadriven.TestData) msg.Message {
	re := uint64(num(d, "re", 0))
	switch word(d, "is") {
	case "hello-reply":
		return &msg.HelloReply{Re: re, Version: uint64(num(d, "version", 1)), Incarnation: kv.Incarnation{byte(num(d, "incarnation", 9))},
			Resumed: d.HasArg("resumed"), Capacity: 10, LeaseMS: num(d, "lease-ms", 15000)}
	case "granted":
		return &msg.Granted{Re: re}
	case "heartbeat-reply":
		return &msg.HeartbeatReply{Re: re}
	case "ended":
		return &msg.Ended{Re: re, Seq: uint64(num(d, "seq", 0))}
	case "error":
		return &msg.Error{Re: re, Code: fault.Code(word(d, "code")), Text: "why", RetryMS: num(d, "retry-ms", 0)}
	case "alloc-response":
		return &msg.AllocResponse{RemoteIndexes: []int64{-1}}
	}
	d.Fatalf(t, "unknown message")
	return nil
}

func word(d *datadriven.TestData, key string) string {
	for _, a := range d.CmdArgs {
		if a.Key == key {
			return a.Vals[0]
		}
	}
	return ""
}

func num(d *datadriven.TestData, key string, otherwise int64) int64 {
	if w := word(d, key); w != "" {
		n, err := strconv.ParseInt(w, 10, 64)
		if err != nil {
			panic(err)
		}
		return n
	}
	return otherwise
}

func TestRequestWithoutSession(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Fatal("a request without a session went through")
		}
	}()
	s := New[int](testConfig(), 0)
	s.Request(&msg.Begin{}, 1)
}

// TestOpener: a hello that resumes names its session by the hello that opened
// it, however often it has been resumed since.
func TestOpener(t *testing.T) {
	s := New[int](testConfig(), 0)
	s.Want(0, true)
	now := kv.Instant(0)
	for i, want := range []uint64{0, 1, 1, 3} {
		conn := kv.ConnID(3<<32 | i + 1)
		s.Connected(now, conn)
		var m *msg.Hello
		for _, a := range s.Actions() {
			if h, ok := a.Msg.(*msg.Hello); ok {
				m = h
			}
		}
		if m == nil || m.Session != want || m.Resume != (want != 0) {
			t.Fatalf("hello %d is %+v; the session is %d", i+1, m, want)
		}
		s.Received(now, conn, &msg.HelloReply{Re: m.Seq, Version: 1, LeaseMS: 15000, Resumed: i == 1})
		s.Disconnected(now, conn, "gone")
		now = s.Next()
		s.Tick(now)
	}
}

// TestSeqFloor: a session that follows one that was forgotten repeats none of
// its numbers.
func TestSeqFloor(t *testing.T) {
	s := New[int](testConfig(), 41)
	s.Want(0, true)
	s.Actions()
	s.Connected(0, 3<<32|1)
	if m := s.Actions()[0].Msg.(*msg.Hello); m.Seq != 42 {
		t.Fatalf("the hello has seq %d, not 42", m.Seq)
	}
}

// TestSteadyState: a request and its answer allocate nothing.
func TestSteadyState(t *testing.T) {
	s := New[int](testConfig(), 0)
	s.Want(0, true)
	s.Connected(0, 3<<32|1)
	s.Received(0, 3<<32|1, &msg.HelloReply{Re: 1, Version: 1, LeaseMS: 15000})
	s.Actions()
	begin, granted := &msg.Begin{}, &msg.Granted{}
	n := testing.AllocsPerRun(1000, func() {
		s.Request(begin, 7)
		granted.Re = begin.Seq
		if got := s.Received(1, 3<<32|1, granted); got.Kind != Reply || got.Ref != 7 {
			t.Fatalf("got %v", got)
		}
		s.Actions()
	})
	if n > 0.01 {
		t.Fatalf("%v allocations for a request and its answer", n)
	}
}
