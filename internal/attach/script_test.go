package attach

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/berthkv/berth/internal/kv"
)

var testConfig = Config{
	Facts:      kv.Facts{SlotBytes: 4096, Format: kv.Format2LTD, DType: "bfloat16", ChunkTokens: 16, TPSize: 2, TPRank: 1},
	Shape:      []int64{2, 4, 16, 16},
	Rank:       1,
	Quarantine: 30 * kv.Second,
}

// testHello is a Hello that fits testConfig.
func testHello(id kv.ConnID, engine string, pid int) Hello {
	return Hello{Conn: id, Call: kv.CallID(id), Version: 1, EngineID: engine, Part: PartWorker, Rank: 1,
		Facts: testConfig.Facts, Shape: testConfig.Shape, TokensKey: "k", Process: pid}
}

func show(a Action) string {
	switch a := a.(type) {
	case Accept:
		return fmt.Sprintf("accept %d, with pools %v", a.Conn, a.WithPools)
	case Refuse:
		if a.Keep {
			return fmt.Sprintf("refuse %d, which stays: %v", a.Conn, a.Err)
		}
		return fmt.Sprintf("refuse %d: %v", a.Conn, a.Err)
	case Lost:
		return fmt.Sprintf("lost %d of %s, last %v", a.Conn, a.EngineID, a.Last)
	case Fenced:
		return fmt.Sprintf("fenced %d, trusted %v", a.Conn, a.Trusted)
	case Wake:
		if a.At == kv.Never {
			return "wake never"
		}
		return fmt.Sprintf("wake at %gs", kv.Duration(a.At).Seconds())
	}
	return fmt.Sprintf("%#v", a)
}

// TestScripts. Commands: hello CONN [engine= pid= part= version= rank= shape=
// key= dtype= tp-rank=], lost CONN, gone PID, tick, status; each may begin with
// at=SECONDS, which moves the clock.
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata/scripts", func(t *testing.T, path string) {
		c, now := New(testConfig, 0), kv.Instant(0)
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			seconds := int64(now) / int64(kv.Second)
			d.MaybeScanArgs(t, "at", &seconds)
			now = kv.Instant(seconds) * kv.Instant(kv.Second)
			if d.Cmd == "status" {
				return status(c)
			}
			ev := event(t, d)
			var out strings.Builder
			for _, a := range c.Step(now, ev) {
				fmt.Fprintln(&out, show(a))
			}
			if err := c.Check(); err != nil {
				d.Fatalf(t, "%v", err)
			}
			if out.Len() == 0 {
				return "nothing\n"
			}
			return out.String()
		})
	})
}

func status(c *Core) string {
	var out strings.Builder
	fmt.Fprintf(&out, "holder %q\n", c.Holder())
	for _, e := range c.engines {
		fmt.Fprintf(&out, "%s: connections %d, processes %d, unseen %v\n", e.id, e.conns, len(e.processes), e.unseen != 0)
	}
	for _, f := range c.fences {
		fmt.Fprintf(&out, "%d of %s waits for %d, unseen %v\n", f.conn, f.engine.id, f.processes(), f.unseen())
	}
	return out.String()
}

func event(t *testing.T, d *datadriven.TestData) Event {
	number := func() (n int) {
		if _, err := fmt.Sscan(d.CmdArgs[0].Key, &n); err != nil {
			d.Fatalf(t, "%v", err)
		}
		return n
	}
	switch d.Cmd {
	case "hello":
		h := testHello(kv.ConnID(number()), "", 0)
		var part, dtype string
		d.MaybeScanArgs(t, "engine", &h.EngineID)
		d.MaybeScanArgs(t, "pid", &h.Process)
		if d.MaybeScanArgs(t, "part", &part) {
			h.Part = Part(part)
		}
		d.MaybeScanArgs(t, "version", &h.Version)
		d.MaybeScanArgs(t, "rank", &h.Rank)
		d.MaybeScanArgs(t, "tp-rank", &h.Facts.TPRank)
		d.MaybeScanArgs(t, "key", &h.TokensKey)
		if d.MaybeScanArgs(t, "dtype", &dtype) {
			h.Facts.DType = kv.DType(dtype)
		}
		if a, ok := d.Arg("shape"); ok {
			h.Shape = make([]int64, len(a.Vals))
			for i := range a.Vals {
				a.Scan(t, i, &h.Shape[i])
			}
		}
		return h
	case "lost":
		return ConnLost{Conn: kv.ConnID(number())}
	case "gone":
		return ProcessGone{Process: number()}
	case "tick":
		return Tick{}
	}
	d.Fatalf(t, "unknown command")
	return nil
}
