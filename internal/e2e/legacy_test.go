package e2e

import (
	"fmt"
	"maps"
	"math"
	"net"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/berthkv/berth"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/testenv"
	"github.com/berthkv/berth/internal/wire"
	"github.com/berthkv/berth/internal/zmtp"
)

// dealer speaks the control plane by hand.
type dealer struct {
	t    *testing.T
	conn *zmtp.Conn
}

func dial(t *testing.T, port int, identity string) *dealer {
	t.Helper()
	c, err := zmtp.DialDealer(ctxFor(t), net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), nil, zmtp.Options{Identity: []byte(identity)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return &dealer{t, c}
}

func (d *dealer) send(m msg.Message) {
	d.t.Helper()
	b, err := wire.Append(nil, m)
	if err != nil {
		d.t.Fatal(err)
	}
	d.raw(b)
}

func (d *dealer) raw(b []byte) {
	d.t.Helper()
	if err := d.conn.Send(nil, b); err != nil {
		d.t.Fatal(err)
	}
}

func (d *dealer) recv() msg.Message {
	d.t.Helper()
	f, err := d.conn.Recv(ctxFor(d.t))
	if err != nil {
		d.t.Fatal(err)
	}
	m, err := wire.Decode(f[len(f)-1])
	if err != nil {
		d.t.Fatal(err)
	}
	return m
}

// alloc asks and returns what is granted.
func (d *dealer) alloc(m *msg.AllocRequest) []int64 {
	d.t.Helper()
	d.send(m)
	r, ok := d.recv().(*msg.AllocResponse)
	if !ok {
		d.t.Fatalf("answered with %T", r)
	}
	return r.RemoteIndexes
}

func keys(req string, from, to int) (out []string) {
	for i := from; i < to; i++ {
		out = append(out, fmt.Sprintf("m@1@0@%s%02x@uint8", req, i))
	}
	return out
}

func allocRequest(req string, total int64, ks []string, last bool) *msg.AllocRequest {
	return &msg.AllocRequest{Keys: ks, Fmt: layout.Format, Shape: shape, DType: layout.DType, LastChunkToks: chunkTokens, ReqID: req, IsLastBatch: last, TotalChunks: total}
}

func refused(r []int64) bool {
	for _, i := range r {
		if i != -1 {
			return false
		}
	}
	return len(r) > 0
}

// The seeds' example from one LMCache sender, which is lock-step: the second
// request is refused within a round trip and the first completes (fault 1 as
// receiver). r1, r7: what can never fit is refused at once and leaves nothing.
func TestLegacy_control_plane(t *testing.T) {
	r := startAgent(t, receiving(t, 10))
	d := dial(t, r.port(), "10.0.0.5-to-127.0.0.17300")
	if got := d.alloc(allocRequest("big", 11, keys("e", 0, 5), false)); !refused(got) || len(got) != 5 {
		t.Errorf("11 chunks of 10: %v, want five times -1", got)
	}
	a := d.alloc(allocRequest("A", 8, keys("a", 0, 5), false))
	if refused(a) || len(a) != 5 {
		t.Fatalf("A's first batch: %v", a)
	}
	if b := d.alloc(allocRequest("B", 8, keys("b", 0, 5), false)); !refused(b) {
		t.Errorf("B beside A from a lock-step sender: %v, want a refusal", b)
	}
	rest := d.alloc(allocRequest("A", 8, keys("a", 5, 8), true))
	if refused(rest) || len(rest) != 3 {
		t.Errorf("A's second batch: %v", rest)
	}
	if got := d.alloc(allocRequest("A2", 2, keys("f", 0, 2), true)); refused(got) {
		t.Errorf("two chunks in the two free slots: %v", got)
	}
	// Faults 3 and 4: cancel, twice, and a batch after it.
	for range 2 {
		d.send(&msg.CancelNotif{ReqID: "A2", Keys: keys("f", 0, 2)})
		if m, ok := d.recv().(*msg.AllocResponse); !ok || len(m.RemoteIndexes) != 0 {
			t.Errorf("cancel is answered with %+v", m)
		}
	}
	if got := d.alloc(allocRequest("A2", 2, keys("f", 1, 2), true)); !refused(got) {
		t.Errorf("a batch after its request's cancel: %v", got)
	}
	d.send(&msg.CancelNotif{ReqID: "A"})
	d.recv()
	r.until(t, "free", allFree)
}

// r28, r64, fault 18: garbage on every port costs only its own connection or
// gets an answer, and others go on.
func TestGarbage_on_every_port(t *testing.T) {
	r := startAgent(t, receiving(t, 10))
	s := startAgent(t, sending(10))
	sender, receiver := s.engine(t), r.engine(t)
	tr := begin(t, sender, "live", 4, r.port())
	granted(t, tr)
	initPort := r.cfg.InitPort()
	for i, junk := range []string{"", "GET / HTTP/1.1\r\n\r\n", strings.Repeat("\xff", 4096), "\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03", strings.Repeat("\x00", 64)} {
		for _, port := range []int{r.port(), initPort} {
			c, err := net.Dial("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
			if err != nil {
				t.Fatalf("port %d after %d pieces of garbage: %v", port, i, err)
			}
			c.Write([]byte(junk))
			c.Close()
		}
	}
	d := dial(t, r.port(), "x-to-y")
	for _, junk := range []string{"", "\xc1", "\x81", "\x80", "\x81\xa4type\xa4Nope", "\x82\xa4type\xa5Hello\xa3seq\x01", strings.Repeat("\x91", 10000), "\xdf\xff\xff\xff\xff"} {
		d.raw([]byte(junk))
		switch m := d.recv().(type) {
		case *msg.AllocResponse:
			if !refused(m.RemoteIndexes) {
				t.Errorf("%q was granted %v", junk, m.RemoteIndexes)
			}
		case *msg.Error:
		default:
			t.Errorf("%q was answered with %T", junk, m)
		}
	}
	// Messages of another role: the notify port's and the receiver's own.
	for _, m := range []msg.Message{&msg.ProxyNotif{ReqID: "live"}, &msg.AllocResponse{RemoteIndexes: []int64{1}}, &msg.Granted{Re: 1, Begin: 1, Generation: 1}, &msg.CommitReply{Re: 7, Begin: 1}} {
		d.send(m)
	}
	d.send(&msg.Heartbeat{Seq: 5})
	for {
		if e, ok := d.recv().(*msg.Error); ok {
			if e.Re != 5 || e.Code != "hello_required" {
				t.Errorf("a heartbeat before hello: %+v", e)
			}
			break
		}
	}
	// The init port answers everything, in lock step.
	q, err := zmtp.DialReq(ctxFor(t), net.JoinHostPort("127.0.0.1", strconv.Itoa(initPort)), zmtp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	for _, b := range []string{"junk", "\x81\xa4type\xafNixlInitRequest"} {
		f, err := q.Do(ctxFor(t), []byte(b))
		if err != nil {
			t.Fatal(err)
		}
		if m, err := wire.DecodeInit(f[len(f)-1], 0); err != nil {
			t.Errorf("%q: %v", b, err)
		} else if _, ok := m.(*wire.BerthRefused); !ok {
			t.Errorf("%q was answered with %T", b, m)
		}
	}
	send(t, sender, tr, 4)
	receive(t, receiver, "live", 4)
	r.until(t, "free", allFree)
}

// Bad fields of an AllocRequest: an error reply at once, nothing left.
func TestLegacy_bad_input(t *testing.T) {
	r := startAgent(t, receiving(t, 10))
	d := dial(t, r.port(), "10.0.0.5-to-127.0.0.17300")
	base := func() *msg.AllocRequest { return allocRequest("bad", 2, keys("a", 0, 2), false) }
	for _, c := range []struct {
		name string
		edit func(*msg.AllocRequest)
	}{
		{"total 0", func(m *msg.AllocRequest) { m.TotalChunks = 0 }},
		{"total negative", func(m *msg.AllocRequest) { m.TotalChunks = -1 }},
		{"total 2^62", func(m *msg.AllocRequest) { m.TotalChunks = 1 << 62 }},
		{"total capacity+1 (r1)", func(m *msg.AllocRequest) { m.TotalChunks = 11 }},
		{"more keys than declared", func(m *msg.AllocRequest) { m.Keys = keys("a", 0, 3) }},
		{"unknown dtype", func(m *msg.AllocRequest) { m.DType = "float16" }},
		{"unknown format", func(m *msg.AllocRequest) { m.Fmt = 9 }},
		{"shape beyond a slot (r36)", func(m *msg.AllocRequest) { m.Shape = []int64{chunkTokens, slotBytes/chunkTokens + 1} }},
		{"shape without tokens", func(m *msg.AllocRequest) { m.Shape = nil }},
		{"shape overflows", func(m *msg.AllocRequest) { m.Shape = []int64{1 << 40, 1 << 40} }},
		{"last_chunk_toks 0", func(m *msg.AllocRequest) { m.LastChunkToks = 0 }},
		{"last_chunk_toks negative", func(m *msg.AllocRequest) { m.LastChunkToks = -5 }},
		{"last_chunk_toks above the chunk", func(m *msg.AllocRequest) { m.LastChunkToks = chunkTokens + 1 }},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := base()
			c.edit(m)
			d.t = t
			if got := d.alloc(m); !refused(got) {
				t.Errorf("granted %v", got)
			}
			if s := r.status(t); !allFree(s) {
				t.Errorf("something is left: %+v", *s.Pool)
			}
		})
	}
	// The ending of "bad" is kept; another name of the same sender goes on.
	d.t = t
	if got := d.alloc(allocRequest("good", 2, keys("g", 0, 2), true)); refused(got) {
		t.Error("a good request after the bad ones is refused")
	}
}

// What no encoder of ours would write: keys and ids beyond every limit, and a
// total that no integer of Go holds. Each is refused at once and leaves nothing;
// a nameless request is one of its own.
func TestLegacy_beyond_limits(t *testing.T) {
	r := startAgent(t, receiving(t, 10))
	d := dial(t, r.port(), "10.0.0.5-to-127.0.0.17300")
	base := map[string]any{"type": "AllocRequest", "keys": []any{"k"}, "fmt": 3, "shape": []any{chunkTokens, slotBytes / chunkTokens}, "dtype": "uint8",
		"last_chunk_toks": chunkTokens, "req_id": "beyond", "is_last_batch": true, "total_chunks": 1}
	for name, edit := range map[string]map[string]any{
		"key of 10 MB":      {"keys": []any{strings.Repeat("k", 10<<20)}},
		"key of 4097 bytes": {"keys": []any{strings.Repeat("k", 4097)}},
		"16,385 keys":       {"keys": make([]any, 16_385)},
		"req_id of 1 MB":    {"req_id": strings.Repeat("r", 1<<20)},
		"req_id of 513":     {"req_id": strings.Repeat("r", 513)},
		"total 2^63":        {"total_chunks": uint64(1) << 63},
		"total 2^64-1":      {"total_chunks": uint64(math.MaxUint64)},
	} {
		t.Run(name, func(t *testing.T) {
			m := maps.Clone(base)
			maps.Copy(m, edit)
			if keys := m["keys"].([]any); keys[0] == nil {
				for i := range keys {
					keys[i] = "k"
				}
			}
			b, err := msgp.AppendMapStrIntf(nil, m)
			if err != nil {
				t.Fatal(err)
			}
			d.t = t
			d.raw(b)
			if a, ok := d.recv().(*msg.AllocResponse); !ok || !refused(a.RemoteIndexes) {
				t.Errorf("answered with %+v", a)
			}
			if s := r.status(t); !allFree(s) {
				t.Errorf("something is left: %+v", *s.Pool)
			}
		})
	}
	d.t = t
	if got := d.alloc(allocRequest("", 0, keys("g", 0, 2), false)); refused(got) || len(got) != 2 {
		t.Errorf("a request without a name got %v", got)
	}
}

// Half-open connections by the thousand: others are served.
func TestHalfOpen_connections(t *testing.T) {
	r := startAgent(t, receiving(t, 10))
	s := startAgent(t, sending(10))
	sender, receiver := s.engine(t), r.engine(t)
	var conns []net.Conn
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	for range 2000 {
		c, err := net.DialTimeout("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(r.port())), time.Second)
		if err != nil {
			break // the backlog is full: that is a limit too
		}
		conns = append(conns, c)
	}
	if len(conns) < 1000 {
		t.Fatalf("only %d connections could be opened", len(conns))
	}
	tr := begin(t, sender, "live", 4, r.port())
	granted(t, tr)
	send(t, sender, tr, 4)
	receive(t, receiver, "live", 4)
}

// The reference's own wire libraries, pyzmq and msgspec, as an LMCache sender
// against the alloc and init port, and as a proxy's PULL socket.
func TestLegacy_python(t *testing.T) {
	r := startAgent(t, receiving(t, 10))
	notify := freePort(t)
	s := startAgent(t, sending(10).with(settings{"pd_skip_proxy_notification": "false", "pd_proxy_host": "127.0.0.1", "pd_proxy_port": strconv.Itoa(notify)}))
	sender, receiver := s.engine(t), r.engine(t)
	py := exec.CommandContext(ctxFor(t), testenv.Python(t), "testdata/lmcache_sender.py", strconv.Itoa(r.port()), strconv.Itoa(r.cfg.InitPort()), strconv.Itoa(notify))
	out, err := py.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	py.Stderr = r.logs
	if err := py.Start(); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 4096)
	n, err := out.Read(buf) // "pulling": the notify port is bound
	if err != nil || !strings.Contains(string(buf[:n]), "pulling") {
		t.Fatalf("%q, %v\n%s", buf[:n], err, r.logs)
	}
	// A request that is not Berth's proxy's: the word goes to the PULL socket.
	tr, err := sender.Begin(ctxFor(t), beginFor("word", 2, r.port()))
	if err != nil {
		t.Fatal(err)
	}
	granted(t, tr)
	send(t, sender, tr, 2)
	if err := py.Wait(); err != nil {
		t.Fatalf("the Python peer: %v\n%s", err, r.logs)
	}
	receive(t, receiver, "word", 2)
	r.until(t, "free", func(s berth.Status) bool { return allFree(s) })
}
