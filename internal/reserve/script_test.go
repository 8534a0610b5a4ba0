package reserve

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
)

// script is a ledger whose requests and senders have names. A request's sender
// is the letters that its name begins with: a1 and a2 are a's.
type script struct {
	l     *Ledger
	cfg   Config
	names []string // by id
}

func (s *script) sender(name string) Sender {
	return Sender(name[0])
}

func (s *script) id(name string) uint64 {
	for id, n := range s.names {
		if n == name {
			return uint64(id)
		}
	}
	s.names = append(s.names, name)
	return uint64(len(s.names) - 1)
}

// drain tells whom Next admits.
func (s *script) drain(out *strings.Builder) {
	for id, ok := s.l.Next(); ok; id, ok = s.l.Next() {
		fmt.Fprintf(out, "%s admitted, free %d\n", s.names[id], s.l.Free())
	}
}

func (s *script) status(out *strings.Builder) {
	fmt.Fprintf(out, "free %d, reach %d of %d, waiting %d\n", s.l.Free(), s.l.Reach(), s.cfg.Capacity, s.l.Waiting())
	for ln := range s.l.Lines {
		fmt.Fprintf(out, "line of %c: %d waiting for %d, oldest %s\n", rune(ln.Sender), ln.Waiting, ln.Chunks, s.names[ln.Oldest])
	}
	for id, name := range s.names {
		w, ok := s.l.Why(uint64(id))
		if !ok {
			continue
		}
		fmt.Fprintf(out, "  %s waits for %s: need %d, free %d, overtaken %d", name, w.For, w.Need, w.Free, w.Overtaken)
		if w.Earmarked {
			out.WriteString(", has the earmark")
		}
		out.WriteByte('\n')
	}
}

func (s *script) run(t *testing.T, d *datadriven.TestData) string {
	var out strings.Builder
	switch d.Cmd {
	case "new":
		s.cfg.MaxWaiting = 100
		d.ScanArgs(t, "capacity", &s.cfg.Capacity)
		s.cfg.Bypass = s.cfg.Capacity
		d.MaybeScanArgs(t, "bypass", &s.cfg.Bypass)
		d.MaybeScanArgs(t, "max-waiting", &s.cfg.MaxWaiting)
		s.l, s.names = New(s.cfg), nil
	case "request": // one a line: name need
		for line := range strings.Lines(d.Input) {
			var name string
			var need int64
			if _, err := fmt.Sscan(line, &name, &need); err != nil {
				d.Fatalf(t, "%q: %v", line, err)
			}
			switch ok, err := s.l.Request(s.id(name), s.sender(name), need); {
			case err != nil:
				fmt.Fprintf(&out, "%s refused: %v\n", name, err)
			case ok:
				fmt.Fprintf(&out, "%s admitted, free %d\n", name, s.l.Free())
			default:
				fmt.Fprintf(&out, "%s waits\n", name)
			}
		}
	case "return":
		for _, a := range d.CmdArgs {
			var n int64
			if _, err := fmt.Sscan(a.Key, &n); err != nil {
				d.Fatalf(t, "%v", err)
			}
			s.l.Return(n)
			s.drain(&out)
		}
	case "remove":
		for _, a := range d.CmdArgs {
			if !s.l.Remove(s.id(a.Key)) {
				fmt.Fprintf(&out, "%s does not wait\n", a.Key)
			}
		}
		s.drain(&out)
	case "blocked":
		var q, f int64
		d.MaybeScanArgs(t, "quarantined", &q)
		d.MaybeScanArgs(t, "lockstep", &f)
		s.l.SetBlocked(q, f)
		s.drain(&out)
	case "status":
		s.status(&out)
	default:
		d.Fatalf(t, "unknown command")
	}
	if err := s.l.Check(); err != nil {
		d.Fatalf(t, "%v", err)
	}
	if out.Len() == 0 {
		return "ok\n"
	}
	return out.String()
}

func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata/scripts", func(t *testing.T, path string) {
		var s script
		datadriven.RunTest(t, path, s.run)
	})
}
