package intake

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// rig is a core with one connection of each kind: 1 a sender, 2 a proxy, 3 an
// LMCache sender, and an engine on 4.
type rig struct {
	*Core
	t   *testing.T
	now kv.Instant
}

func newRig(t *testing.T, change func(*Config)) *rig {
	cfg := testConfig(4)
	change(&cfg)
	r := &rig{Core: New(cfg, 0), t: t}
	for id, role := range []msg.Role{1: msg.RoleSender, 2: msg.RoleProxy, 3: roleLegacy} {
		if role == "" {
			continue
		}
		r.step(Connected{Conn: kv.ConnID(id), Identity: fmt.Sprint("peer", id)})
		if role != roleLegacy {
			f := cfg.Facts
			r.step(Received{kv.ConnID(id), &msg.Hello{Seq: 1, Min: 1, Max: 1, Role: role, Incarnation: incarnation(string(role)), Facts: &f}})
		}
	}
	r.step(EngineAttached{Engine: 4, EngineID: "e"})
	return r
}

func (r *rig) step(e Event) []Action {
	r.t.Helper()
	all := slices.Clone(r.Step(r.now, e))
	if err := r.Check(); err != nil {
		r.t.Fatalf("after %T: %v", e, err)
	}
	return all
}

// refusal returns the code of the only error among a step's answers, or "".
func refusalIn(all []Action) fault.Code {
	for _, a := range all {
		if s, ok := a.(Send); ok {
			if m, ok := s.Msg.(*msg.Error); ok {
				return m.Code
			}
		}
		if x, ok := a.(Answer); ok && x.Err != nil {
			return x.Err.Code
		}
	}
	return ""
}

// TestLimits: at each limit all is well, one past it is a typed refusal (R11).
// Of what is shared, one sender's or proxy's limit is its share.
func TestLimits(t *testing.T) {
	for name, c := range map[string]struct {
		limit  int
		change func(*Config)
		one    func(r *rig, i int) []Action
		code   fault.Code
	}{
		"waiting": {4, func(c *Config) { c.MaxWaiting = 5 }, func(r *rig, i int) []Action {
			if i == 0 {
				r.step(Received{1, &msg.Begin{Seq: 2, Begin: 1, ReqID: "all", Link: "tcp", TotalChunks: 4}})
			}
			return r.step(Received{1, &msg.Begin{Seq: uint64(i + 3), Begin: uint64(i + 2), ReqID: fmt.Sprint(i), Link: "tcp", TotalChunks: 1}})
		}, fault.Busy},
		"waits": {5, func(c *Config) { c.MaxWaiting = 5 }, func(r *rig, i int) []Action {
			return r.step(Wait{Engine: 4, Call: kv.CallID(i + 1), ReqID: fmt.Sprint(i), Deadline: kv.Forever})
		}, fault.Busy},
		"watched names": {7, func(c *Config) { c.MaxWaiting = 5 }, func(r *rig, i int) []Action {
			return r.step(Received{2, &msg.Watch{Seq: uint64(i + 2), ReqID: fmt.Sprint(i)}})
		}, fault.Busy},
		"questions about a name": {maxAsks, func(*Config) {}, func(r *rig, i int) []Action {
			return r.step(Received{2, &msg.Watch{Seq: uint64(i + 2), ReqID: "x"}})
		}, fault.Busy},
		"endings": {7, func(c *Config) { c.MaxEndings = 7 }, func(r *rig, i int) []Action {
			all := r.step(Received{1, &msg.Begin{Seq: uint64(i + 2), Begin: uint64(i + 1), ReqID: fmt.Sprint(i), Link: "tcp", TotalChunks: 5}})
			if refusalIn(all) == fault.TooLarge {
				return nil // as it should be
			}
			return all
		}, fault.Busy},
		"sessions": {8, func(c *Config) { c.MaxConns = 8 }, func(r *rig, i int) []Action {
			if i < 2 {
				return nil // there are two
			}
			id := kv.ConnID(10 + i)
			r.step(Connected{Conn: id, Identity: fmt.Sprint(i)})
			all := r.step(Received{id, &msg.Hello{Seq: 1, Min: 1, Max: 1, Role: msg.RoleTool, Incarnation: incarnation(fmt.Sprint(i))}})
			r.step(Disconnected{Conn: id})
			return all
		}, fault.Busy},
		"keys to find": {kv.MaxKeys, func(*Config) {}, func(r *rig, i int) []Action {
			if i < kv.MaxKeys-1 {
				return nil
			}
			return r.step(Find{Engine: 4, Call: 1, By: "b", Keys: make([]string, i+1)})
		}, fault.BadRequest},
		"chunks of a Commit": {kv.MaxKeys, func(c *Config) { c.Capacity = kv.MaxKeys + 1 }, func(r *rig, i int) []Action {
			if i == 0 {
				return r.step(Received{1, &msg.Begin{Seq: 2, Begin: 1, ReqID: "x", Link: "tcp", TotalChunks: kv.MaxKeys + 1}})
			}
			if i < kv.MaxKeys-1 {
				return nil
			}
			m := &msg.Commit{Seq: uint64(i + 3), Begin: 1, Fmt: 1, DType: "bfloat16", Shape: []int64{2, 1, 16, 1}}
			for k := range i + 1 {
				m.Chunks = append(m.Chunks, msg.Chunk{Index: int64(k), Key: "k", Tokens: 16})
			}
			return r.step(Received{1, m})
		}, fault.BadRequest},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, c.change)
			for i := range c.limit {
				if code := refusalIn(c.one(r, i)); code != "" {
					t.Fatalf("%d of %d: %s", i+1, c.limit, code)
				}
			}
			if code := refusalIn(c.one(r, c.limit)); code != c.code {
				t.Fatalf("one past %d: %q instead of %s", c.limit, code, c.code)
			}
		})
	}
}

func TestLineOfReplies(t *testing.T) {
	r := newRig(t, func(*Config) {})
	alloc := func(id string, total int64) []Action {
		return r.step(Received{3, &msg.AllocRequest{Keys: []string{}, Fmt: 1, ReqID: id, TotalChunks: total}})
	}
	alloc("a", 4)
	alloc("b", 0) // answered at once
	alloc("c", 3) // refused: it could never go
	r.step(Received{1, &msg.Begin{Seq: 2, Begin: 1, ReqID: "x", Link: "tcp", TotalChunks: 4}})
	r.step(Received{3, &msg.CancelNotif{ReqID: "a"}})
	alloc("d", 2) // waits: the sender has all
	for i := range maxReplies - 1 {
		if all := r.step(Received{3, &msg.CancelNotif{ReqID: fmt.Sprint(i)}}); len(all) > 1 {
			t.Fatalf("message %d: %v", i, all)
		}
	}
	if all := r.step(Received{3, &msg.CancelNotif{ReqID: "x"}}); !slices.Contains(all, Action(Close{Conn: 3})) {
		t.Fatalf("one past the limit: %v", all)
	}
	if all := r.step(Received{3, &msg.CancelNotif{ReqID: "x"}}); len(all) > 0 {
		t.Fatalf("after that: %v", all)
	}
}

func TestHandshakesGoOldestFirst(t *testing.T) {
	h := handshakes{at: map[string]uint64{}}
	for i := range 4 {
		h.add(fmt.Sprint("p", i), 3)
		h.add(fmt.Sprint("p", i), 3)
	}
	for id, want := range map[string]bool{"p0-to-h9": false, "p1-to-h9": true, "p2-to-x-to-h9": false, "p3": true, "": false} {
		if h.has(id) != want {
			t.Errorf("%q: %t", id, !want)
		}
	}
	h.add("p-to-q", 9)
	if !h.has("p-to-q-to-h9") {
		t.Error("a local id may contain -to-")
	}
}

func TestTimeNeverGoesBack(t *testing.T) {
	r := newRig(t, func(*Config) {})
	r.now = kv.Instant(5 * kv.Second)
	r.step(Tick{})
	r.now = 0
	r.step(Tick{})
	if r.Core.now != kv.Instant(5*kv.Second) {
		t.Fatal(r.Core.now)
	}
}

// TestCheckFindsEachBreach: each numbered invariant can be seen to fail.
func TestCheckFindsEachBreach(t *testing.T) {
	for want, breakIt := range map[string]func(r *rig){
		"invariant 1: R1":        func(r *rig) { must(r.pool.Reserve(0)); must(r.pool.Revoke(0, 1)); _ = r.pool.LetGo(0, 1, 1) },
		"invariant 2: 2 slots":   func(r *rig) { must(r.pool.Reserve(1)); r.ledger.Return(0) },
		"invariant 3":            func(r *rig) { r.requests.last.gen = 9 },
		"invariant 4":            func(r *rig) { r.requests.first.state = ready },
		"invariant 5":            func(r *rig) { x := r.requests.first; x.chunks[0].key = "k"; r.offer(x) },
		"invariant 6: 1 waiting": func(r *rig) { r.cfg.MaxWaiting = 0 },
		"invariant 7: R10":       func(r *rig) { r.timers.set(&r.requests.last.timer, kv.Never) },
		"invariant 7: 2 leases":  func(r *rig) { r.leases++ },
	} {
		r := newRig(t, func(*Config) {})
		r.step(Received{1, &msg.Begin{Seq: 2, Begin: 1, ReqID: "x", Link: "tcp", TotalChunks: 2}})
		r.step(Received{1, &msg.Begin{Seq: 3, Begin: 2, ReqID: "y", Link: "tcp", TotalChunks: 3}})
		breakIt(r)
		if err := r.Check(); err == nil || !strings.HasPrefix(err.Error(), strings.SplitN(want, ":", 2)[0]) {
			t.Errorf("%s: %v", want, err)
		}
	}
}

// TestFieldsAreClonedAndEncoded: a new field must be led through clone.go and
// encode.go (or left out there for a reason), and then be counted here.
func TestFieldsAreClonedAndEncoded(t *testing.T) {
	for typ, want := range map[reflect.Type]int{
		reflect.TypeFor[Core]():       36,
		reflect.TypeFor[conn]():       7,
		reflect.TypeFor[peer]():       23,
		reflect.TypeFor[request]():    41,
		reflect.TypeFor[chunk]():      8,
		reflect.TypeFor[commit]():     5,
		reflect.TypeFor[legacy]():     10,
		reflect.TypeFor[batch]():      2,
		reflect.TypeFor[reply]():      4,
		reflect.TypeFor[ending]():     12,
		reflect.TypeFor[name]():       7,
		reflect.TypeFor[watch]():      7,
		reflect.TypeFor[ask]():        3,
		reflect.TypeFor[wait]():       5,
		reflect.TypeFor[engine]():     3,
		reflect.TypeFor[reader]():     4,
		reflect.TypeFor[handshakes](): 2,
	} {
		if n := typ.NumField(); n != want {
			t.Errorf("%s has %d fields, %d are known here: see to Clone and Encode", typ, n, want)
		}
	}
}

// TestEncodeForgetsHistory: what has come and gone leaves no trace in the
// encoding, except numbers that peers have seen.
func TestEncodeForgetsHistory(t *testing.T) {
	a, b := newRig(t, func(*Config) {}), newRig(t, func(*Config) {})
	b.step(Connected{Conn: 9, Identity: "gone"})
	b.step(Received{9, &msg.CancelNotif{ReqID: "x"}})
	b.step(Disconnected{Conn: 9})
	b.step(Received{2, &msg.Watch{Seq: 2, ReqID: "y", DeadlineMS: 1000}})
	b.step(Wait{Engine: 4, Call: 1, ReqID: "z", Deadline: kv.Second})
	for _, r := range []*rig{a, b} {
		for range 1300 {
			r.now = r.now.Add(kv.Second / 10)
			r.step(Received{1, &msg.Heartbeat{Seq: 5}})
			r.step(Received{2, &msg.Heartbeat{Seq: 5}})
		}
	}
	if string(a.Encode(nil)) != string(b.Encode(nil)) {
		t.Fatal("two cores that will answer alike are encoded differently")
	}
	b.step(EngineAttached{Engine: 5, EngineID: "e"})
	if string(a.Encode(nil)) == string(b.Encode(nil)) {
		t.Fatal("two cores that differ are encoded alike")
	}
}

// TestEncodeLeaseTimer: a lease's timer is moved only when it rings, so two cores
// in which the same lease ends at the same time may be woken at others.
func TestEncodeLeaseTimer(t *testing.T) {
	heard := func(at ...int) *rig {
		r := newRig(t, func(*Config) {})
		for i := 1; i <= 11; i++ {
			r.now = kv.Instant(0).Add(kv.Duration(i) * r.cfg.Lease / 10)
			if slices.Contains(at, i) {
				r.step(Received{1, &msg.Heartbeat{Seq: 5}})
				r.step(Received{2, &msg.Heartbeat{Seq: 5}})
			}
			r.step(Tick{})
		}
		return r
	}
	early, late, again := heard(5, 11), heard(9, 11), heard(9, 11)
	if string(early.Encode(nil)) == string(late.Encode(nil)) {
		t.Fatal("two cores of which one is woken earlier are encoded alike")
	}
	if string(late.Encode(nil)) != string(again.Encode(nil)) {
		t.Fatal("a core is encoded in two ways")
	}
}

// TestParkedBatches: what waits for room in LMCache's dialect is bounded by its
// bytes too, and nothing is left of it.
func TestParkedBatches(t *testing.T) {
	r := newRig(t, func(*Config) {})
	r.step(Received{1, &msg.Begin{Seq: 2, Begin: 1, ReqID: "all", Link: "tcp", TotalChunks: 4}})
	batch := func(id string) *msg.AllocRequest {
		return &msg.AllocRequest{Keys: slices.Repeat([]string{strings.Repeat("k", kv.MaxKey)}, 4000), Fmt: 1, DType: "bfloat16",
			Shape: []int64{2, 1, 16, 1}, LastChunkToks: 16, ReqID: id, TotalChunks: 4}
	}
	each := keyBytes(batch("x"))
	fit := maxParked / each
	for i := range fit + 1 {
		all := r.step(Received{3, batch(fmt.Sprint("r", i))})
		refused := slices.ContainsFunc(all, func(a Action) bool { n, ok := a.(Note); return ok && n.Reason == fault.Busy })
		if refused != (i == fit) || r.parked != min(i+1, fit)*each {
			t.Fatalf("batch %d: refused %v, %d bytes wait", i, refused, r.parked)
		}
	}
	// A batch more of one that waits is as much.
	r.step(Received{3, batch("r0")})
	if r.parked != (fit-1)*each {
		t.Fatalf("%d bytes wait", r.parked)
	}
	r.step(Received{3, &msg.CancelNotif{ReqID: "r1"}})
	if r.parked != (fit-2)*each {
		t.Fatalf("%d bytes wait", r.parked)
	}
	r.step(Received{1, &msg.Cancel{Seq: 3, Begin: 1}})
	r.step(Fenced{Generation: 1, Slots: []kv.SlotID{0, 1, 2, 3}})
	if len(r.waiting) != 0 && r.parked != int64(len(r.waiting))*each {
		t.Fatalf("%d bytes wait of %d requests", r.parked, len(r.waiting))
	}
}

// TestKeptText: a peer's text is kept short, and whole characters of it.
func TestKeptText(t *testing.T) {
	for _, n := range []int{0, 1, maxKeptText - 1, maxKeptText, maxKeptText + 1, 5000} {
		for _, s := range []string{"x", "é", "日", "😀"} {
			text := strings.Repeat(s, n)
			got := kept(text)
			if len(got) > maxKeptText || !strings.HasPrefix(text, got) || !utf8.ValidString(got) || len(text) > maxKeptText && len(got) <= maxKeptText-4 {
				t.Errorf("%d bytes of %q are kept as %d", len(text), s, len(got))
			}
		}
	}
}
