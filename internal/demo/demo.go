// Package demo is `berth demo`: two prefill nodes, a decode node and a proxy as
// real processes on loopback, real prompts, real KV cache of a real (small)
// transformer, and every answer compared with that of one undivided engine.
package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/berthkv/berth/internal/admin"
	"github.com/berthkv/berth/internal/engine"
)

// Options of a run.
type Options struct {
	Binary  string // of berth
	Prompts io.Reader
	Link    string // tcp or shm; "": the first that works
	Keep    bool   // leave the fleet running until ctx ends
	Chaos   bool
	Out     io.Writer // progress; not the report
}

// ErrPrompts is of a load that cannot be used.
var ErrPrompts = errors.New("prompts")

// clients is how many prompts are asked at a time.
const clients = 12

// Run does everything and returns what happened. The error is for what kept it
// from running to the end (ctx's, when that ended before the report);
// differences and failures are in the report.
func Run(ctx context.Context, o Options) (rep *Report, err error) {
	prompts, err := readPrompts(o.Prompts)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrPrompts, err)
	}
	dir, err := os.MkdirTemp("", "berth-demo-")
	if err != nil {
		return nil, err
	}
	d := &run{o: o, dir: dir, model: "berth-demo", start: time.Now()}
	d.http = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: clients, MaxConnsPerHost: 4 * clients}, Timeout: requestTimeout}
	defer func() {
		d.close()
		if rep != nil && !rep.OK() || err != nil && ctx.Err() == nil {
			fmt.Fprintln(o.Out, "logs are kept in", dir)
			return
		}
		os.RemoveAll(dir)
	}()
	fmt.Fprintf(o.Out, "starting 2 prefill nodes, 1 decode node (a pool of %d slots of %d tokens) and a proxy\n", poolSlots, chunkTokens)
	if d.fleet, err = startFleet(ctx, o.Binary, dir, o.Link, !o.Chaos); err != nil {
		return nil, err
	}
	if err := d.reference(ctx); err != nil {
		return nil, err
	}
	d.progress(ctx)
	if err := d.seeds(ctx); err != nil {
		return nil, err
	}
	if o.Chaos {
		d.chaos(ctx, prompts)
	} else {
		d.ask(ctx, prompts)
	}
	if rep, err = d.report(ctx); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil { // what was cut short is no finding
		return nil, err
	}
	if o.Keep {
		d.keep(ctx, rep)
	}
	return rep, nil
}

// requestTimeout bounds one prompt, so that a hanging one fails the demo.
const requestTimeout = time.Minute

// run is one demo.
type run struct {
	o     Options
	dir   string
	model string
	start time.Time
	http  *http.Client
	fleet *fleet
	undo  []func()

	whole string // address of the undivided engine

	asked, done, equal atomic.Int64
	mu                 sync.Mutex
	results            []result
	outages            []outage
}

// result is one prompt's outcome.
type result struct {
	prompt     int
	start, end time.Time
	answer     answer
	cut        bool   // the demo cut this client's connection on purpose
	wrong      bool   // an answer, and another one than the undivided engine's
	fault      string // "" when equal
}

func (d *run) close() {
	for _, u := range slices.Backward(d.undo) {
		u()
	}
	if d.fleet != nil {
		d.fleet.stop()
	}
	d.http.CloseIdleConnections()
}

// reference starts the undivided engine, in this process.
func (d *run) reference(ctx context.Context) error {
	e, err := engine.New(engine.Config{ChunkSize: chunkTokens, TokenBudget: tokenBudget})
	if err != nil {
		return err
	}
	srv, addr, err := admin.Serve(ctx, "127.0.0.1:0", nil, e.Handler(), slog.New(slog.DiscardHandler))
	if err != nil {
		e.Close()
		return err
	}
	d.whole = addr
	d.undo = append(d.undo, func() { srv.Close(); e.Close() })
	return nil
}

// ask asks all prompts, some at a time, and compares each answer.
func (d *run) ask(ctx context.Context, prompts []prompt) {
	next := make(chan int)
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			for i := range next {
				d.one(ctx, i, prompts[i])
			}
		})
	}
	for i := range prompts {
		select {
		case next <- i:
		case <-ctx.Done():
		}
	}
	close(next)
	wg.Wait()
}

// one asks one prompt at the front door and at the undivided engine.
func (d *run) one(ctx context.Context, i int, p prompt) {
	d.asked.Add(1)
	r := result{prompt: i, start: time.Now()}
	var err error
	r.answer, err = ask(ctx, d.http, d.fleet.proxyAt.HTTP, d.model, p)
	r.end = time.Now()
	if err != nil {
		r.fault = err.Error()
	} else if want, err := ask(ctx, d.http, d.whole, d.model, p); err != nil {
		r.fault = "undivided engine: " + err.Error()
	} else {
		r.fault = r.answer.differs(want)
		r.wrong = r.fault != ""
	}
	d.finish(r)
	if err != nil { // what is down shall not be asked in a tight loop
		d.wait(ctx, 20*time.Millisecond)
	}
}

// wait returns after t, or with ctx.
func (d *run) wait(ctx context.Context, t time.Duration) bool {
	timer := time.NewTimer(t)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

func (d *run) finish(r result) {
	d.done.Add(1)
	if r.fault == "" {
		d.equal.Add(1)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.results = append(d.results, r)
}

// seeds runs the design's example: two requests of 8 chunks each for a pool of
// 10 slots, from two prefill nodes, and again both from one.
func (d *run) seeds(ctx context.Context) error {
	pair := func() []prompt {
		var out []prompt
		for i := range 2 {
			text := make([]byte, 8*chunkTokens-5)
			for j := range text {
				text[j] = byte('a' + (j*7+i*5)%26)
			}
			out = append(out, prompt{Kind: "completion", MaxTokens: 8, Stream: i == 0, Prompt: fmt.Appendf(nil, "%q", text)})
		}
		return out
	}
	fmt.Fprintf(d.o.Out, "two requests of 8 chunks for %d slots, from two prefill nodes\n", poolSlots)
	d.ask(ctx, pair())
	fmt.Fprintf(d.o.Out, "and again, both from one node\n")
	other := d.fleet.prefill()[1]
	if err := d.fleet.admit(ctx, other, false); err != nil {
		return err
	}
	d.ask(ctx, pair())
	return d.fleet.admit(ctx, other, true)
}

const progressEvery = 500 * time.Millisecond

// progress prints a line while something moves, until the run is closed.
func (d *run) progress(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(progressEvery)
		defer tick.Stop()
		var before, shown int64
		for {
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
			s, err := d.fleet.status(ctx, d.fleet.decode())
			done := d.done.Load()
			if err != nil || s.Pool == nil || done == shown && s.Totals.Bytes == before {
				continue
			}
			shown = done
			fmt.Fprintf(d.o.Out, "%5.1f s  %d of %d answered, %d equal; waiting %d; slots: %d free %d granted %d committed %d claimed %d quarantined; %.2f MB/s\n",
				time.Since(d.start).Seconds(), d.done.Load(), d.asked.Load(), d.equal.Load(), s.Waiting,
				s.Pool.Free, s.Pool.Granted+s.Pool.Reserved, s.Pool.Committed, s.Pool.Claimed, s.Pool.Quarantined, float64(s.Totals.Bytes-before)/1e6/progressEvery.Seconds())
			before = s.Totals.Bytes
		}
	})
	d.undo = append(d.undo, func() { cancel(); wg.Wait() })
}

// keep leaves everything running and says how to use it.
func (d *run) keep(ctx context.Context, rep *Report) {
	rep.Print(d.o.Out)
	fmt.Fprintf(d.o.Out, "\nrunning until Ctrl-C. Try:\n  curl -s http://%s/v1/completions -H 'Content-Type: application/json' -d '{\"model\": %q, \"prompt\": \"A ship books a berth\", \"max_tokens\": 16}'\n",
		d.fleet.proxyAt.HTTP, d.model)
	fmt.Fprintf(d.o.Out, "proxy              http://%s\n", d.fleet.proxyAt.HTTP)
	for _, n := range d.fleet.nodes {
		fmt.Fprintf(d.o.Out, "%-18s agent http://%s/v1/status, berth status --socket %s; engine http://%s\n", n.name, n.agentAddrs.HTTP, n.agentAddrs.Local, n.engineAddrs.HTTP)
	}
	<-ctx.Done()
}

// Self returns the running binary, for Options.Binary.
func Self() (string, error) {
	self, err := os.Executable()
	if errors.Is(err, exec.ErrDot) {
		err = nil
	}
	return self, err
}
