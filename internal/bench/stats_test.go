package bench

import (
	"math"
	"testing"
	"time"
)

func TestInterval(t *testing.T) {
	for _, c := range []struct {
		values   []float64
		mean     float64
		from, to float64 // equal: there is none
	}{
		{nil, 0, 0, 0},
		{[]float64{7}, 7, 0, 0},
		{[]float64{4, 4}, 4, 4, 4},
		{[]float64{1, 3}, 2, 2 - 12.71, 2 + 12.71},
		{[]float64{1, 2, 3, 4, 5}, 3, 3 - 2.776*math.Sqrt(0.5), 3 + 2.776*math.Sqrt(0.5)},
	} {
		got := interval(c.values)
		if mean(c.values) != c.mean {
			t.Errorf("mean(%v) = %v, want %v", c.values, mean(c.values), c.mean)
		}
		if len(c.values) < 2 {
			if got != nil {
				t.Errorf("interval(%v) = %v of too few values", c.values, *got)
			}
			continue
		}
		if got == nil || math.Abs(got[0]-c.from) > 1e-9 || math.Abs(got[1]-c.to) > 1e-9 {
			t.Errorf("interval(%v) = %v, want %v to %v", c.values, got, c.from, c.to)
		}
	}
	many := make([]float64, 1000)
	for i := range many {
		many[i] = float64(i % 2)
	}
	if got := interval(many); math.Abs(got[1]-got[0]-2*1.96*0.5/math.Sqrt(999)) > 1e-6 {
		t.Errorf("interval of many: %v", *got)
	}
}

func TestHistogram(t *testing.T) {
	var lat []time.Duration
	for i := range 1000 {
		lat = append(lat, time.Duration(i+1)*time.Microsecond)
	}
	h := histogram(append(lat, -1, time.Hour)) // what cannot be is counted at the ends
	for _, c := range []struct{ q, want float64 }{{0, 0.001}, {50, 500}, {99, 991}, {100, 600e6}} {
		if got := quantile(h, c.q); math.Abs(got-c.want) > c.want/500 {
			t.Errorf("quantile %v is %v µs, want %v", c.q, got, c.want)
		}
	}
	if h.TotalCount() != 1002 {
		t.Errorf("%d values", h.TotalCount())
	}
}
