package chaos

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"time"

	"github.com/berthkv/berth/client"
	"github.com/berthkv/berth/internal/fault"
)

// The layout of every chaos run: small slots, so that many requests compete.
const (
	chunkTokens = 16
	slotBytes   = 16 << 10
	tokenBytes  = slotBytes / chunkTokens
)

var (
	layout = client.Layout{SlotBytes: slotBytes, Format: 3, DType: "uint8", ChunkTokens: chunkTokens, TPSize: 1}
	shape  = []int64{chunkTokens, tokenBytes}
)

// engineConfig is all that an engine process is told at its start.
type engineConfig struct {
	Process string // names it in the history
	Socket  string // of its agent
	HTTP    string // address to serve the proxy at; "": none
	Sends   bool
	Plant   plant
	Names   map[string]string // host:port of a receiver: its node
}

// plant is a fault of the engine, for tests of the checker.
type plant string

const (
	releaseBeforeCopy plant = "release-before-copy"
	writeAfterSubmit  plant = "write-after-submit"
)

// order is what the runner tells an engine to do, one line each.
type order struct {
	ID      uint64
	Op      string // send, receive, cancel (of the order of that ID)
	Req     string
	Attempt uint64
	Chunks  int
	Declare int // chunks to announce, at least those
	Tokens  int // of the last chunk
	To      string
	Host    string
	Port    int

	Deadline time.Duration // from begin to ready
	Hang     time.Duration // after which an order that is not done is a fault
	CancelAt string        // "", begun, granted, staged, submitted, ended
	Stage    int           // staging slots to ask for with the grant
	Again    bool          // the name was used before: its old ending is not the answer
	Seed     uint64
}

// engine is a load engine: it moves chunks of known content through its agent,
// and says in its history what it asked and was told.
type engine struct {
	cfg  engineConfig
	rec  *recorder
	turn chan struct{} // holds the right to stage

	mu     sync.Mutex
	cur    *agentConn
	stops  map[uint64]context.CancelFunc
	lastID uint64 // of orders that came over HTTP, counting down from the top
}

// agentConn is a connection to the agent and the orders that use its memory.
type agentConn struct {
	*client.Client
	uses int // guarded by engine.mu
}

// engineMain is an engine process: it serves until its standard input ends.
func engineMain(config string) int {
	var cfg engineConfig
	if err := json.Unmarshal([]byte(config), &cfg); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	e := &engine{cfg: cfg, rec: &recorder{w: os.Stdout}, turn: make(chan struct{}, 1), stops: map[uint64]context.CancelFunc{}, lastID: 1 << 63}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if cfg.HTTP != "" {
		if err := e.serve(ctx); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	go e.keepAgent(ctx)
	e.rec.add(Event{Op: opDone, Engine: cfg.Process}) // it serves
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		var o order
		if err := json.Unmarshal(in.Bytes(), &o); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 2
		}
		e.take(ctx, o)
	}
	return 0
}

// take starts an order.
func (e *engine) take(ctx context.Context, o order) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if o.Op == "cancel" {
		if stop := e.stops[o.ID]; stop != nil {
			stop()
		}
		return
	}
	ctx, cancel := context.WithTimeout(ctx, o.Hang)
	e.stops[o.ID] = cancel
	go func() {
		defer cancel()
		switch o.Op {
		case "send":
			e.done(o, e.send(ctx, o, nil, make(chan bool, 1)))
		case "receive":
			e.done(o, e.receive(ctx, o, nil))
		}
		e.mu.Lock()
		delete(e.stops, o.ID)
		e.mu.Unlock()
	}()
}

// Outcomes of an order that are no ending of its request.
const (
	noAgent  = "no_agent"  // its agent is not there
	refused  = "refused"   // the agent did not accept it
	agentOut = "agent_out" // the agent was lost on the way
	stopped  = "stopped"   // the runner no longer wanted it
	hung     = "hung"      // not done in time: always a fault
)

// outcome is how an order ended.
type outcome struct{ ending, reason, text string }

func outcomeOf(ending string, err error) outcome {
	return outcome{ending, string(fault.CodeOf(err)), err.Error()}
}

func (e *engine) done(o order, r outcome) {
	e.rec.add(Event{Op: opDone, Ret: true, Engine: e.cfg.Process, Order: o.ID, Req: o.Req, Attempt: o.Attempt, Ending: r.ending, Reason: r.reason, Text: r.text})
}

// redial is how soon a lost agent is tried again.
const redial = 50 * time.Millisecond

// keepAgent keeps a connection to the agent.
func (e *engine) keepAgent(ctx context.Context) {
	for ctx.Err() == nil {
		dctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		c, err := client.Dial(dctx, e.cfg.Socket, client.Hello{Part: client.Worker, EngineID: e.cfg.Process, Layout: layout, Shape: shape})
		cancel()
		if err == nil {
			a := &agentConn{Client: c, uses: 1}
			e.mu.Lock()
			e.cur = a
			e.mu.Unlock()
			select {
			case <-c.Done():
			case <-ctx.Done():
			}
			e.mu.Lock()
			e.cur = nil
			e.mu.Unlock()
			e.drop(a)
		}
		pause(ctx, redial)
	}
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// use returns the connection, whose memory stays mapped until drop.
func (e *engine) use() *agentConn {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.cur != nil {
		e.cur.uses++
	}
	return e.cur
}

func (e *engine) drop(a *agentConn) {
	e.mu.Lock()
	a.uses--
	last := a.uses == 0
	e.mu.Unlock()
	if last {
		a.Close()
	}
}

// deal is one order in work.
type deal struct {
	*engine
	o   order
	a   *agentConn
	rng *rand.Rand

	took bool // what came with the grant
}

func (e *engine) deal(o order) *deal {
	a := e.use()
	if a == nil {
		return nil
	}
	return &deal{engine: e, o: o, a: a, rng: rand.New(rand.NewPCG(o.Seed, o.Attempt))}
}

// say records an event of this order.
func (d *deal) say(ev Event) {
	ev.Engine, ev.Agent, ev.Order, ev.Req, ev.Attempt = d.cfg.Process, d.a.Info().Incarnation, d.o.ID, d.o.Req, d.o.Attempt
	ev.Lost = d.a.Err() != nil
	d.rec.add(ev)
}

func reason(err error) string {
	if err == nil {
		return ""
	}
	return string(fault.CodeOf(err))
}

// send begins a request, moves its chunks and returns its ending. prompts has
// the chunks' checksums of a prompt that came over HTTP. begun gets true once
// the agent has accepted it.
func (e *engine) send(ctx context.Context, o order, prompts []uint32, begun chan<- bool) outcome {
	d := e.deal(o)
	if d == nil {
		return outcome{ending: noAgent}
	}
	defer e.drop(d.a)
	d.say(Event{Op: opBegin, Total: o.Chunks, Text: o.To})
	tr, err := d.a.Begin(ctx, client.Begin{Req: o.Req, TotalChunks: o.Declare, Host: o.Host, AllocPort: o.Port, Deadline: o.Deadline,
		Stage: o.Stage, BerthProxy: prompts != nil})
	d.say(Event{Op: opBegin, Ret: true, Reason: reason(err)})
	if err != nil {
		return d.failed(ctx, refused, err)
	}
	begun <- true
	if err := d.move(ctx, tr, prompts); err != nil {
		d.cancel(ctx, tr)
	}
	select {
	case <-tr.Ended():
	case <-ctx.Done():
		return outcome{hung, "", "no ending came: " + ctx.Err().Error()}
	}
	if err := d.unstage(ctx, tr, d.granted(tr)); err != nil && d.a.Err() == nil {
		return outcomeOf(hung, err)
	}
	end := tr.Ending()
	d.say(Event{Op: opEnded, Ending: end.Ending, Reason: string(end.Reason), Text: end.Text})
	if o.CancelAt == "ended" { // valid, and without effect on what has been told
		d.cancel(ctx, tr)
	}
	if end.Reason == client.PeerLost && d.a.Err() != nil {
		return outcome{agentOut, string(end.Reason), end.Text}
	}
	return outcome{end.Ending, string(end.Reason), end.Text}
}

// granted returns the slots that came with the grant, once: this order has them
// then, whatever becomes of its request.
func (d *deal) granted(tr *client.Transfer) []client.Slot {
	select {
	case <-tr.Granted():
	default:
		return nil
	}
	if d.took || len(tr.Slots()) == 0 {
		return nil
	}
	d.took = true
	d.say(Event{Op: opStage, Slots: numbers(tr.Slots())})
	return tr.Slots()
}

// failed tells why a call failed that is no ending.
func (d *deal) failed(ctx context.Context, ending string, err error) outcome {
	switch {
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return outcomeOf(hung, err)
	case ctx.Err() != nil:
		return outcomeOf(stopped, err)
	case d.a.Err() != nil || fault.CodeOf(err) == client.PeerLost: // a call may hear of it before Err tells
		return outcomeOf(agentOut, err)
	}
	return outcomeOf(ending, err)
}

func (d *deal) cancel(ctx context.Context, tr *client.Transfer) { tr.Cancel(ctx, "", "chaos") }

var errCancel = errors.New("the plan says to cancel here")

// at errs when the plan is to cancel at this point.
func (d *deal) at(point string) error {
	if d.o.CancelAt == point {
		return errCancel
	}
	return nil
}

// move stages, fills and submits every chunk of a request that is granted.
func (d *deal) move(ctx context.Context, tr *client.Transfer, prompts []uint32) error {
	if err := d.at("begun"); err != nil {
		pause(ctx, time.Duration(d.rng.IntN(20))*time.Millisecond)
		return err
	}
	select {
	case <-tr.Granted():
	case <-tr.Ended():
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
	slots := d.granted(tr)
	if err := d.at("granted"); err != nil {
		return errors.Join(err, d.unstage(ctx, tr, slots))
	}
	for next := 0; next < d.o.Chunks; {
		n, err := d.batch(ctx, tr, next, slots, prompts)
		if err != nil {
			return err
		}
		next, slots = next+n, nil
		if err := d.at("submitted"); err != nil {
			return err
		}
	}
	return nil
}

// batch moves one batch from chunk `next` on, in the slots that came with the
// grant or in some that it asks for, and says how many chunks it had.
func (d *deal) batch(ctx context.Context, tr *client.Transfer, next int, slots []client.Slot, prompts []uint32) (int, error) {
	select {
	case d.turn <- struct{}{}:
	case <-ctx.Done():
		return 0, errors.Join(ctx.Err(), d.unstage(context.WithoutCancel(ctx), tr, slots))
	}
	defer func() { <-d.turn }()
	for len(slots) == 0 {
		want := min(1+d.rng.IntN(4), d.o.Chunks-next, d.a.Info().MaxStage)
		got, err := tr.Stage(ctx, want)
		if fault.CodeOf(err) == client.Holding { // somebody else holds what came with its grant, and wants this turn
			<-d.turn
			pause(ctx, time.Millisecond)
			select {
			case d.turn <- struct{}{}:
				continue
			case <-ctx.Done():
				d.turn <- struct{}{} // for the deferred giving back
				return 0, ctx.Err()
			}
		}
		if err != nil {
			return 0, err
		}
		slots = got
		d.say(Event{Op: opStage, Slots: numbers(slots)})
	}
	slots, spare := slots[:min(len(slots), d.o.Chunks-next)], slots[min(len(slots), d.o.Chunks-next):]
	if err := d.unstage(ctx, tr, spare); err != nil {
		return 0, errors.Join(err, d.unstage(ctx, tr, slots))
	}
	if err := d.at("staged"); err != nil {
		return 0, errors.Join(err, d.unstage(ctx, tr, slots))
	}
	var chunks []client.Staged
	var index []int
	for i, s := range slots {
		at, tokens := next+i, chunkTokens
		if at == d.o.Chunks-1 {
			tokens = d.o.Tokens
		}
		t := tag{attempt: d.o.Attempt, index: uint32(at), length: uint32(tokens * tokenBytes)}
		if prompts != nil {
			t.prompt = prompts[at]
		}
		fill(d.a.Staging(s)[:t.length], t)
		chunks = append(chunks, client.Staged{Index: int64(at), Key: chunkKey(d.o.Attempt, at), Slot: s, Tokens: int64(tokens)})
		index = append(index, at)
	}
	end := client.NoEnd
	if next+len(slots) == d.o.Chunks {
		end = d.o.Chunks
	}
	d.say(Event{Op: opSubmit, Index: index})
	d.say(Event{Op: opGive, Slots: numbers(slots)})
	if d.cfg.Plant == writeAfterSubmit && d.rng.IntN(4) == 0 {
		defer d.scribble(slots[0])()
	}
	if err := tr.Submit(ctx, chunks, end); err != nil {
		if d.a.Err() == nil && ctx.Err() == nil { // nothing was taken: they are this order's again
			d.say(Event{Op: opStage, Slots: numbers(slots)})
			err = errors.Join(err, d.unstage(ctx, tr, slots))
		}
		return 0, err
	}
	return len(slots), nil
}

// scribble writes into a slot that is submitted, until the function that it
// returns has been called and a while has passed.
func (d *deal) scribble(slot client.Slot) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			fill(d.a.Staging(slot), tag{attempt: d.o.Attempt, index: 1 << 20, length: slotBytes})
		}
	})
	return func() {
		pause(ctx, time.Millisecond)
		cancel()
		wg.Wait()
	}
}

// unstage gives slots back unused.
func (d *deal) unstage(ctx context.Context, tr *client.Transfer, slots []client.Slot) error {
	if len(slots) == 0 {
		return nil
	}
	d.say(Event{Op: opGive, Slots: numbers(slots)})
	return tr.Unstage(ctx, slots)
}

func numbers(slots []client.Slot) []uint32 {
	out := make([]uint32, len(slots))
	for i, s := range slots {
		out[i] = uint32(s)
	}
	return out
}

// tryAgain is how soon a name is asked for again whose old ending was told.
const tryAgain = 100 * time.Millisecond

// receive waits for a request, claims it, reads it twice and releases it.
func (e *engine) receive(ctx context.Context, o order, check func([]tag) error) outcome {
	d := e.deal(o)
	if d == nil {
		return outcome{ending: noAgent}
	}
	defer e.drop(d.a)
	by := fmt.Sprintf("%s/%d", e.cfg.Process, o.ID)
	until := time.Now().Add(o.Deadline)
	for {
		end, err := d.a.Wait(ctx, o.Req, o.Deadline)
		if err != nil {
			return d.failed(ctx, refused, err)
		}
		if end.Ending != "ready" {
			if o.Again && ctx.Err() == nil && time.Now().Before(until) {
				pause(ctx, tryAgain)
				continue
			}
			d.say(Event{Op: opWait, Ret: true, Ending: end.Ending, Reason: string(end.Reason), Text: end.Text})
			return outcome{end.Ending, string(end.Reason), end.Text}
		}
		d.say(Event{Op: opWait, Ret: true, Ending: end.Ending})
		d.say(Event{Op: opClaim})
		got, err := d.a.Claim(ctx, by, o.Req)
		if err != nil {
			d.say(Event{Op: opClaim, Ret: true, Reason: reason(err)})
			if o.Again && ctx.Err() == nil && d.a.Err() == nil && time.Now().Before(until) {
				pause(ctx, tryAgain)
				continue
			}
			return d.failed(ctx, refused, err)
		}
		return d.read(ctx, by, got, check)
	}
}

// read looks at every byte of a claim, twice, and releases it.
func (d *deal) read(ctx context.Context, by string, got *client.Claimed, check func([]tag) error) outcome {
	ev := Event{Op: opClaim, Ret: true}
	for _, c := range got.Chunks {
		ev.Slots, ev.Index = append(ev.Slots, uint32(c.Slot)), append(ev.Index, int(c.Index))
	}
	d.say(ev)
	out := outcome{ending: "ready"}
	release := func() {
		d.say(Event{Op: opRelease})
		err := d.a.Release(ctx, by, d.o.Req)
		d.say(Event{Op: opRelease, Ret: true, Reason: reason(err)})
		if err != nil {
			out = d.failed(ctx, refused, err)
		}
	}
	if d.cfg.Plant == releaseBeforeCopy {
		release()
		pause(ctx, time.Duration(d.rng.IntN(50))*time.Millisecond)
	}
	var tags []tag
	for range 2 {
		ev := Event{Op: opRead, Ret: true}
		tags = tags[:0]
		for _, c := range got.Chunks {
			r := Read{Slot: uint32(c.Slot), Index: int(c.Index), Key: c.Key}
			t, err := verify(d.a.Receive(c.Slot)[:c.Bytes])
			if r.Attempt, r.Of = t.attempt, int(t.index); err != nil {
				r.Err = err.Error()
			}
			tags = append(tags, t)
			ev.Reads = append(ev.Reads, r)
		}
		d.say(ev)
		pause(ctx, time.Duration(d.rng.IntN(3000))*time.Microsecond)
	}
	if check != nil {
		if err := check(tags); err != nil {
			out = outcome{ending: wrongPrompt, text: err.Error()}
		}
	}
	if d.cfg.Plant != releaseBeforeCopy {
		release()
	}
	return out
}

// wrongPrompt is the outcome of a claim whose bytes are of another prompt.
const wrongPrompt = "wrong_prompt"
