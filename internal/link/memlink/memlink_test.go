package memlink

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/berthkv/berth/internal/arena"
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
	"github.com/berthkv/berth/internal/link/linktest"
)

// plan stands between the ends: it stops the network in the middle of a frame.
type plan struct {
	n       *Network
	stalled bool
}

func (p *plan) Route(addr string) string { return addr }
func (p *plan) Stall(int64)              { p.stalled = true }
func (p *plan) Resume()                  { p.stalled = false }
func (p *plan) Cut()                     { p.each(p.n.Cut) }
func (p *plan) Shut()                    { p.each(p.n.Sever) }

func (p *plan) each(f func(owner, receiver kv.Incarnation)) {
	for _, c := range append([]*conn(nil), p.n.conns...) {
		f(c.peer.Self, c.to.cfg.Incarnation)
	}
}

// step moves what may move: while stalled, nothing that has begun.
func (p *plan) step() bool {
	if !p.stalled {
		return p.n.Step()
	}
	for i, t := range p.n.queue {
		if !t.begun {
			p.n.Pick = func(int) int { return i }
			defer func() { p.n.Pick = nil }()
			return p.n.Step()
		}
	}
	return false
}

func harness(mode link.Mode) func() *linktest.Harness {
	return func() *linktest.Harness {
		n := New(mode)
		p := &plan{n: n}
		return &linktest.Harness{
			Caps: n.Caps(),
			NewReceiver: func(_ testing.TB, c linktest.ReceiverConfig, ev link.ReceiverEvents) link.Receiver {
				return n.Receiver(ReceiverConfig{Incarnation: c.Incarnation, Pool: c.Pool, Checksum: c.Checksum}, ev)
			},
			NewSender: func(_ testing.TB, c linktest.SenderConfig) link.Sender {
				return n.Sender(SenderConfig{Pool: c.Pool, Generation: c.Generations.Load})
			},
			Between: func(testing.TB) linktest.Between { return p },
			Pump:    p.step,
		}
	}
}

func TestStream(t *testing.T)   { linktest.Run(t, harness(link.Stream)) }
func TestPull(t *testing.T)     { linktest.Run(t, harness(link.Pull)) }
func TestOneSided(t *testing.T) { linktest.Run(t, harness(link.OneSided)) }

// world is two pools and the ends of a link between them.
type world struct {
	n          *Network
	recv       *Receiver
	conn       link.Conn
	rpool      link.Pool
	spool      link.Pool
	trace      []any
	pools      []*arena.Pool
	generation kv.Generation // of every staging slot
}

func newWorld(t *testing.T, mode link.Mode) *world {
	t.Helper()
	w := &world{n: New(mode)}
	for range 2 {
		p, err := arena.New(arena.Config{Name: "test pool", Slots: 4, SlotBytes: 64, Anonymous: true})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { p.Close() })
		w.pools = append(w.pools, p)
	}
	w.rpool = link.Pool{Bytes: w.pools[0].Bytes(), SlotBytes: 64, FD: -1}
	w.spool = link.Pool{Bytes: w.pools[1].Bytes(), SlotBytes: 64, FD: -1}
	for i := range w.spool.Bytes {
		w.spool.Bytes[i] = byte(i + 1)
	}
	note := func(name string, v ...any) { w.trace = append(w.trace, name, v) }
	w.recv = w.n.Receiver(ReceiverConfig{Incarnation: kv.Incarnation{1}, Pool: w.rpool}, link.ReceiverEvents{
		Landed: func(l []link.Landing) { note("landed", l[0].Slot, l[0].Generation) },
		Failed: func(s kv.SlotID, g kv.Generation, err *fault.Error) { note("failed", s, g, err.Text) },
		Fenced: func(g kv.Generation, s []kv.SlotID) { note("fenced", g, s[0]) },
		Lost:   func(o kv.Incarnation, _ error) { note("owner lost", o) },
		Late:   func(s kv.SlotID, g kv.Generation) { note("late", s, g) },
	})
	w.recv.Allow(kv.Incarnation{2}, kv.Secret{3})
	s := w.n.Sender(SenderConfig{Pool: w.spool, Generation: func(kv.SlotID) kv.Generation { return w.generation }})
	c, err := s.Connect(t.Context(), link.Peer{Incarnation: kv.Incarnation{1}, Addr: w.recv.Offer(), Self: kv.Incarnation{2}, Secret: kv.Secret{3}}, link.SenderEvents{
		Sent: func(ids []link.WriteID) { note("sent", ids[0]) },
		Lost: func(ids []link.WriteID, _ error) { note("lost", ids[0]) },
		Down: func(error) { note("down") },
	})
	if err != nil {
		t.Fatal(err)
	}
	w.conn = c
	return w
}

func (w *world) has(name string) bool {
	for _, e := range w.trace {
		if e == name {
			return true
		}
	}
	return false
}

// Without an exact fence a revoked slot is written all the same: that is what
// quarantine is for.
func TestOneSidedWritesAfterRevoke(t *testing.T) {
	w := newWorld(t, link.OneSided)
	w.recv.Open(kv.Incarnation{2}, 1, []kv.SlotID{0})
	w.conn.Write([]link.Write{{ID: 1, Src: 1, Dst: 0, Generation: 1, Bytes: 64}})
	w.n.Step()
	w.recv.Revoke(1, []kv.SlotID{0})
	w.n.Deliver()
	if !bytes.Equal(w.rpool.Slot(0), w.spool.Slot(1)) || w.has("fenced") || !w.has("sent") {
		t.Errorf("trace %v", w.trace)
	}
}

func TestFaultPlan(t *testing.T) {
	w := newWorld(t, link.Stream)
	w.recv.Open(kv.Incarnation{2}, 1, []kv.SlotID{0, 1})
	delayed := 0
	w.n.Decide = func(tr Transfer) Action {
		switch {
		case tr.Slot == 0 && tr.Begun:
			return Lose
		case tr.Slot == 1 && delayed < 5:
			delayed++
			return Delay
		}
		return Deliver
	}
	w.conn.Write([]link.Write{{ID: 1, Dst: 0, Generation: 1, Bytes: 64}, {ID: 2, Dst: 1, Generation: 1, Bytes: 64}})
	w.n.Deliver()
	w.n.Decide = nil
	if !w.has("lost") || !w.has("landed") || delayed != 5 {
		t.Errorf("delayed %d, trace %v", delayed, w.trace)
	}
	w.recv.Revoke(1, []kv.SlotID{0}) // the lost frame's reader has let go
	if !w.has("fenced") {
		t.Errorf("trace %v", w.trace)
	}
}

// A pull whose source is handed out anew in the middle fails.
func TestPullSourceReusedInTheMiddle(t *testing.T) {
	w := newWorld(t, link.Pull)
	w.recv.Open(kv.Incarnation{2}, 1, []kv.SlotID{0})
	w.recv.Pull(kv.Incarnation{2}, 1, []link.PullItem{{Slot: 0, Src: 1, SrcGen: 0, Bytes: 64}})
	w.n.Step()
	w.generation++
	w.n.Deliver()
	if !w.has("failed") || w.has("landed") {
		t.Errorf("trace %v", w.trace)
	}
}

// The same seed gives the same trace.
func TestDeterministic(t *testing.T) {
	run := func(seed uint64) []any {
		w := newWorld(t, link.Stream)
		rng := rand.New(rand.NewPCG(seed, 0))
		w.n.Pick = rng.IntN
		w.n.Decide = func(Transfer) Action { return Action(rng.IntN(3)) }
		for gen := kv.Generation(1); gen < 200; gen++ {
			w.recv.Open(kv.Incarnation{2}, gen, []kv.SlotID{0, 1, 2, 3})
			for i := range 4 {
				w.conn.Write([]link.Write{{ID: link.WriteID(gen)*4 + link.WriteID(i), Src: kv.SlotID(i), Dst: kv.SlotID(i), Generation: gen, Bytes: 64}})
			}
			for range rng.IntN(30) {
				w.n.Step()
			}
			switch rng.IntN(10) {
			case 0:
				w.n.Cut(kv.Incarnation{2}, kv.Incarnation{1})
			default:
				for i := range 4 {
					w.conn.Settle([]link.WriteID{link.WriteID(gen)*4 + link.WriteID(i)})
				}
			}
			w.recv.Revoke(gen, []kv.SlotID{0, 1, 2, 3})
		}
		return w.trace
	}
	a, b, c := run(1), run(1), run(2)
	if len(a) < 1000 || !equal(a, b) || equal(a, c) {
		t.Errorf("traces of %d, %d and %d events", len(a), len(b), len(c))
	}
}

func equal(a, b []any) bool { return fmt.Sprint(a) == fmt.Sprint(b) }
