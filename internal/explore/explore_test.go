package explore

import (
	"flag"
	"runtime/debug"
	"testing"
	"time"
)

var (
	flagSys    = flag.String("system", "", "")
	flagBudget = flag.Int("budget", 0, "")
	flagStates = flag.Int("states", 0, "")
)

func TestTry(t *testing.T) {
	if *flagSys == "" {
		return
	}
	m, err := build(*flagSys, *flagBudget, "", "")
	if err != nil {
		t.Fatal(err)
	}
	debug.SetGCPercent(300)
	r := search(m, limits{states: *flagStates, elapsed: 60 * time.Minute})
	t.Log(r)
	if r.bad != "" {
		t.Fatalf("%s\n%s\n%s", r.bad, head(*flagSys, *flagBudget, "", ""), script(m, r.moves))
	}
	if r.excepted != "" {
		t.Log(r.excepted)
	}
}

// unchanged verifies that no part of a state was changed after it was numbered.
func (p *parts[T]) unchanged() bool {
	for id, v := range p.all {
		c := codec{}
		p.walk(&c, v)
		if p.ids[string(c.b)] != uint32(id) {
			return false
		}
	}
	return true
}
