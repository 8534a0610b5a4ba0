package sim

import (
	"errors"
	"slices"

	"github.com/berthkv/berth/internal/kv"
)

// Minimise makes a scenario smaller for as long as its run breaks the same rule
// and more says so. It returns the smallest that it has found, and what breaks
// there. The scenario it is given stays as it is.
func Minimise(sc *Scenario, v *Violation, run Run, more func() bool) (*Scenario, *Violation) {
	m := minimiser{best: sc, bad: v, run: run, more: more}
	m.run.Trace = nil
	m.until(v.At)
	for {
		faults, requests := len(m.best.Faults), len(m.best.Requests)
		shrink(&m, func(sc *Scenario) *[]Fault { return &sc.Faults })
		shrink(&m, func(sc *Scenario) *[]Request { return &sc.Requests })
		if len(m.best.Faults) == faults && len(m.best.Requests) == requests || !m.more() {
			return m.best, m.bad
		}
	}
}

type minimiser struct {
	best *Scenario
	bad  *Violation
	run  Run
	more func() bool
}

// try takes a smaller scenario if it breaks the same rule.
func (m *minimiser) try(sc *Scenario) bool {
	if len(sc.Requests) == 0 || !m.more() {
		return false
	}
	_, err := Simulate(sc, m.run)
	var v *Violation
	if !errors.As(err, &v) || v.Rule != m.bad.Rule {
		return false
	}
	m.best, m.bad = sc, v
	return true
}

// until leaves out what comes after a time.
func (m *minimiser) until(at kv.Instant) {
	sc := *m.best
	sc.Requests = slices.DeleteFunc(slices.Clone(sc.Requests), func(q Request) bool { return kv.Instant(q.At) > at })
	sc.Faults = slices.DeleteFunc(slices.Clone(sc.Faults), func(f Fault) bool { return kv.Instant(f.At) > at })
	m.try(&sc)
}

// shrink leaves out halves, quarters and so on of a list, down to each one.
func shrink[T any](m *minimiser, list func(*Scenario) *[]T) {
	for size := (len(*list(m.best)) + 1) / 2; size > 0 && m.more(); size /= 2 {
		for i := 0; i < len(*list(m.best)) && m.more(); {
			sc := *m.best
			all := *list(&sc)
			*list(&sc) = slices.Delete(slices.Clone(all), i, min(i+size, len(all)))
			if !m.try(&sc) {
				i += size
			}
		}
	}
}
