package explore

import (
	"encoding/binary"
	"fmt"
	"slices"
	"sync"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// world is one state: every core's, the network between them, the memory, the
// engines, and what the observer must remember. It is read from bytes, changed
// by one move, and written to bytes again.
type world struct {
	x     *system // what does not change
	recvs []*receiver
	sends []*sender
	atts  []*attempt
	engs  []*engine
	own   uint32 // which of them are this world's to change; the others are shared

	spent uint8 // of the budget of faults
	idle  uint8 // how often nothing was to be done but to let time pass

	from     []byte   // the state it came from
	todo     []func() // put off until a step is carried out
	bad      string   // the violation that the last move found
	excepted string   // the last move used R6's named exception
	trace    func(format string, args ...any)
}

// receiver is an agent beside a decode engine, and the engine.
type receiver struct {
	place
	life   uint8 // incarnation
	slots  []recvSlot
	fences []fence
	copies []pull
	lost   []uint8 // senders whose data path is gone, which it has not noticed

	reader  uint8   // the engine's connection
	readers []uint8 // its lost connections that are not fenced yet
}

// recvSlot is the memory of one slot, and who may touch it.
type recvSlot struct {
	gen     kv.Generation // under which it is open, 0: closed
	landed  bool
	revoked bool    // its fence is on its way
	filling uint8   // attempt whose bytes somebody may be putting there, from 1
	content content // what is in it
	read    uint8   // attempt of which the engine reads it, from 1
	readBy  uint8   // the engine's connection through which
}

// content is what a slot's bytes are: 0 is nothing of use, else 1 + 8 x attempt
// + chunk.
type content uint8

func contentOf(att, chunk int) content { return content(1 + 8*att + chunk) }

func (c content) String() string {
	if c == 0 {
		return "garbage"
	}
	return fmt.Sprintf("chunk %d of attempt %d", (c-1)%8, (c-1)/8)
}

// fence is a revoke that is not through.
type fence struct {
	gen   kv.Generation
	slots []kv.SlotID
}

// pull is a copy out of a sender's staging pool.
type pull struct {
	from    uint8 // sender
	gen     kv.Generation
	slot    kv.SlotID
	src     kv.SlotID
	srcGen  kv.Generation
	att     uint8
	copying bool
	frozen  bool    // its sender is gone: the source stays as it was
	seen    content // of the source when the copy began
}

// sender is an agent beside a prefill engine.
type sender struct {
	place
	life    uint8
	conns   []conn
	links   []dataLink
	staging []stagingSlot
	frames  []frame // of a stream, on their way
	stray   []write // one-sided writes that nobody waits for, which may still arrive
}

// stagingSlot is the memory of one staging slot.
type stagingSlot struct {
	word    kv.Generation // what the receiver reads before and after it copies
	content content
	owner   uint8 // attempt for which an engine has it, from 1
	lostBy  uint8 // a lost engine connection that may still write it
}

// conn is a control connection, from the dial until both ends know of its end.
type conn struct {
	id    kv.ConnID // the sender's
	up    bool
	known bool    // to the receiver
	cut   bool    // nothing more gets on it
	mute  bool    // what the sender says is lost, and neither end notices
	deaf  bool    // what the receiver says is
	left  bool    // the sender has closed it, or knows that it is gone
	toR   []msgID // in flight
	toS   []msgID
}

// dataLink is one connection of a data link.
type dataLink struct {
	id      uint64
	life    uint8 // of the receiver that it leads to
	up      bool
	closing bool // asked to close
	dead    bool // the receiver has closed it, or is gone
	writes  []write
}

// write is one chunk that the link has and has not let go.
type write struct {
	id      uint64
	src     kv.SlotID
	dst     kv.SlotID
	gen     kv.Generation
	att     uint8
	chunk   uint8
	sent    bool
	aborted bool
	stuck   bool // one-sided: it hangs, and arrives at any time or never
}

// frame is the bytes of a chunk on their way over a stream.
type frame struct {
	dst     kv.SlotID
	gen     kv.Generation
	content content
	att     uint8
	life    uint8 // of its sender
}

// attempt is one prompt at one rank, as its engines see it and as the observer
// remembers it.
type attempt struct {
	begun     bool
	granted   bool
	gone      bool // its agent or its engine was lost: nobody is there to be told
	waits     bool // a blocking stage is out
	stopped   bool // a stage was refused: its engine waits for the ending
	submitted uint8
	staged    []kv.SlotID
	cancel    uint8 // 1: out, 2: answered
	cancelled bool  // at the receiver, by name
	told      ending
	answered  ending // to the decode engine's wait
	notified  bool

	gen     kv.Generation
	slots   []kv.SlotID // at the receiver, by chunk
	at      ending      // how the receiver ended it
	place   atReceiver
	arrival uint8 // order among those that wait, from 1
	passed  uint8 // chunks by which it was overtaken
	trusted bool  // its writer was trusted to be gone
	claim   claimState
}

// atReceiver is where an attempt is at its receiver.
type atReceiver uint8

const (
	unheard atReceiver = iota
	waiting
	admitted
	over
)

type claimState uint8

const (
	unclaimed claimState = iota
	claimed
	released
	unwanted // the engine never asks for it
)

// ending is how somebody heard that an attempt ended.
type ending struct {
	how uint8 // index in endings, 0: not
	why uint8 // index in fault.Codes, from 1
}

var endings = []msg.Ending{"", msg.EndReady, msg.EndFailed, msg.EndCancelled}

// engine is a prefill engine: one thread over the ranks' agents.
type engine struct {
	conn  uint8 // the number of its connections
	lost  uint8 // a lost connection that is not fenced, 0: none
	begun uint8 // prompts begun
}

// parts numbers the parts of states, each kept once: a move changes few of them.
// A part is never changed once it is numbered.
type parts[T any] struct {
	mu   sync.RWMutex
	all  []*T
	ids  map[string]uint32
	walk func(*codec, *T)
}

func newParts[T any](walk func(*codec, *T)) *parts[T] {
	return &parts[T]{ids: map[string]uint32{}, walk: walk}
}

func (p *parts[T]) number(v *T, b []byte) (uint32, []byte) {
	c := codec{b: b[:0]}
	p.walk(&c, v)
	p.mu.RLock()
	id, ok := p.ids[string(c.b)]
	p.mu.RUnlock()
	if ok {
		return id, c.b
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if id, ok := p.ids[string(c.b)]; ok {
		return id, c.b
	}
	id = uint32(len(p.all))
	p.all = append(p.all, v)
	p.ids[string(c.b)] = id
	return id, c.b
}

func (p *parts[T]) get(id uint32) *T {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.all[id]
}

// A state is written as the numbers of its parts. encode numbers those that the
// move may have changed; the others are as in the state it came from.
func (w *world) encode() []byte {
	b := make([]byte, 0, 4*(len(w.recvs)+len(w.sends)+len(w.atts)+len(w.engs))+3)
	scratch := make([]byte, 0, 256)
	at := 0
	put := func(number func() uint32) {
		if w.own&(1<<at) != 0 {
			b = binary.LittleEndian.AppendUint32(b, number())
		} else {
			b = append(b, w.from[4*at:4*at+4]...)
		}
		at++
	}
	for _, v := range w.recvs {
		put(func() (id uint32) { id, scratch = w.x.recvParts.number(v, scratch); return })
	}
	for _, v := range w.sends {
		put(func() (id uint32) { id, scratch = w.x.sendParts.number(v, scratch); return })
	}
	for _, v := range w.atts {
		put(func() (id uint32) { id, scratch = w.x.attParts.number(v, scratch); return })
	}
	for _, v := range w.engs {
		put(func() (id uint32) { id, scratch = w.x.engParts.number(v, scratch); return })
	}
	return append(b, w.spent, w.idle)
}

func (x *system) decode(b []byte) *world {
	n, e := len(x.engines)*x.ranks, len(x.engines)
	all := x.ranks + n + len(x.specs) + e
	w := &world{x: x, from: b, recvs: make([]*receiver, x.ranks), sends: make([]*sender, n), atts: make([]*attempt, len(x.specs)), engs: make([]*engine, e)}
	w.spent, w.idle = b[4*all], b[4*all+1]
	get := func() uint32 {
		id := binary.LittleEndian.Uint32(b)
		b = b[4:]
		return id
	}
	for i := range w.recvs {
		w.recvs[i] = x.recvParts.get(get())
	}
	for i := range w.sends {
		w.sends[i] = x.sendParts.get(get())
	}
	for i := range w.atts {
		w.atts[i] = x.attParts.get(get())
	}
	for i := range w.engs {
		w.engs[i] = x.engParts.get(get())
	}
	return w
}

// fresh reports whether a part is yet to be copied before it is changed.
func (w *world) fresh(at int) bool {
	if w.own&(1<<at) != 0 {
		return false
	}
	w.own |= 1 << at
	return true
}

// recv, send, att and eng are the parts to change; to read, the lists will do.
func (w *world) recv(r int) *receiver {
	if w.fresh(r) {
		c := *w.recvs[r]
		c.slots, c.copies, c.lost, c.readers = slices.Clone(c.slots), slices.Clone(c.copies), slices.Clone(c.lost), slices.Clone(c.readers)
		c.fences = slices.Clone(c.fences)
		w.recvs[r] = &c
	}
	return w.recvs[r]
}

func (w *world) send(n int) *sender {
	if w.fresh(len(w.recvs) + n) {
		c := *w.sends[n]
		c.conns, c.links, c.staging, c.frames, c.stray = slices.Clone(c.conns), slices.Clone(c.links), slices.Clone(c.staging), slices.Clone(c.frames), slices.Clone(c.stray)
		for i := range c.conns {
			c.conns[i].toR, c.conns[i].toS = slices.Clone(c.conns[i].toR), slices.Clone(c.conns[i].toS)
		}
		for i := range c.links {
			c.links[i].writes = slices.Clone(c.links[i].writes)
		}
		w.sends[n] = &c
	}
	return w.sends[n]
}

func (w *world) att(i int) *attempt {
	if w.fresh(len(w.recvs) + len(w.sends) + i) {
		c := *w.atts[i]
		c.staged = slices.Clone(c.staged)
		w.atts[i] = &c
	}
	return w.atts[i]
}

func (w *world) eng(e int) *engine {
	if w.fresh(len(w.recvs) + len(w.sends) + len(w.atts) + e) {
		c := *w.engs[e]
		w.engs[e] = &c
	}
	return w.engs[e]
}

func (c *codec) place(p *place) {
	num(c, &p.core)
	num(c, &p.lag)
}

func (c *codec) receiver(r *receiver) {
	c.place(&r.place)
	num(c, &r.life)
	list(c, &r.slots, (*codec).recvSlot)
	list(c, &r.fences, func(c *codec, f *fence) {
		num(c, &f.gen)
		nums(c, &f.slots)
	})
	list(c, &r.copies, (*codec).pull)
	nums(c, &r.lost)
	num(c, &r.reader)
	nums(c, &r.readers)
}

func (c *codec) recvSlot(s *recvSlot) {
	num(c, &s.gen)
	flags(c, &s.landed, &s.revoked)
	num(c, &s.filling)
	num(c, &s.content)
	num(c, &s.read)
	num(c, &s.readBy)
}

func (c *codec) pull(p *pull) {
	num(c, &p.from)
	num(c, &p.gen)
	num(c, &p.slot)
	num(c, &p.src)
	num(c, &p.srcGen)
	num(c, &p.att)
	flags(c, &p.copying, &p.frozen)
	num(c, &p.seen)
}

func (c *codec) sender(s *sender) {
	c.place(&s.place)
	num(c, &s.life)
	list(c, &s.conns, func(c *codec, k *conn) {
		num(c, &k.id)
		flags(c, &k.up, &k.known, &k.cut, &k.left, &k.mute, &k.deaf)
		nums(c, &k.toR)
		nums(c, &k.toS)
	})
	list(c, &s.links, (*codec).dataLink)
	list(c, &s.staging, func(c *codec, s *stagingSlot) {
		num(c, &s.word)
		num(c, &s.content)
		num(c, &s.owner)
		num(c, &s.lostBy)
	})
	list(c, &s.frames, func(c *codec, f *frame) {
		num(c, &f.dst)
		num(c, &f.gen)
		num(c, &f.content)
		num(c, &f.att)
		num(c, &f.life)
	})
	list(c, &s.stray, (*codec).write)
}

func (c *codec) dataLink(l *dataLink) {
	num(c, &l.id)
	num(c, &l.life)
	flags(c, &l.up, &l.closing, &l.dead)
	list(c, &l.writes, (*codec).write)
}

func (c *codec) write(x *write) {
	num(c, &x.id)
	num(c, &x.src)
	num(c, &x.dst)
	num(c, &x.gen)
	num(c, &x.att)
	num(c, &x.chunk)
	flags(c, &x.sent, &x.aborted, &x.stuck)
}

func (c *codec) attempt(a *attempt) {
	flags(c, &a.begun, &a.granted, &a.gone, &a.waits, &a.notified, &a.trusted, &a.cancelled, &a.stopped)
	num(c, &a.submitted)
	nums(c, &a.staged)
	num(c, &a.cancel)
	for _, e := range []*ending{&a.told, &a.answered, &a.at} {
		num(c, &e.how)
		num(c, &e.why)
	}
	num(c, &a.gen)
	nums(c, &a.slots)
	num(c, &a.place)
	num(c, &a.arrival)
	num(c, &a.passed)
	num(c, &a.claim)
}

func (c *codec) engine(e *engine) {
	num(c, &e.conn)
	num(c, &e.lost)
	num(c, &e.begun)
}

// violate notes a broken rule; the first counts.
func (w *world) violate(rule, format string, args ...any) {
	if w.bad == "" && rule != w.x.blind {
		w.bad = rule + ": " + fmt.Sprintf(format, args...)
	}
}

func (w *world) say(format string, args ...any) {
	if w.trace != nil {
		w.trace(format, args...)
	}
}

func (w *world) sayAct(who string, n int, a *act) {
	if w.trace == nil {
		return
	}
	if t := w.x.m.show(a); t != "" {
		w.trace("  %s %d %s", who, n, t)
	}
}
