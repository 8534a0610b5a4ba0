package intake

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// picker is where a history's choices come from: a seeded generator, or the
// bytes of a fuzzer.
type picker interface {
	// pick returns a number from 0 to n-1.
	pick(n int) int
}

type seeded struct{ *rand.Rand }

func newSeeded(seed uint64) seeded    { return seeded{rand.New(rand.NewPCG(seed, 0xbe47))} }
func (s seeded) pick(n int) int       { return s.IntN(n) }
func chance(p picker, pct int) bool   { return p.pick(100) < pct }
func oneOf[T any](p picker, v ...T) T { return v[p.pick(len(v))] }

type fuzzed struct{ b []byte }

func (f *fuzzed) pick(n int) int {
	if len(f.b) == 0 {
		return 0
	}
	x := int(f.b[0])
	f.b = f.b[1:]
	return x % n
}

// chaos makes events out of choices: what peers, links and engines might do,
// right or wrong, in any order, twice or late. It knows what has been answered
// to it, so that most of what it says makes sense.
type chaos struct {
	picker
	cfg   Config
	conns []*chaosConn // open ones
	last  kv.ConnID
	said  map[kv.Incarnation][]msg.Message // so far, to be said again
	seq   map[kv.Incarnation]uint64
	begin map[kv.Incarnation]uint64
	calls kv.CallID

	o       *observer // knows the grants
	told    []told
	engines []kv.ConnID
	lost    []kv.ConnID
	drained bool
}

type chaosConn struct {
	id  kv.ConnID
	inc kv.Incarnation // that said hello, or is about to
	// role: sender and proxy say Hello, legacy does not
	role msg.Role
}

type told struct {
	inc   kv.Incarnation
	seq   uint64
	begin uint64
}

const (
	chaosCapacity = 6
	chaosNames    = 3
)

func chaosConfig(legacyData bool) Config {
	cfg := testConfig(chaosCapacity)
	cfg.MaxWaiting, cfg.MaxEndings, cfg.MaxConns = 4, 6, 8
	cfg.LegacyData = legacyData
	cfg.AllocationTimeout, cfg.RequestTimeout, cfg.UnclaimedTTL = 20*kv.Second, 40*kv.Second, 25*kv.Second
	return cfg
}

func (x *chaos) name() string { return string(rune('x' + x.pick(chaosNames))) }

func (x *chaos) conn(role msg.Role) *chaosConn {
	var fit []*chaosConn
	for _, c := range x.conns {
		if c.role == role {
			fit = append(fit, c)
		}
	}
	if len(fit) == 0 {
		return nil
	}
	return fit[x.pick(len(fit))]
}

// next returns some event.
func (x *chaos) next() Event {
	for {
		if e := x.attempt(); e != nil {
			return e
		}
	}
}

func (x *chaos) attempt() Event {
	switch n := x.pick(100); {
	case n < 6 || len(x.conns) == 0:
		return x.connect()
	case n < 8:
		i := x.pick(len(x.conns))
		id := x.conns[i].id
		x.conns = append(x.conns[:i:i], x.conns[i+1:]...)
		return Disconnected{Conn: id}
	case n < 40:
		return x.berth()
	case n < 55:
		return x.data()
	case n < 68:
		return x.legacy()
	case n < 76:
		return x.proxy()
	case n < 90:
		return x.engine()
	case n < 91:
		return x.rare()
	default:
		return Tick{}
	}
}

func (x *chaos) connect() Event {
	x.last++
	c := &chaosConn{id: x.last, role: oneOf(x.picker, msg.RoleSender, msg.RoleSender, roleLegacy, msg.RoleProxy)}
	x.conns = append(x.conns, c)
	id := fmt.Sprintf("c%d", x.last)
	switch c.role {
	case msg.RoleSender:
		c.inc = incarnation(oneOf(x.picker, "A", "B"))
	case msg.RoleProxy:
		c.inc = incarnation(oneOf(x.picker, "P", "Q"))
	default:
		id = oneOf(x.picker, "L-to-R", "M-to-R")
	}
	return Connected{Conn: x.last, Identity: id}
}

func (x *chaos) say(c *chaosConn, m msg.Message) Event {
	if _, ok := m.(*msg.Hello); !ok {
		x.said[c.inc] = append(x.said[c.inc], m)
	}
	return Received{c.id, m}
}

func (x *chaos) nextSeq(i kv.Incarnation) uint64 {
	x.seq[i]++
	return x.seq[i]
}

func (x *chaos) hello(c *chaosConn) Event {
	m := &msg.Hello{Seq: x.nextSeq(c.inc), Min: 1, Max: 1, Role: c.role, Node: "n", Incarnation: c.inc, Resume: chance(x.picker, 80)}
	if c.role == msg.RoleSender {
		f := x.cfg.Facts
		m.Facts = &f
	}
	if chance(x.picker, 3) {
		m.Secret[0] = 1
	}
	if chance(x.picker, 95) {
		m.Session = x.o.opener[c.inc]
	}
	if !m.Resume {
		x.begin[c.inc] = 0
	}
	return x.say(c, m)
}

// again says an old message of the same peer once more.
func (x *chaos) again(c *chaosConn) Event {
	said := x.said[c.inc]
	if len(said) == 0 {
		return nil
	}
	return Received{c.id, said[len(said)-1-x.pick(min(len(said), 8))]}
}

func (x *chaos) berth() Event {
	c := x.conn(msg.RoleSender)
	if c == nil {
		return nil
	}
	switch n := x.pick(20); {
	case n < 3:
		return x.hello(c)
	case n < 5:
		return x.again(c)
	case n < 11:
		x.begin[c.inc]++
		b := x.begin[c.inc] + uint64(x.pick(2)*x.pick(2))
		x.begin[c.inc] = b
		return x.say(c, &msg.Begin{Seq: x.nextSeq(c.inc), Begin: b, ReqID: x.name(), Link: oneOf(x.picker, "tcp", "tcp", "shm", "nixl"),
			TotalChunks: int64(x.pick(chaosCapacity + 2)), DeadlineMS: int64(x.pick(3)) * 9000})
	case n < 17:
		return x.commit(c)
	case n < 19:
		return x.say(c, &msg.Cancel{Seq: x.nextSeq(c.inc), Begin: 1 + uint64(x.pick(int(x.begin[c.inc])+2)),
			Reason: oneOf(x.picker, fault.Cancelled, fault.Deadline, fault.Internal)})
	}
	for i, t := range x.told {
		if t.inc == c.inc {
			x.told = append(x.told[:i:i], x.told[i+1:]...)
			return x.say(c, &msg.Drained{Re: t.seq, Begin: t.begin})
		}
	}
	return x.say(c, &msg.Heartbeat{Seq: x.nextSeq(c.inc)})
}

// grants returns those that the observer has seen, oldest first.
func (x *chaos) grants() []*grant {
	return slices.SortedFunc(maps.Values(x.o.gens), func(a, b *grant) int { return cmp.Compare(a.gen, b.gen) })
}

// commit names chunks of a granted request, mostly its own and as it should.
func (x *chaos) commit(c *chaosConn) Event {
	var fit []*grant
	for _, g := range x.grants() {
		if g.owner == c.inc {
			fit = append(fit, g)
		}
	}
	if len(fit) == 0 {
		return nil
	}
	g := fit[max(len(fit)-1-x.pick(3), 0)]
	m := &msg.Commit{Seq: x.nextSeq(c.inc), Begin: g.begin, Fmt: 1, DType: "bfloat16", Shape: []int64{2, 1, 16, 1}}
	n := len(g.slots)
	from := x.pick(n)
	to := from + 1 + x.pick(n-from)
	if chance(x.picker, 40) {
		from, to = 0, n
	}
	if chance(x.picker, 20) {
		m.HasEnd, m.End = true, int64(x.pick(n+1))
		to = min(to, int(m.End))
	}
	for i := from; i < to; i++ {
		k := msg.Chunk{Index: int64(i), Key: fmt.Sprint("k", i), Tokens: 16}
		if g.link == "shm" {
			k.Src = &msg.Source{Slot: kv.SlotID(i), Generation: 1}
		}
		m.Chunks = append(m.Chunks, k)
	}
	if chance(x.picker, 2) {
		m.Chunks = append(m.Chunks, msg.Chunk{Index: int64(n), Key: "k", Tokens: 16})
	}
	return x.say(c, m)
}

// data is what links report: only of slots on which the writer's hand is.
func (x *chaos) data() Event {
	all := x.grants()
	if len(all) == 0 {
		return nil
	}
	g := all[len(all)-1-x.pick(min(len(all), 4))]
	s := g.slots[x.pick(len(g.slots))]
	revoked := g.revoked[s]
	switch {
	case g.fenced[s] || g.link == "nixl":
		return nil
	case revoked && chance(x.picker, 70):
		return Fenced{Generation: g.gen, Slots: []kv.SlotID{s}}
	case chance(x.picker, 2):
		return Failed{Slot: s, Generation: g.gen, Err: fault.New([]fault.Code{fault.BadRequest, fault.StaleGeneration, fault.PeerLost}[x.pick(3)], "failed")}
	}
	return Landed{Slot: s, Generation: g.gen, Bytes: int64(64 - x.pick(50)/49)}
}

func (x *chaos) legacy() Event {
	c := x.conn(roleLegacy)
	if c == nil {
		return nil
	}
	id := x.name()
	switch n := x.pick(12); {
	case n < 2:
		return Received{c.id, &msg.CancelNotif{ReqID: id, Keys: []string{}}}
	case n < 3:
		return Handshaken{LocalID: oneOf(x.picker, "L", "M")}
	case n < 4:
		id = ""
	}
	m := &msg.AllocRequest{Keys: []string{}, Fmt: 1, DType: "bfloat16", Shape: []int64{2, 1, 16, 1}, LastChunkToks: 16, ReqID: id,
		IsLastBatch: chance(x.picker, 30), TotalChunks: 1 + int64(id0(id))%4}
	for i := x.pick(4); i > 0; i-- {
		m.Keys = append(m.Keys, fmt.Sprint("k", x.pick(4)))
	}
	return Received{c.id, m}
}

// id0 fixes a name's total, so that most batches agree.
func id0(id string) byte {
	if id == "" {
		return 0
	}
	return id[0]
}

func (x *chaos) proxy() Event {
	c := x.conn(msg.RoleProxy)
	if c == nil {
		return nil
	}
	switch x.pick(8) {
	case 0, 1:
		return x.hello(c)
	case 2, 3:
		return x.say(c, &msg.Watch{Seq: x.nextSeq(c.inc), ReqID: x.name(), DeadlineMS: int64(x.pick(3)) * 7000})
	case 4, 5:
		return x.say(c, &msg.Ready{Seq: x.nextSeq(c.inc), ReqID: x.name()})
	case 6:
		return x.say(c, &msg.Cancel{Seq: x.nextSeq(c.inc), ReqID: x.name(), Reason: oneOf(x.picker, fault.Cancelled, fault.Deadline)})
	}
	return x.again(c)
}

func (x *chaos) engine() Event {
	if len(x.engines) == 0 || chance(x.picker, 3) {
		x.last++
		x.engines = append(x.engines, x.last)
		return EngineAttached{Engine: x.last, EngineID: "E"}
	}
	e := x.engines[x.pick(len(x.engines))]
	x.calls++
	by := oneOf(x.picker, "r1", "r2")
	switch n := x.pick(16); {
	case n < 3:
		return Wait{Engine: e, Call: x.calls, ReqID: x.name(), Deadline: kv.Duration(x.pick(4)) * 6 * kv.Second}
	case n < 6:
		return Find{Engine: e, Call: x.calls, By: by, Keys: []string{"k0", "k1", "k2", "k3"}}
	case n < 9:
		return Claim{Engine: e, Call: x.calls, By: by, ReqID: x.name()}
	case n < 11:
		return Release{Engine: e, Call: x.calls, By: by, ReqID: x.name()}
	case n < 12:
		return Release{Engine: e, Call: x.calls, By: by, ReqID: x.name(), Chunks: []int64{int64(x.pick(2))}}
	case n < 13:
		return CancelByName{Engine: e, Call: x.calls, ReqID: x.name(), Reason: oneOf(x.picker, "", fault.Deadline)}
	case n < 14:
		return Hangup{Call: kv.CallID(x.pick(int(x.calls)))}
	case n < 15:
		for i, id := range x.lost {
			x.lost = append(x.lost[:i:i], x.lost[i+1:]...)
			return EngineFenced{Engine: id, Trusted: chance(x.picker, 50)}
		}
		return nil
	}
	for i, id := range x.engines {
		if id == e {
			x.engines = append(x.engines[:i:i], x.engines[i+1:]...)
		}
	}
	x.lost = append(x.lost, e)
	return EngineLost{Engine: e}
}

func (x *chaos) rare() Event {
	inc := incarnation(oneOf(x.picker, "A", "B"))
	switch x.pick(5) {
	case 0:
		return PeerGone{Owner: inc}
	case 1:
		return LinkLost{Owner: inc, Link: oneOf(x.picker, "tcp", "shm"), Text: "reset"}
	case 2:
		if len(x.conns) > 0 {
			return Malformed{Conn: x.conns[x.pick(len(x.conns))].id, Seq: uint64(x.pick(3)), Keys: x.pick(3), Unknown: chance(x.picker, 50)}
		}
	case 3:
		if !x.drained && chance(x.picker, 5) {
			x.drained = true
			return Drain{}
		}
	}
	return nil
}

// pass returns how much time goes by before the next event.
func (x *chaos) pass() kv.Duration {
	switch n := x.pick(20); {
	case n < 14:
		return 0
	case n < 19:
		return kv.Duration(x.pick(1500)) * kv.Millisecond
	}
	return kv.Duration(x.pick(18)) * kv.Second
}
