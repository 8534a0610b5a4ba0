package attach

import (
	"fmt"
	"math/rand"
	"slices"
	"strings"
	"testing"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
)

// model is the core once more: a log of all that happened, from which everything
// is worked out anew each time. Nothing is ever forgotten.
type model struct {
	conns     []modelConn
	processes []modelProcess
}

type modelConn struct {
	id         kv.ConnID
	engine     string // "": a tool
	lost       bool
	lostAt     kv.Instant
	waitsFor   []int // indices of processes, when lost
	waitsBlind bool  // for one without a pid
	fenced     bool
}

type modelProcess struct {
	engine string
	pid    int
	gone   bool
}

func (m *model) holder() string {
	for _, c := range m.conns {
		if c.engine != "" && !c.lost {
			return c.engine
		}
	}
	return ""
}

// connected counts connections. Those are the limits that a history of some
// hundred steps can reach; TestLimits has all.
func (m *model) connected(of func(modelConn) bool) (n int) {
	for _, c := range m.conns {
		if !c.lost && of(c) {
			n++
		}
	}
	return n
}

func (m *model) step(now kv.Instant, ev Event) (out []string) {
	switch ev := ev.(type) {
	case Hello:
		out = append(out, m.hello(ev))
	case ConnLost:
		for i := range m.conns {
			if c := &m.conns[i]; c.id == ev.Conn && !c.lost {
				c.lost, c.lostAt = true, now
				if c.engine == "" {
					continue
				}
				for j, p := range m.processes {
					if p.engine == c.engine && !p.gone {
						c.waitsFor = append(c.waitsFor, j)
						c.waitsBlind = c.waitsBlind || p.pid == 0
					}
				}
				out = append(out, show(Lost{Conn: c.id, EngineID: c.engine, Last: m.holder() != c.engine}))
			}
		}
	case ProcessGone:
		for i := range m.processes {
			if p := &m.processes[i]; p.pid == ev.Process && p.pid != 0 {
				p.gone = true
			}
		}
	}
	for i := range m.conns {
		c := &m.conns[i]
		if c.engine == "" || !c.lost || c.fenced {
			continue
		}
		left := slices.ContainsFunc(c.waitsFor, func(j int) bool { return !m.processes[j].gone })
		if c.fenced = !left || now >= c.lostAt.Add(testConfig.Quarantine); c.fenced {
			out = append(out, show(Fenced{Conn: c.id, Trusted: left}))
		}
	}
	m.forgetBlind()
	return out
}

// forgetBlind: a process without a pid is believed to be gone when its engine has
// neither a connection nor an unfenced one.
func (m *model) forgetBlind() {
	for i := range m.processes {
		if p := &m.processes[i]; p.pid == 0 {
			p.gone = p.gone || !slices.ContainsFunc(m.conns, func(c modelConn) bool {
				return c.engine == p.engine && (!c.lost || !c.fenced)
			})
		}
	}
}

func (m *model) hello(h Hello) string {
	for _, c := range m.conns {
		if c.id == h.Conn && !c.lost {
			return "refuse, stays: bad_request"
		}
	}
	if m.connected(func(modelConn) bool { return true }) == MaxConns {
		return "refuse: busy"
	}
	if h.Part == PartTool {
		m.conns = append(m.conns, modelConn{id: h.Conn})
		return show(Accept{Conn: h.Conn})
	}
	if x := m.holder(); x != "" && x != h.EngineID {
		return "refuse: busy"
	}
	if m.connected(func(c modelConn) bool { return c.engine == h.EngineID }) == MaxEngineConns {
		return "refuse: busy"
	}
	m.conns = append(m.conns, modelConn{id: h.Conn, engine: h.EngineID})
	known := slices.ContainsFunc(m.processes, func(p modelProcess) bool {
		return p.engine == h.EngineID && p.pid == h.Process && !p.gone
	})
	if !known {
		m.processes = append(m.processes, modelProcess{engine: h.EngineID, pid: h.Process})
	}
	return show(Accept{Conn: h.Conn, WithPools: true})
}

// told is what Step told, without wake-ups, in the words of the model.
func told(actions []Action) (out []string) {
	for _, a := range actions {
		switch a := a.(type) {
		case Wake:
		case Refuse:
			s := "refuse: "
			if a.Keep {
				s = "refuse, stays: "
			}
			out = append(out, s+string(a.Err.Code))
		default:
			out = append(out, show(a))
		}
	}
	return out
}

// lead counts what comes before the fences.
func lead(told []string) int {
	for i, s := range told {
		if strings.HasPrefix(s, "fenced") {
			return i
		}
	}
	return len(told)
}

func TestAgainstModel(t *testing.T) {
	const histories = 4_000
	reached := map[string]int{}
	for seed := range int64(histories) {
		rng := rand.New(rand.NewSource(seed))
		c, m, now, wake := New(testConfig, 0), &model{}, kv.Instant(0), kv.Never
		next := kv.ConnID(0)
		for step := range 40 {
			if rng.Intn(3) == 0 {
				now = now.Add(kv.Duration(rng.Intn(12)) * kv.Second)
			}
			var ev Event = Tick{}
			switch n := rng.Intn(8); {
			case n < 3:
				next++
				h := testHello(next-kv.ConnID(rng.Intn(2)*rng.Intn(2)), fmt.Sprint("e", rng.Intn(2)), rng.Intn(5))
				if rng.Intn(6) == 0 {
					h.EngineID, h.Part = "", PartTool
				}
				ev = h
			case n < 6 && next > 0:
				ev = ConnLost{Conn: 1 + kv.ConnID(rng.Intn(int(next)))}
			case n < 7:
				ev = ProcessGone{Process: rng.Intn(5)}
			}
			fail := func(format string, args ...any) {
				t.Helper()
				t.Fatalf("seed %d, step %d, %+v at %d: %s", seed, step, ev, now, fmt.Sprintf(format, args...))
			}
			clone := c.Clone()
			actions := c.Step(now, ev)
			got, want := told(actions), m.step(now, ev)
			slices.Sort(want[lead(want):]) // fences of one moment come in any order
			slices.Sort(got[lead(got):])
			if !slices.Equal(got, want) {
				fail("%q, should be %q", got, want)
			}
			if c.Holder() != m.holder() {
				fail("holder %q, should be %q", c.Holder(), m.holder())
			}
			if err := c.Check(); err != nil {
				fail("%v", err)
			}
			// A clone does the same, and is encoded alike.
			again := told(clone.Step(now, ev))
			if slices.Sort(again[lead(again):]); !slices.Equal(got, again) {
				fail("a clone says %q", again)
			}
			if string(c.Encode(nil, now, nil)) != string(clone.Encode(nil, now, nil)) {
				fail("a clone is encoded differently")
			}
			for _, a := range actions {
				if w, ok := a.(Wake); ok {
					wake = w.At
				}
			}
			if wake <= now {
				fail("it is woken at %d", wake)
			}
			for _, s := range got {
				reached[strings.Trim(s, "0123456789, ")]++
				reached[strings.Fields(s)[0]+" "+s[strings.LastIndexByte(s, ' ')+1:]]++
			}
		}
	}
	for _, what := range []string{"accept true", "accept false", "refuse: busy", "refuse, bad_request", "lost true", "lost false", "fenced true", "fenced false"} {
		if reached[what] < histories/10 {
			t.Errorf("%q was reached %d times in %d histories", what, reached[what], histories)
		}
	}
}

// TestEncodeForgets: what a past cannot matter for leaves no trace.
func TestEncodeForgets(t *testing.T) {
	used, fresh := New(testConfig, 0), New(testConfig, 0)
	for i := range kv.ConnID(50) {
		used.Step(kv.Instant(i), testHello(1000+i, fmt.Sprint("old", i), int(i)))
		used.Step(kv.Instant(i), ConnLost{Conn: 1000 + i})
		used.Step(kv.Instant(i), ProcessGone{Process: int(i)})
	}
	later := kv.Instant(100 * kv.Second)
	for c, start := range map[*Core]kv.Instant{used: later, fresh: 7} {
		c.Step(start, testHello(1, "e", 1))
		c.Step(start, testHello(2, "e", 0))
		c.Step(start.Add(kv.Second), ConnLost{Conn: 1})
	}
	a, b := used.Encode(nil, later.Add(2*kv.Second), nil), fresh.Encode(nil, kv.Instant(7).Add(2*kv.Second), nil)
	if string(a) != string(b) {
		t.Errorf("%x and %x", a, b)
	}
	fresh.Step(kv.Instant(7).Add(2*kv.Second), ProcessGone{Process: 1})
	if b := fresh.Encode(nil, kv.Instant(7).Add(2*kv.Second), nil); string(a) == string(b) {
		t.Error("different states are encoded alike")
	}
}

// TestLimits tries each limit at the limit and one past it.
func TestLimits(t *testing.T) {
	for _, c := range []struct {
		name   string
		at     func(c *Core) Hello // brings the core to the limit; its Hello is accepted
		beyond func(c *Core) Hello
		code   fault.Code
		says   []string
	}{
		{"engine_id",
			func(*Core) Hello { return testHello(1, strings.Repeat("x", kv.MaxEngineID), 1) },
			func(*Core) Hello { return testHello(2, strings.Repeat("x", kv.MaxEngineID+1), 1) },
			fault.BadRequest, []string{"257", "256"}},
		{"tokens_key",
			func(*Core) Hello { h := testHello(1, "e", 1); h.TokensKey = strings.Repeat("x", kv.MaxKey); return h },
			func(*Core) Hello { h := testHello(2, "e", 1); h.TokensKey = strings.Repeat("x", kv.MaxKey+1); return h },
			fault.BadRequest, []string{"4097", "4096"}},
		{"connections of an engine",
			func(c *Core) Hello { helloMany(c, MaxEngineConns-1, "e"); return testHello(9999, "e", 1) },
			func(*Core) Hello { return testHello(10_000, "e", 1) },
			fault.Busy, []string{`"e"`, "128"}},
		{"connections",
			func(c *Core) Hello {
				for i := range kv.ConnID(MaxConns - 1) {
					c.Step(0, Hello{Conn: i, Version: 1, Part: PartTool})
				}
				return testHello(9999, "e", 1)
			},
			func(*Core) Hello { return Hello{Conn: 10_000, Version: 1, Part: PartTool} },
			fault.Busy, []string{"256"}},
		{"processes",
			func(c *Core) Hello {
				for i := range MaxProcesses - 1 {
					c.Step(0, testHello(1, "e", 1+i))
					c.Step(0, ConnLost{Conn: 1})
				}
				return testHello(9999, "e", MaxProcesses)
			},
			func(*Core) Hello { return testHello(10_000, "e", MaxProcesses+1) },
			fault.Busy, []string{"1024"}},
		{"fences",
			func(c *Core) Hello {
				helloMany(c, 1, "e")
				for range MaxFences - 1 {
					c.Step(0, testHello(20_000, "e", 1))
					c.Step(0, ConnLost{Conn: 20_000})
				}
				return testHello(9999, "e", 1)
			},
			func(c *Core) Hello { c.Step(0, ConnLost{Conn: 9999}); return testHello(10_000, "e", 1) },
			fault.Busy, []string{"4096"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			core := New(testConfig, 0)
			h := c.at(core)
			if a, ok := core.Step(0, h)[0].(Accept); !ok {
				t.Fatalf("at the limit: %v", a)
			}
			h = c.beyond(core)
			r, ok := core.Step(0, h)[0].(Refuse)
			if !ok || r.Err.Code != c.code || (r.Err.Retry > 0) != (c.code == fault.Busy) {
				t.Fatalf("one past it: %+v", r)
			}
			for _, s := range c.says {
				if !strings.Contains(r.Err.Text, s) {
					t.Errorf("%q does not name %s", r.Err.Text, s)
				}
			}
			if err := core.Check(); err != nil {
				t.Error(err)
			}
		})
	}
	// A process that is known may come again at the limit of processes.
	core := New(testConfig, 0)
	for i := range MaxProcesses {
		core.Step(0, testHello(1, "e", 1+i))
		core.Step(0, ConnLost{Conn: 1})
	}
	if a, ok := core.Step(0, testHello(1, "e", 7))[0].(Accept); !ok {
		t.Errorf("a known process: %v", a)
	}
}

func helloMany(c *Core, n int, engine string) {
	for i := range n {
		c.Step(0, testHello(kv.ConnID(1+i), engine, 1))
	}
}

func TestCheckCanFail(t *testing.T) {
	for _, c := range []struct {
		number string
		damage func(c *Core)
	}{
		{"1", func(c *Core) { c.conns = append(c.conns, c.conns[0]) }},
		{"1", func(c *Core) { c.engines[0].conns++ }},
		{"1", func(c *Core) { c.conns[0].engine = nil }},
		{"2", func(c *Core) { c.engines = append(c.engines, &engine{id: "x"}) }},
		{"3", func(c *Core) { c.fences[0].arrival = 0 }},
		{"3", func(c *Core) { c.fences[0].until = 1 << 60 }},
		{"4", func(c *Core) { c.engines[0].processes[0].arrival = 99 }},
		{"4", func(c *Core) { c.engines[0].processes[1].number = c.engines[0].processes[0].number }},
	} {
		core := New(testConfig, 0)
		for i := range kv.ConnID(4) {
			core.Step(0, testHello(i, "e", 1+int(i)))
		}
		core.Step(0, ConnLost{Conn: 2})
		core.Step(5, ConnLost{Conn: 3})
		if err := core.Check(); err != nil {
			t.Fatal(err)
		}
		c.damage(core)
		if err := core.Check(); err == nil || !strings.HasPrefix(err.Error(), c.number+":") {
			t.Errorf("Check() = %v, should name invariant %s", err, c.number)
		}
	}
}
