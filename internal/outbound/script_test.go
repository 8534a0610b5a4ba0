package outbound

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

// TestScripts runs the scenarios of testdata. Each command is one event, or
// time that passes; the output is every action, in order. check() runs after
// every step. Rewrite with -rewrite and review the difference.
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata/scripts", func(t *testing.T, path string) {
		s := &script{t: t}
		datadriven.RunTest(t, path, s.run)
	})
}

// script is one scenario under way.
type script struct {
	t   *testing.T
	c   *Core
	now kv.Instant
	at  kv.Instant // of the wake-up asked for
	out strings.Builder
}

func testConfig() Config {
	return Config{
		Node: "p0", Incarnation: kv.Incarnation{1}, Secret: kv.Secret{2},
		Facts:   kv.Facts{SlotBytes: 4096, Format: kv.Format2LTD, DType: "bfloat16", ChunkTokens: 16, TPSize: 1},
		Shape:   []int64{2, 4, 16, 16},
		Staging: 16, MaxStage: 8,
		Links:          []Link{{Name: "tcp", ExactFence: true}},
		Dialect:        DialectAuto,
		RequestTimeout: 600 * kv.Second, AllocationTimeout: 30 * kv.Second, WriteTimeout: 10 * kv.Second, EndingTTL: 120 * kv.Second,
		ConnectTimeout: 15 * kv.Second,
		Window:         1 << 20, MaxWaiting: 100, MaxPeers: 8, MaxEndings: 100, LegacyConns: 2,
	}
}

var testLinks = map[string]Link{
	"tcp":  {Name: "tcp", ExactFence: true},
	"shm":  {Name: "shm", Pull: true, ExactFence: true},
	"nixl": {Name: "nixl", OneSided: true},
}

func (s *script) run(t *testing.T, d *datadriven.TestData) string {
	s.t = t
	s.out.Reset()
	a := args{t: t, d: d}
	switch d.Cmd {
	case "new":
		s.start(a)
	case "wait":
		s.wait(a.duration("for", 0))
	case "status":
		s.status()
	case "sleep": // the process is stopped: time passes, and no Tick
		s.now = s.now.Add(a.duration("for", 0))
	case "open": // the control connection, the hello and the data link
		s.step(Connected{Conn: a.conn()})
		reply := args{t: t, d: &datadriven.TestData{CmdArgs: append(d.CmdArgs, datadriven.CmdArg{Key: "is", Vals: []string{"hello-reply"}}, datadriven.CmdArg{Key: "re", Vals: []string{"1"}})}}
		s.step(Received{Conn: a.conn(), Msg: reply.message()})
		s.step(LinkUp{Link: LinkID(a.int("link", 1))})
	default:
		ev := event(a)
		if ev == nil {
			d.Fatalf(t, "unknown command %s", d.Cmd)
		}
		s.step(ev)
	}
	if s.out.Len() == 0 {
		return "ok\n"
	}
	return s.out.String()
}

func (s *script) start(a args) {
	cfg := testConfig()
	cfg.Staging = int(a.int("staging", 16))
	cfg.MaxStage = int(a.int("max-stage", 8))
	cfg.Window = a.int("window", 1<<20)
	cfg.MaxWaiting = int(a.int("max-waiting", 100))
	cfg.MaxPeers = int(a.int("max-peers", 8))
	cfg.MaxEndings = int(a.int("max-endings", 100))
	cfg.LegacyConns = int(a.int("conns", 2))
	cfg.Checksum = a.has("checksum")
	cfg.SkipNotify = a.has("skip-notify")
	cfg.LegacyNoData = a.has("legacy-no-data")
	cfg.LegacyLink = a.str("legacy-link", "")
	cfg.Dialect = Dialect(a.str("dialect", "auto"))
	cfg.AllocationTimeout = a.duration("allocation-timeout", 30*kv.Second)
	if a.has("allow") {
		allowed := a.str("allow", "")
		cfg.ReceiverAllow = func(host string) bool { return host == allowed }
	}
	if a.has("links") {
		cfg.Links = nil
		for _, n := range a.strs("links") {
			cfg.Links = append(cfg.Links, testLinks[n])
		}
	}
	s.now, s.at = 0, kv.Never
	s.c = New(cfg, 0)
}

func (s *script) step(ev Event) {
	for _, act := range s.c.Step(s.now, ev) {
		if w, ok := act.(Wake); ok {
			s.at = w.At
			continue
		}
		fmt.Fprintln(&s.out, show(act))
	}
	if err := s.c.Check(); err != nil {
		s.t.Fatalf("check after %#v: %v", ev, err)
	}
}

// wait lets time pass, with a Tick whenever one was asked for.
func (s *script) wait(d kv.Duration) {
	end := s.now.Add(d)
	for n := 0; s.at <= end; n++ {
		if n > 1000 {
			s.t.Fatalf("wakes for ever at %v", s.now)
		}
		s.now = max(s.now, s.at)
		before := s.out.Len()
		s.step(Tick{})
		if s.out.Len() > before {
			text := s.out.String()
			s.out.Reset()
			fmt.Fprintf(&s.out, "%s@%v\n%s", text[:before], s.now.Sub(0).Seconds(), text[before:])
		}
	}
	s.now = end
}

func (s *script) status() {
	st := s.c.Status(s.now)
	fmt.Fprintf(&s.out, "staging free=%d staged=%d writing=%d quarantined=%d of %d, waiting %d\n", st.Staging.Free, st.Staging.Staged,
		st.Staging.Writing, st.Staging.Quarantined, st.Staging.Capacity, st.Waiting)
	for _, p := range st.Peers {
		fmt.Fprintf(&s.out, "peer %s %s live=%d link=%s%s\n", p.Addr, p.State, p.Live, p.Link, quoted(p.Err))
	}
	for _, r := range st.Requests {
		fmt.Fprintf(&s.out, "request %s %s %s total=%d granted=%d committed=%d", r.ID, r.Peer, r.State, r.Total, r.Granted, r.Committed)
		if r.Why != "" {
			fmt.Fprintf(&s.out, " waits for %s", r.Why)
		}
		fmt.Fprintln(&s.out)
	}
}

// event reads an event off a command.
func event(a args) Event {
	engine, call := kv.ConnID(a.int("engine", 1)), kv.CallID(a.int("call", 0))
	req := a.str("req", "")
	switch a.d.Cmd {
	case "attach":
		return EngineAttached{Engine: engine, EngineID: a.str("id", "e")}
	case "begin":
		return Begin{Engine: engine, Call: call, ReqID: req, Total: a.int("total", 0), Peer: a.peer(), Deadline: a.duration("deadline", kv.Forever),
			Stage: a.int("stage", 0), BerthProxy: a.has("berth-proxy"), TokensKey: a.str("tokens", "")}
	case "stage":
		return Stage{Engine: engine, Call: call, ReqID: req, N: a.int("n", 1), Deadline: a.duration("deadline", kv.Forever), NonBlocking: a.has("non-blocking")}
	case "unstage":
		return Unstage{Engine: engine, Call: call, ReqID: req, Slots: slots(a.strs("slots"))}
	case "submit":
		ev := Submit{Engine: engine, Call: call, ReqID: req, HasEnd: a.has("end"), End: a.int("end", 0)}
		idx, in := numbers(a.strs("chunks")), slots(a.strs("slots"))
		for i := range idx {
			ev.Chunks = append(ev.Chunks, Chunk{Index: idx[i], Key: fmt.Sprintf("%s%d", a.str("key", "k"), idx[i]), Slot: in[i], Tokens: a.int("tokens", 16)})
		}
		return ev
	case "cancel":
		return Cancel{Engine: engine, Call: call, ReqID: req, Reason: fault.Code(a.str("reason", "")), Text: a.str("text", "")}
	case "hangup":
		return Hangup{Call: call}
	case "engine-lost":
		return EngineLost{Engine: engine, Last: a.has("last")}
	case "engine-fenced":
		return EngineFenced{Engine: engine, Trusted: a.has("trusted")}
	case "connected":
		return Connected{Conn: a.conn()}
	case "disconnected":
		return Disconnected{Conn: a.conn(), Text: a.str("text", "connection refused")}
	case "malformed":
		return Malformed{Conn: a.conn(), Text: "garbage"}
	case "recv":
		return Received{Conn: a.conn(), Msg: a.message()}
	case "link-up":
		return LinkUp{Link: LinkID(a.int("link", 1))}
	case "link-down":
		return LinkDown{Link: LinkID(a.int("link", 1)), Text: a.str("text", "reset")}
	case "sent":
		return Sent{Link: LinkID(a.int("link", 1)), Writes: unsigned(a.strs("writes"))}
	case "lost":
		return Lost{Link: LinkID(a.int("link", 1)), Writes: unsigned(a.strs("writes")), Text: "reset"}
	case "summed":
		ev := Summed{Batch: uint64(a.int("batch", 1))}
		for _, n := range numbers(a.strs("sums")) {
			ev.Sums = append(ev.Sums, uint32(n))
		}
		return ev
	case "tick":
		return Tick{}
	case "drain":
		return Drain{}
	}
	return nil
}

// args are the arguments of a command; each is key=value, key=(a,b) or a flag.
type args struct {
	t *testing.T
	d *datadriven.TestData
}

func (a args) has(key string) bool { return a.d.HasArg(key) }

func (a args) strs(key string) []string {
	for _, arg := range a.d.CmdArgs {
		if arg.Key == key {
			return arg.Vals
		}
	}
	return nil
}

func (a args) str(key, otherwise string) string {
	if v := a.strs(key); len(v) > 0 {
		return v[0]
	}
	return otherwise
}

func (a args) int(key string, otherwise int64) int64 {
	v := a.strs(key)
	if len(v) == 0 {
		return otherwise
	}
	n, err := strconv.ParseInt(v[0], 10, 64)
	if err != nil {
		a.d.Fatalf(a.t, "%s: %v", key, err)
	}
	return n
}

// duration reads seconds.
func (a args) duration(key string, otherwise kv.Duration) kv.Duration {
	v := a.strs(key)
	if len(v) == 0 {
		return otherwise
	}
	f, err := strconv.ParseFloat(v[0], 64)
	if err != nil {
		a.d.Fatalf(a.t, "%s: %v", key, err)
	}
	return kv.Duration(f * float64(kv.Second))
}

func (a args) peer() Peer {
	return Peer{Host: a.str("to", "d0"), AllocPort: int(a.int("port", 9000)), InitPort: int(a.int("init", 0))}
}

// conn reads a connection as peer.n.
func (a args) conn() kv.ConnID {
	hi, lo, _ := strings.Cut(a.str("conn", "1.1"), ".")
	h, err1 := strconv.Atoi(hi)
	l, err2 := strconv.Atoi(lo)
	if err1 != nil || err2 != nil {
		a.d.Fatalf(a.t, "conn %s.%s", hi, lo)
	}
	return kv.ConnID(h)<<32 | kv.ConnID(l)
}

// message reads a receiver's message: its kind is the argument "is".
func (a args) message() msg.Message {
	re, begin := uint64(a.int("re", 0)), uint64(a.int("begin", 0))
	switch a.str("is", "") {
	case "hello-reply":
		m := &msg.HelloReply{Re: re, Version: uint64(a.int("version", 1)), Incarnation: kv.Incarnation{byte(a.int("incarnation", 9))},
			Resumed: a.has("resumed"), Capacity: a.int("capacity", 10), LeaseMS: a.int("lease-ms", 15000)}
		names := a.strs("links")
		if names == nil {
			names = []string{"tcp"}
		}
		for _, n := range names {
			m.Links = append(m.Links, msg.LinkOffer{Name: n, Addr: n + "@d0"})
		}
		return m
	case "granted":
		return &msg.Granted{Re: re, Begin: begin, Generation: kv.Generation(a.int("gen", 7)), Slots: slots(a.strs("slots"))}
	case "commit-reply":
		return &msg.CommitReply{Re: re, Begin: begin, Complete: a.has("complete")}
	case "ended":
		return &msg.Ended{Seq: uint64(a.int("seq", 0)), Re: re, Begin: begin, Ending: msg.Ending(a.str("ending", "failed")), Reason: fault.Code(a.str("reason", "")), Text: a.str("text", "")}
	case "error":
		return &msg.Error{Re: re, Code: fault.Code(a.str("code", "internal")), Text: a.str("text", ""), RetryMS: a.int("retry-ms", 0)}
	case "heartbeat-reply":
		return &msg.HeartbeatReply{Re: re}
	case "alloc-response":
		m := &msg.AllocResponse{RemoteIndexes: numbers(a.strs("indexes")), AlreadySent: numbers(a.strs("already"))}
		return m
	}
	a.d.Fatalf(a.t, "unknown message %q", a.str("is", ""))
	return nil
}

// numbers reads numbers and ranges a-b.
func numbers(in []string) []int64 {
	var out []int64
	for _, v := range in {
		lo, hi, ok := strings.Cut(v, "..")
		a, err := strconv.ParseInt(lo, 10, 64)
		if err != nil {
			panic(err)
		}
		b := a
		if ok {
			if b, err = strconv.ParseInt(hi, 10, 64); err != nil {
				panic(err)
			}
		}
		for ; a <= b; a++ {
			out = append(out, a)
		}
	}
	return out
}

func slots(in []string) []kv.SlotID {
	var out []kv.SlotID
	for _, n := range numbers(in) {
		out = append(out, kv.SlotID(n))
	}
	return out
}

func unsigned(in []string) []uint64 {
	var out []uint64
	for _, n := range numbers(in) {
		out = append(out, uint64(n))
	}
	return out
}
