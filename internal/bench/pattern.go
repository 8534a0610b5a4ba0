package bench

import (
	"bufio"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Patterns of arrivals.
const (
	Closed     = "closed"      // no arrivals: a fixed number in flight
	Fixed      = "fixed"       // evenly spaced
	Poisson    = "poisson"     // independent of each other
	LongTailed = "long-tailed" // bursts and pauses: Pareto gaps, shape 1.5
)

// Patterns lists the names that Load.Pattern takes; a path to a trace is
// another.
var Patterns = []string{Closed, Fixed, Poisson, LongTailed}

// Load is how requests come.
type Load struct {
	Pattern string  // one of Patterns, or the path of a trace: a number of seconds a line, ascending
	Rate    float64 // requests a second; of no meaning for Closed and a trace
}

// arrivals returns when n requests come; nil for Closed. A trace is repeated
// until there are n. The same n and load give the same arrivals.
func (l Load) arrivals(n int) ([]time.Duration, error) {
	if l.Pattern == Closed || l.Pattern == "" {
		return nil, nil
	}
	rng := rand.New(rand.NewPCG(1, uint64(n)))
	const shape = 1.5
	var gap func() float64 // with mean 1
	switch l.Pattern {
	case Fixed:
		gap = func() float64 { return 1 }
	case Poisson:
		gap = rng.ExpFloat64
	case LongTailed:
		gap = func() float64 { return (shape - 1) / shape * math.Pow(1-rng.Float64(), -1/shape) }
	default:
		return trace(l.Pattern, n)
	}
	if !(l.Rate > 0) {
		return nil, refuse("--rate is %v; pattern %s needs requests a second above 0", l.Rate, l.Pattern)
	}
	at, out := 0.0, make([]time.Duration, n)
	for i := range out {
		out[i] = time.Duration(at / l.Rate * 1e9)
		at += gap()
	}
	return out, nil
}

func trace(path string, n int) ([]time.Duration, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, refuse("--pattern %s is none of %s and no trace: %w", path, strings.Join(Patterns, ", "), err)
	}
	defer f.Close()
	once, err := readTrace(f)
	if err != nil {
		return nil, refuse("trace %s: %w", path, err)
	}
	period := once[len(once)-1] + max(once[len(once)-1]/time.Duration(len(once)), time.Microsecond)
	out := make([]time.Duration, n)
	for i := range out {
		out[i] = once[i%len(once)] + time.Duration(i/len(once))*period
	}
	return out, nil
}

func readTrace(r io.Reader) (out []time.Duration, err error) {
	s := bufio.NewScanner(r)
	for line := 1; s.Scan(); line++ {
		text, _, _ := strings.Cut(s.Text(), "#")
		if text = strings.TrimSpace(text); text == "" {
			continue
		}
		v, err := strconv.ParseFloat(text, 64)
		if err != nil || !(v >= 0) || v > 1e9 {
			return nil, fmt.Errorf("line %d is %q; it must be seconds from the start", line, s.Text())
		}
		out = append(out, time.Duration(v*1e9))
	}
	if err := s.Err(); err != nil {
		return nil, err
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("it is empty")
	}
	if !slices.IsSorted(out) {
		return nil, fmt.Errorf("its times are not in ascending order")
	}
	return out, nil
}

func (l Load) String() string {
	switch {
	case slices.Contains(Patterns[1:], l.Pattern):
		return fmt.Sprintf("%s at %s/s", l.Pattern, figure(l.Rate))
	case slices.Contains(Patterns, l.Pattern):
		return l.Pattern
	}
	return "as in " + filepath.Base(l.Pattern)
}
