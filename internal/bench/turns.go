package bench

import (
	"fmt"
	"slices"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// side is one of the systems that a benchmark compares.
type side struct {
	name   string
	paused []*child // stopped (SIGSTOP) while others have their turn, so that they spend nothing then
	// turn measures once; the first time is the warm-up and does not count.
	turn func() (sample, error)
}

// sample is what one turn gave: a figure for each metric, and latencies for the
// plot if there are any.
type sample struct {
	figures []float64
	hist    *hdrhistogram.Histogram
}

type metric struct{ name, unit string }

// timed are the metrics of whole turns of requests, and timedSample their sample.
var timed = []metric{{"rate", "per second"}, {"p50", "µs"}, {"p99", "µs"}}

func timedSample(t timing) sample {
	h := histogram(t.latency)
	return sample{[]float64{t.perSecond(), quantile(h, 50), quantile(h, 99)}, h}
}

// compare has the sides take turns, the first of them ours and what it is
// compared with after it, and adds a row for each metric, named after what.
// It returns the means, by side and metric.
func (r *run) compare(what, checks string, metrics []metric, sides ...side) (means [][]float64, err error) {
	figures := make([][][]float64, len(sides)) // by side and metric, one for each turn
	hists := make([]*hdrhistogram.Histogram, len(sides))
	order := make([]int, len(sides))
	for i := range sides {
		figures[i], hists[i], order[i] = make([][]float64, len(metrics)), histogram(nil), i
	}
	for turn := range r.Repeat + 1 {
		for _, i := range order {
			if err := r.ctx.Err(); err != nil {
				return nil, err
			}
			s := sides[i]
			for _, k := range s.paused {
				k.resume()
			}
			got, err := s.turn()
			if err != nil {
				return nil, fmt.Errorf("%s: %s: %w", what, s.name, err)
			}
			for _, k := range s.paused {
				k.pause()
			}
			if turn == 0 {
				r.say("%s: %s is warm", what, s.name)
				continue
			}
			text := ""
			for m, v := range got.figures {
				figures[i][m] = append(figures[i][m], v)
				text += fmt.Sprintf(", %s %s %s", metrics[m].name, figure(v), metrics[m].unit)
			}
			if got.hist != nil {
				hists[i].Merge(got.hist)
			}
			r.say("%s: %s %d/%d%s", what, s.name, turn, r.Repeat, text)
		}
		slices.Reverse(order) // who is first is second next time
	}
	for m, metric := range metrics {
		theirs, name := []float64(nil), ""
		if len(sides) > 1 {
			theirs, name = figures[1][m], sides[1].name
		}
		r.add(what+": "+metric.name, metric.unit, checks, name, figures[0][m], theirs)
	}
	drawn := plot{what: what}
	for i, s := range sides {
		if hists[i].TotalCount() > 0 {
			drawn.curves = append(drawn.curves, curve{s.name, hists[i]})
		}
		means = append(means, nil)
		for m := range metrics {
			means[i] = append(means[i], mean(figures[i][m]))
		}
	}
	if drawn.curves != nil {
		r.plots = append(r.plots, drawn)
	}
	return means, nil
}
