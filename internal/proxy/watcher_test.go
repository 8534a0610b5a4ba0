package proxy

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/msg"
)

// fakeWatcher is a Watcher without a network. Unless told otherwise it accepts
// every watch; who plays the receivers calls settle.
type fakeWatcher struct {
	t testing.TB

	mu sync.Mutex
	receivers
	watches map[string]*fakeWatch
	order   []*fakeWatch
	changed chan struct{} // closed and replaced when anything happens
}

// receivers is what the receivers do.
type receivers struct {
	refuse  error  // Watch returns it
	reject  error  // Accepted returns it
	stall   bool   // Accepted waits for its context
	outcome Ending // of transfers that prefill engines deliver
}

// be changes what the receivers do.
func (w *fakeWatcher) be(r receivers) {
	w.mu.Lock()
	w.receivers = r
	w.mu.Unlock()
}

type fakeWatch struct {
	w       *fakeWatcher
	req     WatchRequest
	settled chan struct{}
	ending  Ending

	// Guarded by w.mu.
	awaited bool // Accepted was called
	told    bool // Result has returned the ending
	ended   string
}

func newWatcher(t testing.TB) *fakeWatcher {
	return &fakeWatcher{t: t, watches: map[string]*fakeWatch{}, changed: make(chan struct{}),
		receivers: receivers{outcome: Ending{Ending: msg.EndReady}}}
}

func (w *fakeWatcher) changeLocked() {
	close(w.changed)
	w.changed = make(chan struct{})
}

func (w *fakeWatcher) Watch(_ context.Context, req WatchRequest) (Watch, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.refuse != nil {
		return nil, w.refuse
	}
	if w.watches[req.ReqID] != nil {
		w.t.Errorf("the req_id %s is used twice", req.ReqID)
	}
	fw := &fakeWatch{w: w, req: req, settled: make(chan struct{})}
	w.watches[req.ReqID] = fw
	w.order = append(w.order, fw)
	w.changeLocked()
	return fw, nil
}

// settle ends a transfer, as its receivers would; a second ending changes nothing.
func (w *fakeWatcher) settle(reqID string, e Ending) {
	w.mu.Lock()
	defer w.mu.Unlock()
	fw := w.watches[reqID]
	if fw == nil {
		w.t.Errorf("nobody watches %q", reqID)
		return
	}
	select {
	case <-fw.settled:
	default:
		fw.ending = e
		close(fw.settled)
	}
	w.changeLocked()
}

// deliver ends it as the receivers' outcome says.
func (w *fakeWatcher) deliver(reqID string) {
	w.mu.Lock()
	outcome := w.outcome
	w.mu.Unlock()
	w.settle(reqID, outcome)
}

func (w *fakeWatcher) ready(reqID string) { w.settle(reqID, Ending{Ending: msg.EndReady}) }

// wasTold reports whether the proxy knows that the transfer is ready.
func (w *fakeWatcher) wasTold(reqID string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	fw := w.watches[reqID]
	return fw != nil && fw.told && fw.ending.Ending == msg.EndReady
}

// until waits until ok says so; it is asked after each change.
func (w *fakeWatcher) until(ctx context.Context, ok func(all []*fakeWatch) bool) error {
	for {
		w.mu.Lock()
		yes, changed := ok(w.order), w.changed
		w.mu.Unlock()
		if yes {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// endings lists how each watch ended, in order; "open" if it did not.
func (w *fakeWatcher) endings() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := []string{}
	for _, fw := range w.order {
		if fw.ended == "" {
			out = append(out, "open")
		} else {
			out = append(out, fw.ended)
		}
	}
	return out
}

func (fw *fakeWatch) Accepted(ctx context.Context) error {
	fw.w.mu.Lock()
	does := fw.w.receivers
	fw.awaited = true
	fw.w.changeLocked()
	fw.w.mu.Unlock()
	if does.stall {
		<-ctx.Done()
		return ctx.Err()
	}
	return does.reject
}

func (fw *fakeWatch) Result(ctx context.Context) (Ending, error) {
	select {
	case <-fw.settled:
		fw.w.mu.Lock()
		fw.told = true
		fw.w.changeLocked()
		fw.w.mu.Unlock()
		return fw.ending, nil
	case <-ctx.Done():
		return Ending{}, ctx.Err()
	}
}

func (fw *fakeWatch) end(how string) {
	fw.w.mu.Lock()
	defer fw.w.mu.Unlock()
	if fw.ended != "" {
		fw.w.t.Errorf("watch %s ended twice: %s, then %s", fw.req.ReqID, fw.ended, how)
	}
	fw.ended = how
	fw.w.changeLocked()
}

func (fw *fakeWatch) Cancel(code fault.Code, text string) {
	if !code.Known() {
		fw.w.t.Errorf("cancelled with the unknown code %q (%s)", code, text)
	}
	fw.end(fmt.Sprintf("cancelled %s", code))
}

func (fw *fakeWatch) Close() { fw.end("closed") }
