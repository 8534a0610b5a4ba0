// Package chaos runs a whole deployment as OS processes, two prefill nodes, two
// decode nodes (one over tcp, one over shm) and the proxy, each node in a network
// namespace of its own where the machine allows it; kills, stops, cuts, slows and
// starves them under load; and checks what came of it: every byte, every ending,
// every pool, and the history of what the engines asked and were told against a
// model of the slots (check.go). `make chaos` and `make soak` run it.
//
// The agents and the proxy are the berth binary. The engines are this program:
// load engines (engine.go) that move chunks of known content.
package chaos

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"
)

// Options of a run.
type Options struct {
	Binary   string // of berth
	Network  string // "", namespaces or loopback
	Seed     uint64
	Requests int           // at least, in all
	Rounds   int           // the load stops between them, and everything is looked at
	Soak     time.Duration // instead of Requests and Rounds
	Calm     bool          // no faults
	Plant    plant
	Out      io.Writer // progress
}

// workers is how many requests are under way at a time.
const workers = 16

// run is one run.
type run struct {
	o       Options
	wire    *wire
	fleet   *fleet
	clients *http.Client
	rep     *Report
	began   time.Time

	mu        sync.Mutex
	history   []Event
	orders    map[pending]chan outcome
	lastOrder uint64
	number    int // of the last request
	ended     map[string][]usedName
	base      map[string]footprint // of each kind, at rest before the faults
	series    *series
}

// Run does everything. The error is for what kept it from running; what it found
// is in the report. The folder of configurations, sockets, logs and, if it found
// something, the history is then kept.
func Run(ctx context.Context, o Options) (rep *Report, err error) {
	dir, err := os.MkdirTemp("", "chaos")
	if err != nil {
		return nil, err
	}
	rep = newReport(o)
	defer func() {
		if err == nil && len(rep.Faults) == 0 {
			os.RemoveAll(dir)
			return
		}
		rep.Kept = dir
		rep.keep()
	}()
	return rep, execute(ctx, o, dir, rep)
}

func execute(ctx context.Context, o Options, dir string, rep *Report) error {
	r := &run{o: o, wire: newWire(o.Seed), orders: map[pending]chan outcome{}, ended: map[string][]usedName{}, base: map[string]footprint{},
		rep: rep, began: time.Now(), series: newSeries()}
	n, err := newNetwork(r.wire, o.Network)
	if err != nil {
		return err
	}
	r.rep.Network = n.String()
	fmt.Fprintf(o.Out, "seed %d; network: %s\n", o.Seed, n)
	r.fleet, err = newFleet(dir, o.Binary, n, o.Plant, r.engineLine, r.engineGone)
	defer func() { r.rep.Faults = append(r.rep.Faults, r.fleet.stop()...) }()
	if err != nil {
		return err
	}
	if err := r.fleet.start(ctx); err != nil {
		return err
	}
	r.clients = &http.Client{Transport: &http.Transport{DialContext: r.fleet.front.dial, MaxIdleConnsPerHost: workers}}
	defer r.clients.CloseIdleConnections()
	if o.Soak > 0 {
		r.soak(ctx)
	} else {
		r.rounds(ctx)
	}
	r.rep.Packets, r.rep.Dropped = r.wire.counts()
	r.rep.Seconds = time.Since(r.began).Seconds()
	return ctx.Err()
}

// warmUp is how many requests a run has before the first fault, so that
// everything is connected when it is measured for the first time.
const warmUp = 100

func (r *run) rounds(ctx context.Context) {
	r.round(ctx, warmUp, nil)
	r.baseline(ctx)
	if r.o.Calm {
		r.round(ctx, r.o.Requests, nil)
		return
	}
	for i := range r.o.Rounds {
		all := blows()
		rng := rand.New(rand.NewPCG(r.o.Seed, uint64(1000+i)))
		rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		r.round(ctx, r.o.Requests/r.o.Rounds, func(ctx context.Context) { r.blowAll(ctx, rng.Uint64(), all) })
		if ctx.Err() != nil {
			return
		}
		r.grown(ctx)
		fmt.Fprintf(r.o.Out, "%5.0f s  round %d of %d is over: %d requests, %d faults inflicted, %d found\n",
			time.Since(r.began).Seconds(), i+1, r.o.Rounds, r.rep.Requests, len(r.rep.Inflicted), len(r.rep.Faults))
	}
}

// round puts at least n requests under way while faults, if any, last; then it
// mends everything, waits for rest and checks.
func (r *run) round(ctx context.Context, n int, faults func(context.Context)) {
	lctx, enough := context.WithCancel(ctx)
	defer enough()
	var hurt sync.WaitGroup
	if faults != nil {
		hurt.Go(func() { faults(ctx) })
	}
	over := make(chan struct{})
	go func() { hurt.Wait(); close(over) }()
	r.mu.Lock()
	first := r.number
	r.mu.Unlock()
	var load sync.WaitGroup
	for range workers {
		load.Go(func() {
			for lctx.Err() == nil {
				r.mu.Lock()
				r.number++
				number := r.number
				r.mu.Unlock()
				if number-first > n {
					select {
					case <-over:
						return
					default:
					}
				}
				r.one(ctx, number)
			}
		})
	}
	load.Wait()
	<-over
	if ctx.Err() != nil {
		return
	}
	r.rest(ctx)
	r.works(ctx)
	r.rest(ctx)
	r.judge()
}

// think is the longest pause of a worker between two requests.
const think = 150 * time.Millisecond

// one carries out one request.
func (r *run) one(ctx context.Context, number int) {
	q := r.request(number)
	r.mu.Lock()
	r.rep.Requests++
	r.mu.Unlock()
	if q.http {
		r.ask(ctx, q)
	} else {
		r.move(ctx, q)
	}
	pause(ctx, time.Duration(q.rng.Int64N(int64(think))))
}

// blowAll inflicts faults: those of processes one after the other, and
// meanwhile those of the network.
func (r *run) blowAll(ctx context.Context, seed uint64, all []blow) {
	var wg sync.WaitGroup
	for _, onWire := range []bool{false, true} {
		some := slices.DeleteFunc(slices.Clone(all), func(b blow) bool { return b.onWire != onWire })
		wg.Go(func() { r.blowSome(ctx, rand.New(rand.NewPCG(seed, uint64(len(some)))), some) })
	}
	wg.Wait()
}

func (r *run) blowSome(ctx context.Context, rng *rand.Rand, all []blow) {
	for _, b := range all {
		if ctx.Err() != nil {
			return
		}
		at := time.Since(r.began)
		what, err := b.do(ctx, r, rng)
		r.mu.Lock()
		r.rep.Inflicted[b.name]++
		r.mu.Unlock()
		fmt.Fprintf(r.o.Out, "%5.1f s  %s: %s\n", at.Seconds(), b.name, what)
		if err != nil && ctx.Err() == nil {
			r.fault("%s: %s: %v", b.name, what, err)
		}
		for _, p := range r.fleet.processes() {
			if s := p.surprise(); s != "" {
				r.fault("after %s (%s): %s", b.name, what, s)
				p.want(false)
				if err := p.start(ctx); err != nil {
					r.fault("%v", err)
				}
			}
		}
		pause(ctx, time.Duration(100+rng.IntN(300))*time.Millisecond)
	}
}

// restLimit is how long slots may be gone once nothing is asked any more: a
// lease, or a quarantine, or the life of what is ready and nobody claims,
// whichever is longest, and some for a busy machine.
const restLimit = max(lease, quarantine, unclaimedTTL) + 10*time.Second

// rest waits until every pool is free.
func (r *run) rest(ctx context.Context) {
	begun := time.Now()
	wctx, cancel := context.WithTimeout(ctx, restLimit)
	defer cancel()
	for _, n := range r.fleet.nodes() {
		err := r.fleet.until(wctx, n.name+" is at rest", func() error {
			s, err := r.fleet.status(ctx, n)
			if err == nil && busy(s) != "" {
				err = errors.New(busy(s))
			}
			return err
		})
		if err != nil && ctx.Err() == nil {
			r.fault("%v", err)
		}
	}
	err := r.fleet.until(wctx, "the proxy is at rest", func() error {
		_, body, err := r.fleet.get(ctx, r.fleet.front, httpPort, "/v1/status")
		var s struct {
			Requests []json.RawMessage `json:"requests"`
		}
		if err == nil {
			err = json.Unmarshal([]byte(body), &s)
		}
		if err == nil && len(s.Requests) > 0 {
			err = fmt.Errorf("%d requests: %s", len(s.Requests), s.Requests)
		}
		return err
	})
	if err != nil && ctx.Err() == nil {
		r.fault("%v", err)
	}
	r.rep.Rest = max(r.rep.Rest, time.Since(begun))
}

// works sees that every way is whole again.
func (r *run) works(ctx context.Context) {
	for s := range r.fleet.senders {
		for d := range r.fleet.receivers {
			wctx, cancel := context.WithTimeout(ctx, restLimit)
			what := r.fleet.senders[s].name + " reaches " + r.fleet.receivers[d].name
			err := r.fleet.until(wctx, what, func() error {
				r.mu.Lock()
				r.number++
				q := r.request(r.number)
				r.mu.Unlock()
				q.sender, q.receiver = s, d
				o := &q.order
				to := r.fleet.receivers[d]
				o.Chunks, o.Declare, o.CancelAt, o.Again = 3, 3, "", false
				o.To, o.Host = to.name, to.place.ip.String()
				return r.plain(q)
			})
			cancel()
			if err != nil && ctx.Err() == nil {
				r.fault("%v", err)
			}
		}
	}
}

// plain carries out a request that nothing disturbs.
func (r *run) plain(q request) error {
	_, sent, ok := r.tell(r.fleet.senders[q.sender], q.order)
	if !ok {
		return errors.New(engineDown)
	}
	out := <-sent
	if out.ending != "ready" {
		return fmt.Errorf("sent: %+v", out)
	}
	_, got, ok := r.tell(r.fleet.receivers[q.receiver], order{Op: "receive", Req: q.order.Req, Deadline: deadline, Hang: hangAfter})
	if !ok {
		return errors.New(engineDown)
	}
	if in := <-got; in.ending != "ready" {
		return fmt.Errorf("received: %+v", in)
	}
	return nil
}

// judge checks the history so far, which nothing adds to any more, and drops it.
func (r *run) judge() {
	r.mu.Lock()
	history := r.history
	r.history = nil
	r.ended = map[string][]usedName{}
	r.mu.Unlock()
	faults := check(history)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rep.Events += len(history)
	for _, e := range history {
		if e.Op == opRead {
			r.rep.Reads += len(e.Reads)
			for _, x := range e.Reads {
				if x.Err != "" && !e.Lost {
					r.rep.Wrong++
				}
			}
		}
	}
	r.rep.Faults = append(r.rep.Faults, faults...)
	if len(r.rep.Faults) > r.rep.kept {
		r.rep.kept = len(r.rep.Faults)
		r.rep.History = append(r.rep.History, history...)
	}
}

func (r *run) fault(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rep.Faults = append(r.rep.Faults, fmt.Sprintf(format, args...))
}

func (r *run) count(who string, o outcome) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.countLocked(who, o)
}

func (r *run) countLocked(who string, o outcome) {
	key := o.ending
	if o.reason != "" {
		key += "(" + o.reason + ")"
	}
	r.rep.count(who, key)
	if o.ending == hung || o.ending == wrongPrompt || o.ending == "failed" && slices.Contains(untrue, o.reason) {
		r.rep.Faults = append(r.rep.Faults, fmt.Sprintf("%s: %s: %s", who, key, o.text))
	}
}

// untrue are reasons that blame somebody, and nobody here lies.
var untrue = []string{"bad_request", "overflow", "not_owner", "stale_generation", "layout_mismatch", "unsupported", "unknown_message", "internal"}

func (r *run) took(since time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rep.Longest = max(r.rep.Longest, time.Since(since))
}

// watched are the processes whose growth is looked at: those of Berth.
func (r *run) watched() []*process {
	var out []*process
	for _, k := range []string{"sender agent", "receiver agent", "proxy"} {
		out = append(out, r.fleet.byKind(k)...)
	}
	return out
}

// baseline measures every process at rest.
func (r *run) baseline(ctx context.Context) {
	for _, p := range r.watched() {
		f, b := r.fleet.footprint(ctx, p), r.base[p.kind]
		r.base[p.kind] = footprint{max(f.RSS, b.RSS), max(f.FDs, b.FDs), max(f.Goroutines, b.Goroutines)}
	}
}

// Slack of what a process may have at rest over its kind's baseline: connections
// that wait to be used again, and a heap that is not collected at once.
const (
	slackCount = 16
	slackRSS   = 64 << 20
)

// grown compares every process at rest with the baseline.
func (r *run) grown(ctx context.Context) {
	wctx, cancel := context.WithTimeout(ctx, restLimit)
	defer cancel()
	for _, p := range r.watched() {
		b := r.base[p.kind]
		err := r.fleet.until(wctx, p.name+" is as small as before", func() error {
			f := r.fleet.footprint(ctx, p)
			if f.FDs > b.FDs+slackCount || f.Goroutines > b.Goroutines+slackCount || f.RSS > b.RSS+slackRSS {
				return fmt.Errorf("it has %+v, at the start it had at most %+v", f, b)
			}
			return nil
		})
		if err != nil && ctx.Err() == nil {
			r.fault("%v", err)
		}
	}
}

// soak runs the load for a given time, with the faults that end no agent and no
// proxy, and follows what each of them has.
func (r *run) soak(ctx context.Context) {
	r.round(ctx, warmUp, nil)
	r.baseline(ctx)
	all := slices.DeleteFunc(blows(), func(b blow) bool { return !b.gentle })
	rng := rand.New(rand.NewPCG(r.o.Seed, 1))
	end := time.Now().Add(r.o.Soak)
	for ctx.Err() == nil && time.Now().Before(end) {
		rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		few := all[:6]
		r.round(ctx, 1, func(ctx context.Context) { r.blowAll(ctx, rng.Uint64(), few) })
		for _, p := range r.watched() {
			r.series.add(p.name, time.Since(r.began), r.fleet.footprint(ctx, p))
		}
	}
	r.grown(ctx)
	r.rep.Growth = r.series.growth()
	for _, g := range r.rep.Growth {
		if g.Grows {
			r.fault("%s grows: %s", g.Process, g)
		}
	}
}

// keep writes the history into the folder that is kept.
func (r *Report) keep() {
	f, err := os.Create(filepath.Join(r.Kept, "history.jsonl"))
	if err != nil {
		return
	}
	defer f.Close()
	rec := &recorder{w: f}
	for _, e := range r.History {
		rec.write(e)
	}
}
