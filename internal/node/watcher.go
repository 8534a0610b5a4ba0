package node

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/watch"
	"github.com/berthkv/berth/internal/wire"
)

// WatcherConfig is what a proxy's watcher is told at start.
type WatcherConfig struct {
	Watch       watch.Config
	DialTimeout time.Duration
	Dialer      Dialer
	Log         *slog.Logger
	Clock       func() kv.Instant // nil: the real one
	Drive       *Drive            // nil: the watcher runs by itself
	// Told, if set, is called by the loop when a watch is accepted, and when it
	// has its result.
	Told func(*Watch)
}

// Watcher is the shell of a proxy's core: one loop, as in Node.
type Watcher struct {
	cfg WatcherConfig

	// Owned by the loop.
	core     *watch.Core
	controls *controls
	wake     kv.Instant
	watches  map[kv.CallID]*Watch
	loop     loop

	mail   *mailbox
	stats  *Stats
	ctx    context.Context
	cancel context.CancelFunc
	tasks  sync.WaitGroup
	close  sync.Once

	mu struct {
		sync.Mutex
		calls kv.CallID
	}
}

// Watch is one transfer that is watched. Its owner ends it with exactly one of
// Cancel and Release.
type Watch struct {
	w    *Watcher
	call kv.CallID

	accepted chan struct{}
	done     chan struct{} // closed with the result
	result   watch.Result  // set before done is closed
}

// NewWatcher starts a watcher; Close it.
func NewWatcher(cfg WatcherConfig) *Watcher {
	if cfg.Clock == nil {
		start := time.Now()
		cfg.Clock = func() kv.Instant { return kv.Instant(time.Since(start)) }
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	w := &Watcher{cfg: cfg, wake: kv.Never, watches: map[kv.CallID]*Watch{}, mail: newMailbox(mailboxLimit), stats: NewStats()}
	w.ctx, w.cancel = context.WithCancel(context.Background())
	w.core = watch.New(cfg.Watch, cfg.Clock())
	w.controls = &controls{ctx: w.ctx, outside: w.outside, mail: w.mail, dialer: cfg.Dialer, timeout: cfg.DialTimeout, log: cfg.Log,
		stats: w.stats, conns: map[kv.ConnID]*controlConn{}}
	w.loop = loop{
		ctx: w.ctx, clock: w.cfg.Clock, mail: w.mail, dispatch: w.dispatch, tick: w.tick,
		next: func() kv.Instant { return w.wake },
		woke: w.stats.batch,
	}
	if cfg.Drive == nil {
		w.mail.step = w.loop.lent
		w.outside(w.run)
	}
	return w
}

// outside runs what may wait beside the loop; Close waits for it.
func (w *Watcher) outside(work func()) { w.cfg.Drive.start(&w.tasks, work) }

// Turn is as Node.Turn.
func (w *Watcher) Turn() kv.Instant { return w.loop.turns() }

// Check is as Node.Check.
func (w *Watcher) Check() error { return w.core.Check() }

// Close ends every watch with an error and waits. The receivers notice by the
// lease. The order is that of Node.Close.
func (w *Watcher) Close() {
	w.close.Do(func() {
		w.mail.close()
		w.cancel()
		w.tasks.Wait()
	})
}

// Notified is called by the notify port for each payload of a PUSH connection.
func (w *Watcher) Notified(conn kv.ConnID, payload []byte) {
	m, err := wire.Decode(payload)
	if err != nil {
		w.cfg.Log.Debug("notify port: not a message", "err", err)
		return
	}
	w.mail.putFrom(conn, len(payload), watch.Notified{Conn: conn, Msg: m})
}

// Watch begins a watch. deadline bounds the time until the transfer is ready. The
// loop's own goroutine sends it: the caller has something better to do first.
func (w *Watcher) Watch(ctx context.Context, req string, peers []watch.Peer, deadline time.Duration) (*Watch, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	w.mu.Lock()
	w.mu.calls++
	wt := &Watch{w: w, call: w.mu.calls, accepted: make(chan struct{}), done: make(chan struct{})}
	w.mu.Unlock()
	if !w.mail.put(watchCall{wt, watch.Watch{Call: wt.call, ReqID: req, Peers: peers, Deadline: kv.Duration(deadline)}}) {
		return nil, errClosed
	}
	return wt, nil
}

var errClosed = fault.New(fault.Cancelled, "the watcher is closed")

// Accepted returns nil once every receiver has the watch, or why one cannot.
func (wt *Watch) Accepted(ctx context.Context) error {
	select {
	case <-wt.accepted:
		return nil
	case <-wt.done:
		select {
		case <-wt.accepted:
			return nil
		default:
		}
		return &fault.Error{Code: wt.result.Reason, Text: wt.result.Text}
	case <-ctx.Done():
		return ctx.Err()
	case <-wt.w.ctx.Done():
		return errClosed
	}
}

// Result returns the ending once there is one.
func (wt *Watch) Result(ctx context.Context) (watch.Result, error) {
	select {
	case <-wt.done:
		return wt.result, nil
	case <-ctx.Done():
		return watch.Result{}, ctx.Err()
	case <-wt.w.ctx.Done():
		return watch.Result{}, errClosed
	}
}

// Cancel ends the transfer at all receivers, and the watch. It does not wait.
func (wt *Watch) Cancel(reason fault.Code, text string) {
	wt.w.mail.postCall(watch.Cancel{Call: wt.call, Reason: reason, Text: text})
}

// Release ends the watch alone. It does not wait.
func (wt *Watch) Release() { wt.w.mail.postCall(watch.Release{Call: wt.call}) }

type watchCall struct {
	watch *Watch
	ev    watch.Watch
}

func (w *Watcher) run() {
	defer w.controls.closeAll()
	w.loop.run()
}

func (w *Watcher) tick(now kv.Instant) bool {
	if w.wake > now {
		return false
	}
	w.wake = kv.Never
	w.step(now, watch.Tick{})
	return true
}

func (w *Watcher) dispatch(ev any) {
	now := w.cfg.Clock()
	switch ev := ev.(type) {
	case watchCall:
		w.watches[ev.ev.Call] = ev.watch
		w.step(now, ev.ev)
	case watch.Cancel:
		delete(w.watches, ev.Call)
		w.step(now, ev)
	case watch.Release:
		delete(w.watches, ev.Call)
		w.step(now, ev)
	case watch.Event:
		w.step(now, ev)
	case controlDialled:
		if w.controls.opened(ev, func(c controlClosed) { w.closed(now, c) }) {
			w.step(now, watch.Connected{Conn: ev.id})
		}
	case controlMessage:
		if ev.err != nil {
			w.step(now, watch.Malformed{Conn: ev.id, Text: ev.err.Error()})
		} else {
			w.step(now, watch.Received{Conn: ev.id, Msg: ev.msg})
		}
	case controlClosed:
		w.closed(now, ev)
	}
}

func (w *Watcher) closed(now kv.Instant, c controlClosed) {
	w.controls.forget(c.id)
	w.step(now, watch.Disconnected{Conn: c.id, Text: fmt.Sprint(c.err)})
}

func (w *Watcher) step(now kv.Instant, ev watch.Event) {
	for _, a := range w.core.Step(now, ev) {
		switch a := a.(type) {
		case watch.Dial:
			w.controls.dial(a.Conn, a.Peer.Host, a.Peer.AllocPort)
		case watch.Close:
			w.controls.close(a.Conn)
		case watch.Send:
			w.controls.send(a.Conn, a.Msg)
		case watch.Accepted:
			if wt := w.watches[a.Call]; wt != nil {
				close(wt.accepted)
				w.tell(wt)
			}
		case watch.Result:
			w.onResult(a)
		case watch.Wake:
			w.wake = a.At
		}
	}
}

func (w *Watcher) onResult(r watch.Result) {
	if r.Ending != msg.EndReady {
		w.cfg.Log.Info("transfer ended badly", "ending", r.Ending, "reason", r.Reason, "text", r.Text, "rank", r.Rank)
	}
	if wt := w.watches[r.Call]; wt != nil {
		wt.result = r
		close(wt.done)
		w.tell(wt)
	}
}

func (w *Watcher) tell(wt *Watch) {
	if w.cfg.Told != nil {
		w.cfg.Told(wt)
	}
}

// Have is what is known of a watch: whether it was accepted, and its result, if
// there is one.
func (wt *Watch) Have() (accepted bool, result *watch.Result) {
	select {
	case <-wt.accepted:
		accepted = true
	default:
	}
	select {
	case <-wt.done:
		result = &wt.result
	default:
	}
	return accepted, result
}
