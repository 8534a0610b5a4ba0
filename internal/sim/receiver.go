package sim

import (
	"slices"

	"github.com/berthkv/berth/internal/attach"
	"github.com/berthkv/berth/internal/explore"
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/intake"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
	"github.com/berthkv/berth/internal/link/memlink"
	"github.com/berthkv/berth/internal/localapi"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/node"
	"github.com/berthkv/berth/internal/wire"
)

// receiver is an agent beside a decode engine, the engine, and the network of
// the data link over which chunks come.
type receiver struct {
	host
	engine   engine
	node     *node.Node
	r        stream
	inc      kv.Incarnation
	link     string
	mode     link.Mode
	pool     link.Pool
	net      *memlink.Network
	in       *memlink.Receiver
	conns    map[kv.ConnID]*pipe
	lastConn kv.ConnID
	moving   bool  // a step of the network is scheduled
	reorder  int   // faults that mix what comes
	lossy    int   // faults that lose some of it
	decoding []int // requests that a proxy has asked the engine for
	ledger
}

func newReceiver(w *world, n int) *receiver {
	r := &receiver{link: w.sc.Links[n%len(w.sc.Links)]}
	r.host.init(w, "r", n)
	r.r = stream{w.random("receiver", r.name)}
	r.mode = modeOf(r.link)
	r.engine.init(w, &r.host, "", func() *node.Node { return r.node })
	r.engine.event, r.engine.ready = func(localapi.Event) {}, func() {}
	r.host.start, r.host.crash, r.host.took = r.boots, r.dies, r.turned
	r.boot()
	return r
}

func (r *receiver) boots() {
	w, sc := r.w, r.w.sc
	r.inc = r.incarnation()
	r.pool = link.Pool{Bytes: make([]byte, sc.Capacity*perChunk), SlotBytes: perChunk, FD: -1}
	r.conns = map[kv.ConnID]*pipe{}
	r.ledger = ledger{seats: make([]seat, sc.Capacity), trusted: map[kv.Generation]bool{}}
	r.net = memlink.New(r.mode)
	r.net.Pick, r.net.Decide, r.net.Holds = r.pick, r.decide, r.holds
	drive := r.drive(&r.r, r.noted)
	r.node = node.New(node.Config{Name: r.name, Incarnation: r.inc, Secret: r.secret(), DialTimeout: aYear, Clock: r.clock, Drive: drive})
	r.in = r.net.Receiver(memlink.ReceiverConfig{Incarnation: r.inc, Pool: r.pool}, r.linkEvents(r.node.ReceiverEvents(r.link)))
	w.addrs[r.in.Offer()] = r
	caps := r.in.Caps()
	r.node.Start(node.Cores{
		Attach: attach.Config{Facts: layout, Shape: chunkShape, Quarantine: 2 * sc.Lease},
		Intake: &intake.Config{
			Incarnation: r.inc, Facts: layout, Capacity: sc.Capacity,
			Links:             []intake.Link{{Name: r.link, Addr: r.in.Offer(), Pull: r.mode == link.Pull, OneSided: r.mode == link.OneSided, ExactFence: caps.ExactFence}},
			AllocationTimeout: 2 * sc.Lease, RequestTimeout: 40 * sc.Lease, Lease: sc.Lease, UnclaimedTTL: sc.Lease, EndingTTL: 8 * sc.Lease,
			Quarantine: 2 * sc.Lease, SurplusGrace: sc.Lease / 3, MaxWaiting: r.maxWaiting(), Bypass: sc.Plant.Bypass(int(sc.Bypass)),
			MaxEndings: kv.MaxEndings, MaxConns: 4096,
		},
	}, node.Deps{Router: r, Receivers: map[string]link.Receiver{r.link: &linkReceiver{r.in, r}}, Local: &r.engine, PoolNames: []string{localapi.ReceivePool}})
	r.turn, r.check = r.node.Turn, r.node.Check
	if sc.Plant == explore.PlantNoWake {
		n := r.node
		r.turn = func() kv.Instant { n.Turn(); return never }
	}
	r.engine.attach()
}

func (r *receiver) maxWaiting() int {
	if r.w.sc.Plant == explore.PlantNoLimit {
		return 1 << 20
	}
	return r.w.sc.MaxWaiting
}

func (r *receiver) dies() {
	w := r.w
	delete(w.addrs, r.in.Offer())
	r.node.Close()
	for _, k := range r.sortedConns() {
		k.died(true)
	}
	r.conns = nil
	r.in.Close()
	r.engine.agentLost()
	r.lost()
}

func (r *receiver) sortedConns() []*pipe {
	var ks []*pipe
	for _, k := range r.conns {
		ks = append(ks, k)
	}
	slices.SortFunc(ks, func(a, b *pipe) int { return int(int64(a.id) - int64(b.id)) })
	return ks
}

// Send and CloseConn make it its node's Router.
func (r *receiver) Send(conn kv.ConnID, b []byte) error {
	k := r.conns[conn]
	if k == nil {
		r.owes = nil // nobody is there to be told
		return errGone
	}
	switch r.w.sc.Plant { // those that change what is said
	case explore.PlantGrantShort, explore.PlantSwallow, explore.PlantOtherEnding:
		m, err := wire.Decode(b)
		if err != nil {
			return err
		}
		if m = r.w.sc.Plant.Sent(m); m == nil {
			return nil
		}
		if b, err = wire.Append(nil, m); err != nil {
			return err
		}
	}
	if r.owes != nil {
		if m, err := wire.Decode(b); err == nil {
			if e, ok := m.(*msg.Error); ok && e.Code == fault.TooLarge {
				r.owes = nil
			}
		}
	}
	return k.say(&k.toS, b)
}

// CloseConn ends a connection behind what was said.
func (r *receiver) CloseConn(conn kv.ConnID) {
	if k := r.conns[conn]; k != nil {
		k.toR.limit = min(k.toR.limit, k.toR.got)
		k.end(&k.toR, 0)
		k.end(&k.toS, k.takes())
	}
}

// repeated is what a message is that came twice: itself, unless the planted
// fault makes a repeated Begin another one.
func (r *receiver) repeated(d *direction, n int, b []byte) []byte {
	if n+1 == d.got && d.sent > 0 || r.w.sc.Plant != explore.PlantRepeatIsNew {
		return b
	}
	m, err := wire.Decode(b)
	if v, ok := m.(*msg.Begin); err == nil && ok {
		v.Begin, v.Seq = v.Begin+1_000_000, v.Seq+1_000_000
		b, _ = wire.Append(nil, v)
	}
	return b
}

// ---- the network of its data link ----

// stepTime is how long half a chunk takes.
const stepTime = 8_000

// kick moves the network on, if it does not move.
func (r *receiver) kick() {
	if r.moving || !r.up || r.net.Len() == 0 {
		return
	}
	r.moving = true
	d := r.r.take(stepTime)
	if r.slow > 0 {
		d *= 50
	}
	life := r.life
	r.w.after(d, func() {
		r.moving = false
		if r.life != life || !r.up || r.stopped > 0 {
			r.kick()
			return
		}
		if r.net.Step() {
			r.kick()
		}
		r.poke()
	})
}

func (r *receiver) pick(n int) int {
	if r.reorder > 0 {
		return r.r.IntN(n)
	}
	return 0
}

// holds: what does not get through, and what a stopped process does not send.
func (r *receiver) holds(t memlink.Transfer) bool {
	s := r.w.owners[t.Owner]
	if s == nil {
		return false
	}
	if r.mode == link.Pull {
		return false // both are on one host, and the memory is there
	}
	if p := r.w.pairs[pairID{s.id, r.id}]; p != nil && p.blocked > 0 {
		return true
	}
	return r.mode == link.Stream && s.stopped > 0
}

func (r *receiver) decide(t memlink.Transfer) memlink.Action {
	r.w.hash.add(uint64(t.Slot)<<32 ^ uint64(t.Generation))
	if r.mode == link.OneSided {
		r.strikes(t.Slot, t.Generation)
	}
	if r.lossy > 0 && r.mode != link.Pull && r.r.IntN(4) == 0 { // what is copied is not lost
		return memlink.Lose
	}
	if s := r.w.owners[t.Owner]; s != nil && s.slow > 0 && r.r.IntN(8) != 0 {
		return memlink.Delay
	}
	return memlink.Deliver
}

// linkEvents lets the observer see what the link reports.
func (r *receiver) linkEvents(ev link.ReceiverEvents) link.ReceiverEvents {
	life := r.life
	mine := func() bool { return r.life == life && r.up }
	return link.ReceiverEvents{
		Landed: func(ls []link.Landing) {
			if !mine() {
				return
			}
			for _, l := range ls {
				r.landed(l)
			}
			ev.Landed(ls)
			r.poke()
		},
		Failed: func(s kv.SlotID, g kv.Generation, err *fault.Error) {
			if mine() {
				ev.Failed(s, g, err)
				r.poke()
			}
		},
		Fenced: func(g kv.Generation, slots []kv.SlotID) {
			if !mine() || r.w.sc.Plant == explore.PlantDropFence {
				return
			}
			r.fenced(g, slots)
			ev.Fenced(g, slots)
			r.poke()
		},
		Lost: func(o kv.Incarnation, err error) {
			if mine() {
				ev.Lost(o, err)
				r.poke()
			}
		},
		Late: func(s kv.SlotID, g kv.Generation) {
			if mine() {
				ev.Late(s, g)
			}
		},
	}
}

// linkReceiver is the receiving half as the node sees it.
type linkReceiver struct {
	*memlink.Receiver
	r *receiver
}

func (l *linkReceiver) Open(owner kv.Incarnation, gen kv.Generation, slots []kv.SlotID) {
	l.r.opened(gen, slots)
	l.Receiver.Open(owner, gen, slots)
	if l.r.w.sc.Plant == explore.PlantCommitOnGrant {
		for _, s := range slots {
			l.r.linkEvents(l.r.node.ReceiverEvents(l.r.link)).Landed([]link.Landing{{Slot: s, Generation: gen, Bytes: perChunk}})
		}
	}
}

func (l *linkReceiver) Pull(owner kv.Incarnation, gen kv.Generation, items []link.PullItem) {
	if l.r.w.sc.Plant == explore.PlantNoGeneration { // no word is ever raised: see sender.Store
		items = slices.Clone(items)
		for i := range items {
			items[i].SrcGen = 0
		}
	}
	l.Receiver.Pull(owner, gen, items)
	l.r.kick()
}

func (l *linkReceiver) Revoke(gen kv.Generation, slots []kv.SlotID) {
	if l.r.w.sc.Plant == explore.PlantFreeOnCancel && l.r.mode != link.OneSided {
		// Free at once: whoever fills them goes on.
		slots = slices.Clone(slots)
		l.r.fenced(gen, slots)
		l.r.node.ReceiverEvents(l.r.link).Fenced(gen, slots)
		l.r.poke()
		return
	}
	l.r.revoked(gen, slots)
	l.Receiver.Revoke(gen, slots)
}

// ---- the decode engine ----

// http is how long a call between a proxy and an engine takes.
const http = 1_000_000

// decode asks for a request that the proxy says is ready, reads it and releases
// it.
func (r *receiver) decode(i int) {
	q := &r.w.requests[i]
	r.decoding = append(r.decoding, i)
	if !r.engine.attached {
		r.decoded(i, "no engine")
		return
	}
	life := r.engine.life
	r.engine.call(&localapi.Wait{Req: q.name, DeadlineMS: r.w.sc.Lease.Millis()}, func(a localapi.Answer, err *fault.Error) {
		if err != nil {
			r.decoded(i, string(err.Code))
			return
		}
		e := a.(*localapi.Ending)
		r.answeredWait(q, ending{e.Ending, e.Reason})
		if e.Ending != msg.EndReady {
			r.decoded(i, string(e.Reason))
			return
		}
		r.engine.call(&localapi.Claim{By: "d" + q.name, Req: q.name}, func(a localapi.Answer, err *fault.Error) {
			if err != nil {
				r.decoded(i, string(err.Code))
				return
			}
			c := a.(*localapi.Claimed)
			r.claimed(q, c)
			r.w.after(r.r.take(http+kv.Duration(len(c.Chunks))*200_000), func() {
				switch {
				case r.engine.life != life:
				case q.life != r.life || !r.up:
					r.decoded(i, "agent lost")
				default:
					r.release(i)
					r.decoded(i, "read")
				}
			})
		})
	})
}

// decoded tells the proxy how it went.
func (r *receiver) decoded(i int, text string) {
	r.decoding = slices.DeleteFunc(r.decoding, func(j int) bool { return j == i })
	r.w.after(r.r.take(http), func() { r.w.proxyOf(&r.w.requests[i]).decoded(i, text) })
}

// release gives back what was read.
func (r *receiver) release(i int) {
	q := &r.w.requests[i]
	r.readOver(q)
	if poke := pokes[r.w.sc.Plant]; poke != nil {
		poke(r)
	}
	m := &localapi.Release{By: "d" + q.name, Req: q.name}
	if r.w.sc.Plant == explore.PlantLeak && q.End > 1 {
		m.Chunks = []int64{0}
	}
	r.engine.call(m, func(_ localapi.Answer, err *fault.Error) {
		if err != nil && err.Code != fault.PeerLost {
			r.w.violate("R5", "%s may not release %s: %s", r.name, q.name, err.Text)
		}
	})
}

// pokes are planted faults in a core's memory, at a release; set by tests.
var pokes = map[explore.Plant]func(*receiver){}

// loseEngine kills the decode engine. What it has claimed it reads until its
// process is gone.
func (r *receiver) loseEngine() {
	if !r.engine.attached {
		return
	}
	r.w.say("%s's engine dies", r.name)
	reading, life := slices.Clone(r.decoding), r.life
	for _, i := range reading {
		r.decoded(i, "engine lost")
	}
	r.engine.die(func() {
		if r.life != life || !r.up {
			return
		}
		for _, i := range reading {
			r.readOver(&r.w.requests[i])
		}
	})
}
