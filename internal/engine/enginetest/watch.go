package enginetest

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/berthkv/berth/internal/fault"
)

// patience bounds every wait of a test. It is never reached by one that
// passes.
const patience = 30 * time.Second

// Until waits for a change of the fleet after which ok holds. ok is called
// under the fleet's lock.
func (f *Fleet) until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	late := time.NewTimer(patience)
	defer late.Stop()
	for {
		f.mu.Lock()
		changed, done := f.changed, ok()
		f.mu.Unlock()
		if done {
			return
		}
		select {
		case <-changed:
		case <-late.C:
			f.mu.Lock()
			defer f.mu.Unlock()
			t.Fatalf("%s did not happen; log %v", what, f.log)
		}
	}
}

// Log returns what happened so far: "begin R", "granted R", "ready R",
// "failed R".
func (f *Fleet) Log() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.log)
}

// Until waits until something stands in the log, so many times.
func (f *Fleet) Until(t testing.TB, entry string, times int) {
	t.Helper()
	f.until(t, fmt.Sprintf("%q (%d times)", entry, times), func() bool {
		n := 0
		for _, l := range f.log {
			if l == entry {
				n++
			}
		}
		return n >= times
	})
}

// Occupy takes free slots of the receive pool, as another sender would.
func (n *Node) Occupy(slots int) (release func()) {
	n.f.mu.Lock()
	defer n.f.mu.Unlock()
	taken := n.receive.take(slots)
	return func() {
		n.f.mu.Lock()
		defer n.f.mu.Unlock()
		n.receive.give(taken...)
		n.admitLocked()
	}
}

// CancelAt ends a request at the receiver, as a proxy does.
func (n *Node) CancelAt(req string) {
	n.f.mu.Lock()
	defer n.f.mu.Unlock()
	for _, w := range n.flows {
		if w.req == req {
			w.endLocked(fault.New(fault.Cancelled, "request %q was cancelled by the proxy", req))
			w.from.n.stageLocked()
		}
	}
}

// Check waits until all slots of all nodes are free again, and fails the test
// for each breach of the local API's rules.
func (f *Fleet) Check(t testing.TB) {
	t.Helper()
	f.until(t, "that all slots are free again", func() bool {
		for _, n := range f.nodes {
			if len(n.receive.free) != n.receive.slots || len(n.staging.free) != n.staging.slots {
				return false
			}
		}
		return f.moves == 0
	})
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, b := range f.breaches {
		t.Error("breach of the local API: " + b)
	}
}

// Free gives back the room of a request that nobody will decode, as a proxy
// does: it waits until the request has ended, and cancels it.
func (n *Node) Free(req string) {
	for {
		n.f.mu.Lock()
		changed, live := n.f.changed, false
		for _, w := range n.flows {
			if w.req != req {
				continue
			}
			live = live || !w.over
			if w.over && w.err == nil && w.claimed == "" && !w.released {
				w.released = true
				n.receive.give(w.slots...)
				n.admitLocked()
			}
		}
		n.f.mu.Unlock()
		if !live {
			return
		}
		<-changed
	}
}

// Resize takes free slots away from the receive pool for good.
func (n *Node) Resize(slots int) {
	n.f.mu.Lock()
	defer n.f.mu.Unlock()
	n.receive.free = n.receive.free[:slots]
	n.receive.slots = slots
}

// UntilClosed waits until an engine has closed its second connection to the
// node, and so has said what is wrong with the first.
func (n *Node) UntilClosed(t testing.TB) {
	t.Helper()
	n.f.until(t, "the end of a connection to "+n.addr, func() bool {
		return len(n.conns) > 1 && n.conns[1].closed
	})
}
