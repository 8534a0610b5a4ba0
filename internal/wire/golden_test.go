package wire

import (
	"encoding/hex"
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/google/go-cmp/cmp"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// samples has each Berth message with every field set, and again with only
// what is required. The bytes of each are in testdata/golden; -rewrite updates
// them, which is a change of the protocol.
var samples = map[string]msg.Message{
	"Hello/sender": &msg.Hello{Seq: 1, Min: 1, Max: 2, Role: msg.RoleSender, Node: "prefill-0", Incarnation: kv.Incarnation{1, 2, 15: 16},
		Secret: kv.Secret{9, 8, 15: 1}, Resume: true, Session: 300,
		Facts: &kv.Facts{SlotBytes: 1 << 25, Format: kv.Format2LTD, DType: "bfloat16", ChunkTokens: 256, TPSize: 2, TPRank: 1}},
	"Hello/proxy": &msg.Hello{Seq: 1, Min: 1, Max: 1, Role: msg.RoleProxy},
	"HelloReply": &msg.HelloReply{Re: 1, Version: 1, Incarnation: kv.Incarnation{15: 7}, Resumed: true, Capacity: 4096, LeaseMS: 15_000,
		Links: []msg.LinkOffer{{Name: "shm", Addr: "/run/berth/shm.sock"}, {Name: "tcp", Addr: "[::1]:7301"}}},
	"HelloReply/no_links": &msg.HelloReply{Re: 1, Version: 1},
	"Begin":               &msg.Begin{Seq: 2, Begin: 1, ReqID: "cmpl-1", Link: "tcp", TotalChunks: 8, DeadlineMS: 600_000, TokensKey: "m@1@0@ab@half"},
	"Begin/required":      &msg.Begin{Seq: 2, Begin: 1, ReqID: "cmpl-1", Link: "shm"},
	"Granted":             &msg.Granted{Re: 2, Begin: 1, Generation: 1 << 40, Slots: []kv.SlotID{0, 1, 258, 1<<20 - 1}},
	"Granted/empty":       &msg.Granted{Re: 2, Begin: 1, Generation: 1},
	"Commit": &msg.Commit{Seq: 3, Begin: 1, Chunks: []msg.Chunk{
		{Index: 0, Key: "k0", Tokens: 256, HasChecksum: true, Checksum: 0xfffffffe, Src: &msg.Source{Slot: 5, Generation: 77}},
		{Index: 1, Key: "k1", Tokens: 3}},
		Fmt: kv.Format2LTD, DType: "bfloat16", Shape: []int64{2, 32, 256, 1024}, HasEnd: true, End: 2},
	"Commit/end_only": &msg.Commit{Seq: 3, Begin: 1, HasEnd: true},
	"Commit/zero_checksum": &msg.Commit{Seq: 3, Begin: 1, Chunks: []msg.Chunk{{Key: "k", Tokens: 1, HasChecksum: true}},
		Fmt: 1, DType: "half", Shape: []int64{2, 1, 1, 1}},
	"CommitReply":       &msg.CommitReply{Re: 3, Begin: 1, Complete: true},
	"CommitReply/false": &msg.CommitReply{Re: 3, Begin: 1},
	"Cancel/begin":      &msg.Cancel{Seq: 4, Begin: 1, Reason: fault.Cancelled, Text: "client gone"},
	"Cancel/req_id":     &msg.Cancel{Seq: 4, ReqID: "cmpl-1", Reason: fault.Deadline},
	"Ended/reply":       &msg.Ended{Re: 4, ReqID: "cmpl-1", Ending: msg.EndReady},
	"Ended/request":     &msg.Ended{Seq: 1, Begin: 1, Ending: msg.EndFailed, Reason: fault.Overflow, Text: "9 chunks, 8 declared"},
	"Drained":           &msg.Drained{Re: 1, Begin: 1},
	"Watch":             &msg.Watch{Seq: 5, ReqID: "cmpl-1", DeadlineMS: 30_000},
	"Watch/required":    &msg.Watch{Seq: 5, ReqID: "cmpl-1"},
	"Ready":             &msg.Ready{Seq: 6, ReqID: "cmpl-1"},
	"Heartbeat":         &msg.Heartbeat{Seq: 7},
	"HeartbeatReply":    &msg.HeartbeatReply{Re: 7},
	"Error":             &msg.Error{Re: 2, Code: fault.Busy, Text: "100000 wait, at most 100000", RetryMS: 500},
	"Error/required":    &msg.Error{Re: 2, Code: fault.Internal},
	"Ending":            &msg.EndingNotice{ReqID: "cmpl-1", Rank: 1, Ending: msg.EndFailed, Reason: fault.PeerLost, Text: "no route"},
	"Ending/required":   &msg.EndingNotice{ReqID: "cmpl-1", Ending: msg.EndCancelled},
}

func TestGolden(t *testing.T) {
	seen := map[string]bool{}
	datadriven.RunTest(t, "testdata/golden", func(t *testing.T, d *datadriven.TestData) string {
		m, ok := samples[d.Cmd]
		if !ok {
			d.Fatalf(t, "no sample %q", d.Cmd)
		}
		seen[d.Cmd] = true
		b, err := Append(nil, m)
		if err != nil {
			d.Fatalf(t, "%v", err)
		}
		got, err := Decode(b)
		if err != nil {
			d.Fatalf(t, "%v", err)
		}
		if diff := cmp.Diff(m, got); diff != "" {
			t.Errorf("%s: decoded (-want +got):\n%s", d.Cmd, diff)
		}
		return wrapHex(b)
	})
	for name := range samples {
		if !seen[name] {
			t.Errorf("testdata/golden has no %s", name)
		}
	}
}

func wrapHex(b []byte) string {
	var s strings.Builder
	for len(b) > 0 {
		n := min(len(b), 40)
		fmt.Fprintln(&s, hex.EncodeToString(b[:n]))
		b = b[n:]
	}
	return s.String()
}
