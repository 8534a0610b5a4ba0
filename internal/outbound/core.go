// Package outbound is all that a sender decides: sessions with receivers, one
// request's states, staging and its shares, the window, writes and their
// repeats, cancel and endings. It is pure: Step(now, event) → actions. It keeps
// no clock and no connection; equal steps give equal actions.
//
//	session.go   receivers and their sessions         link.go      their data links
//	begin.go     a request from Begin to Granted      submit.go    a batch becomes commits
//	commit.go    sum → window → write → commit        ending.go    failure, cancel, endings
//	stage.go     staging slots and who may have them  staging.go   the slots' states
//	engine.go    connections of the engine            legacy*.go   LMCache's receivers
package outbound

import (
	"slices"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
)

// Limits that no option sets. At each the answer is busy.
const (
	maxStageWaits  = 4096 // blocked stages
	maxCancelCalls = 64   // callers that wait for one request's end
	maxTries       = 8    // writes of one chunk
)

// stopGrace is how long timers wait after a stop of the process was noticed,
// so that what is queued is stepped before them.
const stopGrace = 100 * kv.Millisecond

// busyRetry is told to an engine whose Begin found a full table, and used where
// a receiver's busy names no time.
const busyRetry = 100 * kv.Millisecond

// Core is the sender. Create with New.
type Core struct {
	cfg      Config
	perToken int64 // bytes of one token of a chunk

	peers    map[Peer]*peer
	byID     map[uint32]*peer
	lastPeer uint32
	floor    uint64 // no begin or seq of a peer yet to come is at or below it

	reqs    map[string]*request // by req_id, until the engine was told the ending
	live    int                 // requests, those that only wait for answers too
	lastReq uint64
	callers map[kv.CallID]*request // calls of Cancel without an answer
	endings endings

	pool    pool
	waits   []*stageWait // oldest first
	engines map[kv.ConnID]*engineConn
	// tokensKey is the key of the fixed token list that an engine named last.
	tokensKey string

	links     map[LinkID]*dataLink
	lastLink  LinkID
	writes    map[uint64]writeRef // with a link, by id
	lastWrite uint64
	sums      map[uint64]*commit
	lastSum   uint64

	// What the event has touched, settled at the end of the Step.
	touchedReqs  []*request
	touchedPeers []*peer

	timers   timers
	wakeAt   kv.Instant
	stepped  kv.Instant  // the last step
	lease    kv.Duration // the shortest that is held, 0: none
	heldTill kv.Instant  // timers wait until then
	draining bool

	legacy    map[kv.ConnID]*legacyConn
	lastConn  kv.ConnID // of those to LMCache receivers
	legacyDef *Link

	out         []Action
	spareReqs   []*request
	spareCommit []*commit
	seen        []uint64 // scratch bitmap, all zero between uses

	// What actions hold, reused by the next Step.
	heldSlots []kv.SlotID
	heldRaise []StagedSlot
	heldIDs   []uint64
	heldItems []WriteItem
	heldSums  []SumItem
}

// New returns a sender that has begun nothing.
func New(cfg Config, now kv.Instant) *Core {
	one, err := kv.ChunkBytes(cfg.Facts.Format, cfg.Facts.DType, cfg.Shape, 1)
	if err != nil {
		panic("outbound: " + err.Error())
	}
	if cfg.ConnectTimeout == 0 {
		cfg.ConnectTimeout = defaultConnect
	}
	return &Core{
		cfg: cfg, perToken: one,
		peers: map[Peer]*peer{}, byID: map[uint32]*peer{},
		reqs: map[string]*request{}, callers: map[kv.CallID]*request{}, endings: newEndings(cfg.MaxEndings, cfg.EndingTTL),
		pool: newPool(cfg.Staging), engines: map[kv.ConnID]*engineConn{},
		links: map[LinkID]*dataLink{}, writes: map[uint64]writeRef{}, sums: map[uint64]*commit{},
		legacy: map[kv.ConnID]*legacyConn{}, legacyDef: &Link{Name: cfg.LegacyLink, OneSided: true},
		wakeAt: kv.Never, stepped: now,
	}
}

// defaultConnect is Config.ConnectTimeout where none is given.
const defaultConnect = 15 * kv.Second

// Step tells the core one event and returns what is to be done, in order. The
// slice and what it holds, messages too, are valid until the next Step.
func (c *Core) Step(now kv.Instant, ev Event) []Action {
	c.out = c.out[:0]
	c.heldSlots, c.heldRaise, c.heldIDs = c.heldSlots[:0], c.heldRaise[:0], c.heldIDs[:0]
	c.heldItems, c.heldSums = c.heldItems[:0], c.heldSums[:0]
	c.noticeStop(now)
	switch ev := ev.(type) {
	case EngineAttached:
		c.engineAttached(ev)
	case Begin:
		c.begin(now, ev)
	case Stage:
		c.stage(now, ev)
	case Unstage:
		c.unstage(ev)
	case Submit:
		c.submit(now, ev)
	case Cancel:
		c.cancel(now, ev)
	case Hangup:
		c.hangup(ev)
	case EngineLost:
		c.engineLost(now, ev)
	case EngineFenced:
		c.engineFenced(ev)
	case Connected:
		c.connected(now, ev)
	case Disconnected:
		c.disconnected(now, ev)
	case Received:
		c.received(now, ev)
	case Malformed:
		c.malformed(now, ev)
	case LinkUp:
		c.linkUp(ev)
	case LinkDown:
		c.linkDown(now, ev)
	case Sent:
		c.sent(now, ev)
	case Lost:
		c.lost(now, ev)
	case Summed:
		c.summed(ev)
	case Drain:
		c.draining = true
	case Tick:
		c.tick(now)
	}
	c.settleAll(now)
	c.askWake()
	return c.out
}

// carve takes n elements of a buffer that lasts until the next Step.
func carve[T any](buf *[]T, n int) []T {
	at := len(*buf)
	*buf = slices.Grow(*buf, n)[:at+n]
	return (*buf)[at : at+n : at+n]
}

func (c *Core) emit(a Action) { c.out = append(c.out, a) }

func (c *Core) answer(call kv.CallID, err *fault.Error) { c.emit(Answer{Call: call, Err: err}) }

// touch says that something about a request has changed.
func (c *Core) touch(r *request) {
	if !r.touched {
		r.touched = true
		c.touchedReqs = append(c.touchedReqs, r)
	}
	c.touchPeer(r.peer)
}

func (c *Core) touchPeer(p *peer) {
	if !p.touched {
		p.touched = true
		c.touchedPeers = append(c.touchedPeers, p)
	}
}

// settleAll does what the event has made possible: requests are finished and
// forgotten, receivers get what may go to them, stages that wait are served.
func (c *Core) settleAll(now kv.Instant) {
	for len(c.touchedReqs)+len(c.touchedPeers) > 0 {
		for i := 0; i < len(c.touchedReqs); i++ {
			r := c.touchedReqs[i]
			r.touched = false
			c.tidy(now, r)
		}
		c.touchedReqs = c.touchedReqs[:0]
		for i := 0; i < len(c.touchedPeers); i++ {
			p := c.touchedPeers[i]
			p.touched = false
			c.pump(now, p)
		}
		c.touchedPeers = c.touchedPeers[:0]
	}
	c.wakeStages()
}

// noticeStop finds out that the process was stopped: it holds a lease, and its
// steps are more than two thirds of it apart.
func (c *Core) noticeStop(now kv.Instant) {
	if c.lease > 0 && now.Sub(c.stepped) > c.lease/3*2 {
		for _, p := range c.byID {
			p.sess.Stopped(now)
			c.armPeer(p)
		}
		for _, l := range c.links {
			l.progress = now
			c.armLink(l)
		}
		c.heldTill = now.Add(stopGrace)
	}
	c.stepped = now
}

// tick runs what is due, unless the process was stopped a moment ago.
func (c *Core) tick(now kv.Instant) {
	if now < c.heldTill {
		return
	}
	for {
		t := c.timers.first()
		if t == nil || t.at > now {
			break
		}
		c.arm(t, kv.Never)
		switch t.kind {
		case timePeer:
			c.peerDue(now, t.peer)
		case timeRequest:
			c.requestDue(now, t.req)
		case timeStage:
			c.stageDue(t.wait)
		case timeLink:
			c.linkDue(now, t.link)
		}
	}
	c.endings.expire(now)
}

// askWake asks for the next Tick when its time has changed.
func (c *Core) askWake() {
	at := c.endings.next()
	if t := c.timers.first(); t != nil {
		at = min(at, t.at)
	}
	if at != kv.Never {
		at = max(at, c.heldTill)
	}
	if at != c.wakeAt {
		c.wakeAt = at
		c.emit(Wake{At: at})
	}
}
