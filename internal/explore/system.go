package explore

import (
	"fmt"

	"github.com/berthkv/berth/internal/intake"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/outbound"
)

// prompt is one prompt of an engine.
type prompt struct {
	total int  // chunks declared
	end   int  // chunks that it has, 0: as declared
	stage int  // staging slots wanted with Granted
	short bool // its deadline comes before anything else that time brings
}

// config is a system to explore.
type config struct {
	name     string
	link     string // tcp, shm or nixl
	capacity int    // slots of each receive pool
	staging  int    // slots of each staging pool
	maxStage int
	ranks    int        // receivers, and agents of each engine
	engines  [][]prompt // by engine
	bypass   int        // admission_bypass_chunks
	// maxWaiting is max_waiting; 0: it is never reached. Who meets it tries again
	// later, so that time passes.
	maxWaiting int
	blind      string   // a rule that is not looked at
	eager      bool     // an engine submits at once what it has staged
	warm       bool     // sessions and links are up from the start
	alike      bool     // engines have the same prompts: the first is the first to begin
	budget     int      // faults in one run
	faults     faultSet // those that may happen
}

// faultSet says which faults may happen.
type faultSet uint32

const (
	faultBreak     faultSet = 1 << iota // a control connection breaks, with a suffix lost in each direction
	faultOneWay                         // one direction of a control connection is lost, and neither end notices
	faultDial                           // a dial or a link's hello fails
	faultDuplicate                      // a message comes twice
	faultLate                           // time passes while something is under way
	faultCancel                         // an engine cancels
	faultCrashR                         // a receiver's agent dies and is started again
	faultCrashS                         // a sender's agent dies and is started again
	faultData                           // a data connection breaks, or a link goes down
	faultStuck                          // a one-sided write hangs
	faultReader                         // the decode engine is lost, or never asks
	faultEngine                         // a prefill engine is lost

	faultAll faultSet = 1<<iota - 1
)

// system is a config made ready.
type system struct {
	config
	plant   Plant
	reduced bool // see reduce.go
	m       *memo
	specs   []spec // of the attempts
	facts   kv.Facts

	recvParts *parts[receiver]
	sendParts *parts[sender]
	attParts  *parts[attempt]
	engParts  *parts[engine]
}

// spec is what of an attempt does not change.
type spec struct {
	prompt
	req    string
	engine int
	number int // of its prompt in the engine's queue
	rank   int
	before int // attempt of the rank that is begun before, -1: none
	sender int
	recv   int
	ranks  []int // attempts of its prompt, itself included
}

const (
	second    = kv.Second
	lease     = 15 * second
	shortTime = 1 * second
	longTime  = 1e6 * second // nothing waits so long: see checkPatience
	horizon   = longTime / 2
	atOnce    = 100 * kv.Millisecond // a time as short as a message's way
)

var shape = []int64{2, 1, 16, 1}

const chunkBytes = 2 * 1 * 16 * 1 * 2

func newSystem(c config, p Plant) *system {
	x := &system{config: c, plant: p, m: newMemo(p), recvParts: newParts((*codec).receiver), sendParts: newParts((*codec).sender),
		attParts: newParts((*codec).attempt), engParts: newParts((*codec).engine)}
	x.facts = kv.Facts{SlotBytes: chunkBytes, Format: kv.Format2LTD, DType: "bfloat16", ChunkTokens: 16, TPSize: int64(c.ranks)}
	n := 0
	for e, prompts := range c.engines {
		for i, q := range prompts {
			if q.end == 0 {
				q.end = q.total
			}
			first := len(x.specs)
			var ranks []int
			for k := range c.ranks {
				ranks = append(ranks, first+k)
			}
			for k := range c.ranks {
				s := spec{prompt: q, req: fmt.Sprintf("p%d", n), engine: e, number: i, rank: k, before: first + k - 1, sender: e*c.ranks + k, recv: k, ranks: ranks}
				if p.is(PlantAnyOrder) && e%2 == 1 {
					s.before = first + k + 1
				}
				if s.before < first || s.before >= first+c.ranks {
					s.before = -1
				}
				if k < c.ranks-1 {
					s.stage = 0
				}
				x.specs = append(x.specs, s)
			}
			n++
		}
	}
	return x
}

// name is how scripts call an attempt.
func (x *system) name(att int) string {
	if x.ranks == 1 {
		return x.specs[att].req
	}
	return fmt.Sprintf("%s/%d", x.specs[att].req, x.specs[att].rank)
}

func recvIncarnation(r int, life uint8) kv.Incarnation {
	return kv.Incarnation{'r', byte(r + 1), life + 1}
}

func sendIncarnation(s int, life uint8) kv.Incarnation {
	return kv.Incarnation{'s', byte(s + 1), life + 1}
}

// owner tells whose an incarnation is.
func owner(i kv.Incarnation) (s int, life uint8) { return int(i[1]) - 1, i[2] - 1 }

func (x *system) newRecv(r int, life uint8) coreID {
	c := intake.New(intake.Config{
		Incarnation: recvIncarnation(r, life), Facts: x.facts, Capacity: x.capacity,
		Links:             []intake.Link{{Name: x.link, Addr: "a", Pull: x.link == "shm", OneSided: x.link == "nixl", ExactFence: x.link != "nixl"}},
		AllocationTimeout: kv.Forever, RequestTimeout: longTime, Lease: lease, UnclaimedTTL: 20 * second, EndingTTL: longTime,
		Quarantine: 10 * second, SurplusGrace: 5 * second,
		MaxWaiting: x.plant.waiting(x.maxWaiting), Bypass: x.plant.Bypass(x.bypass), MaxEndings: 16, MaxConns: 16,
	}, 0)
	return x.m.keep(&coreState{recv: c, who: recvIncarnation(r, life), wake: kv.Never})
}

func (x *system) newSend(s int, life uint8) coreID {
	c := outbound.New(outbound.Config{
		Node: fmt.Sprintf("s%d", s), Incarnation: sendIncarnation(s, life), Secret: kv.Secret{byte(s + 1), life}, Facts: x.facts, Shape: shape,
		Staging: x.staging, MaxStage: x.maxStage,
		Links:          []outbound.Link{{Name: x.link, Pull: x.link == "shm", OneSided: x.link == "nixl", ExactFence: x.link != "nixl"}},
		Dialect:        outbound.DialectBerth,
		RequestTimeout: kv.Forever, AllocationTimeout: kv.Forever, WriteTimeout: 10 * second, EndingTTL: kv.Forever, ConnectTimeout: 15 * second,
		Window: 1 << 20, MaxWaiting: 8, MaxPeers: 2, MaxEndings: 16,
	}, 0)
	return x.m.keep(&coreState{send: c, who: sendIncarnation(s, life), wake: kv.Never})
}

// root is the first state: agents are started, engines attached, and the decode
// engine waits for every prompt.
func (x *system) root() *world {
	w := &world{x: x, atts: make([]*attempt, len(x.specs)), engs: make([]*engine, len(x.engines)), own: ^uint32(0)}
	for i := range w.atts {
		w.atts[i] = new(attempt)
	}
	for e := range w.engs {
		w.engs[e] = new(engine)
	}
	for r := range x.ranks {
		w.recvs = append(w.recvs, &receiver{place: place{core: x.newRecv(r, 0)}, slots: make([]recvSlot, x.capacity), reader: 1})
	}
	for s := range len(x.engines) * x.ranks {
		w.sends = append(w.sends, &sender{place: place{core: x.newSend(s, 0)}, staging: make([]stagingSlot, x.staging)})
	}
	for r := range w.recvs {
		w.attachReader(r)
		for i := range x.specs {
			if x.specs[i].recv == r {
				w.wait(i)
			}
		}
	}
	for e := range w.engs {
		w.eng(e).conn = 1
		for k := range x.ranks {
			w.attachEngine(e*x.ranks + k)
		}
	}
	if x.warm {
		for n := range w.sends {
			w.warmUp(n)
		}
	}
	return w
}

// warmUp lets a sender serve a prompt without chunks, after which its session
// and its link are up.
func (w *world) warmUp(n int) {
	conn := kv.ConnID(w.engineOf(n).conn)
	w.stepS(n, ev(evBegin, uint64(callWarm)), func() outbound.Event {
		return outbound.Begin{Engine: conn, Call: callWarm, ReqID: "warm", Peer: outbound.Peer{Host: "r", AllocPort: 9000 + w.recvOf(n)}, Deadline: kv.Forever}
	})
	for {
		moves := w.senderMoves(nil, n)
		if len(moves) == 0 {
			return
		}
		w.do(moves[0])
	}
}
