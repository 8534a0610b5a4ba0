// Package enginetest is a fleet of berth agents in memory, for tests of the
// engine: senders with a staging pool, receivers with a receive pool and
// admission by reservation, and moves of bytes between them that a test can
// hold up, or let fail. It keeps the rules of the local API, and notes each
// breach of them by the engine.
package enginetest

import (
	"fmt"
	"net"
	"slices"
	"strconv"
	"sync"

	"github.com/berthkv/berth/internal/engine"
	"github.com/berthkv/berth/internal/engine/kvcache"
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
)

// Fleet is a set of nodes that reach each other.
type Fleet struct {
	layout kvcache.Layout
	chunk  int

	// BeforeWrite, if set, is called before a chunk is moved and may wait; an
	// error fails its request. Fault, if set, is called at each call of an
	// engine and its error is the answer. Set both before the first Dial.
	BeforeWrite func(req string, index int) error
	Fault       func(op, req string) error

	mu       sync.Mutex
	moves    int // batches on their way
	nodes    []*Node
	breaches []string
	log      []string
	changed  chan struct{} // closed and replaced at each change of state
}

// New returns a fleet whose engines have this layout and chunk size.
func New(layout kvcache.Layout, chunk int) *Fleet {
	return &Fleet{layout: layout, chunk: chunk, changed: make(chan struct{})}
}

// Node is one agent.
type Node struct {
	f       *Fleet
	addr    string // of its receiver
	staging *pool
	receive *pool

	// Guarded by f.mu.
	conns    []*conn
	refuse   error
	cuts     int     // how often it was cut: its incarnation
	waiting  []*flow // at the receiver, by arrival
	flows    []*flow // at the receiver, all that were begun
	stagings []*stageCall
	staged   map[kv.SlotID]*flow
}

// pool is a pool of slots; free is guarded by Fleet.mu.
type pool struct {
	slots int
	free  []kv.SlotID
	mem   []byte
	size  int
}

func newPool(slots, size int) *pool {
	p := &pool{slots: slots, size: size, mem: make([]byte, slots*size)}
	for i := range slots {
		p.free = append(p.free, kv.SlotID(i))
	}
	return p
}

func (p *pool) at(s kv.SlotID) []byte {
	return p.mem[int(s)*p.size : (int(s)+1)*p.size : (int(s)+1)*p.size]
}

func (p *pool) take(n int) []kv.SlotID {
	slots := slices.Clone(p.free[:n])
	p.free = p.free[n:]
	return slots
}

// give frees slots and spoils them, so that a late reader is found out.
func (p *pool) give(slots ...kv.SlotID) {
	for _, s := range slots {
		b := p.at(s)
		for i := range b {
			b[i] = 0xdb
		}
	}
	p.free = append(p.free, slots...)
}

// Node adds an agent with so many staging and receive slots; the receiver
// answers at host:port.
func (f *Fleet) Node(host string, port, staging, receive int) *Node {
	f.mu.Lock()
	defer f.mu.Unlock()
	size := f.layout.ChunkBytes(f.chunk)
	n := &Node{
		f: f, addr: net.JoinHostPort(host, strconv.Itoa(port)),
		staging: newPool(staging, size), receive: newPool(receive, size), staged: map[kv.SlotID]*flow{},
	}
	f.nodes = append(f.nodes, n)
	return n
}

// flow is one request at a receiver.
type flow struct {
	f     *Fleet
	from  *conn
	to    *Node
	req   string
	total int

	// Guarded by f.mu.
	slots    []kv.SlotID // granted
	chunks   []engine.Chunk
	landed   int
	moving   int
	whole    bool // its end was submitted
	over     bool
	err      error
	claimed  string // by whom
	released bool

	granted, ended chan struct{}
}

// changeLocked wakes all who wait for a change of state.
func (f *Fleet) changeLocked() {
	close(f.changed)
	f.changed = make(chan struct{})
}

func (f *Fleet) breachLocked(format string, args ...any) {
	f.breaches = append(f.breaches, fmt.Sprintf(format, args...))
}

// admitLocked grants what fits, first come first served.
func (n *Node) admitLocked() {
	rest := n.waiting[:0]
	for _, w := range n.waiting {
		if w.over {
			continue
		}
		if w.total > len(n.receive.free) {
			rest = append(rest, w)
			continue
		}
		w.slots = n.receive.take(w.total)
		n.f.log = append(n.f.log, "granted "+w.req)
		close(w.granted)
	}
	n.waiting = rest
	n.f.changeLocked()
}

// endLocked gives a flow its ending. Its slots are free once nothing moves.
func (w *flow) endLocked(err error) {
	if w.over {
		return
	}
	w.over, w.err = true, err
	if err == nil {
		w.f.log = append(w.f.log, "ready "+w.req)
	} else {
		w.f.log = append(w.f.log, "failed "+w.req)
	}
	close(w.ended)
	w.freeLocked()
	w.to.admitLocked()
}

func (w *flow) freeLocked() {
	if w.over && w.err != nil && w.moving == 0 && w.claimed == "" && !w.released {
		w.released = true
		w.to.receive.give(w.slots...)
		w.to.admitLocked()
	}
}

// stageLocked serves waiting stage calls, first come first served.
func (n *Node) stageLocked() {
	rest := n.stagings[:0]
	for _, s := range n.stagings {
		switch {
		case s.flow.over:
			s.done <- stageResult{err: endingError(s.flow)}
		case s.n <= len(n.staging.free):
			slots := n.staging.take(s.n)
			for _, slot := range slots {
				n.staged[slot] = s.flow
			}
			s.done <- stageResult{slots: slots}
		default:
			rest = append(rest, s)
		}
	}
	n.stagings = rest
	n.f.changeLocked()
}

type stageCall struct {
	flow *flow
	n    int
	done chan stageResult // holds 1
}

type stageResult struct {
	slots []kv.SlotID
	err   error
}

func endingError(w *flow) error {
	if w.err != nil {
		return w.err
	}
	return fault.New(fault.Ended, "request %q has ended", w.req)
}

// move copies chunks to the receiver, one after the other.
func (w *flow) move(chunks []engine.Staged) {
	f, from := w.f, w.from.n
	var err error
	for _, c := range chunks {
		if f.BeforeWrite != nil && err == nil {
			err = f.BeforeWrite(w.req, c.Index)
		}
		f.mu.Lock()
		if err == nil && !w.over {
			n := f.layout.ChunkBytes(c.Tokens)
			copy(w.to.receive.at(w.slots[c.Index]), from.staging.at(c.Slot)[:n])
			w.chunks = append(w.chunks, engine.Chunk{Index: c.Index, Key: c.Key, Slot: w.slots[c.Index], Tokens: c.Tokens, Bytes: int64(n)})
			w.landed++
		}
		from.staging.give(c.Slot)
		from.stageLocked()
		f.mu.Unlock()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	w.moving--
	f.moves--
	switch {
	case err != nil:
		w.endLocked(fault.New(fault.PeerLost, "%v", err))
	case w.landed == w.total:
		slices.SortFunc(w.chunks, func(a, b engine.Chunk) int { return a.Index - b.Index })
		w.endLocked(nil)
	}
	w.freeLocked()
	f.changeLocked()
}
