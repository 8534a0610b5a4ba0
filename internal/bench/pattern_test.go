package bench

import (
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestArrivals(t *testing.T) {
	const n, rate = 20_000, 1000.0
	for _, c := range []struct {
		pattern string
		spread  float64 // standard deviation of the gaps by their mean, about
		within  float64
	}{{Fixed, 0, 0.01}, {Poisson, 1, 0.05}, {LongTailed, 4, 3}} {
		l := Load{c.pattern, rate}
		at, err := l.arrivals(n)
		if err != nil || len(at) != n || at[0] != 0 || !slices.IsSorted(at) {
			t.Fatalf("%s: %d arrivals, %v", l, len(at), err)
		}
		again, _ := l.arrivals(n)
		if !slices.Equal(at, again) {
			t.Errorf("%s: not the same twice", l)
		}
		var gaps []float64
		for i := range at[1:] {
			gaps = append(gaps, (at[i+1]-at[i]).Seconds()*rate)
		}
		m, sum := mean(gaps), 0.0
		for _, g := range gaps {
			sum += (g - m) * (g - m)
		}
		if math.Abs(m-1) > 0.1 {
			t.Errorf("%s: the mean gap is %v of what the rate says", l, m)
		}
		if spread := math.Sqrt(sum / float64(len(gaps))); math.Abs(spread-c.spread) > c.within {
			t.Errorf("%s: the gaps' spread is %v, want about %v", l, spread, c.spread)
		}
	}
	if at, err := (Load{Pattern: Closed}).arrivals(n); at != nil || err != nil {
		t.Errorf("closed has arrivals: %v", err)
	}
}

func TestTrace(t *testing.T) {
	file := filepath.Join(t.TempDir(), "trace")
	for _, c := range []struct {
		text string
		n    int
		want []time.Duration
		err  string
	}{
		{"0\n0.5 # half\n\n# nothing\n1.5\n", 2, []time.Duration{0, 5e8}, ""},
		{"0\n1\n3\n", 7, []time.Duration{0, 1e9, 3e9, 4e9, 5e9, 7e9, 8e9}, ""},
		{"2\n2\n", 3, []time.Duration{2e9, 2e9, 5e9}, ""},
		{"0\n", 2, []time.Duration{0, 1e3}, ""},
		{"", 1, nil, "it is empty"},
		{"1\n0\n", 1, nil, "not in ascending order"},
		{"0\nx\n", 1, nil, `line 2 is "x"`},
		{"-1\n", 1, nil, "line 1"},
		{"NaN\n", 1, nil, "line 1"},
		{"1e10\n", 1, nil, "line 1"},
	} {
		if err := os.WriteFile(file, []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := Load{Pattern: file}.arrivals(c.n)
		switch {
		case c.err == "" && (err != nil || !slices.Equal(got, c.want)):
			t.Errorf("%q: %v, %v; want %v", c.text, got, err, c.want)
		case c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err) || !strings.Contains(err.Error(), file)):
			t.Errorf("%q: %v; want %q", c.text, err, c.err)
		}
	}
	if got := (Load{Pattern: file}).String(); got != "as in trace" {
		t.Error(got)
	}
}
