package sim

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"strconv"

	"github.com/berthkv/berth/internal/kv"
)

// never is later than all else in virtual time.
const never = kv.Never

// Violation is a broken rule.
type Violation struct {
	Rule string // R1 to R12, or check: a core's invariant
	Text string
	At   kv.Instant
}

func (v *Violation) Error() string {
	return fmt.Sprintf("%s: %s (at %.6f s)", v.Rule, v.Text, kv.Duration(v.At).Seconds())
}

// Run are the knobs of one run.
type Run struct {
	// CheckEvery is how many turns of a node lie between two checks of all its
	// cores' invariants; 0: 256. They are checked at each fault and at the end
	// besides.
	CheckEvery int
	// Trace, if set, is told what happens, a line each.
	Trace func(format string, args ...any)
	// Context, if set, ends the run early.
	Context context.Context
}

// world is all nodes and what is between them, on virtual time.
type world struct {
	sc  *Scenario
	run Run

	now    kv.Instant
	events events
	ready  []*host // to take their turn now
	hash   hash
	bad    *Violation
	steps  int

	senders   []*sender
	receivers []*receiver
	proxies   []*proxy
	hosts     []*host
	owners    map[kv.Incarnation]*sender
	addrs     map[string]*receiver // by the address that a link offers
	requests  []request            // parallel to sc.Requests
	byName    map[string]int
	open      int // requests that are not over
	pairs     map[pairID]*pair
	begun     int        // faults that last
	last      kv.Instant // nothing comes after it but the end
	quiet     kv.Instant // since when only the end is awaited, 0: not yet
	done      bool
	report    Report
}

// event is something that happens at a time. Of two at one time that which was
// put first comes first.
type event struct {
	at  kv.Instant
	seq uint64
	do  func()
}

// events is a heap of four children a node.
type events struct {
	heap []event
	seq  uint64
}

func (q *events) less(i, j int) bool {
	a, b := &q.heap[i], &q.heap[j]
	return a.at < b.at || a.at == b.at && a.seq < b.seq
}

func (q *events) push(at kv.Instant, do func()) {
	q.seq++
	q.heap = append(q.heap, event{at, q.seq, do})
	for i := len(q.heap) - 1; i > 0; {
		up := (i - 1) / 4
		if !q.less(i, up) {
			return
		}
		q.heap[i], q.heap[up] = q.heap[up], q.heap[i]
		i = up
	}
}

func (q *events) pop() event {
	first := q.heap[0]
	end := len(q.heap) - 1
	q.heap[0] = q.heap[end]
	q.heap[end] = event{}
	q.heap = q.heap[:end]
	for i := 0; ; {
		least := i
		for k := 4*i + 1; k < min(4*i+5, end); k++ {
			if q.less(k, least) {
				least = k
			}
		}
		if least == i {
			return first
		}
		q.heap[i], q.heap[least] = q.heap[least], q.heap[i]
		i = least
	}
}

// at does something later.
func (w *world) at(t kv.Instant, do func()) { w.events.push(max(t, w.now), do) }

// after does something after a time.
func (w *world) after(d kv.Duration, do func()) { w.at(w.now.Add(d), do) }

// violate notes a broken rule; the first counts.
func (w *world) violate(rule, format string, args ...any) {
	if w.bad == nil {
		w.bad = &Violation{rule, fmt.Sprintf(format, args...), w.now}
		w.say("VIOLATION %s: %s", rule, w.bad.Text)
	}
}

// say tells a line of the trace.
func (w *world) say(format string, args ...any) {
	if w.run.Trace != nil {
		w.run.Trace("%12.6f "+format, append([]any{kv.Duration(w.now).Seconds()}, args...)...)
	}
}

func (w *world) tracing() bool { return w.run.Trace != nil }

// hash is over everything that happens, in order: equal runs have equal ones.
type hash uint64

func (h *hash) add(v uint64) {
	x := uint64(*h) ^ v
	x ^= x >> 32
	x *= 0xd6e8feb86659fd93
	x ^= x >> 32
	*h = hash(x*0xd6e8feb86659fd93 + 1)
}

func (h *hash) bytes(b []byte) {
	v := uint64(len(b))
	for i, c := range b {
		v = v<<8 | v>>56
		v ^= uint64(c)
		if i%8 == 7 {
			h.add(v)
		}
	}
	h.add(v)
}

// random is a stream of its own for each thing, so that taking a request or a
// fault out of the scenario leaves the others' alone.
func (w *world) random(parts ...string) *rand.Rand {
	var h hash
	for _, p := range parts {
		h.bytes([]byte(p))
	}
	return rand.New(rand.NewPCG(w.sc.Seed, uint64(h)))
}

// expo is a time that is mean on average, and at least a fifth of that.
func expo(r *rand.Rand, mean kv.Duration) kv.Duration {
	return mean/5 + kv.Duration(r.ExpFloat64()*float64(mean)*4/5)
}

func newWorld(sc *Scenario, run Run) *world {
	w := &world{sc: sc, run: run, owners: map[kv.Incarnation]*sender{}, addrs: map[string]*receiver{}, byName: make(map[string]int, len(sc.Requests)),
		pairs: map[pairID]*pair{}, requests: make([]request, len(sc.Requests))}
	if w.run.CheckEvery == 0 {
		w.run.CheckEvery = 256
	}
	for i := range sc.Requests {
		w.requests[i] = request{Request: &sc.Requests[i], name: sc.Requests[i].Name()}
		w.byName[w.requests[i].name] = i
	}
	w.open = len(w.requests)
	for i := range sc.Receivers {
		w.receivers = append(w.receivers, newReceiver(w, i))
	}
	for i := range sc.Senders {
		w.senders = append(w.senders, newSender(w, i))
	}
	for i := range sc.Proxies {
		w.proxies = append(w.proxies, newProxy(w, i))
	}
	return w
}

// request is what the engines, the proxy and the observer know of one.
type request struct {
	*Request
	name string
	seen
	sending  // at the prefill engine
	watching // at the proxy
}

// Simulate runs a scenario to its end: until every request is over and every
// slot is free, or until a rule is broken. The error is a *Violation, or that of
// the context.
func Simulate(sc *Scenario, run Run) (Report, error) {
	w := begin(sc, run)
	for w.step() {
		if w.steps%(1<<16) == 0 && run.Context != nil && run.Context.Err() != nil {
			return w.report.end(w), run.Context.Err()
		}
	}
	if w.bad == nil {
		w.finish()
	}
	r := w.report.end(w)
	if w.bad != nil {
		return r, w.bad
	}
	return r, nil
}

// begin makes a world in which nothing has happened yet.
func begin(sc *Scenario, run Run) *world {
	w := newWorld(sc, run)
	w.report.begin(w)
	w.last = kv.Instant(sc.Requests[len(sc.Requests)-1].At)
	w.arrive(0)
	w.fault(0)
	w.sample()
	return w
}

// step lets whoever is ready take a turn, or takes the next event; false when
// all is over. A core or a link that panics has found a rule broken by itself.
func (w *world) step() bool {
	w.steps++
	w.stepOnce()
	return w.bad == nil && !w.done
}

func (w *world) stepOnce() {
	defer func() {
		if p := recover(); p != nil {
			w.violate("check", "panic: %v", p)
			w.say("%s", debug.Stack())
		}
	}()
	if len(w.ready) > 0 {
		h := w.ready[0]
		w.ready = w.ready[1:]
		h.turnNow()
		return
	}
	e := w.events.pop()
	w.now = e.at
	e.do()
}

// arrive lets the requests come, each at its time.
func (w *world) arrive(i int) {
	if i == len(w.requests) {
		return
	}
	w.at(kv.Instant(w.requests[i].At), func() {
		q := &w.requests[i]
		w.proxies[q.Sender%len(w.proxies)].ask(i)
		w.arrive(i + 1)
	})
}

// sampleEvery is how often the pools are looked at.
const sampleEvery = 100 * kv.Millisecond

// sample counts what is used, and looks for the end.
func (w *world) sample() {
	w.report.sample(w)
	if w.now > w.last && w.begun == 0 {
		w.look()
	}
	w.after(sampleEvery, w.sample)
}

// host finds a node by its name.
func (w *world) host(name string) *host {
	if len(name) < 2 {
		return nil
	}
	n, err := strconv.Atoi(name[1:])
	switch {
	case err != nil || n < 0:
	case name[0] == 's' && n < len(w.senders):
		return &w.senders[n].host
	case name[0] == 'r' && n < len(w.receivers):
		return &w.receivers[n].host
	case name[0] == 'p' && n < len(w.proxies):
		return &w.proxies[n].host
	}
	return nil
}

// kick moves what was held on every link that may go on now.
func (w *world) kick() {
	for _, r := range w.receivers {
		r.kick()
	}
}
