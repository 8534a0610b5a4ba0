package node

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/berthkv/berth/internal/attach"
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/intake"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
	"github.com/berthkv/berth/internal/link/memlink"
	"github.com/berthkv/berth/internal/localapi"
	"github.com/berthkv/berth/internal/outbound"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	limit     = 20 * time.Second // bounds every wait
	slots     = 8
	slotBytes = 64
	tokens    = 16
)

var facts = kv.Facts{SlotBytes: slotBytes, Format: kv.Format2TD, DType: "uint8", ChunkTokens: tokens, TPSize: 1}
var shape = []int64{tokens, slotBytes / tokens}

// rig is a sending and a receiving node in one process: real shells and cores,
// with control connections that are function calls and links in memory.
type rig struct {
	t        *testing.T
	recv     *Node
	send     *Node
	net      *memory
	wires    *wires
	recvEnd  *local
	sendEnd  *local
	pools    [2]link.Pool // staging, receive
	recvLogs *logs
}

// options of a rig.
type options struct {
	mode    link.Mode
	clock   func() kv.Instant // of the receiver
	timeout time.Duration     // of a dial
	notify  Pusher            // the proxy's notify port
}

func newRig(t *testing.T, o options) *rig {
	t.Helper()
	if o.timeout == 0 {
		o.timeout = limit
	}
	r := &rig{t: t, net: &memory{Network: memlink.New(o.mode)}, recvEnd: newLocal(), sendEnd: newLocal(), recvLogs: &logs{}}
	for i := range r.pools {
		r.pools[i] = link.Pool{Bytes: make([]byte, slots*slotBytes), SlotBytes: slotBytes, FD: -1}
	}
	inc := [2]kv.Incarnation{{1}, {2}}
	r.send = New(Config{Name: "sender", Incarnation: inc[0], Secret: kv.Secret{9}, DialTimeout: o.timeout})
	r.recv = New(Config{Name: "receiver", Incarnation: inc[1], DialTimeout: o.timeout, Clock: o.clock,
		Log: slog.New(slog.NewTextHandler(r.recvLogs, &slog.HandlerOptions{Level: slog.LevelDebug}))})
	r.wires = newWires(r.recv)

	receiver := r.net.receiver(memlink.ReceiverConfig{Incarnation: inc[1], Pool: r.pools[1], Checksum: true}, r.recv.ReceiverEvents("mem"))
	caps := r.net.Caps()
	r.recv.Start(Cores{
		Attach: attach.Config{Facts: facts, Shape: shape, Quarantine: kv.Second},
		Intake: &intake.Config{Incarnation: inc[1], Facts: facts, Capacity: slots, AllocationTimeout: 30 * kv.Second, RequestTimeout: 60 * kv.Second,
			Lease: 10 * kv.Second, UnclaimedTTL: 60 * kv.Second, EndingTTL: 60 * kv.Second, Quarantine: kv.Second, SurplusGrace: kv.Second,
			MaxWaiting: 100, Bypass: slots, MaxEndings: 100, MaxConns: 100,
			Links: []intake.Link{{Name: "mem", Addr: receiver.Offer(), Pull: caps.Mode == link.Pull, ExactFence: caps.ExactFence}}},
	}, Deps{Router: r.wires, Receivers: map[string]link.Receiver{"mem": receiver}, Local: r.recvEnd, PoolNames: []string{localapi.ReceivePool}})

	words := &generations{words: make([]kv.Generation, slots)}
	sender := r.net.sender(memlink.SenderConfig{Pool: r.pools[0], Generation: words.load})
	r.send.Start(Cores{
		Attach: attach.Config{Facts: facts, Shape: shape, Quarantine: kv.Second},
		Outbound: &outbound.Config{Node: "sender", Incarnation: inc[0], Secret: kv.Secret{9}, Facts: facts, Shape: shape, Staging: slots, MaxStage: slots / 2,
			Dialect: "berth", Checksum: true, RequestTimeout: 60 * kv.Second, AllocationTimeout: 30 * kv.Second, WriteTimeout: 10 * kv.Second,
			EndingTTL: 60 * kv.Second, SkipNotify: o.notify == nil, Window: 1 << 20, MaxWaiting: 100, MaxPeers: 10, MaxEndings: 100, LegacyConns: 1,
			Links: []outbound.Link{{Name: "mem", Pull: caps.Mode == link.Pull, ExactFence: caps.ExactFence}}},
	}, Deps{Dialer: r.wires, Senders: map[string]link.Sender{"mem": sender}, Local: r.sendEnd, Generations: words, Staging: r.pools[0], Notify: o.notify,
		PoolNames: []string{localapi.StagingPool}})
	t.Cleanup(r.close)
	return r
}

func (r *rig) close() {
	r.send.Close()
	r.recv.Close()
	r.wires.wait()
}

// status is a node's status, with R1.
func status(t *testing.T, n *Node) Status {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	s, err := n.Status(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if p := s.Pool; p != nil && p.Free+p.Reserved+p.Granted+p.Committed+p.Claimed+p.Quarantined != p.Capacity {
		t.Fatalf("R1: %+v", *p)
	}
	return s
}

func until(t *testing.T, n *Node, what string, ok func(Status) bool) {
	t.Helper()
	eventually(t, what, func() bool { return ok(status(t, n)) })
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	deadline := time.After(limit)
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("not %s after %v", what, limit)
		}
	}
}

func idle(s Status) bool {
	return len(s.Requests) == 0 && (s.Pool == nil || s.Pool.Free == s.Pool.Capacity) && (s.Staging == nil || s.Staging.Free == s.Staging.Capacity)
}

// memory is a network of memory links that several goroutines may use; what is
// written moves at once, unless held.
type memory struct {
	*memlink.Network
	mu     sync.Mutex
	held   bool
	closed int      // connections
	landed []func() // to be said when mu is free: who says it may step, and call again
}

func (m *memory) hold(held bool) { m.do(func() { m.held = held }) }

// do calls f, moves what may move, and says what has landed.
func (m *memory) do(f func()) {
	m.mu.Lock()
	f()
	m.move()
	landed := m.landed
	m.landed = nil
	m.mu.Unlock()
	for _, say := range landed {
		say()
	}
}

func (m *memory) move() { // mu is held
	if !m.held {
		m.Deliver()
	}
}

// cut breaks the data connections; they are made again at once.
func (m *memory) cut() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.Cut(kv.Incarnation{1}, kv.Incarnation{2})
}

func (m *memory) sever() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.Sever(kv.Incarnation{1}, kv.Incarnation{2})
}

type memoryReceiver struct {
	link.Receiver
	m *memory
}

func (m *memory) receiver(c memlink.ReceiverConfig, ev link.ReceiverEvents) memoryReceiver {
	landed := ev.Landed
	ev.Landed = func(ls []link.Landing) { m.landed = append(m.landed, func() { landed(ls) }) }
	return memoryReceiver{m.Network.Receiver(c, ev), m}
}

func (r memoryReceiver) Allow(o kv.Incarnation, s kv.Secret) { r.do(func() { r.Receiver.Allow(o, s) }) }
func (r memoryReceiver) Disallow(o kv.Incarnation)           { r.do(func() { r.Receiver.Disallow(o) }) }
func (r memoryReceiver) Open(o kv.Incarnation, g kv.Generation, s []kv.SlotID) {
	r.do(func() { r.Receiver.Open(o, g, s) })
}
func (r memoryReceiver) Pull(o kv.Incarnation, g kv.Generation, i []link.PullItem) {
	r.do(func() { r.Receiver.Pull(o, g, i) })
}
func (r memoryReceiver) Revoke(g kv.Generation, s []kv.SlotID) {
	r.do(func() { r.Receiver.Revoke(g, s) })
}

func (r memoryReceiver) do(f func()) { r.m.do(f) }

type memorySender struct {
	link.Sender
	m *memory
}

func (m *memory) sender(c memlink.SenderConfig) memorySender {
	return memorySender{m.Network.Sender(c), m}
}

func (s memorySender) Connect(ctx context.Context, p link.Peer, ev link.SenderEvents) (link.Conn, error) {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	c, err := s.Sender.Connect(ctx, p, ev)
	if err != nil {
		return nil, err
	}
	return memoryConn{c, s.m}, nil
}

type memoryConn struct {
	link.Conn
	m *memory
}

func (c memoryConn) do(f func())               { c.m.do(f) }
func (c memoryConn) Write(ws []link.Write)     { c.do(func() { c.Conn.Write(ws) }) }
func (c memoryConn) Abort(ids []link.WriteID)  { c.do(func() { c.Conn.Abort(ids) }) }
func (c memoryConn) Settle(ids []link.WriteID) { c.do(func() { c.Conn.Settle(ids) }) }
func (c memoryConn) Close() (err error) {
	c.do(func() { c.m.closed++; err = c.Conn.Close() })
	return err
}

type generations struct {
	mu    sync.Mutex
	words []kv.Generation
}

func (g *generations) Store(s kv.SlotID, gen kv.Generation) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.words[s] = gen
}

func (g *generations) load(s kv.SlotID) kv.Generation {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.words[s]
}

// wires are the control connections from a sender to a receiver: the sender's
// Dialer and the receiver's Router. Each has a goroutine for each direction, as
// a socket has.
type wires struct {
	to    *Node
	tasks sync.WaitGroup

	mu               sync.Mutex
	conns            map[kv.ConnID]*cable
	last             kv.ConnID
	dials            int
	refuse           error                                                         // of Dial
	instead          func(ctx context.Context, ev DialEvents) (ControlConn, error) // of Dial
	fullUp, fullDown bool                                                          // Sends fail: to the receiver, to the sender
}

func newWires(to *Node) *wires { return &wires{to: to, conns: map[kv.ConnID]*cable{}} }

// cable is one connection. It is the sender's end; wires is the other.
type cable struct {
	w         *wires
	id        kv.ConnID
	up, down  chan []byte
	over      chan struct{}
	closeOnce sync.Once
}

func (w *wires) set(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
}

func (w *wires) dialled() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.dials
}

var errFull = fmt.Errorf("the queue is full")

func (w *wires) Dial(ctx context.Context, _ string, _ int, _ uint64, ev DialEvents) (ControlConn, error) {
	w.mu.Lock()
	w.dials++
	instead, refuse := w.instead, w.refuse
	w.mu.Unlock()
	switch {
	case refuse != nil:
		return nil, refuse
	case instead != nil:
		return instead(ctx, ev)
	}
	return w.connect(ev), nil
}

// connect makes a connection whose far end reports to ev.
func (w *wires) connect(ev DialEvents) *cable {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.last++
	c := &cable{w: w, id: w.last, up: make(chan []byte, 1000), down: make(chan []byte, 1000), over: make(chan struct{})}
	w.conns[c.id] = c
	w.tasks.Go(func() {
		w.to.RouterEvents().Connected(c.id, "identity", "remote")
		c.pass(c.up, func(b []byte) { w.to.RouterEvents().Message(c.id, b) })
		w.to.RouterEvents().Disconnected(c.id)
	})
	w.tasks.Go(func() {
		c.pass(c.down, ev.Message)
		ev.Closed(io.EOF)
	})
	return c
}

// pass hands on until the connection is over.
func (c *cable) pass(from <-chan []byte, to func([]byte)) {
	for {
		select {
		case b := <-from:
			to(b)
		case <-c.over:
			return
		}
	}
}

func (c *cable) Send(b []byte) error { return c.w.send(c.up, b, &c.w.fullUp) }
func (c *cable) Close()              { c.closeOnce.Do(func() { close(c.over) }) }

func (w *wires) send(to chan<- []byte, b []byte, full *bool) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if *full {
		return errFull
	}
	to <- bytes.Clone(b)
	return nil
}

// Send and CloseConn are the Router.
func (w *wires) Send(conn kv.ConnID, b []byte) error {
	c := w.conn(conn)
	if c == nil {
		return errFull
	}
	return w.send(c.down, b, &w.fullDown)
}

func (w *wires) CloseConn(conn kv.ConnID) {
	if c := w.conn(conn); c != nil {
		c.Close()
	}
}

func (w *wires) conn(id kv.ConnID) *cable {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.conns[id]
}

// cut breaks every connection.
func (w *wires) cut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range w.conns {
		c.Close()
	}
}

func (w *wires) wait() {
	w.cut()
	w.tasks.Wait()
}

// local is an engine's or tool's end of the local API: the Local that the node
// answers through, and what was answered.
type local struct {
	mu     sync.Mutex
	calls  kv.CallID
	waits  map[kv.CallID]chan any // an answer or a *fault.Error
	events []localapi.Event
	block  func(call kv.CallID) // called by the loop for every answer
	closed []kv.ConnID
}

func newLocal() *local { return &local{waits: map[kv.CallID]chan any{}} }

func (l *local) settle(call kv.CallID, v any) {
	l.mu.Lock()
	c, block := l.waits[call], l.block
	delete(l.waits, call)
	l.mu.Unlock()
	if block != nil {
		block(call)
	}
	if c != nil {
		c <- v
	}
}

func (l *local) Answer(call kv.CallID, a localapi.Answer)                     { l.settle(call, a) }
func (l *local) Fail(call kv.CallID, err *fault.Error)                        { l.settle(call, err) }
func (l *local) SendPools(call kv.CallID, a *localapi.HelloAnswer, fds []int) { l.settle(call, a) }
func (l *local) CloseConn(conn kv.ConnID)                                     { l.set(func() { l.closed = append(l.closed, conn) }) }
func (l *local) Emit(_ kv.ConnID, ev localapi.Event) {
	l.set(func() { l.events = append(l.events, ev) })
}
func (l *local) set(f func()) { l.mu.Lock(); defer l.mu.Unlock(); f() }
func (l *local) begin(n *Node, conn kv.ConnID, r localapi.Request) (kv.CallID, chan any) {
	c := make(chan any, 1)
	l.mu.Lock()
	l.calls++
	id := l.calls
	l.waits[id] = c
	l.mu.Unlock()
	n.LocalEvents().Request(conn, id, r)
	return id, c
}

// call makes a request and returns its answer, or the *fault.Error.
func (l *local) call(t *testing.T, n *Node, conn kv.ConnID, r localapi.Request) any {
	t.Helper()
	_, c := l.begin(n, conn, r)
	select {
	case v := <-c:
		return v
	case <-time.After(limit):
		t.Fatalf("%T is not answered after %v", r, limit)
		return nil
	}
}

// must makes a request that has to succeed.
func must[A any](t *testing.T, l *local, n *Node, conn kv.ConnID, r localapi.Request) A {
	t.Helper()
	v := l.call(t, n, conn, r)
	a, ok := v.(A)
	if !ok {
		t.Fatalf("%T is answered with %T %v", r, v, v)
	}
	return a
}

// code makes a request that has to fail, and returns how.
func (l *local) code(t *testing.T, n *Node, conn kv.ConnID, r localapi.Request) fault.Code {
	t.Helper()
	v := l.call(t, n, conn, r)
	err, ok := v.(*fault.Error)
	if !ok {
		t.Fatalf("%T is answered with %T %v, not with an error", r, v, v)
	}
	return err.Code
}

// attach connects an engine.
func (l *local) attach(t *testing.T, n *Node, conn kv.ConnID) {
	t.Helper()
	n.LocalEvents().Connected(conn, localapi.Cred{PID: 1})
	must[*localapi.HelloAnswer](t, l, n, conn, &localapi.Hello{Version: 1, Part: localapi.Worker, EngineID: "engine", Layout: &facts, Shape: shape})
}

func event[E localapi.Event](t *testing.T, l *local, what string, is func(E) bool) E {
	t.Helper()
	var found E
	eventually(t, what, func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return slices.ContainsFunc(l.events, func(ev localapi.Event) bool {
			e, ok := ev.(E)
			if ok && is(e) {
				found = e
				return true
			}
			return false
		})
	})
	return found
}

// logs keeps lines.
type logs struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logs) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bytes.Count(l.b.Bytes(), []byte(text))
}
