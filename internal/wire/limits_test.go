package wire

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// pairs is a map in order, written without any limit of ours.
type pairs []any

func (p pairs) append(b []byte) []byte {
	b = msgp.AppendMapHeader(b, uint32(len(p)/2))
	for i, v := range p {
		if i%2 == 0 {
			b = msgp.AppendString(b, v.(string))
			continue
		}
		switch v := v.(type) {
		case pairs:
			b = v.append(b)
		case []pairs:
			b = msgp.AppendArrayHeader(b, uint32(len(v)))
			for _, e := range v {
				b = e.append(b)
			}
		default:
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

// TestLimits has every limit: at it both directions work, one past it both
// refuse and name both numbers.
func TestLimits(t *testing.T) {
	text := func(n int) string { return strings.Repeat("x", n) }
	id := make([]byte, 16)
	alloc := func(keys []string, shape []int64, dtype, req string) pairs {
		return pairs{"type", "AllocRequest", "keys", keys, "fmt", 1, "shape", shape, "dtype", dtype, "last_chunk_toks", 1, "req_id", req}
	}
	reply := func(links []pairs) pairs {
		return pairs{"type", "HelloReply", "re", 1, "version", 1, "incarnation", id, "resumed", false, "capacity", 1, "lease_ms", 1, "links", links}
	}
	commit := func(chunks []pairs) pairs { return pairs{"type", "Commit", "seq", 1, "begin", 1, "chunks", chunks} }
	chunk := func(key string) pairs { return pairs{"index", 1, "key", key, "tokens", 1} }

	for _, row := range []struct {
		name  string
		limit int
		raw   func(n int) pairs
		msg   func(n int) msg.Message
	}{
		{"keys", kv.MaxKeys,
			func(n int) pairs { return alloc(times(n, ""), nil, "", "") },
			func(n int) msg.Message { return &msg.AllocRequest{Keys: times(n, "")} }},
		{"key", kv.MaxKey,
			func(n int) pairs { return alloc([]string{"a", text(n)}, nil, "", "") },
			func(n int) msg.Message { return &msg.AllocRequest{Keys: []string{"a", text(n)}} }},
		{"shape", kv.MaxDims,
			func(n int) pairs { return alloc(nil, times(n, int64(1)), "", "") },
			func(n int) msg.Message { return &msg.AllocRequest{Shape: times(n, int64(1))} }},
		{"dtype", MaxName,
			func(n int) pairs { return alloc(nil, nil, text(n), "") },
			func(n int) msg.Message { return &msg.AllocRequest{DType: kv.DType(text(n))} }},
		{"req_id", kv.MaxReqID,
			func(n int) pairs { return alloc(nil, nil, "", text(n)) },
			func(n int) msg.Message { return &msg.AllocRequest{ReqID: text(n)} }},
		{"remote_indexes", kv.MaxKeys,
			func(n int) pairs { return pairs{"type", "AllocResponse", "remote_indexes", times(n, int64(0))} },
			func(n int) msg.Message { return &msg.AllocResponse{RemoteIndexes: times(n, int64(0))} }},
		{"already_sent_indexes", kv.MaxKeys,
			func(n int) pairs {
				return pairs{"type", "AllocResponse", "remote_indexes", []int64{}, "already_sent_indexes", times(n, int64(0))}
			},
			func(n int) msg.Message { return &msg.AllocResponse{AlreadySent: times(n, int64(0))} }},
		{"notif req_id", kv.MaxReqID,
			func(n int) pairs { return pairs{"type", "ProxyNotif", "req_id", text(n)} },
			func(n int) msg.Message { return &msg.ProxyNotif{ReqID: text(n)} }},
		{"cancel keys", kv.MaxKeys,
			func(n int) pairs { return pairs{"type", "CancelNotif", "req_id", "", "keys", times(n, "")} },
			func(n int) msg.Message { return &msg.CancelNotif{Keys: times(n, "")} }},
		{"node", kv.MaxNode,
			func(n int) pairs {
				return pairs{"type", "Hello", "seq", 1, "min", 1, "max", 1, "role", "", "node", text(n), "incarnation", id, "secret", id, "resume", false}
			},
			func(n int) msg.Message { return &msg.Hello{Seq: 1, Node: text(n)} }},
		{"role", MaxName,
			func(n int) pairs {
				return pairs{"type", "Hello", "seq", 1, "min", 1, "max", 1, "role", text(n), "node", "", "incarnation", id, "secret", id, "resume", false}
			},
			func(n int) msg.Message { return &msg.Hello{Seq: 1, Role: msg.Role(text(n))} }},
		{"links", MaxLinks,
			func(n int) pairs { return reply(times(n, pairs{"name", "", "addr", ""})) },
			func(n int) msg.Message { return &msg.HelloReply{Re: 1, Links: make([]msg.LinkOffer, n)} }},
		{"link name", MaxName,
			func(n int) pairs { return reply([]pairs{{"name", text(n), "addr", ""}}) },
			func(n int) msg.Message { return &msg.HelloReply{Re: 1, Links: []msg.LinkOffer{{Name: text(n)}}} }},
		{"link addr", MaxAddr,
			func(n int) pairs { return reply([]pairs{{"name", "", "addr", text(n)}}) },
			func(n int) msg.Message { return &msg.HelloReply{Re: 1, Links: []msg.LinkOffer{{Addr: text(n)}}} }},
		{"tokens_key", kv.MaxKey,
			func(n int) pairs {
				return pairs{"type", "Begin", "seq", 1, "begin", 1, "req_id", "", "link", "", "total_chunks", 1, "tokens_key", text(n)}
			},
			func(n int) msg.Message { return &msg.Begin{Seq: 1, TokensKey: text(n)} }},
		{"link", MaxName,
			func(n int) pairs {
				return pairs{"type", "Begin", "seq", 1, "begin", 1, "req_id", "", "link", text(n), "total_chunks", 1}
			},
			func(n int) msg.Message { return &msg.Begin{Seq: 1, Link: text(n)} }},
		{"chunks", kv.MaxKeys,
			func(n int) pairs { return commit(times(n, chunk("k"))) },
			func(n int) msg.Message { return &msg.Commit{Seq: 1, Chunks: make([]msg.Chunk, n)} }},
		{"chunk key", kv.MaxKey,
			func(n int) pairs { return commit([]pairs{chunk(text(n))}) },
			func(n int) msg.Message { return &msg.Commit{Seq: 1, Chunks: []msg.Chunk{{Key: text(n)}}} }},
		{"reason", MaxName,
			func(n int) pairs { return pairs{"type", "Cancel", "seq", 1, "reason", text(n)} },
			func(n int) msg.Message { return &msg.Cancel{Seq: 1, Reason: fault.Code(text(n))} }},
		{"ending", MaxName,
			func(n int) pairs { return pairs{"type", "Ended", "seq", 1, "ending", text(n)} },
			func(n int) msg.Message { return &msg.Ended{Seq: 1, Ending: msg.Ending(text(n))} }},
		{"code", MaxName,
			func(n int) pairs { return pairs{"type", "Error", "re", 1, "code", text(n), "text", ""} },
			func(n int) msg.Message { return &msg.Error{Re: 1, Code: fault.Code(text(n))} }},
	} {
		t.Run(row.name, func(t *testing.T) {
			if _, err := Decode(row.raw(row.limit).append(nil)); err != nil {
				t.Errorf("decode at the limit: %v", err)
			}
			b, err := Append(nil, row.msg(row.limit))
			if err != nil {
				t.Errorf("encode at the limit: %v", err)
			}
			if _, err := Decode(b); err != nil {
				t.Errorf("decode what was encoded at the limit: %v", err)
			}
			_, derr := Decode(row.raw(row.limit + 1).append(nil))
			var e *Error
			if !errors.As(derr, &e) || e.Kind != Malformed {
				t.Errorf("decode past the limit: %v", derr)
			}
			_, eerr := Append(nil, row.msg(row.limit+1))
			for _, err := range []error{derr, eerr} {
				for _, n := range []int{row.limit, row.limit + 1} {
					if err == nil || !strings.Contains(err.Error(), fmt.Sprint(n)) {
						t.Errorf("%v does not name %d", err, n)
					}
				}
			}
		})
	}
}

func TestTextIsCut(t *testing.T) {
	for in, want := range map[string]int{strings.Repeat("x", MaxText): MaxText, strings.Repeat("x", MaxText+1): MaxText,
		strings.Repeat("x", MaxText-1) + "✓": MaxText - 1, "a\xffb": len("a\uFFFDb")} {
		b, err := Append(nil, &msg.Error{Re: 1, Code: fault.Internal, Text: in})
		if err != nil {
			t.Fatal(err)
		}
		got, err := Decode(b)
		if err != nil || len(got.(*msg.Error).Text) != want {
			t.Errorf("text of %d bytes: %d bytes come, %v, want %d", len(in), len(got.(*msg.Error).Text), err, want)
		}
	}
	long := pairs{"type", "Error", "re", 1, "code", "busy", "text", strings.Repeat("x", MaxText+1)}
	if _, err := Decode(long.append(nil)); err == nil {
		t.Error("a longer text is accepted")
	}
}

func TestSlotsLimit(t *testing.T) {
	for _, row := range []struct {
		bytes int
		ok    bool
	}{{0, true}, {4, true}, {3, false}, {5, false}, {4 * kv.MaxSlots, true}, {4*kv.MaxSlots + 4, false}} {
		_, err := Decode(pairs{"type", "Granted", "re", 1, "begin", 1, "generation", 1, "slots", make([]byte, row.bytes)}.append(nil))
		if (err == nil) != row.ok {
			t.Errorf("slots of %d bytes: %v", row.bytes, err)
		}
	}
	for n, ok := range map[int]bool{kv.MaxSlots: true, kv.MaxSlots + 1: false} {
		if _, err := Append(nil, &msg.Granted{Re: 1, Slots: make([]kv.SlotID, n)}); (err == nil) != ok {
			t.Errorf("%d slots: %v", n, err)
		}
	}
}

func TestFixedLengthAndRange(t *testing.T) {
	hello := func(incarnation []byte) pairs {
		return pairs{"type", "Hello", "seq", 1, "min", 1, "max", 1, "role", "", "node", "", "incarnation", incarnation, "secret", make([]byte, 16), "resume", false}
	}
	src := func(slot, generation any) pairs {
		return pairs{"type", "Commit", "seq", 1, "begin", 1, "chunks",
			[]pairs{{"index", 0, "key", "", "tokens", 1, "src", pairs{"slot", slot, "generation", generation}}}}
	}
	for _, row := range []struct {
		name string
		raw  pairs
		ok   bool
	}{
		{"incarnation 15", hello(make([]byte, 15)), false},
		{"incarnation 16", hello(make([]byte, 16)), true},
		{"incarnation 17", hello(make([]byte, 17)), false},
		{"incarnation nil", hello(nil), false},
		{"seq 0", pairs{"type", "Heartbeat", "seq", 0}, false},
		{"seq -1", pairs{"type", "Heartbeat", "seq", -1}, false},
		{"seq 2^64-1", pairs{"type", "Heartbeat", "seq", uint64(1<<64 - 1)}, true},
		{"seq nil", pairs{"type", "Heartbeat", "seq", nil}, false},
		{"re 0", pairs{"type", "HeartbeatReply", "re", 0}, false},
		{"seq missing", pairs{"type", "Heartbeat"}, false},
		{"seq and re in a request", pairs{"type", "Heartbeat", "seq", 1, "re", 1}, true},
		{"Ended with neither", pairs{"type", "Ended", "ending", "ready"}, false},
		{"Ended with both", pairs{"type", "Ended", "seq", 1, "re", 1, "ending", "ready"}, false},
		{"optional as nil", pairs{"type", "Watch", "seq", 1, "req_id", "", "deadline_ms", nil}, false},
		{"slot 2^32-1", src(uint32(1<<32-1), 1), true},
		{"slot 2^32", src(uint64(1<<32), 1), false},
		{"slot -1", src(-1, 1), false},
		{"generation missing", pairs{"type", "Commit", "seq", 1, "begin", 1, "chunks",
			[]pairs{{"index", 0, "key", "", "tokens", 1, "src", pairs{"slot", 1}}}}, false},
		{"src nil", pairs{"type", "Commit", "seq", 1, "begin", 1, "chunks", []pairs{{"index", 0, "key", "", "tokens", 1, "src", nil}}}, false},
		{"checksum 2^32", pairs{"type", "Commit", "seq", 1, "begin", 1, "chunks",
			[]pairs{{"index", 0, "key", "", "tokens", 1, "checksum", uint64(1 << 32)}}}, false},
		{"total 2^63", pairs{"type", "Begin", "seq", 1, "begin", 1, "req_id", "", "link", "", "total_chunks", uint64(1 << 63)}, true},
		{"total negative", pairs{"type", "Begin", "seq", 1, "begin", 1, "req_id", "", "link", "", "total_chunks", -1}, true},
		{"type twice, the same", pairs{"type", "Heartbeat", "seq", 1, "type", "Heartbeat"}, true},
		{"type twice, another", pairs{"type", "Heartbeat", "seq", 1, "type", "Watch"}, false},
		{"type too long", pairs{"type", strings.Repeat("T", MaxName+1), "seq", 1}, false},
	} {
		m, err := Decode(row.raw.append(nil))
		if (err == nil) != row.ok {
			t.Errorf("%s: %v, %v", row.name, m, err)
		}
	}
	for _, m := range []msg.Message{&msg.Heartbeat{}, &msg.HeartbeatReply{}, &msg.Ended{Ending: msg.EndReady},
		&msg.Ended{Seq: 1, Re: 1}, &msg.ProxyNotif{ReqID: "\xff"}, &msg.CancelNotif{Keys: []string{"a", "\xff"}}, nil} {
		if b, err := Append(nil, m); err == nil {
			t.Errorf("%T %+v is encoded: %x", m, m, b)
		}
	}
	var e *Error
	if _, err := Decode(src(-1, 1).append(nil)); !errors.As(err, &e) || e.Error() != "Commit: chunks[0].src.slot: -1, at least 0" {
		t.Errorf("the error does not name its field: %v", err)
	}
}

func TestMessageLimit(t *testing.T) {
	pad := func(total int) []byte {
		head := pairs{"type", "Heartbeat", "seq", 1, "pad", make([]byte, 1<<16)} // bin32 already
		extra := len(head.append(nil)) - 1<<16
		return pairs{"type", "Heartbeat", "seq", 1, "pad", make([]byte, total-extra)}.append(nil)
	}
	if b := pad(MaxMessage); len(b) != MaxMessage {
		t.Fatalf("%d bytes", len(b))
	} else if _, err := Decode(b); err != nil {
		t.Errorf("at the limit: %v", err)
	}
	if _, err := Decode(pad(MaxMessage + 1)); err == nil {
		t.Error("one past the limit is accepted")
	}
}

func TestInitLimits(t *testing.T) {
	bin := func(n int) []byte { return make([]byte, n) }
	const slots = 100
	for _, row := range []struct {
		name  string
		limit int
		raw   func(n int) pairs
	}{
		{"local_meta_bytes", MaxMeta, func(n int) pairs { return pairs{"type", "NixlInitRequest", "local_meta_bytes", bin(n)} }},
		{"remote_agent_name", MaxAgent, func(n int) pairs {
			return pairs{"type", "NixlInitResponse", "remote_agent_name", bin(n), "remote_meta_bytes", bin(0)}
		}},
		{"remote_meta_bytes", MaxMeta, func(n int) pairs {
			return pairs{"type", "NixlInitResponse", "remote_agent_name", bin(0), "remote_meta_bytes", bin(n)}
		}},
		{"local_id", MaxURL, func(n int) pairs {
			return pairs{"type", "NixlMemRegRequest", "remote_agent_name", bin(0), "local_id", strings.Repeat("x", n), "local_xfer_dlist_bytes", bin(0)}
		}},
		{"local_xfer_dlist_bytes", slots*24 + 1024, func(n int) pairs {
			return pairs{"type", "NixlMemRegRequest", "remote_agent_name", bin(0), "local_id", "", "local_xfer_dlist_bytes", bin(n)}
		}},
		{"remote_xfer_dlist_bytes", slots*24 + 1024, func(n int) pairs {
			return pairs{"type", "NixlMemRegResponse", "remote_xfer_dlist_bytes", bin(n)}
		}},
		{"peer_init_url", MaxURL, func(n int) pairs {
			return pairs{"type", "PySocketInitRequest", "peer_init_url", strings.Repeat("x", n)}
		}},
		{"status", MaxName, func(n int) pairs { return pairs{"type", "PySocketInitResponse", "status", strings.Repeat("x", n)} }},
	} {
		if _, err := DecodeInit(row.raw(row.limit).append(nil), slots); err != nil {
			t.Errorf("%s at the limit: %v", row.name, err)
		}
		var e *Error
		if _, err := DecodeInit(row.raw(row.limit+1).append(nil), slots); !errors.As(err, &e) {
			t.Errorf("%s past the limit: %v", row.name, err)
		}
	}
	if _, err := DecodeInit(make([]byte, maxInit(slots)+1), slots); err == nil {
		t.Error("a message past the port's limit is accepted")
	}
	if b, err := AppendInit(nil, &BerthRefused{Text: strings.Repeat("x", MaxText+1)}); err != nil {
		t.Error(err)
	} else if m, err := DecodeInit(b, 0); err != nil || len(m.(*BerthRefused).Text) != MaxText {
		t.Errorf("BerthRefused: %v, %v", m, err)
	}
	if _, err := DecodeInit(pairs{"type", "AllocRequest"}.append(nil), slots); err == nil {
		t.Error("a message of the alloc port is accepted")
	}
}

// TestBoundedAllocation: what a payload announces but does not hold is never
// allocated.
func TestBoundedAllocation(t *testing.T) {
	head := func(p pairs, tail string) []byte {
		b := p.append(nil)
		b[0]++ // one more entry
		return append(b, tail...)
	}
	for name, b := range map[string][]byte{
		"map":     []byte("\xdf\xff\xff\xff\xff"),
		"keys":    head(pairs{"type", "AllocRequest"}, "\xa4keys\xdd\x00\x00\x40\x00"),
		"ints":    head(pairs{"type", "AllocResponse"}, "\xaeremote_indexes\xdd\x00\x00\x40\x00"),
		"chunks":  head(pairs{"type", "Commit", "seq", 1}, "\xa6chunks\xdd\x00\x00\x40\x00"),
		"no maps": head(pairs{"type", "Commit", "seq", 1}, "\xa6chunks\xdd\x00\x00\x40\x00"+strings.Repeat("\x00", 1<<14)),
		"slots":   head(pairs{"type", "Granted", "re", 1}, "\xa5slots\xc6\x00\x40\x00\x00"),
		"str":     head(pairs{"type", "Watch", "seq", 1}, "\xa6req_id\xdb\xff\xff\xff\xff"),
		"unknown": head(pairs{"type", "Watch", "seq", 1}, "\xa1x\xdf\xff\xff\xff\xff"),
		"ext":     head(pairs{"type", "Watch", "seq", 1}, "\xa1x\xc9\xff\xff\xff\xff\x01"),
	} {
		if n := allocated(func() {
			if _, err := Decode(b); err == nil {
				t.Errorf("%s: accepted", name)
			}
		}); n > allowance(len(b)) {
			t.Errorf("%s: %d bytes allocated for %d", name, n, len(b))
		}
	}
}

// allowance is what decoding that many bytes may allocate: an empty string of
// one byte takes 16 of memory.
func allowance(bytes int) uint64 { return 32*uint64(bytes) + 64<<10 }

func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}
