package linktest

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/berthkv/berth/internal/arena"
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
)

// patience bounds every wait of the suite; no case takes nearly as long.
const patience = 20 * time.Second

type options struct {
	slots     int   // 0: 8
	slotBytes int64 // 0: 64 KiB
	checksum  bool
	alone     bool // no sender is connected
	single    bool // one data connection
}

// rig is one receiver and one sender with their pools, connected.
type rig struct {
	t       *testing.T
	h       *Harness
	opts    options
	fill    *rand.ChaCha8 // the bytes of chunks
	rpool   *arena.Pool
	spool   *arena.Pool
	gens    *arena.Generations
	recv    link.Receiver
	send    link.Sender
	conn    link.Conn
	between Between
	peer    link.Peer
	*events
	nextGen  kv.Generation
	nextID   link.WriteID
	nextSrc  kv.SlotID
	nextWord kv.Generation
}

func newRig(t *testing.T, h *Harness, o options) *rig {
	if o.slots == 0 {
		o.slots = 8
	}
	if o.slotBytes == 0 {
		o.slotBytes = 64 << 10
	}
	r := &rig{t: t, h: h, opts: o, fill: rand.NewChaCha8([32]byte{}), events: newEvents()}
	r.rpool = r.pool("receive pool", false)
	r.spool = r.pool("staging pool", true)
	gens, err := arena.NewGenerations(o.slots)
	r.must(err)
	r.gens = gens
	t.Cleanup(func() { gens.Close() })
	r.peer = link.Peer{Incarnation: kv.Incarnation{1, 1}, Self: kv.Incarnation{2, 2}, Secret: kv.Secret{3, 3}}
	r.recv = h.NewReceiver(t, ReceiverConfig{r.peer.Incarnation, poolOf(r.rpool), o.checksum}, r.receiverEvents())
	t.Cleanup(func() { r.must(r.recv.Close()) })
	r.send = h.NewSender(t, SenderConfig{poolOf(r.spool), r.spool, r.gens, o.single})
	t.Cleanup(func() { r.must(r.send.Close()) })
	if got := r.recv.Caps(); got != h.Caps || r.send.Caps() != h.Caps {
		t.Fatalf("caps are %+v and %+v, want %+v", got, r.send.Caps(), h.Caps)
	}
	r.peer.Addr = r.recv.Offer()
	if h.Between != nil {
		r.between = h.Between(t)
		r.peer.Addr = r.between.Route(r.peer.Addr)
	}
	if !o.alone {
		r.recv.Allow(r.peer.Self, r.peer.Secret)
		r.conn = r.connect(r.peer)
	}
	return r
}

func (r *rig) pool(name string, writable bool) *arena.Pool {
	p, err := arena.New(arena.Config{Name: name, Slots: r.opts.slots, SlotBytes: r.opts.slotBytes, Writable: writable})
	r.must(err)
	r.t.Cleanup(func() { p.Close() })
	return p
}

func poolOf(p *arena.Pool) link.Pool {
	return link.Pool{Bytes: p.Bytes(), SlotBytes: p.SlotBytes(), FD: p.FD()}
}

func (r *rig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) tryConnect(p link.Peer) (link.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return r.send.Connect(ctx, p, r.senderEvents())
}

func (r *rig) connect(p link.Peer) link.Conn {
	r.t.Helper()
	c, err := r.tryConnect(p)
	r.must(err)
	return c
}

// open opens slots under a new generation.
func (r *rig) open(slots ...kv.SlotID) kv.Generation {
	r.nextGen++
	r.recv.Open(r.peer.Self, r.nextGen, slots)
	return r.nextGen
}

// chunk is one chunk on its way.
type chunk struct {
	id   link.WriteID
	src  kv.SlotID
	word kv.Generation // the source's generation
	dst  kv.SlotID
	gen  kv.Generation
	data []byte // what was staged
}

// stage fills the next staging slot with n new bytes, under a new generation.
func (r *rig) stage(n int64) *chunk {
	r.nextWord++
	r.nextID++
	c := &chunk{id: r.nextID, src: r.nextSrc, word: r.nextWord, data: make([]byte, n)}
	r.nextSrc = (r.nextSrc + 1) % kv.SlotID(r.opts.slots)
	r.fill.Read(c.data)
	r.gens.Store(c.src, c.word)
	copy(poolOf(r.spool).Slot(c.src), c.data)
	return c
}

// start sets staged chunks moving in the link's own way.
func (r *rig) start(gen kv.Generation, dst kv.SlotID, c *chunk) *chunk {
	c.dst, c.gen = dst, gen
	if r.h.Caps.Mode == link.Pull {
		r.recv.Pull(r.peer.Self, gen, []link.PullItem{{Slot: dst, Src: c.src, SrcGen: c.word, Bytes: int64(len(c.data))}})
		return c
	}
	r.conn.Write([]link.Write{{ID: c.id, Src: c.src, Dst: dst, Generation: gen, Bytes: int64(len(c.data))}})
	return c
}

// move stages n bytes and starts them.
func (r *rig) move(gen kv.Generation, dst kv.SlotID, n int64) *chunk {
	return r.start(gen, dst, r.stage(n))
}

// arrive waits until a chunk is in its slot and checks its bytes.
func (r *rig) arrive(c *chunk) {
	r.t.Helper()
	if r.h.Caps.Mode == link.OneSided {
		r.await(fmt.Sprintf("write %d to be sent", c.id), func(e *log) bool { return e.sent[c.id] > 0 })
	} else {
		r.await(fmt.Sprintf("slot %d to land under generation %d", c.dst, c.gen), func(e *log) bool {
			_, ok := e.landed[at{c.dst, c.gen}]
			return ok
		})
		r.look(func(e *log) {
			if l := e.landed[at{c.dst, c.gen}]; len(l) != 1 || l[0].Bytes != int64(len(c.data)) {
				r.t.Fatalf("landed %+v, want once, %d bytes", l, len(c.data))
			}
		})
	}
	if got := r.slot(c.dst)[:len(c.data)]; !bytes.Equal(got, c.data) {
		r.t.Fatalf("slot %d holds other bytes than were staged", c.dst)
	}
	r.settle(c)
}

func (r *rig) settle(cs ...*chunk) {
	if r.conn == nil {
		return
	}
	var ids []link.WriteID
	for _, c := range cs {
		ids = append(ids, c.id)
	}
	r.conn.Settle(ids)
}

func (r *rig) slot(i kv.SlotID) []byte { return poolOf(r.rpool).Slot(i) }

// revoke revokes slots; with an exact fence it waits until they are fenced.
func (r *rig) revoke(gen kv.Generation, slots ...kv.SlotID) {
	r.t.Helper()
	r.recv.Revoke(gen, slots)
	r.fenced(gen, slots...)
}

func (r *rig) fenced(gen kv.Generation, slots ...kv.SlotID) {
	r.t.Helper()
	if !r.h.Caps.ExactFence {
		return
	}
	for _, s := range slots {
		r.await(fmt.Sprintf("slot %d to be fenced under generation %d", s, gen), func(e *log) bool { return e.fenced[at{s, gen}] > 0 })
	}
}

// await waits until the events so far satisfy f.
func (r *rig) await(what string, f func(*log) bool) {
	r.t.Helper()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	for {
		r.mu.Lock()
		ok := f(&r.log)
		r.mu.Unlock()
		if ok {
			return
		}
		if r.h.Pump != nil {
			if !r.h.Pump() {
				r.t.Fatalf("waiting for %s, and nothing is left to do; events: %v", what, r.dump())
			}
			continue
		}
		select {
		case <-r.changed:
		case <-deadline.C:
			r.t.Fatalf("waited %v for %s; events: %v", patience, what, r.dump())
		}
	}
}

func (r *rig) look(f func(*log)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f(&r.log)
}

func (r *rig) dump() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return fmt.Sprintf("%+v", r.log)
}

// at is one use of a receive slot.
type at struct {
	slot kv.SlotID
	gen  kv.Generation
}

// log counts what was reported.
type log struct {
	landed    map[at][]link.Landing
	failed    map[at]string
	fenced    map[at]int
	late      map[at]int
	ownerLost map[kv.Incarnation]error
	sent      map[link.WriteID]int
	lost      map[link.WriteID]int
	lostErr   error
	down      []error
}

// events records what a link reports.
type events struct {
	mu sync.Mutex
	log
	changed chan struct{}
}

func newEvents() *events {
	return &events{changed: make(chan struct{}, 1), log: log{
		landed: map[at][]link.Landing{}, failed: map[at]string{}, fenced: map[at]int{}, late: map[at]int{},
		ownerLost: map[kv.Incarnation]error{}, sent: map[link.WriteID]int{}, lost: map[link.WriteID]int{},
	}}
}

func (e *events) record(f func(*log)) {
	e.mu.Lock()
	f(&e.log)
	e.mu.Unlock()
	select {
	case e.changed <- struct{}{}:
	default:
	}
}

func (e *events) receiverEvents() link.ReceiverEvents {
	return link.ReceiverEvents{
		Landed: func(ls []link.Landing) {
			e.record(func(e *log) {
				for _, l := range ls {
					k := at{l.Slot, l.Generation}
					e.landed[k] = append(e.landed[k], l)
				}
			})
		},
		Failed: func(s kv.SlotID, g kv.Generation, err *fault.Error) {
			e.record(func(e *log) { e.failed[at{s, g}] = err.Error() })
		},
		Fenced: func(g kv.Generation, ss []kv.SlotID) {
			e.record(func(e *log) {
				for _, s := range ss {
					e.fenced[at{s, g}]++
				}
			})
		},
		Lost: func(o kv.Incarnation, err error) { e.record(func(e *log) { e.ownerLost[o] = err }) },
		Late: func(s kv.SlotID, g kv.Generation) { e.record(func(e *log) { e.late[at{s, g}]++ }) },
	}
}

func (e *events) senderEvents() link.SenderEvents {
	return link.SenderEvents{
		Sent: func(ids []link.WriteID) {
			e.record(func(e *log) {
				for _, id := range ids {
					e.sent[id]++
				}
			})
		},
		Lost: func(ids []link.WriteID, err error) {
			e.record(func(e *log) {
				for _, id := range ids {
					e.lost[id]++
				}
				e.lostErr = err
			})
		},
		Down: func(err error) { e.record(func(e *log) { e.down = append(e.down, err) }) },
	}
}

// warmUp opens what the runtime opens once, so that it is not counted as a leak.
func warmUp(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
}
