package intake

import (
	"fmt"
	"testing"
	"time"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// benchCore has a pool of which half is free, and that many requests of 64
// senders waiting for more than ever comes free.
func benchCore(b *testing.B, waiting int) *Core {
	const capacity = 1 << 14
	cfg := testConfig(capacity)
	cfg.MaxWaiting = 2 * waiting // a sender's share of it is not what is measured
	cfg.MaxEndings, cfg.MaxConns, cfg.Bypass = kv.MaxEndings, 1000, 1<<60
	cfg.EndingTTL = kv.Second / 1000
	c := New(cfg, 0)
	for s := range 65 {
		id := kv.ConnID(s + 1)
		c.Step(0, Connected{Conn: id, Identity: fmt.Sprint("c", s)})
		f := cfg.Facts
		c.Step(0, Received{id, &msg.Hello{Seq: 1, Min: 1, Max: 1, Role: msg.RoleSender, Incarnation: incarnation(fmt.Sprint("s", s)), Facts: &f}})
	}
	c.Step(0, EngineAttached{Engine: 1000, EngineID: "e"})
	c.Step(0, Received{1, &msg.Begin{Seq: 2, Begin: 1, ReqID: "big", Link: "tcp", TotalChunks: capacity / 2, DeadlineMS: 1 << 50}})
	for i := range waiting {
		id := kv.ConnID(i%64 + 1)
		c.Step(0, Received{id, &msg.Begin{Seq: uint64(i + 3), Begin: uint64(i + 2), ReqID: fmt.Sprint("w", i), Link: "tcp", TotalChunks: capacity/2 + 1, DeadlineMS: 1 << 50}})
	}
	if len(c.waiting) != waiting {
		b.Fatalf("%d of %d wait", len(c.waiting), waiting)
	}
	return c
}

// BenchmarkStep takes the time of each step of a request's life while others
// wait. Times are per step; what is made ready for it does not count.
func BenchmarkStep(b *testing.B) {
	const batch = 1024 // requests at a time, of 4 chunks
	steps := []string{"begin", "landed", "commit", "fenced", "claim", "release"}
	for _, waiting := range []int{1000, 100_000} {
		for only, name := range steps {
			b.Run(fmt.Sprintf("%s/waiting=%d", name, waiting), func(b *testing.B) {
				c := benchCore(b, waiting)
				var events [6][]Event
				begin := uint64(1 << 30)
				now := kv.Instant(0)
				b.ReportAllocs()
				b.ResetTimer()
				b.StopTimer()
				for n := 0; n < b.N; n += batch {
					for i := range events {
						events[i] = events[i][:0]
					}
					now += kv.Instant(time.Millisecond)
					gen := c.generation
					for i := range batch {
						begin++
						id, g := fmt.Sprint("r", begin), gen+kv.Generation(i+1)
						slots := []kv.SlotID{}
						m := &msg.Commit{Seq: begin, Begin: begin, Fmt: 1, DType: "bfloat16", Shape: []int64{2, 1, 16, 1}}
						for k := range kv.SlotID(4) {
							slots = append(slots, kv.SlotID(1<<13)+kv.SlotID(i)*4+k)
							events[1] = append(events[1], Landed{Slot: slots[k], Generation: g, Bytes: 64})
							m.Chunks = append(m.Chunks, msg.Chunk{Index: int64(k), Key: id, Tokens: 16})
						}
						events[0] = append(events[0], Received{65, &msg.Begin{Seq: begin, Begin: begin, ReqID: id, Link: "tcp", TotalChunks: 4}})
						events[2] = append(events[2], Received{65, m})
						events[3] = append(events[3], Fenced{Generation: g, Slots: slots})
						events[4] = append(events[4], Claim{Engine: 1000, Call: kv.CallID(begin), By: id, ReqID: id})
						events[5] = append(events[5], Release{Engine: 1000, Call: kv.CallID(begin), By: id, ReqID: id})
					}
					for i, all := range events {
						if i == only {
							b.StartTimer()
						}
						for _, e := range all {
							c.Step(now, e)
						}
						if i == only {
							b.StopTimer()
						}
					}
				}
				if c.pool.Counts().Free != 1<<13 {
					b.Fatalf("%+v", c.pool.Counts())
				}
			})
		}
	}
}
