package client_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/berthkv/berth/client"
)

// An engine sends a prompt of two chunks.
func Example() {
	path, stop := exampleAgent()
	defer stop()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()

	c, err := client.Dial(ctx, path, client.Hello{
		Part: client.Worker, EngineID: "engine-1",
		Layout: client.Layout{SlotBytes: 4096, Format: 1, DType: "half", ChunkTokens: 16, TPSize: 1},
		Shape:  []int64{2, 4, 16, 16},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer c.Close()

	t, err := c.Begin(ctx, client.Begin{Req: "cmpl-1", TotalChunks: 2, Host: "127.0.0.1", AllocPort: 8400})
	if err != nil {
		fmt.Println(err)
		return
	}
	select {
	case <-t.Granted():
	case <-t.Ended():
		fmt.Println(t.Ending().Err())
		return
	}
	slots, err := t.Stage(ctx, 2)
	if err != nil {
		fmt.Println(err)
		return
	}
	var chunks []client.Staged
	for i, slot := range slots {
		copy(c.Staging(slot), "keys and values")
		chunks = append(chunks, client.Staged{Index: int64(i), Key: fmt.Sprint("key-", i), Slot: slot, Tokens: 16})
	}
	if err := t.Submit(ctx, chunks, 2); err != nil {
		fmt.Println(errors.Join(err, t.Unstage(ctx, slots)))
		return
	}
	<-t.Ended()
	fmt.Println(t.Ending().Ending)
	// Output: ready
}
