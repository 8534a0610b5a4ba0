package chaos

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"text/tabwriter"
	"time"
)

// Report is what a run found.
type Report struct {
	Seed      uint64
	Network   string
	Requests  int
	Inflicted map[string]int            // faults by name
	Outcomes  map[string]map[string]int // by who heard it, and what
	Reads     int                       // chunks read, each compared byte by byte
	Wrong     int                       // of them
	Events    int                       // of the histories that were checked
	Longest   time.Duration             // of a request
	Rest      time.Duration             // the longest wait for free = capacity
	Packets   int
	Dropped   int
	Seconds   float64
	Growth    []Growth
	Faults    []string // what must not be
	History   []Event  // of the rounds with faults
	Kept      string   // folder of what a failure needs; "" without one
	kept      int      // faults whose round is in History
}

func newReport(o Options) *Report {
	return &Report{Seed: o.Seed, Inflicted: map[string]int{}, Outcomes: map[string]map[string]int{}}
}

func (r *Report) count(who, what string) {
	if r.Outcomes[who] == nil {
		r.Outcomes[who] = map[string]int{}
	}
	r.Outcomes[who][what]++
}

// Print writes the report as a table.
func (r *Report) Print(w io.Writer) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(name, format string, args ...any) {
		fmt.Fprintf(t, "%s\t"+format+"\n", append([]any{name}, args...)...)
	}
	row("seed", "%d", r.Seed)
	row("network", "%s", r.Network)
	row("requests", "%d in %.0f s", r.Requests, r.Seconds)
	total := 0
	for _, name := range slices.Sorted(maps.Keys(r.Inflicted)) {
		row("  fault", "%3d x %s", r.Inflicted[name], name)
		total += r.Inflicted[name]
	}
	row("faults inflicted", "%d of %d kinds", total, len(r.Inflicted))
	for _, who := range slices.Sorted(maps.Keys(r.Outcomes)) {
		for _, what := range slices.Sorted(maps.Keys(r.Outcomes[who])) {
			row("  "+who, "%6d x %s", r.Outcomes[who][what], what)
		}
	}
	row("chunks read", "%d, every byte compared", r.Reads)
	row("wrong", "%d", r.Wrong)
	row("history", "%d events checked against the model", r.Events)
	row("longest request", "%.1f s (deadline %.0f s)", r.Longest.Seconds(), deadline.Seconds())
	row("longest wait for free = capacity", "%.1f s (lease %.0f s, quarantine %.0f s, unclaimed %.0f s)",
		r.Rest.Seconds(), lease.Seconds(), quarantine.Seconds(), unclaimedTTL.Seconds())
	row("on the wire", "%d passed, %d dropped", r.Packets, r.Dropped)
	for _, g := range r.Growth {
		row("  "+g.Process, "%s", g)
	}
	row("faults found", "%d", len(r.Faults))
	t.Flush()
	for _, f := range r.Faults {
		fmt.Fprintln(w, "FAULT:", f)
	}
}

// series is what processes had over time.
type series struct {
	at   map[string][]time.Duration
	what map[string][]footprint
}

func newSeries() *series {
	return &series{map[string][]time.Duration{}, map[string][]footprint{}}
}

func (s *series) add(name string, at time.Duration, f footprint) {
	s.at[name], s.what[name] = append(s.at[name], at), append(s.what[name], f)
}

// Growth is the slope of what one process has, in units per hour, over the
// second half of a soak, by least squares; and whether it is growth.
type Growth struct {
	Process              string
	Samples              int
	RSS, FDs, Goroutines float64 // per hour; RSS in MiB
	LastRSS              float64 // MiB
	LastN                footprint
	Grows                bool
}

func (g Growth) String() string {
	verdict := "no growth"
	if g.Grows {
		verdict = "GROWTH"
	}
	return fmt.Sprintf("%s: RSS %.1f MiB (%+.2f MiB/h), %d descriptors (%+.1f/h), %d goroutines (%+.1f/h); %d samples",
		verdict, g.LastRSS, g.RSS, g.LastN.FDs, g.FDs, g.LastN.Goroutines, g.Goroutines, g.Samples)
}

// What the median of the last quarter may be above that of the second quarter,
// at rest, and still be no growth: both a count and a share.
const (
	moveCount = 6
	moveRSS   = 8.0 // MiB
	moveShare = 0.1
)

func (s *series) growth() []Growth {
	var out []Growth
	for _, name := range slices.Sorted(maps.Keys(s.at)) {
		at, what := s.at[name], s.what[name]
		n := len(at)
		if n < 4 {
			continue
		}
		g := Growth{Process: name, Samples: n, LastN: what[n-1], LastRSS: float64(what[n-1].RSS) / (1 << 20)}
		pick := func(of func(footprint) float64) (slope float64, moved bool, limit float64) {
			v := make([]float64, n)
			for i, f := range what {
				v[i] = of(f)
			}
			early, late := median(v[n/4:n/2]), median(v[n-n/4:])
			return slopePerHour(at[n/2:], v[n/2:]), late > early*(1+moveShare), late - early
		}
		var m bool
		var by float64
		g.RSS, m, by = pick(func(f footprint) float64 { return float64(f.RSS) / (1 << 20) })
		g.Grows = m && by > moveRSS
		g.FDs, m, by = pick(func(f footprint) float64 { return float64(f.FDs) })
		g.Grows = g.Grows || m && by > moveCount
		g.Goroutines, m, by = pick(func(f footprint) float64 { return float64(f.Goroutines) })
		g.Grows = g.Grows || m && by > moveCount
		out = append(out, g)
	}
	return out
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return v[len(v)/2]
}

// slopePerHour fits a line.
func slopePerHour(at []time.Duration, v []float64) float64 {
	var sx, sy, sxx, sxy float64
	n := float64(len(at))
	for i := range at {
		x := at[i].Hours()
		sx, sy, sxx, sxy = sx+x, sy+v[i], sxx+x*x, sxy+x*v[i]
	}
	if d := n*sxx - sx*sx; d != 0 {
		return (n*sxy - sx*sy) / d
	}
	return 0
}
