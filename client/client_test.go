package client

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/localapi"
	"github.com/berthkv/berth/internal/msg"
)

func TestMain(m *testing.M) {
	if path := os.Getenv(victimEnv); path != "" {
		victim(path)
		return
	}
	goleak.VerifyTestMain(m)
}

// patience is how long a test waits for what must come.
const patience = 20 * time.Second

const slotBytes = 4096

// fakeAgent answers each request with what reply says, after hello.
type fakeAgent struct {
	*localapi.Server
	t                *testing.T
	pools            []int
	staging, receive []byte // its own mappings
	reply            func(a *fakeAgent, conn kv.ConnID, call kv.CallID, req localapi.Request)
	hello            localapi.HelloAnswer
	refuse           *fault.Error // of hello

	mu           sync.Mutex
	pid, process int
	seen         chan localapi.Request
	gone         chan int
	ups          chan kv.CallID
}

func (a *fakeAgent) Connected(_ kv.ConnID, cred localapi.Cred) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.pid, a.process = cred.PID, cred.Process
}
func (a *fakeAgent) Hangup(call kv.CallID)  { a.ups <- call }
func (a *fakeAgent) Disconnected(kv.ConnID) {}
func (a *fakeAgent) ProcessGone(n int)      { a.gone <- n }
func (a *fakeAgent) Request(conn kv.ConnID, call kv.CallID, req localapi.Request) {
	if h, ok := req.(*localapi.Hello); ok {
		switch {
		case a.refuse != nil:
			a.Fail(call, a.refuse)
			a.CloseConn(conn)
		case h.Part == localapi.Tool:
			ans := a.hello
			ans.Pools = nil
			a.Answer(call, &ans)
		default:
			a.SendPools(call, &a.hello, a.pools)
		}
	} else {
		a.reply(a, conn, call, req)
	}
	a.seen <- req
}

// saw returns the next request that the agent got.
func saw[R localapi.Request](a *fakeAgent) R {
	a.t.Helper()
	select {
	case req := <-a.seen:
		r, ok := req.(R)
		if !ok {
			a.t.Fatalf("the agent got %T %+v, want %T", req, req, r)
		}
		return r
	case <-time.After(patience):
		var r R
		a.t.Fatalf("the agent got no %T", r)
		return r
	}
}

// memfd makes a pool as the agent does.
func memfd(t *testing.T, name string, slots int, seals int) (fd int, mapping []byte) {
	t.Helper()
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Ftruncate(fd, int64(slots*slotBytes)); err != nil {
		t.Fatal(err)
	}
	mapping, err = unix.Mmap(fd, 0, slots*slotBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(mapping) })
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		t.Fatal(err)
	}
	return fd, mapping
}

// startAgent starts an agent with pools of that many slots, 0 for none.
func startAgent(t *testing.T, staging, receive int, reply func(*fakeAgent, kv.ConnID, kv.CallID, localapi.Request)) *fakeAgent {
	t.Helper()
	a := newAgent(t, reply)
	if staging > 0 {
		a.withPools(staging, receive)
	}
	a.listen()
	return a
}

func newAgent(t *testing.T, reply func(*fakeAgent, kv.ConnID, kv.CallID, localapi.Request)) *fakeAgent {
	a := &fakeAgent{t: t, reply: reply, seen: make(chan localapi.Request, 10_000), gone: make(chan int, 10), ups: make(chan kv.CallID, 10_000),
		hello: localapi.HelloAnswer{Version: 1, Incarnation: kv.Incarnation{1}, SlotBytes: slotBytes}}
	return a
}

// listen starts the agent; what else is set must be set before.
func (a *fakeAgent) listen() {
	a.t.Helper()
	a.mu.Lock() // held until a.Server is there: Connected waits for it
	defer a.mu.Unlock()
	s, err := localapi.Listen(localapi.Config{Path: filepath.Join(a.t.TempDir(), "a.sock"), Handler: a})
	if err != nil {
		a.t.Fatal(err)
	}
	a.Server = s
	a.t.Cleanup(func() { s.Close() })
}

// withPools gives the agent both pools.
func (a *fakeAgent) withPools(staging, receive int) {
	var sfd, rfd int
	sfd, a.staging = memfd(a.t, "staging", staging, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW)
	rfd, a.receive = memfd(a.t, "receive", receive, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_FUTURE_WRITE)
	a.pools = []int{sfd, rfd}
	a.hello.Pools = []string{localapi.StagingPool, localapi.ReceivePool}
	a.hello.StagingCapacity, a.hello.ReceiveCapacity, a.hello.MaxStage = int64(staging), int64(receive), int64(staging/2)
}

func bounded(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

var engineHello = Hello{Part: Worker, EngineID: "e", Layout: Layout{SlotBytes: slotBytes, Format: 1, DType: "half", ChunkTokens: 16, TPSize: 1},
	Shape: []int64{2, 4, 16, 16}, TokensKey: "k"}

func dial(t *testing.T, a *fakeAgent, h Hello) *Client {
	t.Helper()
	c, err := Dial(bounded(t), a.Path(), h)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	saw[*localapi.Hello](a)
	return c
}

// answers is a fake's reply that answers everything well.
func answers(a *fakeAgent, conn kv.ConnID, call kv.CallID, req localapi.Request) {
	switch req := req.(type) {
	case *localapi.Begin:
		a.Answer(call, &localapi.Done{})
		a.Emit(conn, &localapi.Granted{Req: req.Req, Slots: []kv.SlotID{0, 1}[:req.Stage]})
	case *localapi.Stage:
		a.Answer(call, &localapi.Slots{Slots: []kv.SlotID{2, 3}[:req.N]})
	case *localapi.Submit:
		a.Answer(call, &localapi.Done{})
		if req.HasEnd {
			a.Emit(conn, &localapi.Ended{Req: req.Req, Ending: msg.EndReady})
		}
	case *localapi.Cancel:
		a.Answer(call, &localapi.Ending{Ending: msg.EndFailed, Reason: req.Reason, Text: req.Text})
		a.Emit(conn, &localapi.Ended{Req: req.Req, Ending: msg.EndFailed, Reason: req.Reason, Text: req.Text})
	case *localapi.Wait:
		a.Answer(call, &localapi.Ending{Ending: msg.EndCancelled})
	case *localapi.Find:
		a.Answer(call, &localapi.Found{Req: "r", Matched: int64(len(req.Keys))})
	case *localapi.Claim:
		a.Answer(call, &localapi.Claimed{Chunks: []localapi.Chunk{{Index: 0, Slot: 1, Tokens: 16, Bytes: slotBytes, Key: "k"}}, Fmt: 1, DType: "half", Shape: []int64{2, 4, 16, 16}})
	case *localapi.Status:
		a.Answer(call, &localapi.StatusAnswer{Status: `{"waiting":0}`})
	default:
		a.Answer(call, &localapi.Done{})
	}
}

func closed(t *testing.T, what string, ch <-chan struct{}) {
	t.Helper()
	select {
	case <-ch:
	case <-time.After(patience):
		t.Fatalf("no %s", what)
	}
}

func TestOperations(t *testing.T) {
	a := startAgent(t, 4, 2, answers)
	staging, receive := a.staging, a.receive
	c := dial(t, a, engineHello)
	ctx := bounded(t)
	want := Info{Incarnation: "01000000000000000000000000000000", SlotBytes: slotBytes, StagingCapacity: 4, ReceiveCapacity: 2, MaxStage: 2}
	if d := cmp.Diff(want, c.Info()); d != "" {
		t.Errorf("info (-want +got):\n%s", d)
	}
	if err := c.Touch(ctx); err != nil {
		t.Error(err)
	}

	// Sending: what is written into a slot is in the agent's memory.
	tr, err := c.Begin(ctx, Begin{Req: "r", TotalChunks: 4, Host: "h", AllocPort: 1, InitPort: 2, Deadline: 1500 * time.Microsecond, Stage: 2, BerthProxy: true})
	if err != nil {
		t.Fatal(err)
	}
	wantBegin := &localapi.Begin{Req: "r", TotalChunks: 4, Host: "h", AllocPort: 1, InitPort: 2, DeadlineMS: 2, Stage: 2, BerthProxy: true}
	if d := cmp.Diff(wantBegin, saw[*localapi.Begin](a)); d != "" {
		t.Errorf("begin (-want +got):\n%s", d)
	}
	closed(t, "grant", tr.Granted())
	if d := cmp.Diff([]Slot{0, 1}, tr.Slots()); d != "" {
		t.Error(d)
	}
	slots, err := tr.Stage(ctx, 2)
	if err != nil || len(slots) != 2 {
		t.Fatal(slots, err)
	}
	if m := saw[*localapi.Stage](a); m.DeadlineMS < 1 || m.DeadlineMS > patience.Milliseconds() || m.NonBlocking {
		t.Errorf("%+v", m)
	}
	if _, err := c.TryStage(ctx, "r", 1); err != nil || !saw[*localapi.Stage](a).NonBlocking {
		t.Error("TryStage:", err)
	}
	copy(c.Staging(slots[1]), "from the engine")
	if got := string(staging[3*slotBytes:][:15]); got != "from the engine" {
		t.Errorf("the agent sees %q", got)
	}
	if err := tr.Unstage(ctx, slots[:1]); err != nil {
		t.Error(err)
	}
	saw[*localapi.Unstage](a)
	if err := tr.Submit(ctx, []Staged{{Index: 3, Key: "k3", Slot: slots[1], Tokens: 5}}, NoEnd); err != nil {
		t.Error(err)
	}
	if m := saw[*localapi.Submit](a); m.HasEnd || len(m.Chunks) != 1 {
		t.Errorf("%+v", m)
	}
	if err := tr.Submit(ctx, nil, 4); err != nil {
		t.Error(err)
	}
	if m := saw[*localapi.Submit](a); !m.HasEnd || m.End != 4 {
		t.Errorf("%+v", m)
	}
	closed(t, "ending", tr.Ended())
	if tr.Ending().Err() != nil {
		t.Error(tr.Ending())
	}

	// Ended badly, with the same name again.
	tr, err = c.Begin(ctx, Begin{Req: "r", TotalChunks: 1, Host: "h", AllocPort: 1})
	if err != nil {
		t.Fatal(err)
	}
	saw[*localapi.Begin](a)
	if _, err := c.Begin(ctx, Begin{Req: "r"}); fault.CodeOf(err) != fault.BadRequest {
		t.Error("the same name twice:", err)
	}
	e, err := tr.Cancel(ctx, Deadline, "late")
	if err != nil || e.Ending != "failed" || e.Reason != Deadline {
		t.Error(e, err)
	}
	saw[*localapi.Cancel](a)
	closed(t, "ending", tr.Ended())
	if err := tr.Ending().Err(); !errors.Is(err, &Error{Code: Deadline}) || !strings.Contains(err.Error(), "late") {
		t.Error(err)
	}

	// Receiving: what the agent has is in the slot.
	if e, err := c.Wait(ctx, "r", time.Second); err != nil || fault.CodeOf(e.Err()) != Cancelled {
		t.Error(e, err)
	}
	if m := saw[*localapi.Wait](a); m.DeadlineMS != 1000 {
		t.Errorf("%+v", m)
	}
	req, n, err := c.Find(ctx, "b", []string{"k0", "k1"})
	if req != "r" || n != 2 || err != nil {
		t.Error(req, n, err)
	}
	saw[*localapi.Find](a)
	got, err := c.Claim(ctx, "b", "r")
	if err != nil {
		t.Fatal(err)
	}
	saw[*localapi.Claim](a)
	copy(receive[slotBytes:], "from the agent")
	if s := string(c.Receive(got.Chunks[0].Slot)[:14]); s != "from the agent" {
		t.Errorf("the engine sees %q", s)
	}
	if err := c.Release(ctx, "b", "r", 0); err != nil {
		t.Error(err)
	}
	if m := saw[*localapi.Release](a); len(m.Chunks) != 1 {
		t.Errorf("%+v", m)
	}
	if err := c.Release(ctx, "b", "r"); err != nil {
		t.Error(err)
	}
	if m := saw[*localapi.Release](a); m.Chunks != nil {
		t.Errorf("%+v", m)
	}
	if s, err := c.Status(ctx); s != `{"waiting":0}` || err != nil {
		t.Error(s, err)
	}
	if err := c.Drain(ctx); err != nil {
		t.Error(err)
	}
	for _, f := range []func(){func() { c.Staging(4) }, func() { c.Receive(2) }} {
		if !panics(f) {
			t.Error("a slot outside of the pool has memory")
		}
	}
}

func panics(f func()) (did bool) {
	defer func() { did = recover() != nil }()
	f()
	return
}

// TestReceivePoolIsReadOnly: not even by another mapping of the descriptor can
// an engine write what it received.
func TestReceivePoolIsReadOnly(t *testing.T) {
	a := startAgent(t, 1, 1, answers)
	receive := a.receive
	fd := a.pools[1]
	if m, err := unix.Mmap(fd, 0, slotBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
		unix.Munmap(m)
		t.Error("the receive pool can be mapped writable")
	}
	if _, err := unix.Pwrite(fd, []byte("x"), 0); err == nil {
		t.Error("the receive pool can be written")
	}
	c := dial(t, a, engineHello)
	receive[0] = 'r' // the agent's own mapping still writes
	if c.Receive(0)[0] != 'r' {
		t.Error("the engine does not see it")
	}
	if _, err := mapPool(fd, 1, slotBytes, unix.PROT_READ|unix.PROT_WRITE); err == nil {
		t.Error("mapPool maps it writable")
	}
}

func TestTool(t *testing.T) {
	a := startAgent(t, 1, 1, answers)
	c := dial(t, a, Hello{Part: Tool})
	if e, err := c.Cancel(bounded(t), "r", "", ""); err != nil || e.Ending != "failed" {
		t.Error(e, err)
	}
	if !panics(func() { c.Staging(0) }) {
		t.Error("a tool has memory")
	}
	if err := c.Touch(bounded(t)); err != nil {
		t.Error(err)
	}
}

func TestDialErrors(t *testing.T) {
	fds := countFDs(t)
	for name, row := range map[string]struct {
		change func(*fakeAgent)
		want   string
	}{
		"refused":       {func(a *fakeAgent) { a.refuse = fault.New(fault.LayoutMismatch, "tp_size 1, 2") }, "layout_mismatch: tp_size 1, 2"},
		"version":       {func(a *fakeAgent) { a.hello.Version = 2 }, "version 2"},
		"fewer fds":     {func(a *fakeAgent) { a.pools = a.pools[:1] }, "1 descriptors came for 2 pools"},
		"unknown pool":  {func(a *fakeAgent) { a.hello.Pools[1] = "other" }, "other pool: unknown"},
		"short pool":    {func(a *fakeAgent) { a.hello.ReceiveCapacity++ }, "3 slots of 4096 bytes in 8192 bytes"},
		"no slot bytes": {func(a *fakeAgent) { a.hello.SlotBytes = 0 }, "slots of 0 bytes"},
		"huge":          {func(a *fakeAgent) { a.hello.ReceiveCapacity = 1 << 62 }, "slots of 4096 bytes in"},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAgent(t, answers)
			a.withPools(2, 2)
			row.change(a)
			a.listen()
			c, err := Dial(bounded(t), a.Path(), engineHello)
			if err == nil {
				c.Close()
			}
			if err == nil || !strings.Contains(err.Error(), row.want) || !strings.Contains(err.Error(), a.Path()) {
				t.Errorf("%v, want %q", err, row.want)
			}
			if name == "refused" && fault.CodeOf(err) != fault.LayoutMismatch {
				t.Errorf("the code is lost: %v", err)
			}
		})
	}
	if _, err := Dial(bounded(t), filepath.Join(t.TempDir(), "none"), engineHello); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	if n := countFDs(t); n > fds {
		t.Errorf("%d descriptors, %d before", n, fds)
	}
}

// TestDialDeadline: an agent that accepts and says nothing delays nobody.
func TestDialDeadline(t *testing.T) {
	a := startAgent(t, 0, 0, answers)
	ctx, cancel := context.WithCancel(bounded(t))
	block := make(chan struct{})
	defer close(block)
	connected := make(chan struct{})
	s, err := localapi.Listen(localapi.Config{Path: a.Path() + "2", Handler: stuck{a, connected, block}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	go func() {
		<-connected
		cancel()
	}()
	if _, err := Dial(ctx, s.Path(), engineHello); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// stuck is a Handler that stops in its first Connected.
type stuck struct {
	*fakeAgent
	connected, block chan struct{}
}

func (s stuck) Connected(kv.ConnID, localapi.Cred) {
	close(s.connected)
	<-s.block
}

func countFDs(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}
