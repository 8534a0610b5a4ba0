// Package intake is all that a receiver decides: sessions and leases, who is
// admitted, what is committed, how each request ends, when a slot may be used
// again, in both control dialects. It is pure: Step(now, event) → actions.
// Package node carries the actions out and decides nothing.
//
// One request, one life:
//
//	           room                   all committed
//	waiting ─────────► admitted ─────────────────► ready ──► claimed
//	   │                  │                          │          │ released, reader lost
//	   │                  │ cancel, deadline, ...    │ ttl      │
//	   ▼                  ▼                          ▼          ▼
//	(ended)            draining ◄────────────────────┴──────────┘
//	                      │ every slot free
//	                      ▼
//	                   (forgotten; its ending is kept for a while)
//
// Files: session.go (peers, hello, leases), begin.go and commit.go (Berth
// senders), legacy.go and batch.go (LMCache senders), watch.go (proxies),
// engine.go (the reader's side), ending.go (R5: how requests end and what is
// remembered), fence.go (when slots come free), timers.go, status.go, check.go,
// encode.go, clone.go.
package intake

import (
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/reserve"
	"github.com/berthkv/berth/internal/slot"
)

// Core is a receiver's state. Its invariants, which Check verifies:
//
//  1. R1, R6: those of package slot; every slot that is not free belongs to one
//     chunk of one request here, under that request's generation.
//  2. The ledger's free room is the pool's, what waits there is what waits here,
//     and so do the slots that it is told do not come free by themselves.
//  3. R3: a waiting request has no slot, no generation and no commit.
//  4. An admitted request holds a slot or a reservation for each of its chunks;
//     a ready one has each committed; a claimed one has a reader; a draining one
//     has nothing but quarantined slots, at least one.
//  5. R7: find offers ready unclaimed requests and complete unwatched legacy
//     ones, no others.
//  6. R11: nothing is kept beyond its limit.
//  7. Every name, list, index and timer agrees with the request it speaks of.
type Core struct {
	cfg      Config
	now      kv.Instant // of the last step
	draining bool

	pool       *slot.Pool
	ledger     *reserve.Ledger
	unsettled  bool                       // the ledger may have somebody to admit
	generation kv.Generation              // the last one given
	serial     uint64                     // last number given to a request, wait, watch or peer
	tokensKey  string                     // key of the fixed token list, "" until the engine has said
	requests   list[request]              // every record, by arrival
	granted    map[kv.Generation]*request // every record with slots
	waiting    map[uint64]*request        // by serial, which is the ledger's id
	names      map[string]*name
	endings    list[ending]              // kept, oldest first
	findable   map[string]*list[request] // by the key of chunk 0

	conns      map[kv.ConnID]*conn
	sessions   map[kv.Incarnation]*peer // live ones
	identities map[string]*peer         // legacy owners
	handshakes handshakes
	leases     int   // peers that hold a lease
	lockStep   int64 // F of design 4.2
	parked     int64 // bytes of the keys of batches that wait
	lasting    int64 // quarantined slots that wait for a peer, an engine or a time
	blocked    blocked
	watches    int // of all proxies

	engines map[string]*engine
	readers map[kv.ConnID]*reader
	waits   map[kv.CallID]*wait

	timers timers
	hold   kv.Instant // timers do not ring before
	woken  kv.Instant // the wake-up asked for; past: none

	actions       []Action
	spareRequests spares[request]
	spareCommits  spares[commit]
	spareNames    spares[name]
	spareEndings  spares[ending]
}

// New returns the core of a receiver whose slots are all free. It panics on a
// capacity or bypass outside package reserve's range.
func New(cfg Config, now kv.Instant) *Core {
	c := &Core{
		cfg:        cfg,
		now:        now,
		pool:       slot.New(cfg.Capacity),
		ledger:     reserve.New(reserve.Config{Capacity: int64(cfg.Capacity), Bypass: cfg.Bypass, MaxWaiting: cfg.MaxWaiting}),
		tokensKey:  cfg.TokensKey,
		granted:    map[kv.Generation]*request{},
		waiting:    map[uint64]*request{},
		names:      map[string]*name{},
		findable:   map[string]*list[request]{},
		conns:      map[kv.ConnID]*conn{},
		sessions:   map[kv.Incarnation]*peer{},
		identities: map[string]*peer{},
		handshakes: handshakes{at: map[string]uint64{}},
		engines:    map[string]*engine{},
		readers:    map[kv.ConnID]*reader{},
		waits:      map[kv.CallID]*wait{},
	}
	c.requests.at = func(r *request) *links[request] { return &r.byArrival }
	c.endings.at = func(e *ending) *links[ending] { return &e.byAge }
	return c
}

// Step takes one event at a time that never goes back, and returns what is to
// be done, in order. The slice and what its actions hold are the caller's to
// read until the next Step. The event's message and slices are the core's from
// here on.
func (c *Core) Step(now kv.Instant, e Event) []Action {
	clear(c.actions)
	c.actions = c.actions[:0]
	now = max(now, c.now)
	c.stopped(now)
	c.now = now
	c.dispatch(e)
	c.fire()
	c.settle()
	c.wake()
	return c.actions
}

func (c *Core) dispatch(e Event) {
	switch e := e.(type) {
	case Connected:
		c.connected(e)
	case Disconnected:
		c.disconnected(e.Conn)
	case Received:
		c.received(e)
	case Malformed:
		c.malformed(e)
	case Handshaken:
		c.handshakes.add(e.LocalID, c.cfg.MaxConns)
	case Landed:
		c.landed(e)
	case Failed:
		c.failed(e)
	case Fenced:
		c.fenced(e)
	case LinkLost:
		c.linkLost(e)
	case PeerGone:
		c.peerGone(e.Owner)
	case EngineAttached:
		c.engineAttached(e)
	case Wait:
		c.wait(e)
	case Find:
		c.find(e)
	case Claim:
		c.claim(e)
	case Release:
		c.release(e)
	case CancelByName:
		c.cancelByName(e)
	case Hangup:
		c.hangup(e.Call)
	case EngineLost:
		c.engineLost(e.Engine)
	case EngineFenced:
		c.engineFenced(e)
	case Drain:
		c.drain()
	case Tick:
		c.woken = 0 // it has been used
	}
}

func (c *Core) act(a Action) { c.actions = append(c.actions, a) }

func (c *Core) number() uint64 {
	c.serial++
	return c.serial
}

// send puts a message on a connection that is there and not superseded.
func (c *Core) send(id kv.ConnID, m msg.Message) {
	if cn := c.conns[id]; cn != nil && !cn.superseded {
		c.act(Send{Conn: id, Msg: m})
	}
}

// refuse answers a request with an error.
func (c *Core) refuse(id kv.ConnID, seq uint64, err *fault.Error) {
	m := &msg.Error{Re: seq, Code: err.Code, Text: err.Text}
	if err.Code == fault.Busy {
		m.RetryMS = err.Retry.Millis()
	}
	c.send(id, m)
}

// busyRetry is when a peer that got busy may try again.
const busyRetry = 1 * kv.Second

func busy(format string, args ...any) *fault.Error {
	err := fault.New(fault.Busy, format, args...)
	err.Retry = busyRetry
	return err
}

// settle tells the ledger what has come free and admits whoever may go now.
func (c *Core) settle() {
	for {
		n := c.pool.Counts()
		if back := int64(n.Free) - c.ledger.Free(); back > 0 {
			c.ledger.Return(back)
			c.unsettled = true
		}
		if b := (blocked{c.lasting, c.lockStep}); b != c.blocked {
			c.ledger.SetBlocked(b.lasting, b.lockStep)
			c.blocked = b
			c.unsettled = true
		}
		if !c.unsettled {
			return
		}
		id, ok := c.ledger.Next()
		if !ok {
			c.unsettled = false
			return
		}
		c.admit(c.waiting[id])
	}
}

// blocked is what the ledger was told does not come free by itself. The slots
// that a link is about to fence do: an earmark is not lost over them.
type blocked struct{ lasting, lockStep int64 }

// drain refuses what waits and whatever comes; what is admitted goes on.
func (c *Core) drain() {
	c.draining = true
	for r := range c.requests.all {
		if r.state == waiting {
			c.sendAway(r, errDraining())
		}
	}
}

func errDraining() *fault.Error { return busy("this receiver is draining") }
