package explore

import (
	"flag"
	"runtime/debug"
	"strings"
	"testing"
	"time"
)

var flagBudget = flag.Int("budget", 0, "")
var flagLink = flag.String("link", "tcp", "")
var flagSys = flag.Int("sys", 0, "")
var flagStates = flag.Int("states", 0, "")
var flagFaults = flag.Int("faults", int(faultAll), "")

func TestTry(t *testing.T) {
	c := config{name: "try", link: *flagLink, capacity: 4, staging: 3, maxStage: 1, ranks: 1,
		engines: [][]prompt{{{total: 2}}, {{total: 3}}}, bypass: 4, eager: true, warm: true, budget: *flagBudget, faults: faultSet(*flagFaults)}
	switch *flagSys {
	case 1:
		c.capacity, c.staging, c.engines = 2, 2, [][]prompt{{{total: 2}}, {{total: 1}}}
	case 2:
		c.capacity, c.staging, c.engines = 2, 2, [][]prompt{{{total: 2}}}
	case 3:
		c.capacity, c.staging, c.engines = 1, 2, [][]prompt{{{total: 1}}, {{total: 1}}}
		c.alike = true
	case 4:
		c.capacity, c.staging, c.engines = 1, 2, [][]prompt{{{total: 1}, {total: 1}}}
	}
	x := newSystem(c, plantNone)
	debug.SetGCPercent(400)
	r := search(x, limits{states: *flagStates, elapsed: 10 * time.Minute})
	t.Log(r, "cores", len(x.m.cores.all), "msgs", len(x.m.msgs.all))
	t.Log(len(x.recvParts.all), len(x.sendParts.all), len(x.attParts.all))
	if !x.recvParts.unchanged() || !x.sendParts.unchanged() || !x.attParts.unchanged() || !x.engParts.unchanged() {
		t.Fatal("a part was changed")
	}
	if r.bad != "" {
		var b strings.Builder
		x.describe(r.moves, &b)
		t.Fatalf("%s\n%s", r.bad, b.String())
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
