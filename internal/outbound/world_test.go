package outbound

import (
	"bytes"
	"fmt"
	"math/rand"
	"slices"
	"strings"
	"testing"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// world is everything around one core: engines, receivers, connections and
// links, all of them simple and all driven by one random source. It is the
// second model: what it watches it knows from events and actions alone.
type world struct {
	rnd     *rand.Rand
	c       *Core
	now     kv.Instant
	wake    kv.Instant
	logs    bool
	legacy  bool // the receivers are LMCache's
	lossy   bool // a connection was lost
	log     []string
	recvs   []*fakeReceiver
	conns   map[kv.ConnID]*fakeConn
	links   map[LinkID]*fakeLink
	sums    []Sum
	quiet   bool // nothing new, no more faults: everything ends
	call    kv.CallID
	engines []kv.ConnID
	lost    []kv.ConnID // engine connections not fenced
	nextEng kv.ConnID

	// The observer.
	gens    map[kv.SlotID]kv.Generation
	slots   map[kv.SlotID]*slotUse
	reqs    map[string]*obsRequest
	names   []string
	waiting map[kv.CallID]string // calls without an answer, and what they are
}

// slotUse is who has a staging slot, as seen from outside.
type slotUse struct {
	engine kv.ConnID // staged by
	req    string
	links  int  // writes that were not let go
	sum    bool // being summed
}

// obsRequest is what was seen of one begin.
type obsRequest struct {
	id       string
	total    int64
	peer     int
	granted  bool
	end      int64 // -1: not said
	ended    int
	ending   Ending
	notified int
	next     int64
	staged   []kv.SlotID
}

type fakeConn struct {
	id   kv.ConnID
	peer int
	up   bool
	gone bool // to be reported as disconnected
	toR  []msg.Message
	toS  []msg.Message
}

type fakeLink struct {
	id     LinkID
	def    Link
	peer   int
	up     bool
	closed bool // Disconnect was asked for
	writes map[uint64]*fakeWrite
	order  []uint64
}

type fakeWrite struct {
	WriteItem
	landed, sent, aborted bool
}

func newWorld(seed int64, logs, legacy bool) *world {
	w := &world{logs: logs, legacy: legacy, rnd: rand.New(rand.NewSource(seed)), wake: kv.Never, conns: map[kv.ConnID]*fakeConn{}, links: map[LinkID]*fakeLink{},
		gens: map[kv.SlotID]kv.Generation{}, slots: map[kv.SlotID]*slotUse{}, reqs: map[string]*obsRequest{}, waiting: map[kv.CallID]string{}, nextEng: 1}
	cfg := testConfig()
	cfg.Staging, cfg.MaxStage = 6, 3
	cfg.Window = []int64{1, 8192, 1 << 20}[w.rnd.Intn(3)]
	cfg.Checksum = w.rnd.Intn(4) == 0
	cfg.Links = [][]Link{{testLinks["tcp"]}, {testLinks["shm"], testLinks["tcp"]}, {testLinks["nixl"]}}[w.rnd.Intn(3)]
	cfg.MaxWaiting, cfg.MaxPeers = 5, 2
	if legacy {
		cfg.LegacyLink, cfg.Checksum = "nixl", false
	}
	w.c = New(cfg, 0)
	for i := range 2 {
		w.recvs = append(w.recvs, newReceiver(w, i))
	}
	w.attach()
	return w
}

func (w *world) attach() {
	w.step(EngineAttached{Engine: w.nextEng, EngineID: "e"})
	w.engines = append(w.engines, w.nextEng)
	w.nextEng++
}

func (w *world) failf(format string, args ...any) {
	panic(fmt.Sprintf(format, args...))
}

// step steps the core, and now and then a copy of it, which must answer alike.
func (w *world) step(ev Event) {
	if w.logs {
		w.log = append(w.log, fmt.Sprintf("%.3f %#v", w.now.Sub(0).Seconds(), ev))
	}
	var twin *Core
	if w.rnd.Intn(64) == 0 {
		twin = w.c.Clone()
	}
	acts := w.c.Step(w.now, ev)
	if err := w.c.Check(); err != nil {
		w.failf("check: %v", err)
	}
	if twin != nil {
		if err := twin.Check(); err != nil {
			w.failf("the copy: %v", err)
		}
		other := twin.Step(w.now, ev)
		if len(acts) != len(other) {
			w.failf("the copy does %d actions, not %d", len(other), len(acts))
		}
		for i := range acts {
			if a, b := show(acts[i]), show(other[i]); a != b {
				w.failf("the copy does %q, not %q", b, a)
			}
		}
		if !bytes.Equal(w.c.Encode(nil, w.now), twin.Encode(nil, w.now)) {
			w.failf("the copy encodes otherwise")
		}
	}
	for _, a := range acts {
		if w.logs {
			w.log = append(w.log, "      "+show(a))
		}
	}
	for _, a := range acts {
		w.act(a)
	}
}

func (w *world) act(a Action) {
	switch a := a.(type) {
	case Dial:
		w.conns[a.Conn] = &fakeConn{id: a.Conn, peer: a.Peer.AllocPort - 9000}
	case Close:
		if k := w.conns[a.Conn]; k != nil {
			k.gone = true
		}
	case Send:
		if k := w.conns[a.Conn]; k != nil && k.up && !k.gone {
			k.toR = append(k.toR, copyMsg(a.Msg))
			w.watchSend(k.peer, a.Msg)
		}
	case Connect:
		l := &fakeLink{id: a.Link, def: testLinks[a.Name], peer: int(a.Incarnation[0]), writes: map[uint64]*fakeWrite{}}
		if w.legacy {
			l.peer = int(a.Addr[len(a.Addr)-1] - '0')
		}
		w.links[a.Link] = l
	case Disconnect:
		w.links[a.Link].closed = true
	case Write:
		w.watchWrite(a)
	case Abort:
		for _, id := range a.Writes {
			if l := w.links[a.Link]; l != nil && l.writes[id] != nil {
				l.writes[id].aborted = true
			}
		}
	case Settle:
		for _, id := range a.Writes {
			w.letGo(w.links[a.Link], id)
		}
	case Sum:
		a.Items = slices.Clone(a.Items)
		w.sums = append(w.sums, a)
		for _, it := range a.Items {
			w.slots[it.Slot].sum = true
		}
	case Raise:
		w.watchRaise(a)
	case Wake:
		w.wake = a.At
	case Notify:
		w.watchNotify(a.Msg)
	case Answer:
		w.watchAnswer(a)
	case Granted:
		r := w.reqs[a.ReqID]
		r.granted = true
		w.staged(a.Engine, r, a.Slots)
	case Ended:
		// told apart from NoteEnded, which comes also when no engine is there
	case Note:
		if a.Kind == NoteEnded {
			r := w.reqs[a.ReqID]
			if r.ended++; r.ended > 1 {
				w.failf("%s ended twice", r.id)
			}
			r.ending = Ending{ReqID: a.ReqID, Ending: a.Ending, Reason: a.Reason}
		}
	}
}

func copyMsg(m msg.Message) msg.Message {
	switch m := m.(type) {
	case *msg.Begin:
		k := *m
		return &k
	case *msg.Cancel:
		k := *m
		return &k
	case *msg.Drained:
		k := *m
		return &k
	case *msg.AllocRequest:
		k := *m
		k.Keys = slices.Clone(m.Keys)
		return &k
	case *msg.Commit:
		k := *m
		k.Chunks = slices.Clone(m.Chunks)
		for i := range k.Chunks {
			if s := k.Chunks[i].Src; s != nil {
				v := *s
				k.Chunks[i].Src = &v
			}
		}
		return &k
	}
	return m
}

// watchRaise: R6. A slot is handed out only when nobody has it.
func (w *world) watchRaise(a Raise) {
	for _, s := range a.Slots {
		if s.Generation <= w.gens[s.Slot] {
			w.failf("slot %d is handed out under generation %d after %d", s.Slot, s.Generation, w.gens[s.Slot])
		}
		w.gens[s.Slot] = s.Generation
		if u := w.slots[s.Slot]; u != nil && (u.engine != 0 || u.links > 0 || u.sum) {
			w.failf("slot %d is handed out while it is in use: %+v", s.Slot, *u)
		}
		w.slots[s.Slot] = &slotUse{}
	}
}

func (w *world) staged(engine kv.ConnID, r *obsRequest, slots []kv.SlotID) {
	for _, s := range slots {
		w.slots[s].engine, w.slots[s].req = engine, r.id
	}
	r.staged = append(r.staged, slots...)
}

// watchWrite: at most one write a chunk, and none to a receiver that was told
// that nothing is in flight.
func (w *world) watchWrite(a Write) {
	l := w.links[a.Link]
	if l == nil || !l.up || l.closed {
		w.failf("a write over link %d, which is not up", a.Link)
	}
	for _, it := range a.Writes {
		for _, other := range l.writes {
			if other.Generation == it.Generation && other.Dst == it.Dst && !other.aborted {
				w.failf("two writes for slot %d of generation %d", it.Dst, it.Generation)
			}
		}
		if f := w.recvs[l.peer].byGen[it.Generation]; f != nil && f.drained {
			w.failf("a write for %s after Drained", f.id)
		}
		l.writes[it.ID] = &fakeWrite{WriteItem: it}
		l.order = append(l.order, it.ID)
		w.slots[it.Src].links++
	}
}

func (w *world) letGo(l *fakeLink, id uint64) {
	if l == nil || l.writes[id] == nil {
		return
	}
	w.slots[l.writes[id].Src].links--
	delete(l.writes, id)
	l.order = slices.DeleteFunc(l.order, func(x uint64) bool { return x == id })
}

// watchSend: Drained is said only when no write that the link has not taken is
// in flight.
func (w *world) watchSend(to int, m msg.Message) {
	d, ok := m.(*msg.Drained)
	if !ok {
		return
	}
	r := w.recvs[to].find(d.Begin)
	if r == nil || r.askedEnd != d.Re {
		return
	}
	for _, l := range w.links {
		for _, x := range l.writes {
			if x.Generation == r.gen && !x.sent && l.peer == to {
				w.failf("Drained for %s with write %d in flight", r.id, x.ID)
			}
		}
	}
}

// watchNotify: the proxy hears ready once, and only of what is.
func (w *world) watchNotify(m msg.Message) {
	n, ok := m.(*msg.ProxyNotif)
	if !ok {
		return
	}
	r := w.reqs[n.ReqID]
	if r.notified++; r.notified > 1 {
		w.failf("%s was notified twice", r.id)
	}
	if !w.readyThere(r) {
		w.failf("%s was notified, and is not ready at its receiver", r.id)
	}
}

// readyThere reports whether the receiver has it all. LMCache's never hears of a
// request of no chunks.
func (w *world) readyThere(r *obsRequest) bool {
	return w.recvs[r.peer].was[r.id] || (w.legacy && r.total == 0)
}

func (w *world) watchAnswer(a Answer) {
	what, ok := w.waiting[a.Call]
	if !ok {
		w.failf("call %d is answered twice, or never was", a.Call)
	}
	delete(w.waiting, a.Call)
	if a.Slots != nil {
		var engine kv.ConnID
		var id string
		fmt.Sscanf(what, "stage %d %s", &engine, &id)
		w.staged(engine, w.reqs[id], a.Slots)
	}
	if a.Ending != nil && a.Ending.ReqID != "" {
		if r := w.reqs[a.Ending.ReqID]; r != nil && r.ended > 0 && r.ending.Ending != a.Ending.Ending {
			w.failf("%s ended as %s; a caller hears %s", r.id, r.ending.Ending, a.Ending.Ending)
		}
	}
}

// TestRandomHistories runs short histories against the world.
func TestRandomHistories(t *testing.T) {
	for name, n := range map[string]int64{"berth": histories, "lmcache": histories / 2} {
		t.Run(name, func(t *testing.T) {
			for seed := range n {
				if runHistory(seed, false, name == "lmcache") != "" {
					t.Fatal(runHistory(seed, true, name == "lmcache")) // again, with what led to it
				}
			}
		})
	}
}

func runHistory(seed int64, logs, legacy bool) (failure string) {
	w := newWorld(seed, logs, legacy)
	defer func() {
		if p := recover(); p != nil {
			failure = fmt.Sprintf("%s\nseed %d: %v", strings.Join(w.log, "\n"), seed, p)
			if _, ok := p.(string); !ok && logs {
				panic(failure) // with its stack
			}
		}
	}()
	for range 20 + w.rnd.Intn(60) {
		w.random()
	}
	w.settle()
	return ""
}

// settle lets everything end: no more faults, the network delivers, links move,
// engines give back. Then every request has ended and every slot is free (R12).
func (w *world) settle() {
	w.quiet = true
	for _, id := range w.names {
		if r := w.reqs[id]; r.ended == 0 && w.rnd.Intn(2) == 0 {
			w.newCall("cancel")
			w.step(Cancel{Engine: w.engines[0], Call: w.call, ReqID: id})
		}
	}
	for n := 0; ; n++ {
		if n > 20000 {
			w.failf("it does not come to rest: %d live, %d waiting calls", w.c.live, len(w.waiting))
		}
		if w.random() {
			continue
		}
		if w.c.live == 0 && len(w.c.sums) == 0 {
			break
		}
		if w.wake == kv.Never {
			w.failf("%d requests live, and nothing to wait for", w.c.live)
		}
		w.now = max(w.now, w.wake)
		w.step(Tick{})
	}
	for _, r := range w.reqs {
		if r.ended != 1 {
			w.failf("%s has %d endings", r.id, r.ended)
		}
		if r.ending.Ending == msg.EndReady && !w.readyThere(r) {
			w.failf("%s is ready here, not at its receiver", r.id)
		}
		if (r.ending.Ending == msg.EndReady) != (r.notified == 1) {
			w.failf("%s ended %s and was notified %d times", r.id, r.ending.Ending, r.notified)
		}
	}
	w.giveBack()
	if s := w.c.Status(w.now).Staging; s.Free != s.Capacity {
		w.failf("staging is %+v when all has ended", s)
	}
	if len(w.c.writes) != 0 || len(w.c.waits) != 0 || len(w.c.callers) != 0 {
		w.failf("%d writes, %d waits, %d callers are left", len(w.c.writes), len(w.c.waits), len(w.c.callers))
	}
	if w.legacy {
		w.checkLegacyRest()
	}
	for call, what := range w.waiting {
		w.failf("call %d (%s) was never answered", call, what)
	}
}

func (w *world) newCall(what string) kv.CallID {
	w.call++
	w.waiting[w.call] = what
	return w.call
}

// giveBack returns everything staged, and fences engines that are lost.
func (w *world) giveBack() {
	for _, r := range w.reqs {
		w.unstage(r, slices.Clone(r.staged))
	}
	for _, e := range w.lost {
		w.fence(e)
	}
	w.lost = nil
}

func (w *world) fence(e kv.ConnID) {
	for _, u := range w.slots {
		if u.engine == e {
			u.engine = 0
		}
	}
	w.step(EngineFenced{Engine: e})
}

func (w *world) unstage(r *obsRequest, slots []kv.SlotID) {
	if len(slots) == 0 {
		return
	}
	for _, s := range slots {
		w.slots[s].engine = 0
		r.staged = slices.DeleteFunc(r.staged, func(x kv.SlotID) bool { return x == s })
	}
	w.step(Unstage{Engine: w.engines[0], Call: w.newCall("unstage"), ReqID: r.id, Slots: slots})
}

// endedCode is any code a receiver may fail a request with.
var endedCodes = []fault.Code{fault.Deadline, fault.BadRequest, fault.Internal}
