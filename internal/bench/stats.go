package bench

import (
	"math"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// longest is the largest latency that a histogram holds.
const longest = 10 * time.Minute

// histogram counts latencies in nanoseconds, to three digits.
func histogram(lat []time.Duration) *hdrhistogram.Histogram {
	h := hdrhistogram.New(1, int64(longest), 3)
	for _, d := range lat {
		h.RecordValue(int64(min(max(d, 1), longest))) // within the range: it cannot fail
	}
	return h
}

// quantile returns a quantile (0 to 100) in microseconds.
func quantile(h *hdrhistogram.Histogram, q float64) float64 {
	return float64(h.ValueAtQuantile(q)) / 1e3
}

func mean(v []float64) float64 {
	sum := 0.0
	for _, x := range v {
		sum += x
	}
	return sum / float64(max(len(v), 1))
}

// student has the two-sided 95 % quantiles of Student's t by degrees of freedom.
var student = []float64{0, 12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086}

// interval returns the 95 % confidence interval of the mean, nil for fewer than
// two values.
func interval(v []float64) *[2]float64 {
	n := len(v)
	if n < 2 {
		return nil
	}
	m, sum := mean(v), 0.0
	for _, x := range v {
		sum += (x - m) * (x - m)
	}
	t := 1.96
	if n-1 < len(student) {
		t = student[n-1]
	}
	half := t * math.Sqrt(sum/float64(n-1)/float64(n))
	return &[2]float64{m - half, m + half}
}
