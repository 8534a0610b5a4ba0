package intake

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// TestScripts runs testdata/scripts/*.txt: each line of a block is one event, below it
// stand the actions that it caused, and at the end the pool. Check runs after
// each step. The commands are those of (*script).line.
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata/scripts", func(t *testing.T, path string) {
		s := &script{t: t, conns: map[string]kv.ConnID{}, seqs: map[string]uint64{}}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			s.t = t
			switch d.Cmd {
			case "new":
				return s.start(d.CmdArgs)
			case "do":
				return s.block(d.Input)
			}
			d.Fatalf(t, "unknown command %s", d.Cmd)
			return ""
		})
	})
}

// testConfig is a receiver with small chunks: slots of 64 bytes hold 16 tokens
// of [2, 1, 16, 1] bfloat16.
func testConfig(capacity int) Config {
	return Config{
		Incarnation: incarnation("R"),
		Facts:       kv.Facts{SlotBytes: 64, Format: kv.Format2LTD, DType: "bfloat16", ChunkTokens: 16, TPSize: 1},
		Capacity:    capacity,
		Links: []Link{{Name: "tcp", Addr: "h:1", ExactFence: true}, {Name: "shm", Addr: "/s", Pull: true, ExactFence: true},
			{Name: "nixl", Addr: "n", OneSided: true}},
		AllocationTimeout: 30 * kv.Second, RequestTimeout: 600 * kv.Second, Lease: 15 * kv.Second,
		UnclaimedTTL: 300 * kv.Second, EndingTTL: 120 * kv.Second, Quarantine: 30 * kv.Second, SurplusGrace: 5 * kv.Second,
		MaxWaiting: 100, Bypass: int64(capacity), MaxEndings: 1000, MaxConns: 100,
	}
}

func incarnation(s string) (i kv.Incarnation) {
	copy(i[:], s)
	return i
}

// script is one run.
type script struct {
	t      *testing.T
	core   *Core
	now    kv.Instant
	due    kv.Instant // the wake-up asked for
	manual bool       // fences are ordered by the script, not reported at once
	wakes  bool       // show them
	conns  map[string]kv.ConnID
	names  []string // of connections, by number
	seqs   map[string]uint64
	out    strings.Builder
}

func (s *script) start(args []datadriven.CmdArg) string {
	cfg := testConfig(10)
	for _, a := range args {
		v := ""
		if len(a.Vals) > 0 {
			v = a.Vals[0]
		}
		switch a.Key {
		case "capacity":
			cfg.Capacity = int(s.num(v))
			cfg.Bypass = int64(cfg.Capacity)
		case "bypass":
			cfg.Bypass = s.num(v)
		case "max-waiting":
			cfg.MaxWaiting = int(s.num(v))
		case "max-endings":
			cfg.MaxEndings = int(s.num(v))
		case "max-conns":
			cfg.MaxConns = int(s.num(v))
		case "allocation-timeout":
			cfg.AllocationTimeout = s.duration(v)
		case "ending-ttl":
			cfg.EndingTTL = s.duration(v)
		case "legacy-data":
			cfg.LegacyData = true
		case "slot-bytes-only":
			cfg.Facts = kv.Facts{SlotBytes: cfg.Facts.SlotBytes}
		case "manual-fences":
			s.manual = true
		case "wakes":
			s.wakes = true
		default:
			s.t.Fatalf("new: unknown option %s", a.Key)
		}
	}
	s.core, s.due = New(cfg, 0), kv.Never
	return s.pool()
}

func (s *script) block(input string) string {
	s.out.Reset()
	lines := strings.Split(strings.TrimSpace(input), "\n")
	for _, l := range lines {
		if len(lines) > 1 {
			fmt.Fprintf(&s.out, "%s\n", l)
		}
		s.line(strings.Fields(l))
	}
	return s.out.String() + s.pool()
}

// pool is the pool line: what is not zero, in the order of a slot's life.
func (s *script) pool() string {
	p := s.core.Status(s.now).Pool
	b := fmt.Sprintf("pool: %d free", p.Free)
	for _, k := range []struct {
		n    int
		name string
	}{{p.Reserved, "reserved"}, {p.Granted, "granted"}, {p.Committed, "committed"}, {p.Claimed, "claimed"}, {p.Quarantined, "quarantined"}} {
		if k.n > 0 {
			b += fmt.Sprintf(", %d %s", k.n, k.name)
		}
	}
	if n := len(s.core.waiting); n > 0 {
		b += fmt.Sprintf("; %d waiting", n)
	}
	return b + "\n"
}

// step makes one step and, unless the script orders fences itself, lets the
// links fence at once.
func (s *script) step(e Event) {
	var fences []Event
	for _, a := range s.core.Step(s.now, e) {
		switch a := a.(type) {
		case Wake:
			s.due = a.At
			if !s.wakes {
				continue
			}
		case Revoke:
			if !s.manual && s.exact(a.Link) {
				fences = append(fences, Fenced{Generation: a.Generation, Slots: slices.Clone(a.Slots)})
			}
		}
		fmt.Fprintf(&s.out, "  %s\n", s.action(a))
	}
	if err := s.core.Check(); err != nil {
		s.t.Fatalf("after %T%+v: %v", e, e, err)
	}
	for _, f := range fences {
		s.step(f)
	}
}

func (s *script) exact(link string) bool {
	return s.core.cfg.Links[s.core.linkNamed(link)].ExactFence
}

// args of a line: words in order and key=value pairs.
type args struct {
	s    *script
	word []string
	val  map[string]string
}

func (s *script) line(f []string) {
	a := args{s: s, val: map[string]string{}}
	for _, w := range f[1:] {
		if k, v, ok := strings.Cut(w, "="); ok {
			a.val[k] = v
		} else {
			a.word = append(a.word, w)
		}
	}
	switch f[0] {
	case "sender", "proxy": // sender NAME INCARNATION: connected, session open
		s.quiet("connect "+a.word[0], "hello "+a.word[0]+" "+a.word[1]+" role="+f[0])
	case "lmcache": // lmcache NAME: connected, identity NAME-to-R
		s.quiet("connect " + a.word[0] + " id=" + a.word[0] + "-to-R")
	case "connect": // connect NAME id=IDENTITY
		id := kv.ConnID(len(s.names) + 1)
		s.conns[a.word[0]] = id
		s.names = append(s.names, a.word[0])
		s.step(Connected{Conn: id, Identity: a.str("id", ""), Remote: "net"})
	case "drop":
		s.step(Disconnected{Conn: a.conn()})
	case "hello": // hello CONN INCARNATION role= secret= versions=1-1 resume=yes FACT=...
		s.step(Received{a.conn(), a.hello()})
	case "begin": // begin CONN BEGIN NAME total= link= deadline= tokens=
		s.step(Received{a.conn(), &msg.Begin{Seq: a.seq(), Begin: uint64(a.at(1)), ReqID: a.id(2), TotalChunks: a.num("total", 1),
			Link: a.str("link", "tcp"), DeadlineMS: a.millis("deadline"), TokensKey: a.str("tokens", "")}})
	case "commit": // commit CONN BEGIN [CHUNKS] end= key= tokens= sum= src=SLOT/GEN ...
		s.step(Received{a.conn(), a.commit()})
	case "cancel": // cancel CONN begin=|name= reason= text=
		s.step(Received{a.conn(), &msg.Cancel{Seq: a.seq(), Begin: uint64(a.num("begin", 0)), ReqID: a.str("name", ""),
			Reason: fault.Code(a.str("reason", "cancelled")), Text: a.str("text", "")}})
	case "drained": // drained CONN RE BEGIN
		s.step(Received{a.conn(), &msg.Drained{Re: uint64(a.at(1)), Begin: uint64(a.at(2))}})
	case "watch": // watch CONN NAME deadline=
		s.step(Received{a.conn(), &msg.Watch{Seq: a.seq(), ReqID: a.id(1), DeadlineMS: a.millis("deadline")}})
	case "ready": // ready CONN NAME
		s.step(Received{a.conn(), &msg.Ready{Seq: a.seq(), ReqID: a.id(1)}})
	case "heartbeat":
		s.step(Received{a.conn(), &msg.Heartbeat{Seq: a.seq()}})
	case "stray": // a reply to something never asked
		s.step(Received{a.conn(), &msg.CommitReply{Re: 1, Begin: 1}})
	case "proxynotif":
		s.step(Received{a.conn(), &msg.ProxyNotif{ReqID: a.id(1)}})
	case "alloc": // alloc CONN NAME|- KEYS total= last=yes toks= shape= fmt= dtype=
		s.step(Received{a.conn(), a.alloc()})
	case "cancelnotif": // cancelnotif CONN NAME [KEYS]
		s.step(Received{a.conn(), &msg.CancelNotif{ReqID: a.id(1), Keys: a.keys(2)}})
	case "malformed": // malformed CONN seq= keys= unknown=yes
		s.step(Malformed{Conn: a.conn(), Seq: uint64(a.num("seq", 0)), Keys: int(a.num("keys", 0)), Unknown: a.str("unknown", "") != "", Text: "cannot be decoded"})
	case "handshaken":
		s.step(Handshaken{LocalID: a.word[0]})
	case "landed": // landed GEN SLOTS bytes= sum=
		for _, k := range a.numbers(1) {
			s.step(Landed{Slot: kv.SlotID(k), Generation: kv.Generation(a.at(0)), Bytes: a.num("bytes", 64),
				HasSum: a.val["sum"] != "", Sum: uint32(a.num("sum", 0))})
		}
	case "failed": // failed GEN SLOT code=
		err := fault.New(fault.BadRequest, "a frame of 32 bytes for a chunk of 64")
		if code := a.val["code"]; code != "" {
			err = fault.New(fault.Code(code), "for another reason")
		}
		s.step(Failed{Slot: kv.SlotID(a.at(1)), Generation: kv.Generation(a.at(0)), Err: err})
	case "fenced": // fenced GEN SLOTS
		var slots []kv.SlotID
		for _, k := range a.numbers(1) {
			slots = append(slots, kv.SlotID(k))
		}
		s.step(Fenced{Generation: kv.Generation(a.at(0)), Slots: slots})
	case "linklost": // linklost INCARNATION LINK
		s.step(LinkLost{Owner: incarnation(a.word[0]), Link: a.word[1], Text: "reset"})
	case "peergone":
		s.step(PeerGone{Owner: incarnation(a.word[0])})
	case "engine": // engine NAME id= tokens=
		id := kv.ConnID(len(s.names) + 1)
		s.conns[a.word[0]] = id
		s.names = append(s.names, a.word[0])
		s.step(EngineAttached{Engine: id, EngineID: a.str("id", "E"), TokensKey: a.str("tokens", "")})
	case "wait": // wait ENGINE NAME call= deadline=
		d := kv.Forever
		if a.val["deadline"] != "" {
			d = s.duration(a.val["deadline"])
		}
		s.step(Wait{Engine: a.conn(), Call: a.call(), ReqID: a.id(1), Deadline: d})
	case "find": // find ENGINE BY KEYS
		s.step(Find{Engine: a.conn(), Call: a.call(), By: a.id(1), Keys: a.keys(2)})
	case "claim": // claim ENGINE BY NAME
		s.step(Claim{Engine: a.conn(), Call: a.call(), By: a.id(1), ReqID: a.id(2)})
	case "release": // release ENGINE BY NAME [CHUNKS]
		s.step(Release{Engine: a.conn(), Call: a.call(), By: a.id(1), ReqID: a.id(2), Chunks: a.numbers(3)})
	case "cancelname": // cancelname ENGINE NAME reason=
		s.step(CancelByName{Engine: a.conn(), Call: a.call(), ReqID: a.id(1), Reason: fault.Code(a.str("reason", ""))})
	case "hangup":
		s.step(Hangup{Call: kv.CallID(a.at(0))})
	case "enginelost":
		s.step(EngineLost{Engine: a.conn()})
	case "enginefenced": // enginefenced ENGINE trusted=yes
		s.step(EngineFenced{Engine: a.conn(), Trusted: a.val["trusted"] != ""})
	case "drain":
		s.step(Drain{})
	case "tick": // tick +DURATION: time passes, with the wake-ups that were asked for
		s.tick(a)
	case "stopped": // stopped +DURATION: time passes and this process does not run
		s.now = s.now.Add(s.duration(strings.TrimPrefix(a.word[0], "+")))
	case "status":
		s.status()
	default:
		s.t.Fatalf("unknown command %q", f[0])
	}
}

// quiet runs lines whose output is of no interest.
func (s *script) quiet(lines ...string) {
	said := s.out.String()
	for _, l := range lines {
		s.line(strings.Fields(l))
	}
	s.out.Reset()
	s.out.WriteString(said)
}

func (s *script) tick(a args) {
	to := s.now
	if len(a.word) > 0 {
		to = s.now.Add(s.duration(strings.TrimPrefix(a.word[0], "+")))
	}
	for s.due <= to {
		s.now, s.due = max(s.now, s.due), kv.Never
		s.step(Tick{})
	}
	s.now = to
	s.step(Tick{})
}

func (s *script) status() {
	st := s.core.Status(s.now)
	for _, r := range st.Requests {
		fmt.Fprintf(&s.out, "  %s of %s: %s, total %d, granted %d, committed %d, age %gs", r.ID, r.Owner, r.State, r.Total, r.Granted, r.Committed, r.Age.Seconds())
		if w := r.Why; w != nil {
			fmt.Fprintf(&s.out, "; waits for %s: need %d, free %d, earmarked %t, overtaken %d, deadline %gs", w.For, w.Need, w.Free, w.Earmarked, w.Overtaken, w.Deadline.Seconds())
		}
		s.out.WriteString("\n")
	}
	fmt.Fprintf(&s.out, "  %d waiting, %d sessions, %d endings, draining %t\n", st.Waiting, st.Sessions, st.Endings, st.Draining)
}
