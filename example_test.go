package berth_test

import (
	"context"
	"fmt"
	"log"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/berthkv/berth"
	"github.com/berthkv/berth/client"
	"github.com/berthkv/berth/internal/freeport"
)

// Two agents and their engines in one process: the KV cache of a prompt of one
// chunk goes from the prefill to the decode side.
func Example() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	dir, err := os.MkdirTemp("", "berth")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	ports, err := freeport.Take(1) // in production one from the configuration
	if err != nil {
		log.Fatal(err)
	}
	port := ports[0]

	// An agent each; in production one beside each engine, from a file.
	start := func(name string, more map[string]string) *berth.Agent {
		options := map[string]string{
			"slot_bytes": "4096", "chunk_size": "16", "pd_buffer_size": "40960",
			"http_addr": "127.0.0.1:0", "local_socket": filepath.Join(dir, name+".sock"),
		}
		for k, v := range more {
			options[k] = v
		}
		cfg, err := berth.LoadConfig(berth.Sources{Flags: options})
		if err != nil {
			log.Fatal(err)
		}
		agent, err := berth.StartAgent(ctx, cfg, slog.New(slog.DiscardHandler))
		if err != nil {
			log.Fatal(err)
		}
		return agent
	}
	receiver := start("decode", map[string]string{"pd_role": "receiver", "pd_peer_host": "127.0.0.1", "pd_peer_alloc_port": strconv.Itoa(port)})
	defer receiver.Close()
	sender := start("prefill", map[string]string{"pd_role": "sender", "pd_skip_proxy_notification": "true"})
	defer sender.Close()

	engine := func(a *berth.Agent, name string) *client.Client {
		c, err := a.Engine(ctx, client.Hello{
			Part: client.Worker, EngineID: name, Shape: []int64{16, 256},
			Layout: client.Layout{SlotBytes: 4096, Format: 3, DType: "uint8", ChunkTokens: 16, TPSize: 1},
		})
		if err != nil {
			log.Fatal(err)
		}
		return c
	}
	prefill, decode := engine(sender, "prefill"), engine(receiver, "decode")
	defer prefill.Close()
	defer decode.Close()

	// The prefill engine reserves room for the whole prompt, and writes.
	t, err := prefill.Begin(ctx, client.Begin{Req: "cmpl-1", TotalChunks: 1, Host: "127.0.0.1", AllocPort: port})
	if err != nil {
		log.Fatal(err)
	}
	<-t.Granted()
	slots, err := t.Stage(ctx, 1)
	if err != nil {
		log.Fatal(err)
	}
	copy(prefill.Staging(slots[0]), "keys and values")
	if err := t.Submit(ctx, []client.Staged{{Index: 0, Key: "prefix-hash", Slot: slots[0], Tokens: 16}}, 1); err != nil {
		log.Fatal(err)
	}

	// The decode engine waits until all of it is there, reads, and lets go.
	ending, err := decode.Wait(ctx, "cmpl-1", time.Minute)
	if err != nil {
		log.Fatal(err)
	}
	claim, err := decode.Claim(ctx, "request-7", "cmpl-1")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s: %s\n", ending.Ending, decode.Receive(claim.Chunks[0].Slot)[:15])
	if err := decode.Release(ctx, "request-7", "cmpl-1"); err != nil {
		log.Fatal(err)
	}
	// Output: ready: keys and values
}
