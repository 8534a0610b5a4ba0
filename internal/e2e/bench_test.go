package e2e

import (
	"fmt"
	"strconv"
	"testing"

	"github.com/berthkv/berth/client"
)

// A whole request through the local API: begin, granted, stage, submit, ready,
// claim, release; the engine touches no byte of it.
func BenchmarkRequest(b *testing.B) {
	for _, link := range []string{"shm", "tcp"} {
		for _, size := range []int{4 << 10, 256 << 10, 2 << 20} {
			b.Run(fmt.Sprintf("%s/8x%dKiB", link, size>>10), func(b *testing.B) {
				more := settings{"links": link, "slot_bytes": strconv.Itoa(size), "pd_buffer_size": strconv.Itoa(16 * size), "log_level": "error"}
				r := startAgent(b, receiving(b, 1).with(more))
				s := startAgent(b, sending(2).with(more))
				l := layout
				l.SlotBytes = int64(size)
				hello := client.Hello{Part: client.Worker, EngineID: "bench", Layout: l, Shape: []int64{chunkTokens, int64(size) / chunkTokens}}
				sender, err := client.Dial(ctxFor(b), s.Addrs().Local, hello)
				if err != nil {
					b.Fatal(err)
				}
				defer sender.Close()
				receiver, err := client.Dial(ctxFor(b), r.Addrs().Local, hello)
				if err != nil {
					b.Fatal(err)
				}
				defer receiver.Close()
				if err := sender.Touch(b.Context()); err != nil {
					b.Fatal(err)
				}
				b.SetBytes(int64(8 * size))
				b.ReportAllocs()
				b.ResetTimer()
				for i := range b.N {
					one(b, sender, receiver, "r"+strconv.Itoa(i), r.port())
				}
			})
		}
	}
}

func one(b *testing.B, sender, receiver *client.Client, req string, port int) {
	ctx := b.Context()
	tr, err := sender.Begin(ctx, client.Begin{Req: req, TotalChunks: 8, Host: "127.0.0.1", AllocPort: port, Stage: 8, BerthProxy: true})
	if err != nil {
		b.Fatal(err)
	}
	select {
	case <-tr.Granted():
	case <-tr.Ended():
		b.Fatal(tr.Ending())
	}
	slots := tr.Slots()
	if len(slots) == 0 {
		if slots, err = tr.Stage(ctx, 8); err != nil {
			b.Fatal(err)
		}
	}
	chunks := make([]client.Staged, len(slots))
	for i, s := range slots {
		chunks[i] = client.Staged{Index: int64(i), Key: "key", Slot: s, Tokens: chunkTokens}
	}
	if err := tr.Submit(ctx, chunks, 8); err != nil {
		b.Fatal(err)
	}
	<-tr.Ended()
	if e := tr.Ending(); e.Err() != nil {
		b.Fatal(e)
	}
	if _, err := receiver.Claim(ctx, req, req); err != nil {
		b.Fatal(err)
	}
	if err := receiver.Release(ctx, req, req); err != nil {
		b.Fatal(err)
	}
}
