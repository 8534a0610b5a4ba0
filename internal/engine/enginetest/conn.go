package enginetest

import (
	"context"
	"net"
	"strconv"
	"time"

	"github.com/berthkv/berth/internal/engine"
	"github.com/berthkv/berth/internal/engine/kvcache"
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
)

// conn is an engine's connection to a node.
type conn struct {
	n      *Node
	life   string // of the node when it was made: its incarnation
	done   chan struct{}
	cut    bool // guarded by Fleet.mu
	closed bool // guarded by Fleet.mu
}

// Dial is the engine's Dialer for this node.
func (n *Node) Dial(context.Context) (engine.Agent, error) {
	n.f.mu.Lock()
	defer n.f.mu.Unlock()
	if n.refuse != nil {
		return nil, n.refuse
	}
	c := &conn{n: n, life: strconv.Itoa(n.cuts), done: make(chan struct{})}
	n.conns = append(n.conns, c)
	n.f.changeLocked()
	return c, nil
}

// Cut breaks the node's connections; until Mend new ones are refused.
func (n *Node) Cut() {
	n.f.mu.Lock()
	defer n.f.mu.Unlock()
	n.refuse = fault.New(fault.PeerLost, "the agent is down")
	n.cuts++
	for _, c := range n.conns {
		c.cutLocked()
	}
}

// Mend lets the node accept connections again.
func (n *Node) Mend() {
	n.f.mu.Lock()
	defer n.f.mu.Unlock()
	n.refuse = nil
}

func (c *conn) cutLocked() {
	if c.cut {
		return
	}
	c.cut = true
	close(c.done)
	for _, node := range c.n.f.nodes {
		for _, w := range node.flows {
			if w.from == c && !w.whole {
				w.endLocked(fault.New(fault.PeerLost, "the engine is gone"))
			}
		}
	}
}

// Close gives back what the connection still has staged: only now is it sure
// that the engine no longer writes there.
func (c *conn) Close() error {
	f := c.n.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if c.closed {
		f.breachLocked("a connection was closed twice")
	}
	c.closed = true
	c.cutLocked()
	for slot, w := range c.n.staged {
		if w.from == c {
			delete(c.n.staged, slot)
			c.n.staging.give(slot)
		}
	}
	for _, w := range c.n.flows {
		if w.claimed != "" && !w.released {
			w.released = true
			c.n.receive.give(w.slots...)
		}
	}
	c.n.stageLocked()
	c.n.admitLocked()
	return nil
}

func (c *conn) Done() <-chan struct{} { return c.done }

func (c *conn) Info() engine.Info {
	return engine.Info{Incarnation: c.life, SlotBytes: int64(c.n.staging.size), MaxStage: c.n.staging.slots / 2}
}

func (c *conn) Staging(slot kv.SlotID) []byte {
	f := c.n.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if c.n.staged[slot] == nil || c.closed {
		f.breachLocked("staging slot %d is touched while it is not staged", slot)
	}
	return c.n.staging.at(slot)
}

func (c *conn) Receive(slot kv.SlotID) []byte {
	f := c.n.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if c.closed {
		f.breachLocked("receive slot %d is touched after Close", slot)
	}
	return c.n.receive.at(slot)
}

// fault gives the test a chance to let a call fail.
func (c *conn) fault(op, req string) error {
	if c.n.f.Fault == nil {
		return nil
	}
	return c.n.f.Fault(op, req)
}

var errLost = fault.New(fault.PeerLost, "the connection is lost")

func (c *conn) Begin(_ context.Context, b engine.Begin) (engine.Transfer, error) {
	if err := c.fault("begin", b.Req); err != nil {
		return nil, err
	}
	f := c.n.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if c.cut {
		return nil, errLost
	}
	var to *Node
	for _, n := range f.nodes {
		if n.addr == net.JoinHostPort(b.Host, strconv.Itoa(b.AllocPort)) {
			to = n
		}
	}
	w := &flow{f: f, from: c, to: to, req: b.Req, total: b.TotalChunks, granted: make(chan struct{}), ended: make(chan struct{})}
	f.log = append(f.log, "begin "+b.Req)
	switch {
	case b.TotalChunks < 1 || b.Deadline <= 0:
		f.breachLocked("begin of %q with %d chunks and deadline %v", b.Req, b.TotalChunks, b.Deadline)
		return nil, fault.New(fault.BadRequest, "begin")
	case to == nil:
		w.to = c.n
		w.endLocked(fault.New(fault.PeerLost, "no receiver at %s:%d", b.Host, b.AllocPort))
	case b.TotalChunks > to.receive.slots:
		w.endLocked(fault.New(fault.TooLarge, "%d chunks, capacity %d", b.TotalChunks, to.receive.slots))
	default:
		to.flows = append(to.flows, w)
		to.waiting = append(to.waiting, w)
		to.admitLocked()
	}
	return w, nil
}

// GiveUp notes that the engine said so.
func (c *conn) GiveUp(_ context.Context, b engine.Begin, lost string) error {
	if err := c.fault("give up", b.Req); err != nil {
		return err
	}
	f := c.n.f
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case c.cut:
		return errLost
	case lost == c.life:
		return nil
	}
	f.log = append(f.log, "given up "+b.Req)
	f.changeLocked()
	return nil
}

func (w *flow) Granted() <-chan struct{} { return w.granted }
func (w *flow) Ended() <-chan struct{}   { return w.ended }

func (w *flow) Err() error {
	w.f.mu.Lock()
	defer w.f.mu.Unlock()
	return w.err
}

func (w *flow) Stage(ctx context.Context, n int, wait bool) ([]kv.SlotID, error) {
	if err := w.from.fault("stage", w.req); err != nil {
		return nil, err
	}
	f, node := w.f, w.from.n
	f.mu.Lock()
	switch {
	case w.from.cut:
		f.mu.Unlock()
		return nil, errLost
	case w.over:
		f.mu.Unlock()
		return nil, endingError(w)
	case w.slots == nil:
		f.breachLocked("stage of %q, which is not granted", w.req)
		f.mu.Unlock()
		return nil, fault.New(fault.NotGranted, "%q", w.req)
	case n < 1 || n > node.staging.slots/2:
		f.breachLocked("stage of %d slots, max_stage is %d", n, node.staging.slots/2)
		f.mu.Unlock()
		return nil, fault.New(fault.TooLarge, "%d", n)
	case !wait && n > len(node.staging.free):
		err := fault.New(fault.Busy, "%d of %d slots are free", len(node.staging.free), n)
		f.mu.Unlock()
		return nil, err
	case len(node.staged) > 0 && n > len(node.staging.free):
		err := fault.New(fault.Holding, "%d slots are held", len(node.staged))
		f.mu.Unlock()
		return nil, err
	}
	call := &stageCall{flow: w, n: n, done: make(chan stageResult, 1)}
	node.stagings = append(node.stagings, call)
	node.stageLocked()
	f.mu.Unlock()

	var err error
	select {
	case r := <-call.done:
		return r.slots, r.err
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-w.from.done:
		err = errLost
	}
	// Given up: what was given in the same moment is the agent's again.
	f.mu.Lock()
	defer f.mu.Unlock()
	for i, s := range node.stagings {
		if s == call {
			node.stagings = append(node.stagings[:i], node.stagings[i+1:]...)
			return nil, err
		}
	}
	if r := <-call.done; r.err == nil {
		w.unstageLocked(r.slots)
	}
	return nil, err
}

func (w *flow) unstageLocked(slots []kv.SlotID) {
	node := w.from.n
	for _, s := range slots {
		if node.staged[s] != w {
			w.f.breachLocked("slot %d of %q is handed in, but not staged", s, w.req)
			continue
		}
		delete(node.staged, s)
		node.staging.give(s)
	}
	node.stageLocked()
}

func (w *flow) Unstage(_ context.Context, slots []kv.SlotID) error {
	w.f.mu.Lock()
	defer w.f.mu.Unlock()
	w.unstageLocked(slots)
	return nil
}

func (w *flow) Submit(_ context.Context, chunks []engine.Staged, end bool) error {
	if err := w.from.fault("submit", w.req); err != nil {
		return err
	}
	f, node := w.f, w.from.n
	f.mu.Lock()
	defer f.mu.Unlock()
	for i, c := range chunks {
		full := c.Tokens == f.chunk
		last := c.Index == w.total-1
		if node.staged[c.Slot] != w || c.Index >= w.total || c.Index < 0 || c.Tokens < 1 || c.Tokens > f.chunk ||
			!full && !last || end != last && i == len(chunks)-1 || c.Key == "" {
			f.breachLocked("submit of %q: %+v, end %v, of %d", w.req, c, end, w.total)
		}
	}
	if w.from.cut {
		return errLost
	}
	if w.over {
		return endingError(w)
	}
	for _, c := range chunks {
		delete(node.staged, c.Slot)
	}
	w.whole = w.whole || end
	w.moving++
	f.moves++
	go w.move(chunks)
	return nil
}

func (w *flow) Cancel(context.Context) error {
	w.f.mu.Lock()
	defer w.f.mu.Unlock()
	if w.from.cut {
		return errLost
	}
	if w.over && w.err == nil && w.claimed == "" && !w.released {
		w.released = true // ready and unclaimed: freed, the ending stays
		w.to.receive.give(w.slots...)
		w.to.admitLocked()
	}
	w.endLocked(fault.New(fault.Cancelled, "request %q was cancelled", w.req))
	w.from.n.stageLocked()
	return nil
}

func (c *conn) Wait(ctx context.Context, req string, deadline time.Duration) error {
	if err := c.fault("wait", req); err != nil {
		return err
	}
	f := c.n.f
	late := time.NewTimer(deadline)
	defer late.Stop()
	for {
		f.mu.Lock()
		changed := f.changed
		live, ended := false, error(nil)
		for _, w := range c.n.flows {
			switch {
			case w.req != req:
			case w.over && w.err == nil:
				f.mu.Unlock()
				return nil
			case w.over:
				ended = w.err
			default:
				live = true
			}
		}
		f.mu.Unlock()
		if ended != nil && !live {
			return ended
		}
		select {
		case <-changed:
		case <-late.C:
			return fault.New(fault.Deadline, "request %q was not ready in %v", req, deadline)
		case <-c.done:
			return errLost
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (c *conn) Find(_ context.Context, by string, keys []string) (string, int, error) {
	if err := c.fault("find", ""); err != nil {
		return "", 0, err
	}
	f := c.n.f
	f.mu.Lock()
	defer f.mu.Unlock()
	var best *flow
	most := 0
	for _, w := range c.n.flows {
		if !w.over || w.err != nil || w.released || w.claimed != "" && w.claimed != by {
			continue
		}
		n := 0
		for n < len(w.chunks) && n < len(keys) && w.chunks[n].Key == keys[n] {
			n++
		}
		if n > most {
			best, most = w, n
		}
	}
	if best == nil {
		return "", 0, nil
	}
	best.claimed = by
	return best.req, most, nil
}

func (c *conn) Claim(_ context.Context, by, req string) (engine.Claimed, error) {
	if err := c.fault("claim", req); err != nil {
		return engine.Claimed{}, err
	}
	f := c.n.f
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, w := range c.n.flows {
		if w.req != req || !w.over || w.err != nil || w.released {
			continue
		}
		if w.claimed != "" && w.claimed != by {
			return engine.Claimed{}, fault.New(fault.NotOwner, "%q is claimed by %q", req, w.claimed)
		}
		w.claimed = by
		return engine.Claimed{Chunks: w.chunks, Format: kv.Format2LTD, DType: f.layout.DType, Shape: f.layout.Shape(f.chunk)}, nil
	}
	return engine.Claimed{}, fault.New(fault.Ended, "request %q", req)
}

func (c *conn) Release(_ context.Context, by, req string) error {
	f := c.n.f
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, w := range c.n.flows {
		if w.req == req && w.claimed == by && !w.released {
			w.released = true
			c.n.receive.give(w.slots...)
			c.n.admitLocked()
		}
	}
	return nil
}

// Layout returns the fleet's layout.
func (f *Fleet) Layout() kvcache.Layout { return f.layout }
