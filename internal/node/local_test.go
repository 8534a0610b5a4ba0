package node

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/localapi"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/wire"
)

// TestNode_local_calls: which calls are whose, and what each gets that may not.
func TestNode_local_calls(t *testing.T) {
	r := newRig(t, options{})
	r.attachBoth()
	r.recv.LocalEvents().Connected(2, localapi.Cred{})
	r.recv.LocalEvents().Connected(3, localapi.Cred{})
	must[*localapi.HelloAnswer](t, r.recvEnd, r.recv, 3, &localapi.Hello{Version: 1, Part: localapi.Tool})
	for _, c := range []struct {
		name string
		end  *local
		n    *Node
		conn kv.ConnID
		req  localapi.Request
		want fault.Code
	}{
		{"before hello", r.recvEnd, r.recv, 2, &localapi.Status{}, fault.HelloRequired},
		{"before hello", r.recvEnd, r.recv, 2, &localapi.Claim{By: "b", Req: "x"}, fault.HelloRequired},
		{"second hello", r.recvEnd, r.recv, 1, &localapi.Hello{Version: 1, Part: localapi.Worker, EngineID: "engine", Layout: &facts, Shape: shape}, fault.BadRequest},
		{"sending at a receiver", r.recvEnd, r.recv, 1, &localapi.Begin{Req: "x", TotalChunks: 1, Host: "h", AllocPort: 1}, fault.Unsupported},
		{"receiving at a sender", r.sendEnd, r.send, 1, &localapi.Claim{By: "b", Req: "x"}, fault.Unsupported},
		{"drain by an engine", r.recvEnd, r.recv, 1, &localapi.Drain{}, fault.Unsupported},
		{"claim by a tool", r.recvEnd, r.recv, 3, &localapi.Claim{By: "b", Req: "x"}, fault.Unsupported},
		{"unknown", r.recvEnd, r.recv, 1, &localapi.Claim{By: "b", Req: "x"}, fault.Ended},
		{"not granted", r.sendEnd, r.send, 1, &localapi.Stage{Req: "x", N: 1}, fault.NotGranted},
	} {
		t.Run(c.name, func(t *testing.T) {
			if code := c.end.code(t, c.n, c.conn, c.req); code != c.want {
				t.Errorf("%T: %s, want %s", c.req, code, c.want)
			}
		})
	}
	t.Run("drain", func(t *testing.T) {
		must[*localapi.Done](t, r.recvEnd, r.recv, 3, &localapi.Drain{})
		if s := status(t, r.recv); !s.Draining || s.Ready || s.NotReady != "draining" {
			t.Errorf("%+v", s)
		}
		must[*localapi.Done](t, r.sendEnd, r.send, 1, &localapi.Begin{Req: "late", TotalChunks: 1, Host: "h", AllocPort: 1, DeadlineMS: 50})
		if e := r.ended("late"); e.Ending != msg.EndFailed {
			t.Errorf("a drained receiver took a request: %+v", e)
		}
	})
}

// TestNode_hangup: a call that its caller gives up is answered all the same, on
// either side, and waits for nothing any more.
func TestNode_hangup(t *testing.T) {
	r := newRig(t, options{})
	r.attachBoth()
	r.net.hold(true)
	r.begin("a", slots)
	r.granted("a")
	// Half of the staging slots are being written from; as many again are more than
	// one receiver's share.
	got := must[*localapi.Slots](t, r.sendEnd, r.send, 1, &localapi.Stage{Req: "a", N: slots / 2}).Slots
	batch := &localapi.Submit{Req: "a"}
	for i, slot := range got {
		batch.Chunks = append(batch.Chunks, localapi.Staged{Index: int64(i), Key: "k", Slot: slot, Tokens: tokens})
	}
	must[*localapi.Done](t, r.sendEnd, r.send, 1, batch)
	for name, c := range map[string]struct {
		end *local
		n   *Node
		req localapi.Request
	}{
		"wait":  {r.recvEnd, r.recv, &localapi.Wait{Req: "nobody", DeadlineMS: 60_000}},
		"stage": {r.sendEnd, r.send, &localapi.Stage{Req: "a", N: slots / 2}},
	} {
		call, answer := c.end.begin(c.n, 1, c.req)
		status(t, c.n) // the loop has had the call
		select {
		case v := <-answer:
			t.Fatalf("%s: did not wait: %v", name, v)
		default:
		}
		c.n.LocalEvents().Hangup(call)
		select {
		case v := <-answer:
			if err, ok := v.(*fault.Error); !ok || err.Code != fault.Cancelled {
				t.Errorf("%s: given up, it got %v", name, v)
			}
		case <-time.After(limit):
			t.Errorf("%s: given up, it is not answered", name)
		}
	}
	r.net.hold(false)
	must[*localapi.Ending](t, r.sendEnd, r.send, 1, &localapi.Cancel{Req: "a"})
	until(t, r.send, "idle", idle)
	until(t, r.recv, "idle", idle)
}

// TestNode_engine_lost: a claim outlives its connection until the engine's
// process is gone.
func TestNode_engine_lost(t *testing.T) {
	r := newRig(t, options{})
	r.attachBoth()
	r.begin("a", 2)
	r.granted("a")
	r.submit("a", 2)
	must[*localapi.Ending](t, r.recvEnd, r.recv, 1, &localapi.Wait{Req: "a", DeadlineMS: limit.Milliseconds()})
	must[*localapi.Claimed](t, r.recvEnd, r.recv, 1, &localapi.Claim{By: "me", Req: "a"})
	r.recv.LocalEvents().Disconnected(1)
	until(t, r.recv, "quarantined", func(s Status) bool { return s.Pool.Quarantined == 2 && s.Engine == "" })
	r.recv.LocalEvents().ProcessGone(1)
	until(t, r.recv, "free", idle)
}

// TestInit: every message on the init port is answered.
func TestInit(t *testing.T) {
	r := newRig(t, options{})
	h := handshake{}
	for name, c := range map[string]struct {
		h    DataHandshake
		ask  []byte
		want string
	}{
		"garbage":      {h, []byte("\xff"), "not a handshake"},
		"empty":        {h, nil, "not a handshake"},
		"mock":         {nil, initMessage(t, &wire.PySocketInitRequest{}), "ok"},
		"without nixl": {nil, initMessage(t, &wire.NixlInitRequest{LocalMeta: []byte("m")}), "no nixl link"},
		"init":         {h, initMessage(t, &wire.NixlInitRequest{LocalMeta: []byte("m")}), "ours"},
		"refused":      {handshake{errors.New("no such backend")}, initMessage(t, &wire.NixlInitRequest{LocalMeta: []byte("m")}), "no such backend"},
		"register":     {h, initMessage(t, &wire.NixlMemRegRequest{RemoteAgent: []byte("a"), LocalID: "id", LocalPages: []byte("p")}), "pages"},
		"an answer":    {h, initMessage(t, &wire.NixlInitResponse{RemoteAgent: []byte("a")}), "is no request"},
	} {
		t.Run(name, func(t *testing.T) {
			b := r.recv.RespondInit(c.h, c.ask)
			if _, err := wire.DecodeInit(b, slots); err != nil || !strings.Contains(string(b), c.want) {
				t.Errorf("answered with %q, %v; want %q in it", b, err, c.want)
			}
		})
	}
}

func initMessage(t *testing.T, m wire.InitMessage) []byte {
	t.Helper()
	b, err := wire.AppendInit(nil, m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

type handshake struct{ err error }

func (h handshake) Init([]byte) (agent, ours []byte, err error) {
	return []byte("agent"), []byte("ours"), h.err
}
func (h handshake) Register([]byte) ([]byte, error) { return []byte("pages"), h.err }
