package demo

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"
)

// outage is one thing that the demo broke, from when until it served again.
type outage struct {
	what       string
	node       string // whose requests may fail; "" for those of all
	from, till time.Time
}

func (o outage) String() string {
	return fmt.Sprintf("%s; back after %.1f s", o.what, o.till.Sub(o.from).Seconds())
}

// excused: the request was in flight at what was broken, or sent to it before
// it was ready again, and said clearly that it failed.
func (d *run) excused(r result) bool {
	if strings.HasPrefix(r.fault, "token ids") || strings.HasPrefix(r.fault, "text") || strings.HasPrefix(r.fault, "finish_reason") {
		return false // an answer, and a wrong one
	}
	for _, o := range d.outages {
		if r.end.Before(o.from) || r.start.After(o.till) {
			continue
		}
		// A failure without the header came before a node was chosen or with the
		// proxy's own end.
		if o.node == "" || r.answer.prefill == "" || strings.Contains(r.answer.prefill+" "+r.answer.decode, o.node) {
			return true
		}
	}
	return false
}

// chaos asks the prompts over and over while it kills and cuts.
func (d *run) chaos(ctx context.Context, prompts []prompt) {
	cctx, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		for cctx.Err() == nil {
			d.ask(ctx, prompts)
		}
	})
	f := d.fleet
	p1, p2 := f.prefill()[0], f.prefill()[1]
	steps := []struct {
		what  string
		node  *node
		procs []*process
	}{
		{"kill -9 of the agent of " + p1.name, p1, []*process{p1.agent}},
		{"kill -9 of the engine of " + p2.name, p2, []*process{p2.engine}},
		{"kill -9 of the engine of " + f.decode().name, f.decode(), []*process{f.decode().engine}},
		{"kill -9 of the proxy", nil, []*process{f.proxy}},
	}
	for _, s := range steps {
		if !d.pause(ctx) {
			break
		}
		o := outage{what: s.what, from: time.Now()}
		if s.node != nil && s.node != f.decode() {
			o.node = s.node.relayAddr()
		}
		fmt.Fprintln(d.o.Out, "chaos:", s.what)
		var err error
		for _, p := range s.procs {
			p.kill()
			if err = f.restart(ctx, p); err != nil {
				break
			}
		}
		if err == nil {
			err = f.allReady(ctx)
		}
		if err != nil {
			d.finish(result{prompt: -1, fault: "token ids: restart after " + s.what + ": " + err.Error()})
			break
		}
		o.till = time.Now()
		d.mu.Lock()
		d.outages = append(d.outages, o)
		d.mu.Unlock()
	}
	for _, n := range f.nodes {
		if !d.pause(ctx) {
			break
		}
		o := outage{what: "connections between the proxy and the engine of " + n.name + " cut", from: time.Now()}
		if n != f.decode() {
			o.node = n.relayAddr()
		}
		k := n.relay.cut()
		o.what = fmt.Sprintf("%d %s", k, o.what)
		fmt.Fprintln(d.o.Out, "chaos:", o.what)
		o.till = time.Now()
		d.mu.Lock()
		d.outages = append(d.outages, o)
		d.mu.Unlock()
	}
	d.cutClients(ctx, prompts)
	stop()
	wg.Wait()
}

// pause lets the load run between two blows.
func (d *run) pause(ctx context.Context) bool {
	t := time.NewTimer(700 * time.Millisecond)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// cutClients hangs up on streams as soon as their first token is there.
func (d *run) cutClients(ctx context.Context, prompts []prompt) {
	var wg sync.WaitGroup
	for i, p := range prompts[len(prompts)/2:] {
		if i >= clients {
			break
		}
		wg.Go(func() {
			cctx, cancel := context.WithCancel(ctx)
			defer cancel()
			p.Stream = true
			r := result{prompt: len(prompts)/2 + i, start: time.Now(), cut: true, fault: "cut by the client"}
			d.asked.Add(1)
			resp, err := d.post(cctx, p)
			if err == nil {
				b := make([]byte, 1)
				resp.Body.Read(b) // the first byte of the stream; then gone
				cancel()
				resp.Body.Close()
			}
			r.end = time.Now()
			d.finish(r)
		})
	}
	wg.Wait()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.outages = append(d.outages, outage{what: fmt.Sprintf("%d clients hung up in mid-stream", clients), node: "-", from: time.Now(), till: time.Now()})
}

func (d *run) post(ctx context.Context, p prompt) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+d.fleet.proxyAt.HTTP+p.path(), strings.NewReader(string(p.body(d.model))))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	return d.http.Do(req)
}
