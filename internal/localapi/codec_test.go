package localapi

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand"
	"reflect"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/google/go-cmp/cmp"
	"github.com/tinylib/msgp/msgp"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/wire"
)

// samples has each request, answer and event with every field set, and those
// with optional fields also without. Their bytes are in testdata/golden.
var samples = map[string]any{
	"hello/engine": &Hello{Version: 1, Part: Worker, EngineID: "e-1", Rank: 1,
		Layout: &kv.Facts{SlotBytes: 4096, Format: 1, DType: "half", ChunkTokens: 16, TPSize: 2, TPRank: 1}, Shape: []int64{2, 4, 16, 16}, TokensKey: "k"},
	"hello/tool": &Hello{Version: 1, Part: Tool},
	"begin": &Begin{Req: "r", TotalChunks: 8, Host: "::1", AllocPort: 7301, InitPort: 7300, DeadlineMS: 600_000, Stage: 4,
		BerthProxy: true},
	"begin/required":      &Begin{Req: "r", TotalChunks: 8, Host: "h", AllocPort: 7301},
	"stage":               &Stage{Req: "r", N: 4, DeadlineMS: 30_000, NonBlocking: true},
	"stage/required":      &Stage{Req: "r", N: 4},
	"unstage":             &Unstage{Req: "r", Slots: []kv.SlotID{3, 200}},
	"submit":              &Submit{Req: "r", Chunks: []Staged{{Index: 7, Key: "k7", Slot: 3, Tokens: 5}}, HasEnd: true, End: 8},
	"submit/end_only":     &Submit{Req: "r", HasEnd: true},
	"submit/no_end":       &Submit{Req: "r", Chunks: []Staged{{}}},
	"cancel":              &Cancel{Req: "r", Reason: fault.Deadline, Text: "late"},
	"cancel/required":     &Cancel{Req: "r"},
	"wait":                &Wait{Req: "r", DeadlineMS: 1000},
	"find":                &Find{By: "b", Keys: []string{"k0", "k1"}},
	"claim":               &Claim{By: "b", Req: "r"},
	"release":             &Release{By: "b", Req: "r", Chunks: []int64{0, 1}},
	"release/required":    &Release{By: "b", Req: "r"},
	"status":              &Status{},
	"drain":               &Drain{},
	"hangup":              &Hangup{Call: 7},
	"answer/hello":        &HelloAnswer{Version: 1, Incarnation: kv.Incarnation{1, 15: 2}, SlotBytes: 4096, StagingCapacity: 10, ReceiveCapacity: 20, MaxStage: 5, Pools: []string{StagingPool, ReceivePool}},
	"answer/done":         &Done{},
	"answer/slots":        &Slots{Slots: []kv.SlotID{0, 1}},
	"answer/ending":       &Ending{Ending: msg.EndFailed, Reason: fault.PeerLost, Text: "gone"},
	"answer/ending/ready": &Ending{Ending: msg.EndReady},
	"answer/found":        &Found{Req: "r", Matched: 2},
	"answer/found/none":   &Found{},
	"answer/claimed":      &Claimed{Chunks: []Chunk{{Index: 0, Slot: 9, Tokens: 16, Bytes: 4096, Key: "k0"}}, Fmt: 1, DType: "half", Shape: []int64{2, 4, 16, 16}},
	"answer/status":       &StatusAnswer{Status: "{}"},
	"answer/error":        &fault.Error{Code: fault.Busy, Text: "full", Retry: 500 * kv.Millisecond},
	"event/granted":       &Granted{Req: "r", Slots: []kv.SlotID{4}},
	"event/ended":         &Ended{Req: "r", Ending: msg.EndCancelled, Reason: fault.Cancelled, Text: "client gone"},
	"event/ended/ready":   &Ended{Req: "r", Ending: msg.EndReady},
}

// requestOf is a request that an answer of this type answers.
var requestOf = map[reflect.Type]Request{
	reflect.TypeFor[*HelloAnswer]():  &Hello{},
	reflect.TypeFor[*Done]():         &Submit{},
	reflect.TypeFor[*Slots]():        &Stage{},
	reflect.TypeFor[*Ending]():       &Wait{},
	reflect.TypeFor[*Found]():        &Find{},
	reflect.TypeFor[*Claimed]():      &Claim{},
	reflect.TypeFor[*StatusAnswer](): &Status{},
}

const sampleID = 300

func encode(b []byte, v any) ([]byte, error) {
	switch v := v.(type) {
	case Request:
		return AppendRequest(b, sampleID, v)
	case Answer:
		return AppendAnswer(b, sampleID, v)
	case Event:
		return AppendEvent(b, v)
	case *fault.Error:
		return AppendError(b, sampleID, v)
	}
	panic(fmt.Sprintf("%T", v))
}

// decode reads what encode wrote of something like v.
func decode(b []byte, v any) (any, error) {
	if _, ok := v.(Request); ok {
		id, hasID, req, err := DecodeRequest(b)
		if err == nil && (!hasID || id != sampleID) {
			err = fmt.Errorf("id %d, %t", id, hasID)
		}
		return req, err
	}
	reply, err := DecodeReply(b)
	if err != nil {
		return nil, err
	}
	if _, ok := v.(Event); ok {
		if reply.HasID || reply.Err != nil {
			return nil, fmt.Errorf("an event is %+v", reply)
		}
		return reply.Event, nil
	}
	if !reply.HasID || reply.ID != sampleID || reply.Event != nil {
		return nil, fmt.Errorf("an answer is %+v", reply)
	}
	if _, ok := v.(*fault.Error); ok {
		return reply.Err, nil
	}
	if reply.Err != nil {
		return nil, reply.Err
	}
	return DecodeAnswer(b, requestOf[reflect.TypeOf(v)])
}

func TestGolden(t *testing.T) {
	seen := map[string]bool{}
	datadriven.RunTest(t, "testdata/golden", func(t *testing.T, d *datadriven.TestData) string {
		v, ok := samples[d.Cmd]
		if !ok {
			d.Fatalf(t, "no sample %q", d.Cmd)
		}
		seen[d.Cmd] = true
		b, err := encode(nil, v)
		if err != nil {
			d.Fatalf(t, "%v", err)
		}
		got, err := decode(b, v)
		if err != nil {
			d.Fatalf(t, "%v", err)
		}
		if diff := cmp.Diff(v, got); diff != "" {
			t.Errorf("%s: decoded (-want +got):\n%s", d.Cmd, diff)
		}
		var s strings.Builder
		for ; len(b) > 40; b = b[40:] {
			fmt.Fprintln(&s, hex.EncodeToString(b[:40]))
		}
		return s.String() + hex.EncodeToString(b) + "\n"
	})
	for name := range samples {
		if !seen[name] {
			t.Errorf("testdata/golden has no %s", name)
		}
	}
}

// pairs is a map in order, written without any limit of ours.
type pairs []any

func (p pairs) bytes() []byte {
	b := msgp.AppendMapHeader(nil, uint32(len(p)/2))
	for i, v := range p {
		if i%2 == 0 {
			b = msgp.AppendString(b, v.(string))
		} else if list, ok := v.([]pairs); ok {
			b = msgp.AppendArrayHeader(b, uint32(len(list)))
			for _, e := range list {
				b = append(b, e.bytes()...)
			}
		} else {
			b, _ = msgp.AppendIntf(b, v)
		}
	}
	return b
}

func times[T any](n int, v T) []T {
	out := make([]T, n)
	for i := range out {
		out[i] = v
	}
	return out
}

// TestLimits has the limits of requests; those of the other direction are
// wire's, in the same tables.
func TestLimits(t *testing.T) {
	text := func(n int) string { return strings.Repeat("x", n) }
	chunk := func(key string) pairs { return pairs{"index", 0, "key", key, "slot", 0, "tokens", 1} }
	for _, row := range []struct {
		name  string
		limit int
		raw   func(n int) pairs
		req   func(n int) Request
	}{
		{"part", wire.MaxName, func(n int) pairs { return pairs{"id", 1, "op", "hello", "version", 1, "part", text(n)} },
			func(n int) Request { return &Hello{Part: Part(text(n))} }},
		{"engine_id", kv.MaxEngineID, func(n int) pairs {
			return pairs{"id", 1, "op", "hello", "version", 1, "part", "", "engine_id", text(n)}
		}, func(n int) Request { return &Hello{EngineID: text(n)} }},
		{"shape", kv.MaxDims, func(n int) pairs {
			return pairs{"id", 1, "op", "hello", "version", 1, "part", "", "shape", times(n, int64(1))}
		}, func(n int) Request { return &Hello{Shape: times(n, int64(1))} }},
		{"tokens_key", kv.MaxKey, func(n int) pairs {
			return pairs{"id", 1, "op", "hello", "version", 1, "part", "", "tokens_key", text(n)}
		}, func(n int) Request { return &Hello{TokensKey: text(n)} }},
		{"req", kv.MaxReqID, func(n int) pairs { return pairs{"id", 1, "op", "stage", "req", text(n), "n", 1} },
			func(n int) Request { return &Stage{Req: text(n)} }},
		{"host", maxHost, func(n int) pairs {
			return pairs{"id", 1, "op", "begin", "req", "", "total_chunks", 1, "host", text(n), "alloc_port", 1}
		}, func(n int) Request { return &Begin{Host: text(n)} }},
		{"slots", kv.MaxSlots, func(n int) pairs { return pairs{"id", 1, "op", "unstage", "req", "", "slots", times(n, int64(1))} },
			func(n int) Request { return &Unstage{Slots: make([]kv.SlotID, n)} }},
		{"chunks", kv.MaxKeys, func(n int) pairs { return pairs{"id", 1, "op", "submit", "req", "", "chunks", times(n, chunk("k"))} },
			func(n int) Request { return &Submit{Chunks: make([]Staged, n)} }},
		{"key", kv.MaxKey, func(n int) pairs { return pairs{"id", 1, "op", "submit", "req", "", "chunks", []pairs{chunk(text(n))}} },
			func(n int) Request { return &Submit{Chunks: []Staged{{Key: text(n)}}} }},
		{"reason", wire.MaxName, func(n int) pairs { return pairs{"id", 1, "op", "cancel", "req", "", "reason", text(n)} },
			func(n int) Request { return &Cancel{Reason: fault.Code(text(n))} }},
		{"by", kv.MaxBy, func(n int) pairs { return pairs{"id", 1, "op", "claim", "by", text(n), "req", ""} },
			func(n int) Request { return &Claim{By: text(n)} }},
		{"keys", kv.MaxKeys, func(n int) pairs { return pairs{"id", 1, "op", "find", "by", "", "keys", times(n, "")} },
			func(n int) Request { return &Find{Keys: times(n, "")} }},
		{"find key", kv.MaxKey, func(n int) pairs { return pairs{"id", 1, "op", "find", "by", "", "keys", []string{text(n)}} },
			func(n int) Request { return &Find{Keys: []string{text(n)}} }},
		{"release chunks", kv.MaxSlots, func(n int) pairs {
			return pairs{"id", 1, "op", "release", "by", "", "req", "", "chunks", times(n, int64(1))}
		}, func(n int) Request { return &Release{Chunks: times(n, int64(1))} }},
	} {
		if _, _, _, err := DecodeRequest(row.raw(row.limit).bytes()); err != nil {
			t.Errorf("%s: decode at the limit: %v", row.name, err)
		}
		if _, err := AppendRequest(nil, 1, row.req(row.limit)); err != nil {
			t.Errorf("%s: encode at the limit: %v", row.name, err)
		}
		id, hasID, _, derr := DecodeRequest(row.raw(row.limit + 1).bytes())
		if id != 1 || !hasID {
			t.Errorf("%s: the id is lost", row.name)
		}
		_, eerr := AppendRequest(nil, 1, row.req(row.limit+1))
		for _, err := range []error{derr, eerr} {
			if fault.CodeOf(err) != fault.BadRequest {
				t.Errorf("%s: past the limit: %v", row.name, err)
				continue
			}
			for _, n := range []int{row.limit, row.limit + 1} {
				if !strings.Contains(err.Error(), fmt.Sprint(n)) {
					t.Errorf("%s: %v does not name %d", row.name, err, n)
				}
			}
		}
	}
}

func TestRequestErrors(t *testing.T) {
	for _, row := range []struct {
		name  string
		b     []byte
		hasID bool
		code  fault.Code
		text  string
	}{
		{"empty", nil, false, fault.BadRequest, "truncated"},
		{"no map", []byte("\x93\x01\x02\x03"), false, fault.BadRequest, "want map, got array"},
		{"no id", pairs{"op", "status"}.bytes(), false, "", ""},
		{"id as str", pairs{"id", "1", "op", "status"}.bytes(), false, fault.BadRequest, "want int, got str"},
		{"negative id", pairs{"id", -1, "op", "status"}.bytes(), false, fault.BadRequest, "at least 0"},
		{"no op", pairs{"id", 1}.bytes(), true, fault.BadRequest, "missing op"},
		{"op as int", pairs{"id", 1, "op", 2}.bytes(), true, fault.BadRequest, "want str, got int"},
		{"unknown op", pairs{"id", 1, "op", "fly"}.bytes(), true, fault.UnknownMessage, `unknown op "fly"`},
		{"op twice", pairs{"id", 1, "op", "status", "op", "drain"}.bytes(), true, fault.BadRequest, "another op"},
		{"missing fields", pairs{"id", 1, "op", "claim"}.bytes(), true, fault.BadRequest, "claim: missing by, req"},
		{"nil for absent", pairs{"id", 1, "op", "cancel", "req", "r", "reason", nil}.bytes(), true, fault.BadRequest, "cancel: reason: want str, got nil"},
		{"id last", pairs{"op", "claim", "by", 1, "req", "r", "id", 5}.bytes(), true, fault.BadRequest, "claim: by: want str, got int"},
		{"trailing", append(pairs{"id", 1, "op", "status"}.bytes(), 0xc0), true, fault.BadRequest, "1 bytes after"},
		{"unknown field", pairs{"id", 1, "op", "status", "x", []any{1, nil}}.bytes(), true, "", ""},
	} {
		_, hasID, req, err := DecodeRequest(row.b)
		if hasID != row.hasID || fault.CodeOf(err) != row.code || err != nil && !strings.Contains(err.Error(), row.text) {
			t.Errorf("%s: %t, %v, %v", row.name, hasID, req, err)
		}
		if (req == nil) != (err != nil) {
			t.Errorf("%s: %v with %v", row.name, req, err)
		}
	}
}

func TestUnknownEventIsSkipped(t *testing.T) {
	reply, err := DecodeReply(pairs{"event", "moved", "x", 1}.bytes())
	if err != nil || reply.HasID || reply.Event != nil {
		t.Errorf("%+v, %v", reply, err)
	}
	if _, err := DecodeReply(pairs{"x", 1}.bytes()); err == nil {
		t.Error("a frame that is neither answer nor event is accepted")
	}
}

func TestFrame(t *testing.T) {
	body := func(n int) func([]byte) ([]byte, error) {
		return func(b []byte) ([]byte, error) { return append(b, make([]byte, n)...), nil }
	}
	b, err := appendFrame([]byte("x"), body(258))
	if err != nil || !bytes.Equal(b[:5], []byte{'x', 0, 0, 1, 2}) || len(b) != 5+258 {
		t.Errorf("%x, %v", b[:5], err)
	}
	if _, err := appendFrame(nil, body(MaxFrame)); err != nil {
		t.Errorf("at the limit: %v", err)
	}
	if _, err := appendFrame(nil, body(MaxFrame+1)); fault.CodeOf(err) != fault.TooLarge {
		t.Errorf("past the limit: %v", err)
	}
}

// FuzzRequest: no request crashes, is refused without a code, or decodes to
// something that does not survive being written and read again.
func FuzzRequest(f *testing.F) {
	for _, v := range samples {
		if req, ok := v.(Request); ok {
			b, _ := AppendRequest(nil, 1, req)
			f.Add(b)
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		id, hasID, req, err := DecodeRequest(b)
		if err != nil {
			var e *fault.Error
			if !errors.As(err, &e) || !e.Code.Known() {
				t.Fatalf("an untyped error: %v", err)
			}
			return
		}
		if !hasID {
			return
		}
		out, err := AppendRequest(nil, id, req)
		if err != nil {
			t.Fatalf("%+v: %v", req, err)
		}
		id2, _, again, err := DecodeRequest(out)
		if d := cmp.Diff(req, again); err != nil || id2 != id || d != "" {
			t.Fatalf("%v (-first +second):\n%s", err, d)
		}
	})
}

// FuzzAnswer is FuzzRequest for what an agent sends.
func FuzzAnswer(f *testing.F) {
	for _, v := range samples {
		if _, ok := v.(Request); !ok {
			b, _ := encode(nil, v)
			f.Add(b)
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		reply, err := DecodeReply(b)
		if err != nil {
			return
		}
		if reply.Event != nil {
			out, err := AppendEvent(nil, reply.Event)
			if err != nil {
				t.Fatalf("%+v: %v", reply.Event, err)
			}
			again, err := DecodeReply(out)
			if d := cmp.Diff(reply.Event, again.Event); err != nil || d != "" {
				t.Fatalf("%v (-first +second):\n%s", err, d)
			}
			return
		}
		for _, req := range requestOf {
			ans, err := DecodeAnswer(b, req)
			if err != nil {
				continue
			}
			out, err := AppendAnswer(nil, reply.ID, ans)
			if err != nil {
				t.Fatalf("%+v: %v", ans, err)
			}
			again, err := DecodeAnswer(out, req)
			if d := cmp.Diff(ans, again); err != nil || d != "" {
				t.Fatalf("%v (-first +second):\n%s", err, d)
			}
		}
	})
}

// TestTruncated: no proper prefix of a frame is taken for a whole one.
func TestTruncated(t *testing.T) {
	rng := rand.New(rand.NewSource(1))
	for name, v := range samples {
		b, err := encode(nil, v)
		if err != nil {
			t.Fatal(err)
		}
		for range 50 {
			if got, err := decode(b[:rng.Intn(len(b))], v); err == nil {
				t.Errorf("%s: a truncated frame is read as %+v", name, got)
			}
		}
	}
}
