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
	Python   string    // of an environment with the reference in it; "": where `make` targets put it
	Anyway   bool      // measure also where it means little, and say so
	Progress io.Writer // gets a line for each step
}

// Lmcache is the reference that Options.Against names.
const Lmcache = "lmcache"

// begin checks the options and the machine, and sets the stage.
func (o *Options) begin(ctx context.Context, name string) (*Report, *stage, error) {
	if o.Repeat < 1 {
		return nil, nil, fmt.Errorf("--repeat is %d; it must be at least 1", o.Repeat)
	}
	if o.Against != "" && o.Against != Lmcache {
		return nil, nil, fmt.Errorf("--against is %q; the one reference is %s", o.Against, Lmcache)
	}
	if o.Progress == nil {
		o.Progress = io.Discard
	}
	m, notes, err := machine(o.Anyway)
	if err != nil {
		return nil, nil, err
	}
	r := &Report{Bench: name, Machine: m, Notes: notes}
	s, err := newStage(ctx, o.Progress)
	return r, s, err
}

// python returns the interpreter of the reference's environment.
func (o *Options) python() (string, error) {
	path := o.Python
	if path == "" {
		path = os.Getenv("BERTH_LMCACHE_PYTHON")
	}
	if path == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return "", err
		}
		path = filepath.Join(home, ".cache", "berth", "lmcache-1", "bin", "python")
	}
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("--against lmcache needs a Python with LMCache in it (--python, BERTH_LMCACHE_PYTHON; interop/peers/install.sh makes one): %w", err)
	}
	return path, nil
}

//go:embed reference/lmcache.py
var lmcachePy []byte

// lmcache writes the driver of the reference into the stage and returns how to
// run it.
func (o *Options) lmcache(s *stage) (python, script string, err error) {
	if python, err = o.python(); err != nil {
		return "", "", err
	}
	script = filepath.Join(s.dir, "lmcache.py")
	return python, script, os.WriteFile(script, lmcachePy, 0o600)
}
