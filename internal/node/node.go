// Package node is the one shell: it drives the receiver's core, the sender's
// core, or both, and the core that admits engines. It decodes what comes in,
// steps a core, and carries out the actions; it decides nothing.
//
// One goroutine at a time, the loop, owns every core. Sockets, links and the local
// API call in from their own goroutines; each call becomes an event in the
// mailbox. A goroutine that brings a message or a call steps it itself where
// nobody steps; the loop's own does the rest, and what timers want.
// What would block (a dial, a link's hello, a checksum) is done by a goroutine
// of its own, bounded by what the cores have asked for, whose outcome is an
// event again.
//
//	zmtp, links, local API ──put/post──► mailbox ──► loop: Step → execute ──► Send, Open, Write, Answer ...
//
// Locks: mailbox.mu and Stats.mu, both leaves; nothing blocks or calls out
// under them.
package node

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/berthkv/berth/internal/attach"
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/intake"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
	"github.com/berthkv/berth/internal/outbound"
)

// Config is what a node is told at start.
type Config struct {
	Name        string
	Rank        int
	Incarnation kv.Incarnation
	Secret      kv.Secret

	// DialTimeout bounds a control connection's dial and a link's hello.
	DialTimeout time.Duration
	Log         *slog.Logger
	// Clock returns the time since the process started; nil: the real one.
	Clock func() kv.Instant
	Drive *Drive // nil: the node runs by itself
}

// Drive makes a shell single-threaded, for a simulator. No goroutine is started:
// the owner calls Turn whenever an event was delivered, an outside work done, or
// the time come that Turn returned last. Every call is the owner's alone.
type Drive struct {
	// Outside is given what would have its own goroutine (a dial, a link's hello
	// or close, a checksum), to be run once, later. Its outcome is an event.
	Outside func(work func())
	// Noted, if set, is told each intake.Note and outbound.Note when it is carried
	// out.
	Noted func(note any)
}

// start runs work beside the loop.
func (d *Drive) start(tasks *sync.WaitGroup, work func()) {
	if d != nil {
		d.Outside(work)
		return
	}
	tasks.Add(1)
	go func() {
		defer tasks.Done()
		work()
	}()
}

func (d *Drive) noted(note any) {
	if d.Noted != nil {
		d.Noted(note)
	}
}

// mailboxLimit is how many events of peers wait for the loop before their
// readers do.
const mailboxLimit = 16_384

// Node is a running agent. Create with New, wire, Start, Close.
type Node struct {
	// Constant after Start.
	cfg   Config
	cores Cores
	deps  Deps
	log   *noteLog

	// Owned by the loop.
	attach    *attach.Core
	intake    *intake.Core
	outbound  *outbound.Core
	wake      [3]kv.Instant              // of each core, Never: none
	hellos    map[kv.ConnID]attach.Hello // being judged
	processes map[kv.ConnID]int          // of local connections
	controls  *controls
	links     map[outbound.LinkID]*linkConn
	encoded   []byte // scratch
	draining  bool
	everUp    bool // a receiver was reachable once
	loop      loop

	// Safe for everybody.
	mail   *mailbox
	stats  *Stats
	ctx    context.Context // ends everything that waits
	cancel context.CancelFunc
	tasks  sync.WaitGroup // the loop and what it started
	close  sync.Once
}

// Indexes of Node.wake.
const (
	wakeAttach = iota
	wakeIntake
	wakeOutbound
)

// New returns a node that does nothing yet: its event sinks (RouterEvents,
// ReceiverEvents, Local) may be given to sockets and links, which must not
// deliver before Start.
func New(cfg Config) *Node {
	if cfg.Clock == nil {
		start := time.Now()
		cfg.Clock = func() kv.Instant { return kv.Instant(time.Since(start)) }
	}
	n := &Node{
		cfg:       cfg,
		log:       newNoteLog(cfg.Log),
		hellos:    map[kv.ConnID]attach.Hello{},
		processes: map[kv.ConnID]int{},
		links:     map[outbound.LinkID]*linkConn{},
		wake:      [3]kv.Instant{kv.Never, kv.Never, kv.Never},
		mail:      newMailbox(mailboxLimit),
		stats:     NewStats(),
	}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	return n
}

// Deps are the endpoints that the loop acts on. All outlive the node's loop:
// the caller closes them after Close, in the order it says.
type Deps struct {
	Router    Router                   // nil without a receive pool
	Receivers map[string]link.Receiver // by link name; each of Intake.Links
	Dialer    Dialer                   // nil without a staging pool
	Senders   map[string]link.Sender
	Notify    Pusher // nil: no proxy is told
	Local     Local
	// Generations holds the staging slots' generation words; nil without.
	Generations Generations
	Staging     link.Pool
	// Pools are the memfds that an engine gets, in the order of their names.
	Pools     []int
	PoolNames []string
	// Mapped tells the bytes that links map of peers' pools; may be nil.
	Mapped func() int64
}

// Cores are the configurations of the cores that the node drives.
type Cores struct {
	Attach   attach.Config
	Intake   *intake.Config   // nil: no receive pool
	Outbound *outbound.Config // nil: no staging pool
}

// Start builds the cores and starts the loop.
func (n *Node) Start(c Cores, d Deps) {
	n.cores, n.deps = c, d
	now := n.cfg.Clock()
	n.attach = attach.New(c.Attach, now)
	if c.Intake != nil {
		n.intake = intake.New(*c.Intake, now)
	}
	n.controls = &controls{ctx: n.ctx, outside: n.outside, mail: n.mail, dialer: d.Dialer, timeout: n.cfg.DialTimeout, log: n.log.Logger,
		stats: n.stats, conns: map[kv.ConnID]*controlConn{}}
	if c.Outbound != nil {
		n.outbound = outbound.New(*c.Outbound, now)
	}
	n.loop = loop{
		ctx: n.ctx, clock: n.cfg.Clock, mail: n.mail, dispatch: n.dispatch, tick: n.tick,
		next: func() kv.Instant { return min(n.wake[0], n.wake[1], n.wake[2]) },
		woke: n.stats.batch,
	}
	if n.cfg.Drive == nil {
		n.mail.step = n.loop.lent
		n.outside(n.run)
	}
}

// outside runs what may wait beside the loop; Close waits for it.
func (n *Node) outside(work func()) { n.cfg.Drive.start(&n.tasks, work) }

// Turn steps all that waits and all that is due, and returns when it is to be
// called again at the latest. Only with Config.Drive.
func (n *Node) Turn() kv.Instant { return n.loop.turns() }

// Check verifies the invariants of every core. Only with Config.Drive.
func (n *Node) Check() error {
	err := n.attach.Check()
	if err == nil && n.intake != nil {
		err = n.intake.Check()
	}
	if err == nil && n.outbound != nil {
		err = n.outbound.Check()
	}
	return err
}

// Pool counts the slots of the receive pool. Only with Config.Drive.
func (n *Node) Pool() PoolStatus { return PoolStatus(n.intake.Pool()) }

// Peek is Status between two turns. Only with Config.Drive.
func (n *Node) Peek() Status { return n.status(n.cfg.Clock()) }

// Close stops the loop and what it started, and waits. What was live ends with
// its peers' leases; drain first (Drain, Idle) to end it well. The second call
// is harmless.
//
// The order: no new events (mailbox), then everything that waits is told to
// stop (context), then connections that the loop owns are closed, by the loop,
// and then it is gone; the sockets, links and pools are closed by their owner
// afterwards, since only then does nobody act on them.
func (n *Node) Close() {
	n.close.Do(func() {
		n.mail.close()
		n.cancel()
		n.tasks.Wait()
	})
}

// Drain tells the cores to take nothing new.
func (n *Node) Drain() { n.mail.post(drain{}) }

// drain, statusCall are events of the shell itself.
type drain struct{}

type statusCall struct{ reply chan Status }

// run owns the cores.
func (n *Node) run() {
	defer n.closeOwned()
	n.loop.run()
}

// tick steps the cores whose wake-up has come and reports whether any had.
func (n *Node) tick(now kv.Instant) bool {
	any := false
	for i, at := range n.wake {
		if at > now {
			continue
		}
		any, n.wake[i] = true, kv.Never
		switch i {
		case wakeAttach:
			n.stepAttach(now, attach.Tick{})
		case wakeIntake:
			n.stepIntake(now, intake.Tick{})
		case wakeOutbound:
			n.stepOutbound(now, outbound.Tick{})
		}
	}
	return any
}

// dispatch steps the core that the event is for.
func (n *Node) dispatch(ev any) {
	now := n.cfg.Clock()
	switch ev := ev.(type) {
	case intake.Event:
		n.stepIntake(now, ev)
	case outbound.Event:
		n.stepOutbound(now, ev)
	case attach.Event:
		n.stepAttach(now, ev)
	case landed:
		n.onLanded(now, ev)
	case controlDialled:
		if n.controls.opened(ev, func(c controlClosed) { n.onControlClosed(now, c) }) {
			n.stepOutbound(now, outbound.Connected{Conn: ev.id})
		}
	case controlMessage:
		if ev.err != nil {
			n.stepOutbound(now, outbound.Malformed{Conn: ev.id, Text: ev.err.Error()})
		} else {
			n.stepOutbound(now, outbound.Received{Conn: ev.id, Msg: ev.msg})
		}
	case controlClosed:
		n.onControlClosed(now, ev)
	case linked:
		n.onLinked(now, ev)
	case linkEnded:
		n.onLinkEnded(now, ev)
	case localConn:
		n.onLocalConn(ev)
	case localCall:
		n.onCall(now, ev)
	case localHangup:
		n.onHangup(now, ev.call)
	case localGone:
		n.onLocalGone(now, ev.conn)
	case drain:
		n.onDrain(now)
	case statusCall:
		ev.reply <- n.status(now)
	}
}

func (n *Node) onDrain(now kv.Instant) {
	n.draining = true
	if n.intake != nil {
		n.stepIntake(now, intake.Drain{})
	}
	if n.outbound != nil {
		n.stepOutbound(now, outbound.Drain{})
	}
}

// stepAttach steps the core that admits engines and carries out its actions;
// what it says of engines goes on to the others.
func (n *Node) stepAttach(now kv.Instant, ev attach.Event) {
	if h, ok := ev.(attach.Hello); ok {
		n.hellos[h.Conn] = h
	}
	for _, a := range n.attach.Step(now, ev) {
		switch a := a.(type) {
		case attach.Accept:
			n.onAccept(now, a)
		case attach.Refuse:
			delete(n.hellos, a.Conn)
			n.deps.Local.Fail(a.Call, a.Err)
			if !a.Keep {
				n.deps.Local.CloseConn(a.Conn)
			}
			n.log.Warn("engine refused", "code", a.Err.Code, "text", a.Err.Text)
		case attach.Lost:
			delete(n.hellos, a.Conn)
			n.log.Warn("engine connection lost", "engine", a.EngineID, "last", a.Last)
			if n.intake != nil {
				n.stepIntake(now, intake.EngineLost{Engine: a.Conn})
			}
			if n.outbound != nil {
				n.stepOutbound(now, outbound.EngineLost{Engine: a.Conn, Last: a.Last})
			}
		case attach.Fenced:
			if n.intake != nil {
				n.stepIntake(now, intake.EngineFenced{Engine: a.Conn, Trusted: a.Trusted})
			}
			if n.outbound != nil {
				n.stepOutbound(now, outbound.EngineFenced{Engine: a.Conn, Trusted: a.Trusted})
			}
		case attach.Wake:
			n.wake[wakeAttach] = a.At
		}
	}
}

func (n *Node) onControlClosed(now kv.Instant, c controlClosed) {
	n.controls.forget(c.id)
	n.stepOutbound(now, outbound.Disconnected{Conn: c.id, Text: fmt.Sprint(c.err)})
}

// fail answers a call that this node cannot serve at all.
func (n *Node) fail(call kv.CallID, code fault.Code, format string, args ...any) {
	n.deps.Local.Fail(call, fault.New(code, format, args...))
}

// closeOwned closes what the loop has opened; Close waits for it.
func (n *Node) closeOwned() {
	n.controls.closeAll()
	for _, l := range n.links {
		if l.conn != nil {
			n.release(l.conn, nil)
		}
	}
}
