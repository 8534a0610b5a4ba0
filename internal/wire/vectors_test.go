package wire

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"math"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// vector is a line of testdata/messages.jsonl: what msgspec writes, or what its
// decoder makes of bytes that its encoder would not write.
type vector struct {
	Name    string
	Hex     string
	HexHead string `json:"hex_head"`
	Repeat  string
	Times   int
	HexTail string `json:"hex_tail"`
	Fields  map[string]any
	Msgspec struct {
		Fields map[string]any
		Error  string
	}
}

func (v vector) payload(t testing.TB) []byte {
	s := v.Hex
	if v.HexHead != "" {
		s = v.HexHead + strings.Repeat(v.Repeat, v.Times) + v.HexTail
	}
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func (v vector) init() bool {
	return strings.HasPrefix(v.Name, "nixl/") || strings.HasPrefix(v.Name, "mock/")
}

func vectors(t testing.TB) []vector {
	f, err := os.Open("testdata/messages.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var out []vector
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var v vector
		d := json.NewDecoder(bytes.NewReader(lines.Bytes()))
		d.UseNumber()
		if err := d.Decode(&v); err != nil {
			t.Fatal(err)
		}
		out = append(out, v)
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	if len(out) < 60 {
		t.Fatalf("%d vectors, want at least 60", len(out))
	}
	return out
}

// fields builds a message from the JSON of a vector, independently of the
// package's tables.
type fields map[string]any

func (f fields) str(k string) string { s, _ := f[k].(string); return s }
func (f fields) bool(k string) bool  { b, _ := f[k].(bool); return b }
func (f fields) bin(t testing.TB, k string) []byte {
	b, err := hex.DecodeString(f.str(k))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// number returns an integer of JSON, saturated as decoding does it.
func number(v any) int64 {
	n, ok := v.(json.Number)
	if !ok {
		return 0
	}
	i, err := strconv.ParseInt(n.String(), 10, 64)
	if errors.Is(err, strconv.ErrRange) {
		return math.MaxInt64
	}
	return i
}

func (f fields) int(k string) int64 { return number(f[k]) }
func (f fields) ints(k string) []int64 {
	var out []int64
	list, _ := f[k].([]any)
	for _, v := range list {
		out = append(out, number(v))
	}
	return out
}
func (f fields) strs(k string) []string {
	var out []string
	list, _ := f[k].([]any)
	for _, v := range list {
		out = append(out, v.(string))
	}
	return out
}

func control(t testing.TB, f fields) msg.Message {
	switch f.str("type") {
	case "AllocRequest":
		return &msg.AllocRequest{Keys: f.strs("keys"), Fmt: kv.Format(f.int("fmt")), Shape: f.ints("shape"), DType: kv.DType(f.str("dtype")),
			LastChunkToks: f.int("last_chunk_toks"), ReqID: f.str("req_id"), IsLastBatch: f.bool("is_last_batch"), TotalChunks: f.int("total_chunks")}
	case "AllocResponse":
		return &msg.AllocResponse{RemoteIndexes: f.ints("remote_indexes"), AlreadySent: f.ints("already_sent_indexes")}
	case "ProxyNotif":
		return &msg.ProxyNotif{ReqID: f.str("req_id")}
	case "CancelNotif":
		return &msg.CancelNotif{ReqID: f.str("req_id"), Keys: f.strs("keys")}
	}
	t.Fatalf("a vector of type %q", f.str("type"))
	return nil
}

func initMessage(t testing.TB, f fields) InitMessage {
	switch f.str("type") {
	case "NixlInitRequest":
		return &NixlInitRequest{LocalMeta: f.bin(t, "local_meta_bytes")}
	case "NixlInitResponse":
		return &NixlInitResponse{RemoteAgent: f.bin(t, "remote_agent_name"), RemoteMeta: f.bin(t, "remote_meta_bytes")}
	case "NixlMemRegRequest":
		return &NixlMemRegRequest{RemoteAgent: f.bin(t, "remote_agent_name"), LocalID: f.str("local_id"), LocalPages: f.bin(t, "local_xfer_dlist_bytes")}
	case "NixlMemRegResponse":
		return &NixlMemRegResponse{RemotePages: f.bin(t, "remote_xfer_dlist_bytes")}
	case "PySocketInitRequest":
		return &PySocketInitRequest{HasURL: f["peer_init_url"] != nil, PeerInitURL: f.str("peer_init_url")}
	case "PySocketInitResponse":
		return &PySocketInitResponse{Status: f.str("status")}
	}
	t.Fatalf("a vector of type %q", f.str("type"))
	return nil
}

func TestVectors(t *testing.T) {
	for _, v := range vectors(t) {
		t.Run(v.Name, func(t *testing.T) {
			b := v.payload(t)
			switch {
			case strings.HasPrefix(v.Name, "decode/"):
				decodeVector(t, v, b)
			case v.init():
				want := initMessage(t, v.Fields)
				got, err := DecodeInit(b, 64)
				if err != nil {
					t.Fatal(err)
				}
				if d := cmp.Diff(want, got); d != "" {
					t.Errorf("decoded (-want +got):\n%s", d)
				}
				if out, err := AppendInit(nil, want); err != nil || !bytes.Equal(out, b) {
					t.Errorf("encoded %x, %v, want %x", out, err, b)
				}
			default:
				want := control(t, v.Fields)
				got, err := Decode(b)
				if err != nil {
					t.Fatal(err)
				}
				if d := cmp.Diff(want, got); d != "" {
					t.Errorf("decoded (-want +got):\n%s", d)
				}
				if out, err := Append(nil, want); err != nil || !bytes.Equal(out, b) {
					t.Errorf("encoded %x, %v, want %x", out, err, b)
				}
			}
		})
	}
}

// TestDeepUnknownField is what the vector of that name means: its head, as
// written, ends before the unknown field's key.
func TestDeepUnknownField(t *testing.T) {
	for _, lead := range []string{"\x91", "\x81\x01"} {
		b := []byte("\x83\xa4type\xaaProxyNotif\xa6req_id\xa1a\xa1x" + strings.Repeat(lead, 100_000) + "\xc0")
		got, err := Decode(b)
		if want := (&msg.ProxyNotif{ReqID: "a"}); err != nil || !cmp.Equal(got, msg.Message(want)) {
			t.Errorf("got %v, %v, want %v", got, err, want)
		}
	}
}

func decodeVector(t *testing.T, v vector, b []byte) {
	got, err := Decode(b)
	if v.Msgspec.Error == "" {
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(control(t, v.Msgspec.Fields), got); d != "" {
			t.Errorf("decoded (-want +got):\n%s", d)
		}
		return
	}
	var e *Error
	if !errors.As(err, &e) {
		t.Fatalf("got %v, %v; msgspec says %s", got, err, v.Msgspec.Error)
	}
	if unknown := v.Name == "decode/unknown_type"; (e.Kind == UnknownType) != unknown {
		t.Errorf("kind %d of %v", e.Kind, e)
	}
	if got != nil {
		t.Errorf("a message comes with the error: %v", got)
	}
}
