package sim

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/berthkv/berth/internal/attach"
	"github.com/berthkv/berth/internal/explore"
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
	"github.com/berthkv/berth/internal/link/memlink"
	"github.com/berthkv/berth/internal/localapi"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/node"
	"github.com/berthkv/berth/internal/outbound"
	"github.com/berthkv/berth/internal/wire"
)

// sender is an agent beside a prefill engine, and the engine.
type sender struct {
	host
	engine  engine
	node    *node.Node
	r       stream
	inc     kv.Incarnation
	staging link.Pool
	words   []kv.Generation // of the staging slots
	seats   []stagingSeat
	prefill
}

// stagingSeat says who has a hand on a staging slot.
type stagingSeat struct {
	engine int // life of the engine's process that has it, 0: none
	writes int
	dead   int // life of an engine's process that died with it and may still write
}

func newSender(w *world, n int) *sender {
	s := &sender{}
	s.host.init(w, "s", n)
	s.r = stream{w.random("sender", s.name)}
	s.engine.init(w, &s.host, "", func() *node.Node { return s.node })
	s.engine.event, s.engine.ready = s.heard, s.pump
	s.host.start, s.host.crash = s.boots, s.dies
	s.prefill.now = -1
	s.boot()
	return s
}

var (
	layout     = kv.Facts{SlotBytes: perChunk, Format: kv.Format2LTD, DType: "bfloat16", ChunkTokens: shape, TPSize: 1}
	chunkShape = []int64{2, 1, shape, 1}
)

// links are the data links that a node can have, with what each is.
var links = []struct {
	name string
	mode link.Mode
}{{"tcp", link.Stream}, {"shm", link.Pull}, {"nixl", link.OneSided}}

func modeOf(name string) link.Mode {
	for _, l := range links {
		if l.name == name {
			return l.mode
		}
	}
	return link.Stream
}

func (s *sender) boots() {
	w, sc := s.w, s.w.sc
	s.inc = s.incarnation()
	w.owners[s.inc] = s
	s.staging = link.Pool{Bytes: make([]byte, sc.Staging*perChunk), SlotBytes: perChunk, FD: -1}
	s.words = make([]kv.Generation, sc.Staging)
	s.seats = make([]stagingSeat, sc.Staging)
	drive := s.drive(&s.r, s.noted)
	s.node = node.New(node.Config{Name: s.name, Incarnation: s.inc, Secret: s.secret(), DialTimeout: aYear, Clock: s.clock, Drive: drive})
	oc := &outbound.Config{
		Node: s.name, Incarnation: s.inc, Secret: s.secret(), Facts: layout, Shape: chunkShape,
		Staging: sc.Staging, MaxStage: sc.Staging / 2, Dialect: outbound.DialectBerth,
		RequestTimeout: 40 * sc.Lease, AllocationTimeout: 2 * sc.Lease, WriteTimeout: sc.Lease * 2 / 3, EndingTTL: 8 * sc.Lease,
		ConnectTimeout: sc.Lease, Window: window, MaxWaiting: 100_000, MaxPeers: 4096, MaxEndings: kv.MaxEndings, LegacyConns: 32,
	}
	senders := map[string]link.Sender{}
	for _, l := range links {
		caps := memlink.New(l.mode).Caps()
		senders[l.name] = &linkSender{s: s, life: s.life, caps: caps}
		oc.Links = append(oc.Links, outbound.Link{Name: l.name, Pull: l.mode == link.Pull, OneSided: l.mode == link.OneSided, ExactFence: caps.ExactFence})
	}
	s.node.Start(node.Cores{Attach: attach.Config{Facts: layout, Shape: chunkShape, Quarantine: 2 * sc.Lease}, Outbound: oc}, node.Deps{
		Dialer: dialer{&s.host}, Senders: senders, Notify: pusher{s, s.life}, Local: &s.engine,
		Generations: s, Staging: s.staging, PoolNames: []string{localapi.StagingPool},
	})
	s.turn, s.check = s.node.Turn, s.node.Check
	s.engine.attach()
}

// aYear is a timeout of the real clock's that never comes.
const aYear = 365 * 24 * 3600e9

// window is the bytes of unanswered Commits for each receiver.
const window = 64 * perChunk

func (s *sender) dies() {
	w := s.w
	delete(w.owners, s.inc)
	s.node.Close()
	for _, r := range w.receivers {
		if p := w.pairs[pairID{s.id, r.id}]; p != nil {
			for _, k := range slices.Clone(p.pipes) {
				k.died(false)
			}
			if r.net != nil {
				r.net.Sever(s.inc, r.inc) // nobody of that incarnation comes again
				r.poke()
			}
		}
	}
	s.engine.agentLost()
	s.agentLost()
}

// Store implements node.Generations: a staging slot is handed out.
func (s *sender) Store(i kv.SlotID, gen kv.Generation) {
	t := &s.seats[i]
	if s.w.tracing() {
		s.w.say("%s hands out staging slot %d under generation %d", s.name, i, gen)
	}
	switch {
	case t.engine != 0 || t.dead != 0:
		s.w.violate("R6", "staging slot %d of %s is handed out while an engine has it", i, s.name)
	case t.writes != 0:
		s.w.violate("R6", "staging slot %d of %s is handed out while %d writes have it", i, s.name, t.writes)
	}
	if s.w.sc.Plant != explore.PlantNoGeneration {
		s.words[i] = gen
	}
}

// noted: what died with a dead engine's process is trusted to be gone after
// quarantine_sec (R6's named exception).
func (s *sender) noted(note any) {
	n, ok := note.(outbound.Note)
	switch {
	case !ok:
	case n.Kind == outbound.NoteViolation && strings.HasSuffix(n.Text, "not answered"): // in time, by a clock that jumps
	case n.Kind == outbound.NoteViolation:
		s.w.violate("check", "%s says that %s has broken the protocol: %s", s.name, n.Peer, n.Text)
	case n.Kind == outbound.NoteTrusted:
		s.w.report.Trusted++
		for i := range s.seats {
			s.seats[i].dead = 0
		}
	}
}

// pusher carries words to the sender's proxy.
type pusher struct {
	s    *sender
	life int
}

func (p pusher) Push(b []byte) error {
	s := p.s
	b = slices.Clone(b)
	if s.w.tracing() {
		if m, err := wire.Decode(b); err == nil {
			s.w.say("%s -> its proxy  %s", s.name, explore.ShowMsg(m))
		}
	}
	x := s.w.proxies[s.number()%len(s.w.proxies)]
	life := x.life
	s.w.after(s.r.take(200_000), func() {
		x.deliver(life, func() { x.watcher.Notified(kv.ConnID(s.id+1), b) })
	})
	return nil
}

func (s *sender) number() int { return s.id - len(s.w.receivers) }

// linkSender is a sending half: its connections lead to the networks of the
// receivers.
type linkSender struct {
	s    *sender
	life int
	caps link.Caps
}

func (l *linkSender) Caps() link.Caps { return l.caps }
func (l *linkSender) Close() error    { return nil }

func (l *linkSender) Connect(ctx context.Context, p link.Peer, ev link.SenderEvents) (link.Conn, error) {
	s, r := l.s, l.s.w.addrs[p.Addr]
	switch {
	case r == nil || !r.up:
		return nil, fmt.Errorf("nobody is at %s", p.Addr)
	case s.w.pair(&s.host, r).blocked > 0:
		return nil, fmt.Errorf("%s cannot be reached", r.name)
	}
	c := &linkConn{s: s, r: r, sources: map[link.WriteID]kv.SlotID{}, seats: s.seats}
	mine := func() bool { return s.life == l.life && s.up }
	in, err := r.net.Sender(memlink.SenderConfig{Pool: s.staging, Generation: func(i kv.SlotID) kv.Generation { return s.words[i] }}).
		Connect(ctx, p, link.SenderEvents{
			Sent: func(ids []link.WriteID) {
				if mine() {
					ev.Sent(ids)
					s.poke()
				}
			},
			Lost: func(ids []link.WriteID, err error) {
				c.letGo(ids)
				if mine() {
					s.w.say("%s: writes %v over %s are lost: %v", s.name, ids, p.Addr, err)
					ev.Lost(ids, err)
					s.poke()
				}
			},
			Down: func(err error) {
				if mine() {
					s.w.say("%s: the link to %s is down: %v", s.name, r.name, err)
					ev.Down(err)
					s.poke()
				}
			},
		})
	if err != nil {
		return nil, err
	}
	c.Conn = in
	return c, nil
}

// linkConn is a link's connection, with what each write has a hand on.
type linkConn struct {
	link.Conn
	s       *sender
	r       *receiver
	sources map[link.WriteID]kv.SlotID
	seats   []stagingSeat
}

func (c *linkConn) Write(ws []link.Write) {
	for _, x := range ws {
		c.sources[x.ID] = x.Src
		c.seats[x.Src].writes++
	}
	c.Conn.Write(ws)
	c.r.kick()
}

func (c *linkConn) Settle(ids []link.WriteID) {
	c.Conn.Settle(ids)
	c.letGo(ids)
}

func (c *linkConn) letGo(ids []link.WriteID) {
	for _, id := range ids {
		if src, ok := c.sources[id]; ok {
			delete(c.sources, id)
			c.seats[src].writes--
		}
	}
}

// ---- the prefill engine ----

// prefill is a prefill engine: it begins prompts in order, a few at a time, and
// computes and submits those that are granted, one after the other.
type prefill struct {
	queue   []int // not begun
	started []int // begun, some of them over by now
	begun   int   // begun and neither granted nor ended
	granted []int // to be computed
	now     int   // being computed, -1: none
}

// sending is a request at its prefill engine.
type sending struct {
	state     sendState
	engine    int // life of the engine's process
	agent     int // life of the agent's
	granted   bool
	told      ending
	cancelled bool
	submitted int
	staged    []kv.SlotID
}

type sendState uint8

const (
	notSent sendState = iota
	queued
	begun
	sent // its ending is known, or nobody is there to be told
)

// ahead is how many prompts an engine begins that are not granted yet.
const ahead = 4

// send takes a prompt from the proxy.
func (s *sender) send(i int) {
	q := &s.w.requests[i]
	q.state = queued
	s.queue = append(s.queue, i)
	s.pump()
}

func (s *sender) pump() {
	for s.engine.attached && s.begun < ahead && len(s.queue) > 0 {
		i := s.queue[0]
		s.queue = s.queue[1:]
		if s.w.requests[i].state == queued {
			s.begin(i)
		}
	}
}

func (s *sender) begin(i int) {
	q := &s.w.requests[i]
	left := q.At + q.Deadline - kv.Duration(s.w.now)
	if left <= 0 {
		s.ended(i, ending{msg.EndFailed, fault.Deadline}, "it was not begun in time", true)
		return
	}
	q.state, q.engine, q.agent = begun, s.engine.life, s.host.life
	s.begun++
	if len(s.started) == cap(s.started) {
		s.started = slices.DeleteFunc(s.started, func(i int) bool { return s.w.requests[i].state != begun })
	}
	s.started = append(s.started, i)
	stage := int64(0)
	if q.ID%3 == 0 {
		stage = int64(min(2, q.End, s.w.sc.Staging/2))
	}
	s.engine.call(&localapi.Begin{Req: q.name, TotalChunks: int64(q.Chunks), Host: "r", AllocPort: int64(q.Receiver) + 1, DeadlineMS: left.Millis(), Stage: stage, BerthProxy: true},
		func(_ localapi.Answer, err *fault.Error) {
			switch {
			case err == nil || q.state != begun:
			case err.Code == fault.Busy: // to be tried again
				q.state = queued
				s.begun--
				s.w.after(max(err.Retry, kv.Millisecond), func() {
					s.queue = append(s.queue, i)
					s.pump()
				})
				s.pump()
			default:
				s.ended(i, ending{msg.EndFailed, err.Code}, err.Text, err.Code == fault.PeerLost)
			}
		})
}

// heard takes what the agent tells.
func (s *sender) heard(ev localapi.Event) {
	switch ev := ev.(type) {
	case *localapi.Granted:
		i, ok := s.w.byName[ev.Req]
		q := &s.w.requests[i]
		if !ok || q.granted {
			s.w.violate("R9", "%s is told that %s is granted, again or unasked", s.name, ev.Req)
			return
		}
		q.granted = true
		s.hold(q, ev.Slots)
		if q.state != begun {
			s.unstage(q)
			return
		}
		s.begun--
		s.granted = append(s.granted, i)
		if s.now >= 0 {
			s.unstage(q) // an engine that computes holds nothing for others
		}
		s.pump()
		s.work()
	case *localapi.Ended:
		i, ok := s.w.byName[ev.Req]
		if !ok {
			return
		}
		s.ended(i, ending{ev.Ending, ev.Reason}, ev.Text, false)
	}
}

// ended: a request is over for its engine. alone says that the engine itself
// says so.
func (s *sender) ended(i int, e ending, text string, alone bool) {
	q := &s.w.requests[i]
	s.w.toldSender(s, q, e, text, alone)
	if q.state == begun && !q.granted {
		s.begun--
	}
	q.state = sent
	if s.now != i {
		s.unstage(q)
	}
	if e.how != msg.EndReady {
		s.w.after(s.r.take(http), func() { s.w.proxyOf(q).prefillFailed(i, e) })
	}
	s.pump()
	s.work()
}

// work computes the next prompt.
func (s *sender) work() {
	if s.now >= 0 || !s.engine.attached {
		return
	}
	for len(s.granted) > 0 {
		i := s.granted[0]
		s.granted = s.granted[1:]
		if s.w.requests[i].state == begun {
			s.now = i
			s.batch()
			return
		}
		s.unstage(&s.w.requests[i])
	}
}

// rest ends the work on a prompt, submitted whole or not.
func (s *sender) rest() {
	s.unstage(&s.w.requests[s.now])
	s.now = -1
	s.work()
}

// batch stages slots for what comes next, computes it and submits it.
func (s *sender) batch() {
	q := &s.w.requests[s.now]
	n := min(max(s.w.sc.Staging/2, 1), q.End-q.submitted)
	switch {
	case q.state != begun:
		s.rest()
	case len(q.staged) > 0:
		s.compute(q)
	case n == 0:
		s.submit(q)
	default:
		s.engine.call(&localapi.Stage{Req: q.name, N: int64(n), DeadlineMS: (s.w.sc.Lease * 4).Millis()}, func(a localapi.Answer, err *fault.Error) {
			switch {
			case err == nil && q.agent == s.host.life:
				s.hold(q, a.(*localapi.Slots).Slots)
				if !s.computes(q) {
					s.unstage(q)
					return
				}
				s.compute(q)
			case !s.computes(q):
			case err != nil && err.Code == fault.Holding: // slots that came with another's grant are about to be returned
				s.w.after(s.r.take(4*hop), s.again(q))
			default:
				s.rest()
			}
		})
	}
}

// computes reports whether a prompt is the one that is being computed.
func (s *sender) computes(q *request) bool { return s.now >= 0 && &s.w.requests[s.now] == q }

// again goes on with a prompt, unless the engine has left it meanwhile.
func (s *sender) again(q *request) func() {
	life := s.engine.life
	return func() {
		if s.engine.life == life && s.computes(q) {
			s.batch()
		}
	}
}

// perChunkTime is how long an engine computes a chunk.
const perChunkTime = 1_000_000

func (s *sender) compute(q *request) {
	life := s.engine.life
	if len(q.staged) > q.End-q.submitted {
		s.w.violate("R2", "%s was given %d staging slots for %d chunks", q.name, len(q.staged), q.End-q.submitted)
	}
	s.w.after(s.r.take(kv.Duration(len(q.staged))*perChunkTime), func() {
		switch {
		case s.engine.life != life || !s.computes(q):
		case q.state != begun || !s.engine.attached:
			s.rest()
		default:
			s.submit(q)
		}
	})
}

func (s *sender) submit(q *request) {
	m := &localapi.Submit{Req: q.name}
	for k, slot := range q.staged {
		index := q.submitted + k
		tokens := int64(shape)
		if index == q.End-1 {
			tokens = int64(q.Tokens)
		}
		fill(s.staging.Slot(slot), q.content(index))
		m.Chunks = append(m.Chunks, localapi.Staged{Index: int64(index), Key: q.key(index), Slot: slot, Tokens: tokens})
	}
	final := q.submitted+len(q.staged) == q.End
	if final && (q.End < q.Chunks || q.ID%2 == 0) {
		m.HasEnd, m.End = true, int64(q.End)
	}
	slots := s.drop(q)
	s.engine.call(m, func(_ localapi.Answer, err *fault.Error) {
		if err != nil { // it has taken nothing
			if q.agent == s.host.life {
				s.hold(q, slots)
			}
			if s.computes(q) {
				s.rest()
			} else {
				s.unstage(q)
			}
			return
		}
		if !s.computes(q) {
			return
		}
		q.submitted += len(slots)
		if q.submitted == q.End {
			s.rest()
			return
		}
		s.batch()
	})
}

// hold notes that the engine has staging slots.
func (s *sender) hold(q *request, slots []kv.SlotID) {
	for _, i := range slots {
		s.seats[i].engine = s.engine.life
	}
	q.staged = append(q.staged, slots...)
	if len(slots) > 0 && s.w.tracing() {
		s.w.say("%s's engine has staging slots %v for %s", s.name, slots, q.name)
	}
}

// drop notes that it has them no more.
func (s *sender) drop(q *request) []kv.SlotID {
	slots := q.staged
	q.staged = nil
	if len(slots) > 0 && s.w.tracing() {
		s.w.say("%s's engine gives back staging slots %v of %s", s.name, slots, q.name)
	}
	for _, i := range slots {
		s.seats[i].engine = 0
	}
	return slots
}

func (s *sender) unstage(q *request) {
	if len(q.staged) == 0 {
		return
	}
	if q.agent != s.host.life || q.engine != s.engine.life {
		q.staged = nil
		return
	}
	s.engine.call(&localapi.Unstage{Req: q.name, Slots: s.drop(q)}, func(_ localapi.Answer, err *fault.Error) {
		if err != nil && err.Code != fault.PeerLost {
			s.w.violate("R5", "%s may not return the staging slots of %s: %s", s.name, q.name, err.Text)
		}
	})
}

// abort is the proxy's word that nobody wants the prompt any more.
func (s *sender) abort(i int) {
	q := &s.w.requests[i]
	switch {
	case q.state == queued:
		q.state = sent
	case q.state == begun && s.engine.attached && !q.cancelled:
		q.cancelled = true
		s.engine.call(&localapi.Cancel{Req: q.name}, func(a localapi.Answer, err *fault.Error) {
			if err == nil {
				e := a.(*localapi.Ending)
				s.w.toldCanceller(s, q, ending{e.Ending, e.Reason})
			}
		})
	}
}

// forget ends all that the engine or the agent had begun: nobody is there to be
// told.
func (s *sender) forget() {
	for _, i := range s.started {
		if q := &s.w.requests[i]; q.state == begun {
			q.staged = nil
			s.give(i)
		}
	}
	s.begun, s.granted, s.started, s.now = 0, nil, nil, -1
}

// give up a prompt: nobody computes it any more.
func (s *sender) give(i int) {
	q := &s.w.requests[i]
	q.state = sent
	s.w.after(s.r.take(http), func() { s.w.proxyOf(q).prefillFailed(i, ending{msg.EndFailed, fault.PeerLost}) })
}

func (s *sender) agentLost() { s.forget() }

// loseEngine kills the engine's process. What it had staged it may still write
// until it is gone, and does.
func (s *sender) loseEngine() {
	if !s.engine.attached {
		return
	}
	s.w.say("%s's engine dies", s.name)
	died := s.engine.life
	for i := range s.seats {
		if t := &s.seats[i]; t.engine != 0 {
			t.dead, t.engine = t.engine, 0
		}
	}
	seats, staging := s.seats, s.staging
	s.forget()
	for _, i := range s.queue {
		if s.w.requests[i].state == queued {
			s.give(i)
		}
	}
	s.queue = nil
	s.engine.die(func() {
		for i := range seats {
			if seats[i].dead == died {
				fill(staging.Slot(kv.SlotID(i)), 0xdead)
				seats[i].dead = 0
			}
		}
	})
}
