package watch

import (
	"bytes"
	"fmt"
	"math/rand"
	"slices"
	"testing"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// world is everything around one core: simple receivers, senders that push
// words, a proxy that watches. What it expects it knows from that alone.
type world struct {
	rnd     *rand.Rand
	c       *Core
	now     kv.Instant
	wake    kv.Instant
	conns   map[kv.ConnID]*fakeConn
	order   []kv.ConnID
	recvs   []*fakeReceiver
	watches map[kv.CallID]*fakeWatch
	calls   kv.CallID
	quiet   bool
}

type fakeConn struct {
	id       kv.ConnID
	peer     int
	up, gone bool
	toR, toS []msg.Message
}

// fakeReceiver knows names and how they have ended; of others it waits.
type fakeReceiver struct {
	n       int
	life    byte
	legacy  bool
	conn    *fakeConn
	session bool
	endings map[string]msg.Ended
	watches map[string][]uint64
	seen    map[string]bool // watched or cancelled here in this life
	done    map[uint64]msg.Message
}

type fakeWatch struct {
	call     kv.CallID
	name     string
	peers    []int
	accepted int
	results  []Result
	over     bool // cancelled or released
	faulty   bool // a receiver was lost meanwhile, or a sender spoke
}

func newWorld(seed int64) *world {
	w := &world{rnd: rand.New(rand.NewSource(seed)), wake: kv.Never, conns: map[kv.ConnID]*fakeConn{}, watches: map[kv.CallID]*fakeWatch{}}
	w.c = New(Config{Node: "p", Incarnation: kv.Incarnation{1}, MaxWatches: 4, MaxPeers: 3, MaxEarly: 2}, 0)
	for i := range 3 {
		w.recvs = append(w.recvs, &fakeReceiver{n: i, legacy: i == 2 && seed%3 == 0})
		w.restart(i)
	}
	return w
}

func (w *world) restart(i int) {
	f := w.recvs[i]
	f.life++
	f.conn, f.session, f.endings, f.watches, f.seen, f.done = nil, false, map[string]msg.Ended{}, map[string][]uint64{}, map[string]bool{}, map[uint64]msg.Message{}
	for _, id := range w.order {
		if k := w.conns[id]; k != nil && k.peer == i {
			k.gone = true
		}
	}
	for _, x := range w.watches {
		x.faulty = x.faulty || slices.Contains(x.peers, i)
	}
}

func (w *world) step(ev Event) {
	twin := w.c.Clone()
	acts := w.c.Step(w.now, ev)
	if err := w.c.Check(); err != nil {
		panic(err)
	}
	if w.rnd.Intn(16) == 0 {
		twin.Step(w.now, ev)
		if !bytes.Equal(w.c.Encode(nil, w.now), twin.Encode(nil, w.now)) {
			panic(fmt.Sprintf("after %#v a copy encodes otherwise", ev))
		}
	}
	for _, a := range acts {
		w.act(a)
	}
}

func (w *world) act(a Action) {
	switch a := a.(type) {
	case Dial:
		w.conns[a.Conn] = &fakeConn{id: a.Conn, peer: a.Peer.AllocPort}
		w.order = append(w.order, a.Conn)
	case Close:
		if k := w.conns[a.Conn]; k != nil {
			k.gone = true
		}
	case Send:
		if k := w.conns[a.Conn]; k != nil && k.up && !k.gone {
			k.toR = append(k.toR, a.Msg)
		}
	case Wake:
		w.wake = a.At
	case Accepted:
		x := w.watches[a.Call]
		if x.accepted++; x.accepted > 1 || x.over {
			panic(fmt.Sprintf("%s is accepted %d times, over %v", x.name, x.accepted, x.over))
		}
		for _, i := range x.peers {
			if f := w.recvs[i]; !f.legacy && !x.faulty && !f.seen[x.name] {
				panic(fmt.Sprintf("%s is accepted, and receiver %d has not seen it", x.name, i))
			}
		}
	case Result:
		w.result(a)
	}
}

// result: once, none after the end, and ready only of what is ready everywhere.
func (w *world) result(a Result) {
	x := w.watches[a.Call]
	x.results = append(x.results, a)
	if len(x.results) > 1 || x.over {
		panic(fmt.Sprintf("%s has %d results, over %v", x.name, len(x.results), x.over))
	}
	for rank, i := range x.peers {
		f := w.recvs[i]
		e, ended := f.endings[x.name]
		if a.Ending == msg.EndReady && !f.legacy && !x.faulty && (!ended || e.Ending != msg.EndReady) {
			panic(fmt.Sprintf("%s is ready, and at receiver %d it is %v", x.name, i, e.Ending))
		}
		theirs := a.Text == "" // the core's own causes say why
		if a.Ending != msg.EndReady && theirs && a.Rank == rank && !f.legacy && !x.faulty && e.Ending == msg.EndReady {
			panic(fmt.Sprintf("%s has failed (%v) at rank %d, and it is ready there", x.name, a, rank))
		}
	}
}

func (f *fakeReceiver) send(m msg.Message) {
	if f.conn != nil && f.conn.up && !f.conn.gone {
		f.conn.toS = append(f.conn.toS, m)
	}
}

func (f *fakeReceiver) receive(k *fakeConn, m msg.Message) {
	if h, ok := m.(*msg.Hello); ok {
		if f.legacy {
			k.toS = append(k.toS, &msg.AllocResponse{RemoteIndexes: []int64{-1}})
			return
		}
		resumed := h.Resume && f.session
		if !resumed {
			f.watches, f.done = map[string][]uint64{}, map[uint64]msg.Message{}
		}
		f.conn, f.session = k, true
		f.send(&msg.HelloReply{Re: h.Seq, Version: 1, Incarnation: kv.Incarnation{byte(f.n), f.life}, Resumed: resumed, LeaseMS: 15000})
		return
	}
	if f.conn != k {
		return
	}
	switch m := m.(type) {
	case *msg.Heartbeat:
		f.send(&msg.HeartbeatReply{Re: m.Seq})
	case *msg.Watch:
		f.seen[m.ReqID] = true
		if a := f.done[m.Seq]; a != nil {
			f.send(a)
			return
		}
		if !slices.Contains(f.watches[m.ReqID], m.Seq) {
			f.watches[m.ReqID] = append(f.watches[m.ReqID], m.Seq)
		}
		f.tell(m.ReqID)
	case *msg.Ready:
		e := f.endings[m.ReqID]
		if e.Ending == "" {
			f.endings[m.ReqID] = msg.Ended{Ending: msg.EndReady}
			e = f.endings[m.ReqID]
			f.tell(m.ReqID)
		}
		e.Re = m.Seq
		f.send(&e)
	case *msg.Cancel:
		f.seen[m.ReqID] = true
		if _, ok := f.endings[m.ReqID]; !ok {
			f.endings[m.ReqID] = msg.Ended{Ending: msg.EndCancelled, Reason: m.Reason}
			f.tell(m.ReqID)
		}
		e := f.endings[m.ReqID]
		e.Re = m.Seq
		f.send(&e)
	}
}

// tell answers the watches of a name that has ended.
func (f *fakeReceiver) tell(name string) {
	e, ok := f.endings[name]
	if !ok {
		return
	}
	for _, seq := range f.watches[name] {
		a := e
		a.Re = seq
		f.done[seq] = &a
		f.send(&a)
	}
	delete(f.watches, name)
}

func (w *world) random() bool {
	moves := []func() bool{w.connect, w.deliver, w.deliver, w.deliver}
	if !w.quiet {
		moves = append(moves, w.proxy, w.proxy, w.end, w.word, w.fault, w.time)
	}
	for _, i := range w.rnd.Perm(len(moves)) {
		if moves[i]() {
			return true
		}
	}
	return false
}

func (w *world) connect() bool {
	for _, id := range w.order {
		k := w.conns[id]
		switch {
		case k == nil:
		case k.gone:
			delete(w.conns, id)
			w.step(Disconnected{Conn: id, Text: "gone"})
			return true
		case !k.up && !w.quiet && w.rnd.Intn(5) == 0:
			k.gone = true
			return true
		case !k.up:
			k.up = true
			w.step(Connected{Conn: id})
			return true
		}
	}
	return false
}

func (w *world) deliver() bool {
	for _, id := range w.order {
		k := w.conns[id]
		switch {
		case k == nil || k.gone || !k.up:
		case len(k.toR) > 0 && w.rnd.Intn(2) == 0:
			m := k.toR[0]
			k.toR = k.toR[1:]
			w.recvs[k.peer].receive(k, m)
			return true
		case len(k.toS) > 0:
			m := k.toS[0]
			k.toS = k.toS[1:]
			w.step(Received{Conn: id, Msg: m})
			if w.rnd.Intn(8) == 0 { // twice
				w.step(Received{Conn: id, Msg: m})
			}
			return true
		case len(k.toR) > 0:
			return w.deliver()
		}
	}
	return false
}

// proxy watches something, cancels or releases.
func (w *world) proxy() bool {
	var live []*fakeWatch
	for call := range w.calls + 1 {
		if x := w.watches[call]; x != nil && !x.over {
			live = append(live, x)
		}
	}
	if len(live) > 3 || (len(live) > 0 && w.rnd.Intn(2) == 0) {
		x := live[w.rnd.Intn(len(live))]
		if w.rnd.Intn(3) == 0 {
			x.over = true
			w.step(Cancel{Call: x.call, Reason: fault.Cancelled})
		} else if len(x.results) > 0 {
			x.over = true
			w.step(Release{Call: x.call})
		}
		return true
	}
	w.calls++
	x := &fakeWatch{call: w.calls, name: fmt.Sprint("r", w.calls)}
	for i := range w.recvs {
		if w.rnd.Intn(2) == 0 {
			x.peers = append(x.peers, i)
		}
	}
	ev := Watch{Call: x.call, ReqID: x.name, Deadline: kv.Duration(1+w.rnd.Intn(60)) * kv.Second}
	for _, i := range x.peers {
		ev.Peers = append(ev.Peers, Peer{Host: "d", AllocPort: i})
	}
	w.watches[x.call] = x
	w.step(ev)
	return true
}

// end lets some name end at some receiver.
func (w *world) end() bool {
	if w.calls == 0 {
		return false
	}
	x := w.watches[1+kv.CallID(w.rnd.Int63n(int64(w.calls)))]
	if len(x.peers) == 0 {
		return false
	}
	f := w.recvs[x.peers[w.rnd.Intn(len(x.peers))]]
	if _, ok := f.endings[x.name]; !ok && !f.legacy {
		f.endings[x.name] = []msg.Ended{{Ending: msg.EndReady}, {Ending: msg.EndReady}, {Ending: msg.EndFailed, Reason: fault.PeerLost}}[w.rnd.Intn(3)]
		f.tell(x.name)
	}
	return true
}

// word lets a sender say something, of a name that is watched or will be.
func (w *world) word() bool {
	name := fmt.Sprint("r", 1+w.rnd.Int63n(int64(w.calls)+2))
	conn := kv.ConnID(1 + w.rnd.Intn(3))
	if w.rnd.Intn(6) == 0 {
		for _, x := range w.watches {
			x.faulty = x.faulty || x.name == name
		}
		w.step(Notified{Conn: conn, Msg: &msg.EndingNotice{ReqID: name, Rank: int64(w.rnd.Intn(3)), Ending: msg.EndFailed, Reason: fault.Deadline}})
		return true
	}
	w.step(Notified{Conn: conn, Msg: &msg.ProxyNotif{ReqID: name}})
	return true
}

func (w *world) fault() bool {
	switch w.rnd.Intn(10) {
	case 0:
		w.restart(w.rnd.Intn(3))
	case 1:
		for _, id := range w.order {
			if k := w.conns[id]; k != nil && k.up && w.rnd.Intn(3) == 0 {
				k.gone = true
			}
		}
	default:
		return false
	}
	return true
}

func (w *world) time() bool {
	w.now = w.now.Add(kv.Duration(w.rnd.Int63n(int64(kv.Second))))
	if w.rnd.Intn(12) == 0 {
		w.now = w.now.Add(kv.Duration(w.rnd.Int63n(int64(20 * kv.Second))))
		for _, x := range w.watches {
			x.faulty = true // silence, or a deadline
		}
	}
	if w.now >= w.wake {
		w.step(Tick{})
	}
	return true
}

// TestRandomHistories: one Accepted and one Result a watch, ready only of what is
// ready, whatever is lost, comes twice or late; and at the end nothing is kept.
func TestRandomHistories(t *testing.T) {
	for seed := range int64(histories) {
		func() {
			defer func() {
				if p := recover(); p != nil {
					t.Errorf("seed %d", seed)
					panic(p)
				}
			}()
			runHistory(t, seed)
		}()
	}
}

func runHistory(t *testing.T, seed int64) {
	w := newWorld(seed)
	for range 60 + w.rnd.Intn(60) {
		w.random()
	}
	w.quiet = true
	for call := range w.calls + 1 {
		if x := w.watches[call]; x != nil && !x.over {
			if len(x.results) == 0 || w.rnd.Intn(2) == 0 {
				x.over = true
				w.step(Cancel{Call: call})
			} else {
				x.over = true
				w.step(Release{Call: call})
			}
		}
	}
	for n := 0; n < 10000 && (w.random() || w.wake != kv.Never); n++ {
		if !w.random() && w.wake != kv.Never {
			w.now = max(w.now, w.wake)
			w.step(Tick{})
		}
	}
	if len(w.c.watches) != 0 || w.wake != kv.Never {
		t.Fatalf("seed %d: %d watches are kept, and it wakes at %v", seed, len(w.c.watches), w.wake)
	}
	for _, p := range w.c.byID {
		if p.watched()+len(p.cancels) != 0 || !p.sess.Idle() {
			t.Fatalf("seed %d: %s has %d ranks, %d cancels, idle %v", seed, p.addr, p.watched(), len(p.cancels), p.sess.Idle())
		}
	}
	// A name that was cancelled while it was watched is not live anywhere.
	for _, x := range w.watches {
		for _, i := range x.peers {
			if f := w.recvs[i]; !x.faulty && !f.legacy && x.accepted > 0 && len(x.results) == 1 && x.results[0].Ending != msg.EndReady {
				if _, ok := f.endings[x.name]; !ok {
					t.Fatalf("seed %d: %s has failed (%v), and receiver %d still waits for it", seed, x.name, x.results[0], i)
				}
			}
		}
	}
}

// FuzzSteps steps a core with whatever the bytes say. The invariants hold after
// each step and a copy encodes alike.
func FuzzSteps(f *testing.F) {
	for seed := range byte(16) {
		b := make([]byte, 200)
		for i := range b {
			b[i] = byte(i*int(seed+5)) ^ byte(i>>3)*seed
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c := New(Config{MaxWatches: 3, MaxPeers: 2, MaxEarly: 2}, 0)
		next := func(n int) int {
			if len(data) == 0 {
				return 0
			}
			b := data[0]
			data = data[1:]
			return int(b) % n
		}
		now, calls := kv.Instant(0), kv.CallID(0)
		conns := []kv.ConnID{0}
		for len(data) > 0 {
			now = now.Add(kv.Duration(next(8)) * kv.Second / 2)
			conn := conns[max(0, len(conns)-1-next(4))]
			seq, name := uint64(next(12)), fmt.Sprint("r", next(3))
			var ev Event
			switch next(14) {
			case 0, 1, 2:
				calls++
				ev = Watch{Call: calls, ReqID: name, Peers: []Peer{{"d", next(3)}, {"d", next(3)}}[:next(3)], Deadline: kv.Duration(next(60)) * kv.Second}
			case 3:
				ev = Cancel{Call: kv.CallID(next(int(calls) + 1))}
			case 4:
				ev = Release{Call: kv.CallID(next(int(calls) + 1))}
			case 5, 6:
				ev = Connected{Conn: conn}
			case 7:
				ev = Disconnected{Conn: conn, Text: "gone"}
			case 8:
				ev = Notified{Conn: kv.ConnID(next(3)), Msg: []msg.Message{&msg.ProxyNotif{ReqID: name}, &msg.EndingNotice{ReqID: name, Rank: int64(next(3)), Ending: msg.EndFailed}}[next(2)]}
			case 9:
				ev = Tick{}
			case 10:
				ev = Malformed{Conn: conn, Text: "garbage"}
			default:
				ev = Received{Conn: conn, Msg: []msg.Message{
					&msg.HelloReply{Re: seq, Version: 1, LeaseMS: 3000, Incarnation: kv.Incarnation{byte(next(2))}, Resumed: next(2) == 0},
					&msg.Ended{Re: seq, Ending: []msg.Ending{msg.EndReady, msg.EndFailed}[next(2)]},
					&msg.HeartbeatReply{Re: seq}, &msg.Error{Re: seq, Code: fault.Codes[next(len(fault.Codes))]},
					&msg.AllocResponse{}, &msg.ProxyNotif{},
				}[next(6)]}
			}
			twin := c.Clone()
			for _, a := range c.Step(now, ev) {
				if d, ok := a.(Dial); ok {
					conns = append(conns, d.Conn)
				}
			}
			if err := c.Check(); err != nil {
				t.Fatalf("%#v: %v", ev, err)
			}
			twin.Step(now, ev)
			if !bytes.Equal(c.Encode(nil, now), twin.Encode(nil, now)) {
				t.Fatalf("%#v: a copy encodes otherwise", ev)
			}
		}
	})
}
