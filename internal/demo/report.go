package demo

import (
	"context"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"
)

// Report is what a demo found. Its JSON names are stable.
type Report struct {
	Requests int     `json:"requests"`
	Equal    int     `json:"equal"`
	Failed   int     `json:"failed"`  // differences and failures that are not excused
	Excused  int     `json:"excused"` // failed in flight at what --chaos had killed
	Chunks   int64   `json:"chunks"`
	Bytes    int64   `json:"bytes"`
	Seconds  float64 `json:"seconds"`
	Link     string  `json:"link"`

	AdmissionWait Quantiles `json:"admission_wait_seconds"`
	Transfer      Quantiles `json:"transfer_seconds"`
	FirstToken    Quantiles `json:"first_token_seconds"`

	Pools  []Pool   `json:"pools"`
	Faults []string `json:"faults"`
	Chaos  []string `json:"chaos,omitempty"` // what was killed or cut
}

// Quantiles are of seconds.
type Quantiles struct {
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
}

// Pool is one pool at the end.
type Pool struct {
	Node     string `json:"node"`
	Pool     string `json:"pool"` // receive or staging
	Capacity int    `json:"capacity"`
	Free     int    `json:"free"`
}

// OK: all answers equal but for excused failures, and no slot missing.
func (r *Report) OK() bool { return len(r.Faults) == 0 }

// drainTimeout is how long slots may take to come back: a lease, a quarantine
// and the TTL of what nobody claimed.
const drainTimeout = 15 * time.Second

// report waits for the slots and sums up.
func (d *run) report(ctx context.Context) (*Report, error) {
	rep := &Report{Seconds: time.Since(d.start).Seconds(), Faults: []string{}}
	d.mu.Lock()
	var first []float64
	for _, r := range d.results {
		rep.Requests++
		switch {
		case r.fault == "":
			rep.Equal++
			if r.answer.firstToken > 0 {
				first = append(first, r.answer.firstToken.Seconds())
			}
		case r.cut || d.excused(r):
			rep.Excused++
		default:
			rep.Failed++
			rep.Faults = append(rep.Faults, fmt.Sprintf("prompt %d: %s", r.prompt, r.fault))
		}
	}
	for _, o := range d.outages {
		rep.Chaos = append(rep.Chaos, o.String())
	}
	d.mu.Unlock()
	rep.FirstToken = quantiles(first)

	dctx, cancel := context.WithTimeout(ctx, drainTimeout)
	defer cancel()
	for _, n := range d.fleet.nodes {
		if err := d.pools(dctx, rep, n); err != nil {
			return rep, err
		}
	}
	return rep, nil
}

// pools waits until an agent's pools are free, or time is up, and adds them.
func (d *run) pools(ctx context.Context, rep *Report, n *node) error {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		s, err := d.fleet.status(context.WithoutCancel(ctx), n)
		if err != nil {
			return fmt.Errorf("%s: %w", n.name, err)
		}
		var ps []Pool
		if s.Pool != nil {
			ps = append(ps, Pool{n.name, "receive", s.Pool.Capacity, s.Pool.Free})
			rep.Chunks, rep.Bytes = s.Totals.Chunks, s.Totals.Bytes
			rep.AdmissionWait = Quantiles{s.Timings.AdmissionWait.P50, s.Timings.AdmissionWait.P99}
			rep.Transfer = Quantiles{s.Timings.Transfer.P50, s.Timings.Transfer.P99}
		}
		if s.Staging != nil {
			ps = append(ps, Pool{n.name, "staging", s.Staging.Capacity, s.Staging.Free})
			for _, p := range s.Peers {
				if p.Link != "" {
					rep.Link = p.Link
				}
			}
		}
		missing := slices.IndexFunc(ps, func(p Pool) bool { return p.Free != p.Capacity })
		if missing >= 0 && ctx.Err() == nil {
			select {
			case <-tick.C:
			case <-ctx.Done():
			}
			continue
		}
		rep.Pools = append(rep.Pools, ps...)
		for _, p := range ps {
			if p.Free != p.Capacity {
				rep.Faults = append(rep.Faults, fmt.Sprintf("%s %s pool: %d of %d slots are free", p.Node, p.Pool, p.Free, p.Capacity))
			}
		}
		return nil
	}
}

func quantiles(v []float64) Quantiles {
	if len(v) == 0 {
		return Quantiles{}
	}
	slices.Sort(v)
	return Quantiles{v[len(v)/2], v[min(len(v)*99/100, len(v)-1)]}
}

// Print writes the report as a table.
func (r *Report) Print(w io.Writer) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	ms := func(q Quantiles) string { return fmt.Sprintf("p50 %.2f ms, p99 %.2f ms", q.P50*1e3, q.P99*1e3) }
	fmt.Fprintf(t, "\nrequests\t%d\n", r.Requests)
	fmt.Fprintf(t, "equal answers\t%d\n", r.Equal)
	fmt.Fprintf(t, "failures\t%d\n", r.Failed)
	if len(r.Chaos) > 0 {
		fmt.Fprintf(t, "failed in flight at what was killed\t%d\n", r.Excused)
	}
	fmt.Fprintf(t, "moved\t%d chunks, %.2f MB over %s\n", r.Chunks, float64(r.Bytes)/1e6, r.Link)
	fmt.Fprintf(t, "admission wait\t%s\n", ms(r.AdmissionWait))
	fmt.Fprintf(t, "transfer\t%s\n", ms(r.Transfer))
	fmt.Fprintf(t, "first token\t%s\n", ms(r.FirstToken))
	for _, p := range r.Pools {
		fmt.Fprintf(t, "%s, %s pool\t%d of %d slots free\n", p.Node, p.Pool, p.Free, p.Capacity)
	}
	fmt.Fprintf(t, "time\t%.1f s\n", r.Seconds)
	t.Flush()
	for _, c := range r.Chaos {
		fmt.Fprintln(w, "chaos:", c)
	}
	for _, f := range r.Faults {
		fmt.Fprintln(w, "FAULT:", f)
	}
}
