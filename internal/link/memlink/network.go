// Package memlink is the link inside one process, for simulations and tests:
// single-threaded and deterministic. It has no goroutine, lock or clock;
// nothing moves but when the test calls Step, and the same calls give the same
// result. It comes in the shape of each real link: Stream (like tcp), Pull
// (like shm), OneSided (like nixl, without an exact fence: a revoked slot may
// still be written).
//
// A chunk moves in two steps, so that whatever can happen in the middle of one
// can be made to happen. Callbacks are called from within Step and from within
// the methods of the two halves.
package memlink

import (
	"errors"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
	"github.com/berthkv/berth/internal/link/gate"
)

// Action is what a fault plan does with the transfer whose turn it is.
type Action uint8

const (
	// Deliver moves it one step on.
	Deliver Action = iota
	// Delay puts it behind all others.
	Delay
	// Lose ends it: a write is reported as Lost, a pull as Failed.
	Lose
)

// Transfer describes what is moving, to a fault plan.
type Transfer struct {
	Owner, Receiver kv.Incarnation
	Slot            kv.SlotID // receive slot
	Generation      kv.Generation
	Begun           bool // the first half has been moved
}

// Network joins senders and receivers. Fields may be set at any time.
type Network struct {
	// Decide, if set, is asked at each step.
	Decide func(Transfer) Action
	// Pick, if set, chooses which of n transfers has its turn, from the oldest,
	// 0; nil always takes the oldest.
	Pick func(n int) int
	// Holds, if set, says that a transfer does not move for now.
	Holds func(Transfer) bool

	mode      link.Mode
	receivers map[string]*Receiver
	conns     []*conn // in the order in which they were made
	queue     []*transfer
	severed   map[[2]kv.Incarnation]bool
}

// New returns an empty network of links of one mode.
func New(mode link.Mode) *Network {
	return &Network{mode: mode, receivers: map[string]*Receiver{}, severed: map[[2]kv.Incarnation]bool{}}
}

// Caps returns what the network's links can do.
func (n *Network) Caps() link.Caps {
	return link.Caps{Mode: n.mode, ExactFence: n.mode != link.OneSided}
}

// Len returns how many transfers are under way.
func (n *Network) Len() int { return len(n.queue) }

// Step moves one transfer by one step and reports whether there was one that
// moves. One that is held gives its turn to the next.
func (n *Network) Step() bool {
	if len(n.queue) == 0 {
		return false
	}
	i := 0
	if n.Pick != nil {
		i = n.Pick(len(n.queue))
	}
	if n.Holds != nil {
		first := i
		for n.Holds(n.queue[i].describe()) {
			if i = (i + 1) % len(n.queue); i == first {
				return false
			}
		}
	}
	t := n.queue[i]
	action := Deliver
	if n.Decide != nil {
		action = n.Decide(t.describe())
	}
	switch action {
	case Lose:
		n.remove(t)
		t.lose(errLost)
	case Delay:
		n.remove(t)
		n.queue = append(n.queue, t)
	case Deliver:
		if !t.begun {
			t.begun = true
			t.begin()
		} else {
			n.remove(t)
			t.end()
		}
	}
	return true
}

// Deliver steps until nothing is under way. A plan that delays for ever keeps
// it for ever.
func (n *Network) Deliver() {
	for n.Step() {
	}
}

// Cut breaks the data connections between an owner and a receiver: what is
// unsettled is lost. They are made again at once.
func (n *Network) Cut(owner, receiver kv.Incarnation) {
	for _, c := range n.between(owner, receiver) {
		c.breakOff(errCut)
	}
}

// Sever is Cut for good, as when a process died: the sender's link is down, the
// receiver has lost the owner, and Connect fails until Heal.
func (n *Network) Sever(owner, receiver kv.Incarnation) {
	n.severed[[2]kv.Incarnation{owner, receiver}] = true
	for _, c := range n.between(owner, receiver) {
		c.end(errCut, true, true)
	}
}

// Heal lets an owner connect to a receiver again.
func (n *Network) Heal(owner, receiver kv.Incarnation) {
	delete(n.severed, [2]kv.Incarnation{owner, receiver})
}

var (
	errLost    = errors.New("lost by the fault plan")
	errCut     = errors.New("the connection was cut")
	errAborted = errors.New("given up by the caller")
	errClosed  = errors.New("the link was closed")
)

func (n *Network) between(owner, receiver kv.Incarnation) (cs []*conn) {
	for _, c := range n.conns {
		if c.peer.Self == owner && c.to.cfg.Incarnation == receiver {
			cs = append(cs, c)
		}
	}
	return cs
}

func (n *Network) remove(t *transfer) {
	for i, q := range n.queue {
		if q == t {
			n.queue = append(n.queue[:i:i], n.queue[i+1:]...)
			return
		}
	}
}

// transfer is one chunk on its way, by a write or a pull.
type transfer struct {
	n      *Network
	to     *Receiver
	owner  kv.Incarnation
	dst    kv.SlotID
	gen    kv.Generation
	bytes  int64
	begun  bool
	inside bool // it fills its slot

	// A write:
	conn    *conn // nil for a pull, and when its connection is gone
	id      link.WriteID
	aborted bool
	filler  bool // settled in the middle: its slot is the caller's again

	// Both: where the bytes come from.
	from   link.Pool
	src    kv.SlotID
	srcGen kv.Generation                 // a pull's
	word   func(kv.SlotID) kv.Generation // a pull's
}

func (t *transfer) describe() Transfer {
	return Transfer{t.owner, t.to.cfg.Incarnation, t.dst, t.gen, t.begun}
}

// Interrupt implements gate.Filler.
func (t *transfer) Interrupt() { t.to.interrupted = append(t.to.interrupted, t) }

// copyHalf moves the first or second half of the bytes.
func (t *transfer) copyHalf(second bool) {
	lo, hi := int64(0), t.bytes/2
	if second {
		lo, hi = hi, t.bytes
	}
	dst := t.to.cfg.Pool.Slot(t.dst)[lo:hi]
	if t.filler {
		clear(dst)
	} else {
		copy(dst, t.from.Slot(t.src)[lo:hi])
	}
}

func (t *transfer) begin() {
	r := t.to
	if t.n.mode == link.OneSided { // nobody asks the receiver
		t.copyHalf(false)
		return
	}
	verdict := r.gate.Enter(t.owner, t.gen, t.dst, t)
	if verdict == gate.Busy && t.n.mode == link.Stream {
		r.gate.Interrupt(t.dst)
		r.letGo()
		verdict = r.gate.Enter(t.owner, t.gen, t.dst, t)
	}
	switch {
	case verdict == gate.Entered:
		t.inside = true
		t.copyHalf(false)
	case t.n.mode == link.Stream:
		r.ev.Late(t.dst, t.gen)
	}
}

// end moves the second half and reports. A frame whose reader has let go is
// sent all the same, and discarded.
func (t *transfer) end() {
	r := t.to
	switch {
	case t.n.mode == link.OneSided:
		t.copyHalf(true)
	case t.inside && t.word != nil && t.word(t.src) != t.srcGen:
		t.leave(false)
		r.ev.Failed(t.dst, t.gen, fault.New(fault.StaleGeneration, "staging slot %d holds generation %d, not %d", t.src, t.word(t.src), t.srcGen))
	case t.inside:
		t.copyHalf(true)
		t.leave(true)
	}
	c := t.conn
	if c == nil {
		return
	}
	t.conn = nil
	switch {
	case t.filler:
	case t.aborted:
		delete(c.writes, t.id)
		c.ev.Lost([]link.WriteID{t.id}, errAborted)
	default:
		c.writes[t.id] = nil // sent
		c.ev.Sent([]link.WriteID{t.id})
	}
}

// lose ends a transfer, which is out of the queue, without its bytes.
func (t *transfer) lose(err error) {
	if t.inside {
		t.leave(false)
	}
	if t.word != nil {
		t.to.ev.Failed(t.dst, t.gen, fault.New(fault.BadRequest, "%v", err))
	}
	if c := t.conn; c != nil {
		t.conn = nil
		if !t.filler {
			delete(c.writes, t.id)
			c.ev.Lost([]link.WriteID{t.id}, err)
		}
	}
}

// leave lets go of the slot and reports how.
func (t *transfer) leave(full bool) {
	t.inside = false
	r := t.to
	switch r.gate.Leave(t.dst, full) {
	case gate.Full:
		r.ev.Landed([]link.Landing{r.landing(t)})
	case gate.Fenced:
		r.ev.Fenced(t.gen, []kv.SlotID{t.dst})
	case gate.Empty:
	}
}
