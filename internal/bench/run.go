package bench

import (
	"context"
	_ "embed"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// Options are what every benchmark is told.
type Options struct {
	Repeat   int       // turns of each side
	Against  string    // "" or Lmcache
	Python   string    // of an environment with the reference in it; "": where `make lmcache` puts it
	Anyway   bool      // measure also where it means little, and say so
	Progress io.Writer // gets a line for each step; nil: nobody does
}

// Lmcache is the reference that Options.Against names.
const Lmcache = "lmcache"

// run is one benchmark under way.
type run struct {
	Options
	*Report
	*stage
	before cpuTicks
}

// begin checks the options and the machine, and sets the stage. The caller
// calls end.
func (o Options) begin(ctx context.Context, name string) (*run, error) {
	if err := check([]bound{{"repeat", int64(o.Repeat), maxRepeat}}); err != nil {
		return nil, err
	}
	if o.Against != "" && o.Against != Lmcache {
		return nil, refuse("--against is %q; the one reference is %s", o.Against, Lmcache)
	}
	if o.Progress == nil {
		o.Progress = io.Discard
	}
	m, notes, err := machine(o.Anyway)
	if err != nil {
		return nil, err
	}
	r := &run{Options: o, Report: &Report{Bench: name, Machine: m, Notes: notes}}
	if r.stage, err = newStage(ctx); err != nil {
		return nil, err
	}
	r.before, err = readCPU()
	return r, err
}

// Bounds of options.
const (
	maxRepeat = 1000
	maxCount  = 1_000_000 // requests in a turn
)

// UsageError is about the options.
type UsageError struct{ error }

func refuse(format string, args ...any) error { return UsageError{fmt.Errorf(format, args...)} }

// bound is an option that must be within 1 to max.
type bound struct {
	flag       string
	value, max int64
}

func check(bounds []bound) error {
	for _, b := range bounds {
		if b.value < 1 || b.value > b.max {
			return refuse("--%s is %d; it must be 1 to %d", b.flag, b.value, b.max)
		}
	}
	return nil
}

// end ends every child, and completes the report unless err says that it failed.
func (r *run) end(err error) (*Report, error) {
	r.stage.close()
	if err != nil {
		return nil, err
	}
	after, err := readCPU()
	if err != nil {
		return nil, err
	}
	self, err := usageOf(os.Getpid())
	if err != nil {
		return nil, err
	}
	others := after.since(r.before)
	others.used = max(0, others.used-int64((self.cpu+r.stage.spent).Seconds()*ticks))
	r.Machine.During = others.cores()
	if r.Machine.Busy <= busyLimit*float64(r.Machine.Cores) && r.Machine.During > busyLimit*float64(r.Machine.Cores) {
		r.note("something else used %.2f of %d cores during the run: read ratios, not figures", r.Machine.During, r.Machine.Cores)
	}
	return r.Report, nil
}

// say reports progress.
func (r *run) say(format string, args ...any) { fmt.Fprintf(r.Progress, format+"\n", args...) }

//go:embed reference/lmcache.py
var lmcachePy []byte

// python starts a process of the reference and waits until it serves.
func (r *run) python(name string, args ...string) (*child, error) {
	path := r.Python
	if path == "" {
		path = os.Getenv("BERTH_LMCACHE_PYTHON")
	}
	if path == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return nil, err
		}
		path = filepath.Join(home, ".cache", "berth", "lmcache-1", "bin", "python")
	}
	if _, err := os.Stat(path); err != nil {
		return nil, fmt.Errorf("no Python for the reference (--python, BERTH_LMCACHE_PYTHON; make lmcache installs one with LMCache in it): %w", err)
	}
	script := filepath.Join(r.dir, "reference.py") // not lmcache.py: that would be imported
	if err := os.WriteFile(script, lmcachePy, 0o600); err != nil {
		return nil, err
	}
	r.say("starting Python: %s", name)
	var ready struct{ Ready bool }
	return r.start(name, &ready, path, append([]string{script}, args...)...)
}
