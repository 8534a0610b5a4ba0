package node

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
	"github.com/berthkv/berth/internal/localapi"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/wire"
)

// begin asks for a request at the rig's receiver.
func (r *rig) begin(req string, total int64) {
	r.t.Helper()
	must[*localapi.Done](r.t, r.sendEnd, r.send, 1, &localapi.Begin{Req: req, TotalChunks: total, Host: "h", AllocPort: 1})
}

func (r *rig) granted(req string) {
	r.t.Helper()
	event(r.t, r.sendEnd, req+" granted", func(e *localapi.Granted) bool { return e.Req == req })
}

func (r *rig) ended(req string) *localapi.Ended {
	r.t.Helper()
	return event(r.t, r.sendEnd, req+" ended", func(e *localapi.Ended) bool { return e.Req == req })
}

// submit stages chunks and submits them all.
func (r *rig) submit(req string, total int) {
	r.t.Helper()
	slots := must[*localapi.Slots](r.t, r.sendEnd, r.send, 1, &localapi.Stage{Req: req, N: int64(total)}).Slots
	s := &localapi.Submit{Req: req, HasEnd: true, End: int64(total)}
	for i, slot := range slots {
		copy(r.pools[0].Slot(slot), content(req, i))
		s.Chunks = append(s.Chunks, localapi.Staged{Index: int64(i), Key: fmt.Sprint(i), Slot: slot, Tokens: tokens})
	}
	must[*localapi.Done](r.t, r.sendEnd, r.send, 1, s)
}

func content(req string, chunk int) []byte {
	return bytes.Repeat([]byte(fmt.Sprintf("%s/%d;", req, chunk)), slotBytes)[:slotBytes]
}

// receive waits, claims, compares and releases.
func (r *rig) receive(req string, total int) {
	r.t.Helper()
	if e := must[*localapi.Ending](r.t, r.recvEnd, r.recv, 1, &localapi.Wait{Req: req, DeadlineMS: limit.Milliseconds()}); e.Ending != msg.EndReady {
		r.t.Fatalf("%s ended as %+v", req, e)
	}
	got := must[*localapi.Claimed](r.t, r.recvEnd, r.recv, 1, &localapi.Claim{By: "me", Req: req})
	if len(got.Chunks) != total {
		r.t.Fatalf("%d chunks claimed of %d", len(got.Chunks), total)
	}
	for i, c := range got.Chunks {
		if !bytes.Equal(r.pools[1].Slot(c.Slot), content(req, i)) {
			r.t.Errorf("chunk %d of %s has other bytes", i, req)
		}
	}
	must[*localapi.Done](r.t, r.recvEnd, r.recv, 1, &localapi.Release{By: "me", Req: req})
}

func (r *rig) attachBoth() {
	r.t.Helper()
	r.sendEnd.attach(r.t, r.send, 1)
	r.recvEnd.attach(r.t, r.recv, 1)
}

// TestNode_moves: every action of a whole transfer is carried out, over a link
// that writes and over one that is pulled from, with checksums; nothing is left.
func TestNode_moves(t *testing.T) {
	for name, mode := range map[string]link.Mode{"stream": link.Stream, "pull": link.Pull} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, options{mode: mode})
			r.attachBoth()
			for i := range 3 {
				req := fmt.Sprintf("req-%d", i)
				r.begin(req, 4)
				r.granted(req)
				r.submit(req, 4)
				if e := r.ended(req); e.Ending != msg.EndReady {
					t.Fatalf("%+v", e)
				}
				r.receive(req, 4)
			}
			until(t, r.send, "idle", idle)
			until(t, r.recv, "idle", idle)
			s := status(t, r.recv)
			if s.Totals != (Totals{3, 12, 12 * slotBytes}) || s.Timings.Transfer.Count != 3 || !s.Ready {
				t.Errorf("%+v", s)
			}
			if s := status(t, r.send); len(s.Peers) != 1 || s.Peers[0].Link != "mem" || s.Peers[0].State != "up" {
				t.Errorf("peers %+v", s.Peers)
			}
			if c := r.recv.Stats().Snapshot(); c.Endings[Label{"receive", "ready", ""}] != 3 || c.Messages["in"] == 0 || c.Messages["out"] == 0 {
				t.Errorf("counters %+v", c)
			}
		})
	}
}

// TestNode_close: the second Close is harmless; what comes later is refused, not
// hung; what waits for the node is told.
func TestNode_close(t *testing.T) {
	r := newRig(t, options{})
	r.attachBoth()
	r.net.hold(true)
	r.begin("live", 4)
	r.granted("live")
	r.submit("live", 4)
	until(t, r.recv, "granted", func(s Status) bool { return s.Pool.Granted == 4 })
	r.send.Close()
	r.send.Close()
	select {
	case <-r.wires.conn(1).over:
	default:
		t.Error("Close leaves a control connection")
	}
	if r.net.closed != 1 {
		t.Error("Close leaves a link")
	}
	r.recv.Close()
	if _, err := r.recv.Status(t.Context()); err == nil {
		t.Error("a closed node has a status")
	}
	// Endpoints outlive the loop: what they still say goes nowhere.
	r.recv.RouterEvents().Message(1, encode(t, &msg.Heartbeat{Seq: 1}))
	r.recv.LocalEvents().Request(1, 99, &localapi.Status{})
	r.recv.Drain()
	r.net.sever()
}

// TestNode_close_while_it_connects: Close ends a dial and a link's hello that
// hang, and what a connection attempt brings after that is closed again.
func TestNode_close_while_it_connects(t *testing.T) {
	closed := make(chan struct{})
	for name, late := range map[string]ControlConn{"hangs": nil, "brings a connection late": closer(func() { close(closed) })} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, options{})
			begun := make(chan struct{})
			r.wires.set(func() {
				r.wires.instead = func(ctx context.Context, _ DialEvents) (ControlConn, error) {
					close(begun)
					<-ctx.Done()
					if late != nil {
						return late, nil
					}
					return nil, ctx.Err()
				}
			})
			r.attachBoth()
			r.begin("x", 1)
			await(t, begun, "the dial")
			r.send.Close()
			if late != nil {
				await(t, closed, "the connection's end")
			}
		})
	}
}

type closer func()

func (closer) Send([]byte) error { return nil }
func (c closer) Close()          { c() }

func await(t *testing.T, c <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(limit):
		t.Fatalf("%s did not come in %v", what, limit)
	}
}

// TestNode_dial_timeout: a dial has a deadline, which is one peer's alone, and
// is tried again.
func TestNode_dial_timeout(t *testing.T) {
	r := newRig(t, options{timeout: 20 * time.Millisecond})
	r.wires.set(func() {
		r.wires.instead = func(ctx context.Context, _ DialEvents) (ControlConn, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}
	})
	r.attachBoth()
	r.begin("x", 1)
	eventually(t, "dialled again", func() bool { return r.wires.dialled() > 1 })
	r.wires.set(func() { r.wires.instead = nil })
	r.granted("x")
	if status(t, r.send).Waiting != 0 {
		t.Error("it waits")
	}
}

// TestNode_peer_that_reads_nothing: a control connection whose queue is full, at
// either end, is closed, and the request goes on over a new one.
func TestNode_peer_that_reads_nothing(t *testing.T) {
	for name, full := range map[string]func(*wires, bool){
		"receiver": func(w *wires, full bool) { w.fullUp = full },
		"sender":   func(w *wires, full bool) { w.fullDown = full },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, options{})
			r.attachBoth()
			r.begin("a", 1)
			r.granted("a")
			first := r.wires.dialled()
			r.wires.set(func() { full(r.wires, true) })
			r.submit("a", 1)
			eventually(t, "dialled again", func() bool { return r.wires.dialled() > first })
			r.wires.set(func() { full(r.wires, false) })
			if e := r.ended("a"); e.Ending != msg.EndReady {
				t.Fatalf("%+v", e)
			}
			r.receive("a", 1)
			until(t, r.recv, "idle", idle)
		})
	}
}

// TestNode_control_cut: when the control connection breaks and both ends live,
// what was admitted and what waits goes on over the next one.
func TestNode_control_cut(t *testing.T) {
	r := newRig(t, options{})
	r.attachBoth()
	r.begin("a", slots/2)
	r.granted("a")
	r.begin("b", slots)
	until(t, r.recv, "waiting", func(s Status) bool { return s.Waiting == 1 })
	for range 3 {
		before := r.wires.dialled()
		r.wires.cut()
		eventually(t, "dialled again", func() bool { return r.wires.dialled() > before })
	}
	r.submit("a", slots/2)
	if e := r.ended("a"); e.Ending != msg.EndReady {
		t.Fatalf("%+v", e)
	}
	r.receive("a", slots/2)
	r.granted("b")
	must[*localapi.Ending](t, r.sendEnd, r.send, 1, &localapi.Cancel{Req: "b"})
	until(t, r.recv, "idle", idle)
	if n := r.recv.Stats().Snapshot().Endings[Label{"receive", "failed", "peer_lost"}]; n != 0 {
		t.Errorf("%d requests were lost", n)
	}
}

// TestNode_cut_while_a_commit_waits: the control connection, the data
// connections or both break while the bytes and the Commit's answer are on their
// way: the request becomes ready all the same.
func TestNode_cut_while_a_commit_waits(t *testing.T) {
	for name, cut := range map[string]struct{ control, data bool }{
		"control": {true, false}, "data": {false, true}, "both": {true, true},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, options{})
			r.attachBoth()
			r.net.hold(true)
			r.begin("a", 4)
			r.granted("a")
			r.submit("a", 4)
			in := r.recv.Stats().Snapshot().Messages["in"]
			until(t, r.send, "writing", func(s Status) bool { return s.Staging.Writing == 4 })
			before := r.wires.dialled()
			if cut.data {
				r.net.cut()
			}
			if cut.control {
				r.wires.cut()
				eventually(t, "dialled again", func() bool { return r.wires.dialled() > before })
				eventually(t, "sent again", func() bool { return r.recv.Stats().Snapshot().Messages["in"] > in })
			}
			r.net.hold(false)
			if e := r.ended("a"); e.Ending != msg.EndReady {
				t.Fatalf("%+v", e)
			}
			r.receive("a", 4)
			until(t, r.send, "idle", idle)
			until(t, r.recv, "idle", idle)
		})
	}
}

// TestNode_link_down: a link that goes down is released and ends its requests;
// the next one takes a new link.
func TestNode_link_down(t *testing.T) {
	r := newRig(t, options{})
	r.attachBoth()
	r.net.hold(true)
	r.begin("a", 2)
	r.granted("a")
	r.submit("a", 2)
	until(t, r.send, "writing", func(s Status) bool { return s.Staging.Writing == 2 })
	r.net.sever()
	if e := r.ended("a"); e.Ending != msg.EndFailed || e.Reason != fault.PeerLost {
		t.Fatalf("%+v", e)
	}
	until(t, r.send, "idle", idle)
	until(t, r.recv, "idle", idle)
	eventually(t, "released", func() bool { r.net.mu.Lock(); defer r.net.mu.Unlock(); return r.net.closed == 1 })
	r.net.mu.Lock()
	r.net.Heal(kv.Incarnation{1}, kv.Incarnation{2})
	r.net.mu.Unlock()
	r.net.hold(false)
	r.begin("b", 2)
	r.granted("b")
	r.submit("b", 2)
	r.receive("b", 2)
}

// TestNode_stopped: a node that was stopped for longer than a lease does not
// judge who was silent by that.
func TestNode_stopped(t *testing.T) {
	var now atomic.Int64
	r := newRig(t, options{clock: func() kv.Instant { return kv.Instant(now.Load()) }})
	r.attachBoth()
	r.begin("a", 2)
	r.granted("a")

	// The loop is stopped in the middle of an answer, time passes, and a
	// heartbeat waits behind it.
	stopped, goOn := make(chan struct{}), make(chan struct{})
	var once sync.Once
	r.recvEnd.set(func() {
		r.recvEnd.block = func(kv.CallID) { once.Do(func() { close(stopped); <-goOn }) }
	})
	answer := make(chan any, 1)
	go func() { // which steps it itself
		_, a := r.recvEnd.begin(r.recv, 1, &localapi.Status{})
		answer <- <-a
	}()
	await(t, stopped, "the stop")
	now.Add(int64(9 * kv.Second)) // of a lease of 10
	r.wires.conn(1).Send(encode(t, &msg.Heartbeat{Seq: 1 << 40}))
	in := r.recv.Stats().Snapshot().Messages["in"]
	eventually(t, "in the mailbox", func() bool { return r.recv.Stats().Snapshot().Messages["in"] >= in })
	eventually(t, "queued", func() bool { r.recv.mail.mu.Lock(); defer r.recv.mail.mu.Unlock(); return len(r.recv.mail.queue) > 0 })
	now.Add(int64(9 * kv.Second))
	close(goOn)
	<-answer
	s := status(t, r.recv)
	if len(s.Requests) != 1 || s.Requests[0].State != "admitted" || s.Sessions != 1 {
		t.Errorf("after the stop: %+v", s)
	}
	if r.recvLogs.count("lease_expired") != 0 {
		t.Error("a lease has run out although its heartbeat was there")
	}
}

// TestNode_notify (r50): the proxy's port is told of each request once, and that
// it cannot be reached harms nothing but the counter.
func TestNode_notify(t *testing.T) {
	port := &notifyPort{}
	r := newRig(t, options{notify: port})
	r.attachBoth()
	for i, fail := range []error{nil, errFull} {
		port.set(fail)
		req := fmt.Sprint("req-", i)
		r.begin(req, 1)
		r.granted(req)
		r.submit(req, 1)
		if e := r.ended(req); e.Ending != msg.EndReady {
			t.Fatalf("%+v", e)
		}
		r.receive(req, 1)
	}
	if want := encode(t, &msg.ProxyNotif{ReqID: "req-0"}); len(port.got) != 1 || !bytes.Equal(port.got[0], want) {
		t.Errorf("the port got %q, want %q once", port.got, want)
	}
	if n := r.send.Stats().Snapshot().NotifyFail; n != 1 {
		t.Errorf("%d failures are counted", n)
	}
	until(t, r.send, "idle", idle)
}

// notifyPort keeps what it gets, or refuses it.
type notifyPort struct {
	mu  sync.Mutex
	err error
	got [][]byte
}

func (p *notifyPort) set(err error) { p.mu.Lock(); defer p.mu.Unlock(); p.err = err }

func (p *notifyPort) Push(b []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err == nil {
		p.got = append(p.got, bytes.Clone(b))
	}
	return p.err
}

// TestNode_timers: a wake-up that a core asks for comes, without any event.
func TestNode_timers(t *testing.T) {
	r := newRig(t, options{})
	r.attachBoth()
	if code := r.recvEnd.code(t, r.recv, 1, &localapi.Wait{Req: "nobody", DeadlineMS: 20}); code != fault.Deadline {
		t.Errorf("a wait ended with %s", code)
	}
}

// TestNode_undecodable: what a peer sends that is no message is answered as
// PROTOCOL says, and costs nothing else.
func TestNode_undecodable(t *testing.T) {
	r := newRig(t, options{})
	answers := make(chan msg.Message, 10)
	conn := r.wires.connect(DialEvents{Closed: func(error) {}, Message: func(b []byte) {
		m, err := wire.Decode(b)
		if err != nil {
			t.Error(err)
		}
		answers <- m
	}})
	next := func() msg.Message {
		t.Helper()
		select {
		case m := <-answers:
			return m
		case <-time.After(limit):
			t.Fatal("no answer")
			return nil
		}
	}
	conn.Send([]byte("garbage"))
	if m, ok := next().(*msg.AllocResponse); !ok || len(m.RemoteIndexes) != 1 || m.RemoteIndexes[0] != -1 {
		t.Errorf("garbage is answered with %+v", m)
	}
	conn.Send(encode(t, &msg.Hello{Seq: 6, Min: 1, Max: 1, Role: msg.RoleTool, Node: "n", Incarnation: kv.Incarnation{7}}))
	if m, ok := next().(*msg.HelloReply); !ok || m.Re != 6 {
		t.Errorf("Hello is answered with %+v", m)
	}
	conn.Send([]byte("\x82\xa4type\xa5Dance\xa3seq\x07"))
	if m, ok := next().(*msg.Error); !ok || m.Re != 7 || m.Code != fault.UnknownMessage {
		t.Errorf("an unknown message is answered with %+v", m)
	}
}

func encode(t *testing.T, m msg.Message) []byte {
	t.Helper()
	b, err := wire.Append(nil, m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestNode_log_is_limited: one kind of line has a limit, and what is left out is
// counted.
func TestNode_log_is_limited(t *testing.T) {
	r := newRig(t, options{})
	conn := r.wires.connect(DialEvents{Closed: func(error) {}, Message: func([]byte) {}})
	const many = 400
	for i := range many {
		conn.Send(encode(t, &msg.AllocRequest{Keys: []string{"k"}, Fmt: 3, Shape: shape, DType: "uint8", LastChunkToks: tokens,
			ReqID: fmt.Sprint(i), TotalChunks: slots + 1}))
	}
	eventually(t, "all refused", func() bool {
		a := r.recv.Stats().Snapshot().Admissions
		return a["too_large"]+a["busy"] == many // busy: all endings that may be kept are
	})
	lines, left := r.recvLogs.count("request_refused"), r.recv.Stats().Snapshot().Suppressed["request_refused"]
	if lines >= many || lines == 0 || uint64(lines)+left != many {
		t.Errorf("%d lines and %d left out, of %d", lines, left, many)
	}
}

// TestNode_everybody_at_once gives the race detector something to look at: all
// that may call in at any time does.
func TestNode_everybody_at_once(t *testing.T) {
	r := newRig(t, options{})
	r.attachBoth()
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for j := range 20 {
				if _, err := r.recv.Status(t.Context()); err != nil {
					t.Error(err)
				}
				r.recv.RouterEvents().Connected(kv.ConnID(1000+100*i+j), "x", "y")
				r.recv.RouterEvents().Message(kv.ConnID(1000+100*i+j), []byte("garbage"))
				r.recv.RouterEvents().Disconnected(kv.ConnID(1000 + 100*i + j))
				r.recv.Handshaken("x")
				r.recv.Stats().Snapshot()
			}
		})
	}
	for i := range 8 {
		req := fmt.Sprint(i)
		r.begin(req, 3)
		r.granted(req)
		r.submit(req, 3)
		r.receive(req, 3)
	}
	wg.Wait()
	until(t, r.recv, "idle", idle)
}

// TestNotes: every kind of note has a name of its own, and docs/metrics.md has
// exactly these, since they are the label of a metric.
func TestNotes(t *testing.T) {
	doc, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile("(?s)Kinds of events, `receive` side: (.*?)\\. `send` side: (.*?)\\.\n").FindStringSubmatch(string(doc))
	if m == nil {
		t.Fatal("docs/metrics.md has no list of the kinds of events")
	}
	for i, kinds := range [][]noteKind{intakeNotes[:], outboundNotes[:]} {
		var want []string
		for word := range strings.SplitSeq(regexp.MustCompile(`(?s)\(.*?\)`).ReplaceAllString(m[i+1], ""), ",") {
			want = append(want, strings.TrimSpace(word))
		}
		var got []string
		for _, k := range kinds {
			got = append(got, k.name)
		}
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("the kinds are %q, docs/metrics.md has %q", got, want)
		}
	}
}
