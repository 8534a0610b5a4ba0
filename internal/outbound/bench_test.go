package outbound

import (
	"fmt"
	"testing"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// loop is one engine, one receiver and one request at a time: begin → granted →
// stage → submit → reply. Messages and events are made once.
type loop struct {
	c       *Core
	conn    kv.ConnID
	ids     []string
	begin   Begin
	stage   Stage
	submit  Submit
	granted msg.Granted
	reply   msg.CommitReply
	round   int
	crossed int
}

func newLoop(tb testing.TB, link Link, chunks int) *loop {
	cfg := testConfig()
	cfg.Staging, cfg.MaxStage, cfg.Links = 4*chunks, chunks, []Link{link}
	cfg.MaxEndings, cfg.EndingTTL, cfg.MaxWaiting = 64, 1000*kv.Second, 1<<20
	l := &loop{c: New(cfg, 0), conn: 1<<32 | 1}
	l.c.Step(0, EngineAttached{Engine: 1, EngineID: "e"})
	for i := range 128 {
		l.ids = append(l.ids, fmt.Sprintf("request-%d", i))
	}
	peer := Peer{Host: "d0", AllocPort: 9000}
	l.c.Step(0, Begin{Engine: 1, Call: 1, ReqID: "first", Total: 0, Peer: peer, Deadline: kv.Forever})
	l.c.Step(0, Connected{Conn: l.conn})
	l.c.Step(0, Received{Conn: l.conn, Msg: &msg.HelloReply{Re: 1, Version: 1, Capacity: 1 << 16, LeaseMS: 1 << 40, Links: []msg.LinkOffer{{Name: link.Name}}}})
	l.c.Step(0, LinkUp{Link: 1})
	l.c.Step(0, Received{Conn: l.conn, Msg: &msg.Granted{Re: 2, Begin: 1, Generation: 1}})
	if l.c.live != 0 {
		tb.Fatal("the loop does not start")
	}
	l.begin = Begin{Engine: 1, Call: 2, Total: int64(chunks), Peer: peer, Deadline: kv.Forever}
	l.stage = Stage{Engine: 1, Call: 3, N: int64(chunks), Deadline: kv.Forever}
	l.submit = Submit{Engine: 1, Call: 4}
	for i := range chunks {
		l.submit.Chunks = append(l.submit.Chunks, Chunk{Index: int64(i), Key: fmt.Sprintf("model@1@0@%016x@half", i), Tokens: 16})
		l.granted.Slots = append(l.granted.Slots, kv.SlotID(i))
	}
	l.granted.Generation = 7
	return l
}

// step steps the core and counts what crosses its border: events and actions
// are values in interfaces, and each costs its one allocation there.
func (l *loop) step(ev Event) []Action {
	acts := l.c.Step(1, ev)
	l.crossed += 1 + len(acts)
	return acts
}

// run carries one request through.
func (l *loop) run(tb testing.TB) {
	id := l.ids[l.round%len(l.ids)]
	l.round++
	l.begin.ReqID, l.stage.ReqID, l.submit.ReqID = id, id, id
	for _, a := range l.step(l.begin) {
		if s, ok := a.(Send); ok {
			m := s.Msg.(*msg.Begin)
			l.granted.Re, l.granted.Begin = m.Seq, m.Begin
		}
	}
	l.step(Received{Conn: l.conn, Msg: &l.granted})
	for _, a := range l.step(l.stage) {
		if s, ok := a.(Answer); ok {
			for i := range s.Slots {
				l.submit.Chunks[i].Slot = s.Slots[i]
			}
		}
	}
	for _, a := range l.step(l.submit) {
		if s, ok := a.(Send); ok {
			m := s.Msg.(*msg.Commit)
			l.reply = msg.CommitReply{Re: m.Seq, Begin: m.Begin, Complete: true}
		}
	}
	l.step(Received{Conn: l.conn, Msg: &l.reply})
	if l.c.live != 0 || len(l.c.pool.free) != len(l.c.pool.slots) {
		tb.Fatalf("round %d does not end: %+v", l.round, l.c.Status(1))
	}
}

// TestSteadyState: carrying a request through allocates nothing but what crosses
// the border, however many chunks it has.
func TestSteadyState(t *testing.T) {
	for _, link := range []string{"tcp", "shm"} {
		for _, chunks := range []int{1, 8, 64} {
			l := newLoop(t, testLinks[link], chunks)
			for range 512 {
				l.run(t)
			}
			l.crossed = 0
			const runs = 1000
			allocs := testing.AllocsPerRun(runs, func() { l.run(t) })
			if crossed := float64(l.crossed) / (runs + 1); allocs > crossed {
				t.Errorf("%s, %d chunks: %.1f allocations; %.1f events and actions", link, chunks, allocs, crossed)
			}
		}
	}
}

func BenchmarkRequest(b *testing.B) {
	for _, link := range []string{"tcp", "shm"} {
		for _, chunks := range []int{1, 8, 64} {
			b.Run(fmt.Sprintf("%s/chunks=%d", link, chunks), func(b *testing.B) {
				l := newLoop(b, testLinks[link], chunks)
				for range 256 {
					l.run(b)
				}
				b.ReportAllocs()
				for b.Loop() {
					l.run(b)
				}
			})
		}
	}
}

// BenchmarkWaiting: one request goes through while many others wait for
// admission or for a receiver that is down.
func BenchmarkWaiting(b *testing.B) {
	for _, waiting := range []int{1_000, 100_000} {
		b.Run(fmt.Sprintf("waiting=%d", waiting), func(b *testing.B) {
			l := newLoop(b, testLinks["tcp"], 8)
			for i := range waiting {
				l.c.Step(1, Begin{Engine: 1, ReqID: fmt.Sprintf("waits-%d", i), Total: 8, Peer: Peer{Host: []string{"d0", "down"}[i%2], AllocPort: 9000},
					Deadline: kv.Duration(i+1) * kv.Second})
			}
			b.ReportAllocs()
			b.ResetTimer()
			for b.Loop() {
				id := l.ids[l.round%len(l.ids)]
				l.round++
				l.begin.ReqID = id
				var seq uint64
				for _, a := range l.c.Step(1, l.begin) {
					if s, ok := a.(Send); ok {
						seq = s.Msg.(*msg.Begin).Seq
					}
				}
				l.c.Step(1, Received{Conn: l.conn, Msg: &msg.Error{Re: seq, Code: "too_large"}})
			}
		})
	}
}
