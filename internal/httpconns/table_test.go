package httpconns

import (
	"fmt"
	"math/rand"
	"strings"
	"testing"
	"time"
)

// Each step is "seconds op conn"; the result of open is what it answers.
func TestTable(t *testing.T) {
	for _, c := range []struct {
		name, steps, want string
	}{
		{"room for all", "0 open a, 0 open b, 0 open c", "ok ok ok"},
		{"nobody has been quiet for long", "0 open a, 0 open b, 0 open c, 0.9 open d", "ok ok ok refused"},
		{"the longest quiet goes", "0 open a, 0.1 open b, 0.2 open c, 1 open d, 1 open e", "ok ok ok ok-a refused"},
		{"one after the other", "0 open a, 0.1 open b, 0.2 open c, 2 open d, 2 open e, 2 open f, 2 open g", "ok ok ok ok-a ok-b ok-c refused"},
		{"who is busy stays", "0 open a, 0 open b, 0 open c, 0 busy a, 0 busy b, 9 open d, 9 open e", "ok ok ok ok-c refused"},
		{"all are busy", "0 open a, 0 open b, 0 open c, 0 busy a, 0 busy b, 0 busy c, 9 open d", "ok ok ok refused"},
		{"a request counts from its end", "0 open a, 0 open b, 0 open c, 0 busy a, 5 quiet a, 5.5 open d, 5.5 open e, 5.5 open f, 6 open f", "ok ok ok ok-b ok-c refused ok-a"},
		{"a place comes free", "0 open a, 0 open b, 0 open c, 0 gone b, 0 open d, 0 open e", "ok ok ok ok refused"},
		{"a busy one's place too", "0 open a, 0 open b, 0 open c, 0 busy b, 0 gone b, 0 open d, 0 open e", "ok ok ok ok refused"},
		{"gone twice, and after it went", "0 open a, 0 open b, 0 open c, 2 open d, 2 gone a, 2 gone a, 2 open e, 2 open f, 2 open g", "ok ok ok ok-a ok-b ok-c refused"},
		{"one without a place changes nothing", "0 busy x, 0 quiet x, 0 open a, 0 open b, 0 open c, 0 busy x, 0 quiet x, 2 open d", "ok ok ok ok-a"},
	} {
		tb := newTable[string](3, time.Second)
		var got []string
		for step := range strings.SplitSeq(c.steps, ", ") {
			var s float64
			var op, conn string
			if _, err := fmt.Sscan(step, &s, &op, &conn); err != nil {
				t.Fatal(step, err)
			}
			now := time.Duration(s * float64(time.Second))
			switch op {
			case "open":
				goes, evicted, ok := tb.open(now, conn)
				switch {
				case !ok:
					got = append(got, "refused")
				case evicted:
					got = append(got, "ok-"+goes)
				default:
					got = append(got, "ok")
				}
			case "busy":
				tb.busy(conn)
			case "quiet":
				tb.quieten(now, conn)
			case "gone":
				tb.gone(conn)
			}
			tb.check(t)
		}
		if g := strings.Join(got, " "); g != c.want {
			t.Errorf("%s: %s\n got %s\nwant %s", c.name, c.steps, g, c.want)
		}
	}
}

// check verifies the invariants.
func (t *table[K]) check(tb testing.TB) {
	tb.Helper()
	if len(t.conns) > t.max {
		tb.Fatalf("%d connections, at most %d", len(t.conns), t.max)
	}
	quiet, last := 0, time.Duration(-1)
	for at := t.quiet.Front(); at != nil; at = at.Next() {
		p := at.Value.(*place[K])
		if e := t.conns[p.conn]; e == nil || e.at != at || p.since < last {
			tb.Fatalf("%v is quiet since %v after %v, and its entry is %+v", p.conn, p.since, last, e)
		}
		quiet, last = quiet+1, p.since
	}
	for _, e := range t.conns {
		if e.at == nil {
			quiet++
		}
	}
	if quiet != len(t.conns) {
		tb.Fatalf("%d of %d connections are busy or quiet", quiet, len(t.conns))
	}
}

func TestTable_random(t *testing.T) {
	seed := time.Now().UnixNano()
	rng := rand.New(rand.NewSource(seed))
	tb := newTable[int](1+rng.Intn(5), 10)
	for now := range time.Duration(20_000) {
		conn := rng.Intn(12)
		switch rng.Intn(4) {
		case 0:
			if tb.conns[conn] == nil {
				_, evicted, ok := tb.open(now, conn)
				if ok != (tb.conns[conn] != nil) || evicted && !ok {
					t.Fatalf("seed %d: evicted %v, ok %v", seed, evicted, ok)
				}
			}
		case 1:
			tb.busy(conn)
		case 2:
			tb.quieten(now, conn)
		case 3:
			tb.gone(conn)
		}
		tb.check(t)
	}
}
