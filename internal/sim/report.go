package sim

import (
	"fmt"
	"io"
	"slices"
	"sort"
	"strings"

	"github.com/berthkv/berth/internal/kv"
)

// Report is what a run has measured. Times are virtual, in seconds.
type Report struct {
	Seed      uint64         `json:"seed"`
	Senders   int            `json:"senders"`
	Receivers int            `json:"receivers"`
	Proxies   int            `json:"proxies"`
	Requests  int            `json:"requests"`
	Seconds   float64        `json:"seconds"` // from the first arrival to the last slot that came free
	Steps     int            `json:"steps"`
	Trace     string         `json:"trace"` // hash of everything that happened
	Over      map[string]int `json:"over"`  // requests by how they ended for their client
	Admitted  int            `json:"admitted"`
	Busy      int            `json:"busy"`    // refusals that are no ending
	Trusted   int            `json:"trusted"` // writers trusted to be gone: R6's exception

	Wait        Quantiles `json:"admission_wait_seconds"`
	Utilisation float64   `json:"utilisation"` // slots not free, of all, over the time of arrivals
	Fairness    Fairness  `json:"fairness"`
	Overtaken   Overtaken `json:"overtaken"`
	Faults      Struck    `json:"faults"`

	waits  []kv.Duration
	bySend [][2]float64 // sum of waits, count
	used   float64
	looked int
}

// Quantiles of a time.
type Quantiles struct {
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
	Max float64 `json:"max"`
}

// Fairness compares senders by their mean wait for admission.
type Fairness struct {
	Mean  float64 `json:"mean_wait_seconds"`
	Max   float64 `json:"max_wait_seconds"` // of a sender's mean
	Ratio float64 `json:"max_to_mean"`
}

// Overtaken tells by how many chunks requests that waited were passed.
type Overtaken struct {
	Bound int64 `json:"bound"` // admission_bypass_chunks
	Max   int64 `json:"max"`
	Total int64 `json:"total"` // passings
}

// Struck counts faults, and what they did to messages.
type Struck struct {
	Kinds      map[Kind]int `json:"kinds,omitempty"`
	Lost       int          `json:"messages_lost"`
	Duplicates int          `json:"messages_twice"`
}

func (r *Report) begin(w *world) {
	sc := w.sc
	*r = Report{Seed: sc.Seed, Senders: sc.Senders, Receivers: sc.Receivers, Proxies: sc.Proxies, Requests: len(sc.Requests),
		Over: map[string]int{}, bySend: make([][2]float64, sc.Senders), waits: make([]kv.Duration, 0, len(sc.Requests)),
		Overtaken: Overtaken{Bound: sc.Bypass}, Faults: Struck{Kinds: map[Kind]int{}}}
}

func (r *Report) admitted(q *request) {
	r.Admitted++
	r.waits = append(r.waits, q.waited)
	r.bySend[q.Sender][0] += q.waited.Seconds()
	r.bySend[q.Sender][1]++
}

func (r *Report) overtaken(q *request) {
	r.Overtaken.Total++
	r.Overtaken.Max = max(r.Overtaken.Max, q.passed)
}

func (r *Report) over(_ *request, outcome string) { r.Over[outcome]++ }

func (r *Report) struck(k Kind) { r.Faults.Kinds[k]++ }

func (r *Report) sample(w *world) {
	if w.now > kv.Instant(w.sc.Requests[len(w.sc.Requests)-1].At) {
		return
	}
	for _, x := range w.receivers {
		r.looked += w.sc.Capacity
		if x.up {
			p := x.node.Pool()
			r.used += float64(p.Capacity - p.Free)
		}
	}
}

func (r *Report) end(w *world) Report {
	r.Seconds = kv.Duration(w.now).Seconds()
	r.Steps = w.steps
	r.Trace = fmt.Sprintf("%016x", uint64(w.hash))
	if n := len(r.waits); n > 0 {
		slices.Sort(r.waits)
		at := func(q float64) float64 { return r.waits[min(int(q*float64(n)), n-1)].Seconds() }
		r.Wait = Quantiles{at(.5), at(.99), at(1)}
	}
	if r.looked > 0 {
		r.Utilisation = r.used / float64(r.looked)
	}
	sum, count := 0.0, 0
	for _, s := range r.bySend {
		if s[1] > 0 {
			m := s[0] / s[1]
			sum, count = sum+m, count+1
			r.Fairness.Max = max(r.Fairness.Max, m)
		}
	}
	if count > 0 && sum > 0 {
		r.Fairness.Mean = sum / float64(count)
		r.Fairness.Ratio = r.Fairness.Max / r.Fairness.Mean
	}
	return *r
}

// Write prints the report for people.
func (r *Report) Write(w io.Writer) {
	fmt.Fprintf(w, "seed %d: %d requests of %d senders to %d receivers, %d proxies; %.1f s of virtual time, %d steps, trace %s\n",
		r.Seed, r.Requests, r.Senders, r.Receivers, r.Proxies, r.Seconds, r.Steps, r.Trace)
	fmt.Fprintf(w, "  admitted %d, waits p50 %.4f s, p99 %.4f s, max %.4f s; utilisation %.2f\n", r.Admitted, r.Wait.P50, r.Wait.P99, r.Wait.Max, r.Utilisation)
	fmt.Fprintf(w, "  fairness: mean wait %.4f s, of the sender that waits longest %.4f s (%.2f times); overtaken by at most %d chunks, bound %d\n",
		r.Fairness.Mean, r.Fairness.Max, r.Fairness.Ratio, r.Overtaken.Max, r.Overtaken.Bound)
	fmt.Fprintf(w, "  over: %s\n", counts(r.Over))
	kinds := map[string]int{}
	for k, n := range r.Faults.Kinds {
		kinds[string(k)] = n
	}
	fmt.Fprintf(w, "  faults: %s; messages lost %d, twice %d; writers trusted to be gone %d\n", counts(kinds), r.Faults.Lost, r.Faults.Duplicates, r.Trusted)
}

// counts prints a table on one line, the most frequent first.
func counts(m map[string]int) string {
	var keys []string
	for k := range m {
		keys = append(keys, k)
	}
	sort.Slice(keys, func(i, j int) bool {
		a, b := keys[i], keys[j]
		return m[a] > m[b] || m[a] == m[b] && a < b
	})
	var out []string
	for _, k := range keys {
		out = append(out, fmt.Sprintf("%s %d", k, m[k]))
	}
	if len(out) == 0 {
		return "none"
	}
	return strings.Join(out, ", ")
}
