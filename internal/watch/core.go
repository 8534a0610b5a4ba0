package watch

import (
	"cmp"
	"container/heap"
	"slices"

	"github.com/berthkv/berth/internal/kv"
)

// stopGrace is how long timers wait after a stop of the process was noticed, so
// that what is queued is stepped before them.
const stopGrace = 100 * kv.Millisecond

// Core is the proxy's side of the control plane. Create with New.
//
// A watch has one rank for each receiver. Its result is fixed once: ready when
// all ranks are, or the first bad ending, which cancels the others.
type Core struct {
	cfg      Config
	peers    map[Peer]*peer
	byID     map[uint32]*peer
	lastPeer uint32
	floor    uint64 // no seq of a peer yet to come is at or below it

	watches   map[kv.CallID]*watched
	byName    map[string]*watched
	lastWatch uint64
	due       queue[*watched] // those without a result, by deadline
	alarms    queue[*peer]    // every receiver, by its session's next time
	early     early

	wakeAt   kv.Instant
	stepped  kv.Instant
	lease    kv.Duration // the shortest that is held, 0: none
	heldTill kv.Instant  // timers wait until then
	out      []Action
}

// New returns a core that watches nothing.
func New(cfg Config, now kv.Instant) *Core {
	cfg.fillDefaults()
	return &Core{
		cfg: cfg, peers: map[Peer]*peer{}, byID: map[uint32]*peer{},
		watches: map[kv.CallID]*watched{}, byName: map[string]*watched{},
		early: early{max: cfg.MaxEarly, ttl: cfg.EarlyTTL, byName: map[string]*earlyWord{}}, wakeAt: kv.Never, stepped: now,
	}
}

// Step tells the core one event and returns what is to be done, in order. The
// slice and what it holds are valid until the next Step.
func (c *Core) Step(now kv.Instant, ev Event) []Action {
	c.out = c.out[:0]
	c.noticeStop(now)
	switch ev := ev.(type) {
	case Watch:
		c.watch(now, ev)
	case Cancel:
		c.cancel(now, ev)
	case Release:
		if w := c.watches[ev.Call]; w != nil {
			c.forget(now, w)
		}
	case Connected:
		c.connected(now, ev)
	case Disconnected:
		c.disconnected(now, ev)
	case Malformed:
		c.malformed(now, ev)
	case Received:
		c.received(now, ev)
	case Notified:
		c.notified(now, ev)
	case Tick:
		c.tick(now)
	}
	c.askWake()
	return c.out
}

func (c *Core) emit(a Action) { c.out = append(c.out, a) }

// noticeStop finds out that the process was stopped: it holds a lease, and its
// steps are more than two thirds of it apart.
func (c *Core) noticeStop(now kv.Instant) {
	if c.lease > 0 && now.Sub(c.stepped) > c.lease/3*2 {
		for _, p := range c.byID {
			p.sess.Stopped(now)
			c.arm(p)
		}
		c.heldTill = now.Add(stopGrace)
	}
	c.stepped = now
}

// tick does what is due.
func (c *Core) tick(now kv.Instant) {
	if now < c.heldTill {
		return
	}
	for c.alarms.next() <= now {
		p := c.alarms[0]
		n := p.sess.Tick(now)
		c.flush(p)
		c.notice(now, p, n)
	}
	for c.due.next() <= now {
		c.expire(c.due[0])
	}
	c.early.expire(now)
}

// arm notes when a session wants its next Tick: after whatever was done to it.
func (c *Core) arm(p *peer) {
	if at := p.sess.Next(); at != p.at {
		p.at = at
		heap.Fix(&c.alarms, p.pos)
	}
}

func (c *Core) askWake() {
	at := min(c.early.next(), c.due.next(), c.alarms.next())
	if at != kv.Never {
		at = max(at, c.heldTill)
	}
	if at != c.wakeAt {
		c.wakeAt = at
		c.emit(Wake{At: at})
	}
}

func (c *Core) sortedPeers() []*peer {
	ps := make([]*peer, 0, len(c.byID))
	for _, p := range c.byID {
		ps = append(ps, p)
	}
	slices.SortFunc(ps, func(a, b *peer) int { return cmp.Compare(a.id, b.id) })
	return ps
}

func (c *Core) sortedWatches() []*watched {
	ws := make([]*watched, 0, len(c.watches))
	for _, w := range c.watches {
		ws = append(ws, w)
	}
	slices.SortFunc(ws, func(a, b *watched) int { return cmp.Compare(a.n, b.n) })
	return ws
}
