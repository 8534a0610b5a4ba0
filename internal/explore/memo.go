package explore

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"reflect"
	"slices"
	"sync"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/intake"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/outbound"
	"github.com/berthkv/berth/internal/wire"
)

// coreID names a core state. Equal canonical encodings have one number.
type coreID uint32

// msgID names a message by its bytes on the wire; 0 is none.
type msgID uint32

// coreState is one state of a core, never changed once it is numbered.
type coreState struct {
	recv *intake.Core   // one of the two
	send *outbound.Core // is set
	who  kv.Incarnation // its configuration is not in its encoding
	at   kv.Instant     // by the core's own clock
	wake kv.Instant     // when it asked to be woken; Never when it did not

	free, capacity int  // slots of its pool
	quarantined    int  // of them
	sum            int  // of all states
	negative       bool // some state has fewer than none
	waiting        int  // requests that wait for admission
	live           int  // requests that it still has
}

// step is what a core did with an event.
type step struct {
	next coreID
	acts []act
	bad  string // a broken invariant, "" if all hold
}

// memo holds every core state, message and step once. It is safe for
// concurrent use.
type memo struct {
	plant Plant
	steps [64]struct {
		sync.RWMutex
		of map[string]*step
	}
	cores struct {
		sync.RWMutex
		all  []*coreState
		byID map[string]coreID // by encoding
		// twins, unless nil, are some more that had the encoding of one that was
		// there, to see that they answer as it does.
		twins map[coreID][]*coreState
	}
	msgs struct {
		sync.RWMutex
		all     []msg.Message
		byBytes map[string]msgID
	}
	seed maphash.Seed
}

func newMemo(p Plant) *memo {
	m := &memo{plant: p, seed: maphash.MakeSeed()}
	for i := range m.steps {
		m.steps[i].of = map[string]*step{}
	}
	m.cores.byID = map[string]coreID{}
	m.msgs.byBytes = map[string]msgID{}
	m.msgs.all = make([]msg.Message, 1)
	return m
}

// maxTwins are the twins that are kept of a core state.
const maxTwins = 4

func (m *memo) twinsOf(id coreID) []*coreState {
	m.cores.RLock()
	defer m.cores.RUnlock()
	return m.cores.twins[id]
}

func (m *memo) core(id coreID) *coreState {
	m.cores.RLock()
	defer m.cores.RUnlock()
	return m.cores.all[id]
}

// message returns a message to read, nobody changes it.
func (m *memo) message(id msgID) msg.Message {
	m.msgs.RLock()
	defer m.msgs.RUnlock()
	return m.msgs.all[id]
}

// number numbers a message by what the codec makes of it, and keeps what the
// codec reads back: a core's next step may change what it sent.
func (m *memo) number(v msg.Message) msgID {
	b, err := wire.Append(nil, v)
	if err != nil {
		panic(fmt.Sprintf("explore: %T is not encoded: %v", v, err))
	}
	m.msgs.Lock()
	defer m.msgs.Unlock()
	if id := m.msgs.byBytes[string(b)]; id != 0 {
		return id
	}
	back, err := wire.Decode(b)
	if err != nil {
		panic(fmt.Sprintf("explore: %T is not decoded: %v", v, err))
	}
	id := msgID(len(m.msgs.all))
	m.msgs.all = append(m.msgs.all, back)
	m.msgs.byBytes[string(b)] = id
	return id
}

// keep numbers a core state.
func (m *memo) keep(c *coreState) coreID {
	enc := c.encode()
	m.cores.Lock()
	defer m.cores.Unlock()
	if id, ok := m.cores.byID[string(enc)]; ok {
		if t := m.cores.twins[id]; m.cores.twins != nil && len(t) < maxTwins {
			m.cores.twins[id] = append(t, c)
		}
		return id
	}
	if c.recv != nil {
		s := c.recv.Status(c.at)
		c.free, c.capacity, c.waiting, c.live = s.Pool.Free, s.Pool.Capacity, s.Waiting, len(s.Requests)
		c.quarantined = s.Pool.Quarantined
		for _, n := range []int{s.Pool.Free, s.Pool.Reserved, s.Pool.Granted, s.Pool.Committed, s.Pool.Claimed, s.Pool.Quarantined} {
			c.sum += n
			c.negative = c.negative || n < 0
		}
	} else {
		s := c.send.Status(c.at)
		c.free, c.capacity, c.waiting, c.live = s.Staging.Free, s.Staging.Capacity, s.Waiting, len(s.Requests)
	}
	id := coreID(len(m.cores.all))
	m.cores.all = append(m.cores.all, c)
	m.cores.byID[string(enc)] = id
	return id
}

func (c *coreState) encode() []byte {
	b := append([]byte(nil), c.who[:3]...)
	if c.recv != nil {
		b = c.recv.EncodeWithin(b, horizon)
	} else {
		b = c.send.Encode(b, c.at)
	}
	left := c.wake.Sub(c.at)
	if c.wake == kv.Never || left > horizon { // no search takes so long
		return append(b, 0xff)
	}
	return binary.AppendVarint(b, int64(left))
}

// place is a core in a state of the world: its own state, and the time since
// its last step.
type place struct {
	core coreID
	lag  kv.Duration
}

// left is the time until a core wants to be woken; Forever when it does not.
func (m *memo) left(p place) kv.Duration {
	c := m.core(p.core)
	if c.wake == kv.Never {
		return kv.Forever
	}
	return max(c.wake.Sub(c.at)-p.lag, 0)
}

// find looks a step up by the core's place and the event's encoding.
func (m *memo) find(p place, event []byte, make func() *step) *step {
	key := binary.AppendUvarint(nil, uint64(p.core))
	key = binary.AppendUvarint(key, uint64(p.lag))
	key = append(key, event...)
	shard := &m.steps[maphash.Bytes(m.seed, key)%uint64(len(m.steps))]
	shard.RLock()
	s := shard.of[string(key)]
	shard.RUnlock()
	if s != nil {
		return s
	}
	s = make()
	shard.Lock()
	shard.of[string(key)] = s
	shard.Unlock()
	return s
}

// stepRecv steps a receiver's core.
func (m *memo) stepRecv(p place, ev event, make func() intake.Event) *step {
	return m.find(p, ev.b, func() (s *step) {
		defer caught(&s)
		e := make()
		c := m.core(p.core).later(p.lag)
		acts := m.carryRecv(c, e)
		s = &step{acts: acts}
		if err := c.recv.Check(); err != nil {
			s.bad = err.Error()
		} else if ev.repeat {
			s.bad = m.repeatRecv(c, e, acts)
		}
		for _, t := range m.twinsOf(p.core) {
			t = t.later(p.lag)
			if again := m.carryRecv(t, make()); s.bad == "" && !sameAnswer(c, t, acts, again) {
				s.bad = fmt.Sprintf("a receiver of the same encoding answers %T otherwise", e)
			}
		}
		s.next = m.keep(c)
		return s
	})
}

// carryRecv steps a copy of a receiver's core.
func (m *memo) carryRecv(c *coreState, e intake.Event) []act {
	if _, ok := e.(intake.Tick); ok {
		c.wake = kv.Never // the wake-up is used
	}
	undo := m.plant.beforeRecv(c.recv, e)
	acts := m.intakeActs(c, c.recv.Step(c.at, e))
	undo()
	m.plant.afterRecv(c.recv, e)
	return acts
}

// later is a copy of a core to step, some time after its last step.
func (c *coreState) later(lag kv.Duration) *coreState {
	l := &coreState{who: c.who, at: c.at.Add(lag), wake: c.wake}
	if c.recv != nil {
		l.recv = c.recv.Clone()
	} else {
		l.send = c.send.Clone()
	}
	return l
}

func sameAnswer(a, b *coreState, did, does []act) bool {
	return bytes.Equal(a.encode(), b.encode()) && reflect.DeepEqual(did, does)
}

// stepSend steps a sender's core.
func (m *memo) stepSend(p place, ev event, make func() outbound.Event) *step {
	return m.find(p, ev.b, func() (s *step) {
		defer caught(&s)
		e := make()
		c := m.core(p.core).later(p.lag)
		acts := m.carrySend(c, e)
		s = &step{acts: acts}
		if err := c.send.Check(); err != nil {
			s.bad = err.Error()
		} else if ev.repeat {
			s.bad = m.repeatSend(c, e)
		}
		for _, t := range m.twinsOf(p.core) {
			t = t.later(p.lag)
			if again := m.carrySend(t, make()); s.bad == "" && !sameAnswer(c, t, acts, again) {
				s.bad = fmt.Sprintf("a sender of the same encoding answers %T otherwise", e)
			}
		}
		s.next = m.keep(c)
		return s
	})
}

// carrySend steps a copy of a sender's core.
func (m *memo) carrySend(c *coreState, e outbound.Event) []act {
	if _, ok := e.(outbound.Tick); ok {
		c.wake = kv.Never
	}
	return m.outboundActs(c, c.send.Step(c.at, e))
}

// caught makes a violation of a panic: cores panic on their own mistakes.
func caught(s **step) {
	if p := recover(); p != nil {
		*s = &step{bad: fmt.Sprint("panic: ", p)}
	}
}

// repeatRecv is R9 for one message: the same again changes nothing, and what it
// was answered it is answered again.
func (m *memo) repeatRecv(c *coreState, e intake.Event, first []act) string {
	twin := &coreState{recv: c.recv.Clone(), who: c.who, at: c.at, wake: c.wake}
	again := m.intakeActs(twin, twin.recv.Step(c.at, e))
	r := e.(intake.Received)
	if _, ok := r.Msg.(*msg.Hello); ok {
		return "" // a second Hello on one connection is an error
	}
	if !bytes.Equal(c.encode(), twin.encode()) {
		return fmt.Sprintf("R9: %s again changes the receiver", ShowMsg(r.Msg))
	}
	if slices.ContainsFunc(first, func(a act) bool { return a.do == doNote && (a.code == fault.Deadline || a.code == fault.PeerLost) }) {
		return "" // the time that had come after it has ended something: that is the answer now
	}
	if a, b := m.answerTo(first, r), m.answerTo(again, r); a != 0 && b != a && !m.busy(a) {
		return fmt.Sprintf("R9: %s is answered %s, and again %s", ShowMsg(r.Msg), ShowMsg(m.message(a)), ShowMsg(m.message(b)))
	}
	return ""
}

func (m *memo) busy(id msgID) bool {
	e, ok := m.message(id).(*msg.Error)
	return ok && e.Code == fault.Busy
}

// answerTo finds the answer to a request among actions.
func (m *memo) answerTo(acts []act, r intake.Received) msgID {
	seq := seqOf(r.Msg)
	for i := range acts {
		if a := &acts[i]; a.do == doSend && a.conn == r.Conn && seq != 0 && reOf(m.message(a.msg)) == seq {
			return a.msg
		}
	}
	return 0
}

// repeatSend is R9 at a sender.
func (m *memo) repeatSend(c *coreState, e outbound.Event) string {
	twin := &coreState{send: c.send.Clone(), who: c.who, at: c.at, wake: c.wake}
	m.outboundActs(twin, twin.send.Step(c.at, e))
	if !bytes.Equal(c.encode(), twin.encode()) {
		return fmt.Sprintf("R9: %s again changes the sender", ShowMsg(e.(outbound.Received).Msg))
	}
	return ""
}

func seqOf(v msg.Message) uint64 {
	switch v := v.(type) {
	case *msg.Hello:
		return v.Seq
	case *msg.Begin:
		return v.Seq
	case *msg.Commit:
		return v.Seq
	case *msg.Cancel:
		return v.Seq
	case *msg.Heartbeat:
		return v.Seq
	}
	return 0
}

func reOf(v msg.Message) uint64 {
	switch v := v.(type) {
	case *msg.HelloReply:
		return v.Re
	case *msg.Granted:
		return v.Re
	case *msg.CommitReply:
		return v.Re
	case *msg.Ended:
		return v.Re
	case *msg.HeartbeatReply:
		return v.Re
	case *msg.Error:
		return v.Re
	}
	return 0
}
