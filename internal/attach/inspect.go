package attach

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/berthkv/berth/internal/kv"
)

// Clone returns an independent copy.
func (c *Core) Clone() *Core {
	d := *c
	d.actions = nil
	d.conns, d.fences = slices.Clone(c.conns), slices.Clone(c.fences)
	d.engines = make([]*engine, len(c.engines))
	copies := map[*engine]*engine{}
	for i, e := range c.engines {
		x := *e
		x.processes = slices.Clone(e.processes)
		d.engines[i], copies[e] = &x, &x
	}
	for i := range d.conns {
		d.conns[i].engine = copies[d.conns[i].engine]
	}
	for i := range d.fences {
		d.fences[i].engine = copies[d.fences[i].engine]
	}
	return &d
}

// Encode appends a canonical form of the state at now (not of the Config) to b:
// equal encodings behave alike from there on. Times are relative, arrivals are
// replaced by what they decide: for how many processes a fence waits. Connections
// are written as rename says; nil leaves them as they are.
func (c *Core) Encode(b []byte, now kv.Instant, rename func(kv.ConnID) uint64) []byte {
	if rename == nil {
		rename = func(id kv.ConnID) uint64 { return uint64(id) }
	}
	num := func(n uint64) { b = binary.AppendUvarint(b, n) }
	str := func(s string) {
		num(uint64(len(s)))
		b = append(b, s...)
	}
	num(uint64(len(c.engines)))
	for _, e := range c.engines {
		str(e.id)
		if e.conns > 0 {
			str(e.tokensKey)
		}
		num(uint64(e.conns))
		num(flag(e.unseen != 0))
		num(uint64(len(e.processes)))
		for _, p := range e.processes {
			num(uint64(p.number))
		}
	}
	index := func(e *engine) uint64 { return uint64(1 + slices.Index(c.engines, e)) } // 0: a tool
	num(uint64(len(c.conns)))
	for _, x := range c.conns {
		num(rename(x.id))
		num(index(x.engine))
		str(string(x.part))
	}
	num(uint64(len(c.fences)))
	for i := range c.fences {
		f := &c.fences[i]
		num(rename(f.conn))
		num(index(f.engine))
		num(uint64(f.processes()))
		num(flag(f.unseen()))
		if f.until == kv.Never {
			num(0)
		} else {
			num(1 + uint64(f.until.Sub(now)))
		}
	}
	return b
}

func flag(v bool) uint64 {
	if v {
		return 1
	}
	return 0
}

// processes counts those that the fence waits for, as far as they are known.
func (f *fence) processes() (n int) {
	for _, p := range f.engine.processes {
		if p.arrival < f.arrival {
			n++
		}
	}
	return n
}

// Check verifies the numbered invariants of Core and returns the first that does
// not hold.
func (c *Core) Check() error {
	conns, alive := map[*engine]int{}, 0
	seen := map[kv.ConnID]bool{}
	for _, x := range c.conns {
		if seen[x.id] || (x.engine == nil) != (x.part == PartTool) || x.engine != nil && !slices.Contains(c.engines, x.engine) {
			return fmt.Errorf("1: connection %d of part %q is known twice, or its engine is not", x.id, x.part)
		}
		seen[x.id] = true
		if x.engine != nil {
			conns[x.engine]++
		}
	}
	fences := map[*engine]int{}
	for _, f := range c.fences {
		fences[f.engine]++
	}
	processes := 0
	for _, e := range c.engines {
		if e.conns != conns[e] || e.fences != fences[e] || e.conns > MaxEngineConns {
			return fmt.Errorf("1: engine %q has %d connections and %d fences, counted %d and %d", e.id, conns[e], fences[e], e.conns, e.fences)
		}
		if e.conns > 0 {
			alive++
		}
		if e.conns == 0 && fences[e] == 0 && len(e.processes) == 0 {
			return fmt.Errorf("2: engine %q is known without a reason", e.id)
		}
		processes += len(e.processes)
		if err := e.check(c.arrived); err != nil {
			return err
		}
	}
	if alive > 1 || len(c.conns) > MaxConns {
		return fmt.Errorf("1: %d engines with connections, %d connections", alive, len(c.conns))
	}
	if processes > MaxProcesses || len(c.fences) > MaxFences+MaxConns {
		return fmt.Errorf("4: %d processes, %d fences", processes, len(c.fences))
	}
	for i := range c.fences {
		f := &c.fences[i]
		if !f.waits() || i > 0 && f.until < c.fences[i-1].until || !slices.Contains(c.engines, f.engine) {
			return fmt.Errorf("3: the fence of connection %d until %d, waits %v", f.conn, f.until, f.waits())
		}
	}
	return nil
}

func (e *engine) check(arrived uint64) error {
	last, numbers := uint64(0), map[int]bool{}
	for _, p := range e.processes {
		if p.arrival <= last || p.arrival > arrived || numbers[p.number] {
			return fmt.Errorf("4: process %d of engine %q came at %d, after %d, or is known twice", p.number, e.id, p.arrival, last)
		}
		last, numbers[p.number] = p.arrival, true
	}
	return nil
}
