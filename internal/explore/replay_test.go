package explore

import (
	"flag"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
)

var flagScript = flag.String("script", "", "the one script that TestReplay runs")

// TestReplay runs scripts: what a search has found, and what is worth reading.
// A script's first line names the system; with -rewrite what comes of it is
// written down.
func TestReplay(t *testing.T) {
	replay := func(t *testing.T, path string) {
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			var system, p, blind string
			budget := 0
			for _, a := range d.CmdArgs {
				switch a.Key {
				case "system":
					system = a.Vals[0]
				case "plant":
					p = a.Vals[0]
				case "blind":
					blind = a.Vals[0]
				case "budget":
					n, err := strconv.Atoi(a.Vals[0])
					if err != nil {
						d.Fatalf(t, "%v", err)
					}
					budget = n
				}
			}
			m, err := build(system, budget, Plant(p), blind)
			if err != nil {
				d.Fatalf(t, "%v", err)
			}
			out := run(m, strings.Split(strings.TrimSpace(d.Input), "\n"))
			if strings.Contains(out, "\nerror: ") {
				t.Errorf("%s: %s", d.Pos, out[strings.Index(out, "\nerror: ")+1:])
			}
			if *flagScript != "" {
				t.Logf("%s", out)
			}
			return out
		})
	}
	if *flagScript != "" {
		replay(t, *flagScript)
		return
	}
	datadriven.Walk(t, "testdata", replay)
}
