package wire

import (
	"bytes"
	"encoding/hex"
	"errors"
	"math/rand"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/tinylib/msgp/msgp"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// prototypes has one value of every message type.
var prototypes = []msg.Message{&msg.AllocRequest{}, &msg.AllocResponse{}, &msg.ProxyNotif{}, &msg.CancelNotif{}, &msg.Hello{},
	&msg.HelloReply{}, &msg.Begin{}, &msg.Granted{}, &msg.Commit{}, &msg.CommitReply{}, &msg.Cancel{}, &msg.Ended{}, &msg.Drained{},
	&msg.Watch{}, &msg.Ready{}, &msg.Heartbeat{}, &msg.HeartbeatReply{}, &msg.Error{}, &msg.EndingNotice{}}

// fill sets v to something random that the wire can carry.
func fill(rng *rand.Rand, v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		if rng.Intn(2) == 0 {
			v.Set(reflect.New(v.Type().Elem()))
			fill(rng, v.Elem())
		}
	case reflect.Struct:
		for i := range v.NumField() {
			fill(rng, v.Field(i))
			// Without its flag a value is not there.
			if name, has := strings.CutPrefix(v.Type().Field(i).Name, "Has"); has && !v.Field(i).Bool() {
				f := v.FieldByName(name)
				defer f.SetZero()
			}
		}
	case reflect.Slice:
		n := rng.Intn(9)
		if n == 0 {
			return // empty lists are nil
		}
		v.Set(reflect.MakeSlice(v.Type(), n, n))
		for i := range n {
			fill(rng, v.Index(i))
		}
	case reflect.Array:
		for i := range v.Len() {
			fill(rng, v.Index(i))
		}
	case reflect.String:
		b := make([]rune, rng.Intn(16))
		for i := range b {
			b[i] = []rune{rune(rng.Intn(128)), 'é', '请', '🚢'}[rng.Intn(4)]
		}
		v.SetString(string(b))
	case reflect.Int64:
		n := int64(rng.Uint64() >> rng.Intn(64))
		if rng.Intn(3) == 0 {
			n = -n
		}
		v.SetInt(n)
	case reflect.Uint8, reflect.Uint32, reflect.Uint64:
		v.SetUint(rng.Uint64() >> (64 - v.Type().Bits()) >> rng.Intn(v.Type().Bits()))
	case reflect.Bool:
		v.SetBool(rng.Intn(2) == 0)
	default:
		panic(v.Kind())
	}
}

func random(rng *rand.Rand) msg.Message {
	p := reflect.New(reflect.TypeOf(prototypes[rng.Intn(len(prototypes))]).Elem())
	fill(rng, p.Elem())
	for _, name := range []string{"Seq", "Re"} {
		if f := p.Elem().FieldByName(name); f.IsValid() && f.Uint() == 0 {
			f.SetUint(1)
		}
	}
	m := p.Interface().(msg.Message)
	if e, ok := m.(*msg.Ended); ok {
		if rng.Intn(2) == 0 {
			e.Seq = 0
		} else {
			e.Re = 0
		}
	}
	return m
}

func TestRandomRoundTrip(t *testing.T) {
	const seed = 1
	rng := rand.New(rand.NewSource(seed))
	for range 10_000 {
		m := random(rng)
		b, err := Append([]byte("before"), m)
		if err != nil {
			t.Fatalf("%+v: %v", m, err)
		}
		b, ok := bytes.CutPrefix(b, []byte("before"))
		if !ok {
			t.Fatal("what was there is gone")
		}
		got, err := Decode(b)
		if err != nil {
			t.Fatalf("%+v: %v", m, err)
		}
		if d := cmp.Diff(m, got); d != "" {
			t.Fatalf("(-want +got):\n%s", d)
		}
		// As any other library reads it: a map of str keys, no nil anywhere.
		v, rest, err := msgp.ReadMapStrIntfBytes(b, nil)
		if err != nil || len(rest) > 0 {
			t.Fatalf("%+v is no map: %v, %d bytes left", m, err, len(rest))
		}
		for k, v := range v {
			if v == nil {
				t.Fatalf("%+v: %s is nil", m, k)
			}
		}
		// Decoding copies what it keeps.
		clear(b)
		if !cmp.Equal(m, got) {
			t.Fatal("a decoded message changes with its payload")
		}
		// Cut short it is no message any more.
		b, _ = Append(b[:0], m)
		if m, err := Decode(b[:rng.Intn(len(b))]); err == nil {
			t.Fatalf("a truncated message is accepted: %+v", m)
		}
	}
}

func TestUndecodable(t *testing.T) {
	for _, row := range []struct {
		name string
		b    []byte
		want Error // Text may be a part
	}{
		{"empty", nil, Error{Text: "truncated"}},
		{"garbage", []byte("GET / HTTP/1.1\r\n"), Error{Text: "want map"}},
		{"no type", pairs{"keys", []string{"a", "b"}}.append(nil), Error{Text: "missing type", Keys: 2}},
		{"unknown without seq", pairs{"type", "Nope"}.append(nil), Error{Kind: UnknownType, Type: "Nope", Text: `unknown message "Nope"`}},
		{"unknown with seq", pairs{"type", "Nope", "seq", 9}.append(nil), Error{Kind: UnknownType, Type: "Nope", Text: `unknown message "Nope"`, Seq: 9}},
		{"unknown with seq first", pairs{"seq", 9, "x", pairs{"y", 1}, "type", "Nope"}.append(nil), Error{Kind: UnknownType, Type: "Nope", Text: `unknown message "Nope"`, Seq: 9}},
		{"malformed with seq", pairs{"type", "Begin", "seq", 9, "begin", "1"}.append(nil), Error{Type: "Begin", Text: "begin: want int, got str", Seq: 9}},
		{"seq after the fault", pairs{"type", "Begin", "begin", "1", "seq", 9}.append(nil), Error{Type: "Begin", Text: "begin: want int, got str", Seq: 9}},
		{"no type with seq", pairs{"seq", 9}.append(nil), Error{Text: "missing type", Seq: 9}},
		{"malformed seq", pairs{"type", "Begin", "seq", "9"}.append(nil), Error{Type: "Begin", Text: "seq: want int, got str"}},
		{"alloc", pairs{"type", "AllocRequest", "fmt", 1, "keys", []string{"a", "b", "c"}}.append(nil), Error{Type: "AllocRequest", Text: "missing shape, dtype, last_chunk_toks", Keys: 3}},
		{"alloc without keys", pairs{"type", "AllocRequest", "keys", []string{}}.append(nil), Error{Type: "AllocRequest", Text: "missing fmt, shape"}},
		{"truncated after keys", pairs{"type", "AllocRequest", "keys", []string{"a", "b"}, "fmt", "12345"}.append(nil)[:34], Error{Type: "AllocRequest", Text: "fmt: want int, got str", Keys: 2}},
	} {
		m, err := Decode(row.b)
		var e *Error
		if !errors.As(err, &e) {
			t.Errorf("%s: %v, %v", row.name, m, err)
			continue
		}
		if !strings.Contains(e.Text, row.want.Text) {
			t.Errorf("%s: %q, want %q", row.name, e.Text, row.want.Text)
		}
		row.want.Text = e.Text
		if d := cmp.Diff(&row.want, e); d != "" {
			t.Errorf("%s (-want +got):\n%s", row.name, d)
		}
	}
}

// FuzzDecode: no input crashes, costs more than a multiple of its length, or
// decodes to something that does not survive being written and read again.
func FuzzDecode(f *testing.F) {
	for _, v := range vectors(f) {
		if !v.init() {
			f.Add(v.payload(f))
		}
	}
	for _, m := range samples {
		b, err := Append(nil, m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var m msg.Message
		var err error
		if n := allocated(func() { m, err = Decode(b) }); n > allowance(len(b)) {
			t.Errorf("%d bytes allocated for %d", n, len(b))
		}
		if err != nil {
			var e *Error
			if !errors.As(err, &e) {
				t.Fatalf("an untyped error: %v", err)
			}
			return
		}
		fixpoint(t, m, Append, Decode)
	})
}

// FuzzDecodeInit is FuzzDecode for the init port.
func FuzzDecodeInit(f *testing.F) {
	for _, v := range vectors(f) {
		if v.init() {
			f.Add(v.payload(f))
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := DecodeInit(b, 64)
		if err != nil {
			return
		}
		fixpoint(t, m, AppendInit, func(b []byte) (InitMessage, error) { return DecodeInit(b, 64) })
	})
}

func fixpoint[M any](t *testing.T, m M, encode func([]byte, M) ([]byte, error), decode func([]byte) (M, error)) {
	b, err := encode(nil, m)
	if err != nil {
		t.Fatalf("decoded, but cannot be encoded: %+v: %v", m, err)
	}
	again, err := decode(b)
	if err != nil {
		t.Fatalf("encoded, but cannot be decoded: %+v: %v", m, err)
	}
	if d := cmp.Diff(m, again); d != "" {
		t.Fatalf("(-first +second):\n%s", d)
	}
	if twice, err := encode(nil, again); err != nil || !bytes.Equal(b, twice) {
		t.Fatalf("encoded %x, then %x, %v", b, twice, err)
	}
}

// BenchmarkAlloc8Keys is decoding and encoding an AllocRequest of 8 keys: at
// most 2 µs together.
func BenchmarkAlloc8Keys(b *testing.B) {
	m := &msg.AllocRequest{Fmt: 1, Shape: []int64{2, 32, 256, 1024}, DType: "bfloat16", LastChunkToks: 256, ReqID: "cmpl-0123456789abcdef", TotalChunks: 8}
	for i := range 8 {
		m.Keys = append(m.Keys, "meta-llama/Llama-3.1-8B-Instruct@1@0@"+strings.Repeat(hex.EncodeToString([]byte{byte(i)}), 16)+"@bfloat16")
	}
	payload, err := Append(nil, m)
	if err != nil {
		b.Fatal(err)
	}
	buf := make([]byte, 0, len(payload))
	b.SetBytes(int64(len(payload)))
	b.ReportAllocs()
	for b.Loop() {
		m, err := Decode(payload)
		if err == nil {
			buf, err = Append(buf[:0], m)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
	if !bytes.Equal(buf, payload) {
		b.Fatal("changed")
	}
}

// BenchmarkCommit256 is a Commit of 256 chunks, as over shm.
func BenchmarkCommit256(b *testing.B) {
	m := &msg.Commit{Seq: 1, Begin: 1, Fmt: 1, DType: "bfloat16", Shape: []int64{2, 32, 256, 1024}}
	for i := range 256 {
		m.Chunks = append(m.Chunks, msg.Chunk{Index: int64(i), Key: strings.Repeat("k", 90), Tokens: 256, Src: &msg.Source{Slot: kv.SlotID(i), Generation: 7}})
	}
	payload, err := Append(nil, m)
	if err != nil {
		b.Fatal(err)
	}
	buf := make([]byte, 0, len(payload))
	b.SetBytes(int64(len(payload)))
	b.ReportAllocs()
	for b.Loop() {
		m, err := Decode(payload)
		if err == nil {
			buf, err = Append(buf[:0], m)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
}

// TestCommitBounds: what a sender counts when it splits Commits (len(key) + 128
// a chunk and 1024 for the rest) is at least what they take, whatever their
// numbers are.
func TestCommitBounds(t *testing.T) {
	const big = 1<<63 - 1
	full := msg.Chunk{Index: big, Key: strings.Repeat("k", kv.MaxKey), Tokens: big, HasChecksum: true, Checksum: 1<<32 - 1,
		Src: &msg.Source{Slot: 1<<32 - 1, Generation: 1<<64 - 1}}
	m := &msg.Commit{Seq: 1<<64 - 1, Begin: 1<<64 - 1, Fmt: big, DType: kv.DType(strings.Repeat("d", MaxName)),
		Shape: times(kv.MaxDims, int64(big)), HasEnd: true, End: big}
	last := 0
	for n := range 40 {
		b, err := Append(nil, m)
		if err != nil {
			t.Fatal(err)
		}
		if n == 0 && len(b) > 1024 || n > 0 && len(b)-last > kv.MaxKey+128 {
			t.Errorf("%d bytes with %d chunks after %d with one fewer", len(b), n, last)
		}
		last = len(b)
		m.Chunks = append(m.Chunks, full)
	}
}
