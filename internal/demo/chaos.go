package demo

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
)

// outage is one thing that the demo broke, from when until it served again.
type outage struct {
	what       string
	engine     string // address of the engine whose requests may fail; "": those of the proxy
	from, till time.Time
}

func (o outage) String() string {
	if o.till.Equal(o.from) {
		return o.what
	}
	return fmt.Sprintf("%s; back after %.2f s", o.what, o.till.Sub(o.from).Seconds())
}

// excused: the request was in flight at what was broken, or was sent to it
// before it was ready again, and was told so; a wrong answer never is.
func (d *run) excused(r result) bool {
	if r.wrong {
		return false
	}
	return slices.ContainsFunc(d.outages, func(o outage) bool {
		if r.end.Before(o.from) || r.start.After(o.till) {
			return false
		}
		return o.engine == "" || slices.Contains(r.answer.nodes, o.engine)
	})
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
	kills := []struct {
		what   string
		engine string
		p      *process
	}{
		{"kill -9 of the agent of " + p1.name, p1.relayAddr(), p1.agent},
		{"kill -9 of the engine of " + p2.name, p2.relayAddr(), p2.engine},
		{"kill -9 of the engine of " + f.decode().name, f.decode().relayAddr(), f.decode().engine},
		{"kill -9 of the proxy", "", f.proxy},
	}
	for _, k := range kills {
		if !d.pause(ctx) {
			break
		}
		o := d.breakIt(k.what, k.engine)
		k.p.kill()
		err := f.restart(ctx, k.p)
		if err == nil {
			err = f.allReady(ctx)
		}
		d.mended(o)
		if err != nil && ctx.Err() == nil {
			d.finish(result{prompt: -1, wrong: true, fault: "restart after " + k.what + ": " + err.Error()})
			break
		}
	}
	for _, n := range f.nodes {
		if !d.pause(ctx) {
			break
		}
		o := d.breakIt("connections between the proxy and the engine of "+n.name+" cut", n.relayAddr())
		n.relay.cut()
		d.mended(o)
	}
	d.cutClients(ctx, prompts)
	stop()
	wg.Wait()
}

// breakIt notes an outage before it begins; mended notes its end.
func (d *run) breakIt(what, engine string) (index int) {
	fmt.Fprintln(d.o.Out, "chaos:", what)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.outages = append(d.outages, outage{what: what, engine: engine, from: time.Now()})
	return len(d.outages) - 1
}

func (d *run) mended(index int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.outages[index].till = time.Now()
}

// pause lets the load run between two blows.
func (d *run) pause(ctx context.Context) bool { return d.wait(ctx, 700*time.Millisecond) }

// cutClients hangs up on streams as soon as their first token is there.
func (d *run) cutClients(ctx context.Context, prompts []prompt) {
	o := d.breakIt(fmt.Sprintf("%d clients hang up in mid-stream", clients), "none")
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
	d.mended(o)
}

func (d *run) post(ctx context.Context, p prompt) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+d.fleet.proxyAt.HTTP+p.path(), strings.NewReader(string(p.body(d.model))))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	return d.http.Do(req)
}
