// Package engine is Berth's built-in demo engine: an OpenAI-compatible server
// around a small but real transformer, which can send the KV of its prompts
// away and continue from KV that arrives. It exists to show and to test the
// path of the bytes; it is no engine for production, and its answers are noise
// (package model says which).
//
// One loop computes, step by step, what package sched says. Around it, each
// request that is sent has one goroutine (transfer.go), so has each that is
// loaded while it is (load.go), and each rank's connection to its agent
// (rank.go). They meet in Engine.mu, which is held for bookkeeping only.
// Greedy decoding only: temperature and seed are accepted and change nothing.
package engine

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"maps"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/berthkv/berth/internal/engine/kvcache"
	"github.com/berthkv/berth/internal/engine/model"
	"github.com/berthkv/berth/internal/engine/sched"
	"github.com/berthkv/berth/internal/fault"
)

// Engine is a running engine. Close it.
type Engine struct {
	// Constant.
	cfg     Config
	model   *model.Model
	ranks   []*rank
	prefix  string // of the names of this engine's requests
	ctx     context.Context
	cancel  context.CancelCauseFunc
	unreach context.CancelFunc // ends the connections to the agents

	stats counters
	next  atomic.Uint64

	wake  chan struct{}  // holds one token while the loop may have work
	wg    sync.WaitGroup // the loop, transfers, loads
	links sync.WaitGroup // the ranks

	mu struct {
		sync.Mutex
		sched    *sched.Scheduler
		requests map[sched.ID]*request
		closing  bool
		empty    chan struct{} // closed when requests is empty and closing; nil until Drain
	}
}

// New starts an engine. It errs, with all faults at once, on a config that
// cannot work. Agents that are not reachable are no error: they are dialled
// until they are.
func New(cfg Config) (*Engine, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	m, err := model.New(cfg.Model)
	if err != nil {
		return nil, err
	}
	var salt [6]byte
	rand.Read(salt[:])
	e := &Engine{cfg: cfg, model: m, prefix: hex.EncodeToString(salt[:]), wake: make(chan struct{}, 1)}
	e.mu.sched = sched.New(cfg.sched())
	e.mu.requests = map[sched.ID]*request{}
	e.ctx, e.cancel = context.WithCancelCause(context.Background())
	reach, unreach := context.WithCancel(context.Background())
	e.unreach = unreach
	for i, dial := range cfg.Agents {
		r := newRank(i, dial, int64(cfg.layout().ChunkBytes(cfg.ChunkSize)), cfg.Role.sends(), cfg.Log)
		e.ranks = append(e.ranks, r)
		e.links.Go(func() { r.run(reach) })
	}
	e.wg.Go(e.loop)
	return e, nil
}

var errClosing = fault.New(fault.Cancelled, "the engine is closing")

// Close ends all requests and waits until nothing of the engine runs. A second
// call is harmless.
func (e *Engine) Close() {
	// Nothing new; then what is there, which says goodbye to the agents; then
	// the connections over which it does so.
	e.mu.Lock()
	e.mu.closing = true
	requests := slices.Collect(maps.Values(e.mu.requests))
	e.mu.Unlock()
	for _, r := range requests {
		e.fail(r, errClosing)
	}
	e.cancel(errClosing)
	e.wg.Wait()
	e.unreach()
	e.links.Wait()
}

// Drain refuses new requests and waits until those in flight have ended, or ctx
// ends. What was submitted to the agents whole goes on.
func (e *Engine) Drain(ctx context.Context) error {
	e.mu.Lock()
	e.mu.closing = true
	if e.mu.empty == nil {
		e.mu.empty = make(chan struct{})
		if len(e.mu.requests) == 0 {
			close(e.mu.empty)
		}
	}
	empty := e.mu.empty
	e.mu.Unlock()
	select {
	case <-empty:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Ready returns nil when the engine can serve: it is not closing and all its
// agents are connected.
func (e *Engine) Ready() error {
	e.mu.Lock()
	closing := e.mu.closing
	e.mu.Unlock()
	var errs []error
	if closing {
		errs = append(errs, errClosing)
	}
	for _, r := range e.ranks {
		errs = append(errs, r.state())
	}
	return errors.Join(errs...)
}

// Connected waits until every rank's agent is connected. When ctx ends first it
// says why one is not.
func (e *Engine) Connected(ctx context.Context) error {
	for _, r := range e.ranks {
		if err := r.connected(ctx); err != nil {
			return err
		}
	}
	return nil
}

// name returns a name for a request that no other engine gives.
func (e *Engine) name() string {
	return e.prefix + "-" + strconv.FormatUint(e.next.Add(1), 10)
}

// submit queues a request. Its answer comes at r.out. Whoever submits it calls
// abandon when it no longer waits for that.
func (e *Engine) submit(r *request) error {
	class := sched.Local
	if r.send != nil {
		class = r.send.class()
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.mu.closing {
		e.stats.refused.Add(1)
		return errClosing
	}
	r.id = sched.ID(e.next.Add(1))
	if err := e.mu.sched.Add(r.id, class); err != nil {
		e.stats.refused.Add(1)
		return fault.New(fault.Busy, "%v (%d)", err, e.cfg.Queue)
	}
	e.stats.requests.Add(1)
	late := fault.New(fault.Deadline, "the request took longer than %v", e.cfg.RequestTimeout)
	timed, cancel := context.WithTimeoutCause(e.ctx, e.cfg.RequestTimeout, late)
	ctx, stop := context.WithCancelCause(timed)
	r.ctx, r.stop = ctx, func(err error) { stop(err); cancel() }
	context.AfterFunc(ctx, func() { e.fail(r, context.Cause(ctx)) })
	e.mu.requests[r.id] = r
	e.poke()
	return nil
}

// poke wakes the loop.
func (e *Engine) poke() {
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

// startLocked sets a request going that has got its place: what is sent or
// loaded has a goroutine of its own first.
func (e *Engine) startLocked(r *request) {
	switch {
	case r.send != nil:
		r.busy, r.sending = true, true
		e.wg.Go(func() { e.transfer(r) })
	case r.load != "":
		r.busy = true
		e.wg.Go(func() { e.load(r) })
	default:
		e.runLocked(r)
	}
}

// run lets the loop compute what a started request's sequence lacks.
func (e *Engine) run(r *request) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.runLocked(r)
}

func (e *Engine) runLocked(r *request) {
	if r.over {
		return
	}
	if r.seq == nil {
		r.seq = e.sequence(r)
	}
	r.tokens = append(make([]int, 0, r.seq.Capacity()), r.prompt...)
	e.mu.sched.Run(r.id, len(r.prompt)-r.done)
	e.poke()
}

func (e *Engine) sequence(r *request) *kvcache.Sequence {
	return kvcache.NewSequence(e.cfg.layout(), len(r.prompt)+r.answer.maxTokens)
}

// fail ends a request's answer with an error, unless it has ended, and what is
// sent of it.
func (e *Engine) fail(r *request, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if r.over {
		return
	}
	e.stats.failed.Add(1)
	e.overLocked(r, err)
}

// abandon ends a request whose answer nobody waits for any more. After its
// answer it changes nothing.
func (e *Engine) abandon(r *request) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if r.over {
		return
	}
	e.stats.aborted.Add(1)
	e.overLocked(r, fault.New(fault.Cancelled, "the client has left"))
}

// overLocked ends a request's answer: with nil when it is complete, and then
// its transfer goes on.
func (e *Engine) overLocked(r *request, err error) {
	r.over = true
	if err != nil {
		r.out.fail(err)
		r.stop(err)
	}
	e.forgetLocked(r)
}

// idle says that a request's own goroutine no longer uses its memory.
func (e *Engine) idle(r *request) {
	e.mu.Lock()
	defer e.mu.Unlock()
	r.busy = false
	e.forgetLocked(r)
}

// settled says that a request's transfer has ended.
func (e *Engine) settled(r *request) {
	e.mu.Lock()
	defer e.mu.Unlock()
	r.sending = false
	e.forgetLocked(r)
}

// forgetLocked gives up what a request does not need any more: its place once
// its answer has ended and nothing uses its memory, its context once its
// transfer has ended too.
func (e *Engine) forgetLocked(r *request) {
	if !r.over {
		return
	}
	if !r.sending {
		r.stop(nil)
	}
	if r.busy || e.mu.requests[r.id] == nil {
		return
	}
	e.mu.sched.Remove(r.id)
	delete(e.mu.requests, r.id)
	if e.mu.empty != nil && len(e.mu.requests) == 0 {
		close(e.mu.empty)
	}
	e.poke()
}
