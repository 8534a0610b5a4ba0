package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"
	"time"

	"github.com/berthkv/berth"
	"github.com/berthkv/berth/client"
)

// Work is what a worker process is: an engine, with the agent inside its process
// or beside it.
type Work struct {
	What   string            // a key of workers
	Agent  map[string]string // options of the agent to start inside; nil: dial Socket
	Socket string
	Slot   int64 // bytes
	ID     int   // of a sender: its requests are called s<ID>-<n>
}

// layoutOf is a full chunk of so many bytes.
func layoutOf(slot int64) (client.Layout, []int64) {
	return client.Layout{SlotBytes: slot, Format: 3, DType: "uint8", ChunkTokens: chunkTokens, TPSize: 1}, []int64{chunkTokens, slot / chunkTokens}
}

const chunkTokens = 256

// order is a line that a sending or a receiving worker gets.
type order struct {
	First    int       `json:"first"`
	Count    int       `json:"count"`
	Chunks   int       `json:"chunks"`
	Inflight int       `json:"inflight"`
	Arrivals []float64 `json:"arrivals,omitempty"` // seconds; the reference's name for it
	Sender   int       `json:"sender"`             // whose requests a receiver reads
	Keys     int       `json:"keys,omitempty"`     // for the reference's client
	// Receiver is where a sender's requests go.
	Receiver int `json:"receiver,omitempty"` // alloc port, on loopback
}

// answer is what a worker says of an order, in seconds.
type answer struct {
	Seconds   float64   `json:"seconds"`
	Latencies []float64 `json:"latencies,omitempty"`
	CPU       float64   `json:"cpu,omitempty"` // of the process
}

// RunWorker is the main of a worker process: JSON lines in, JSON lines out.
func RunWorker(ctx context.Context, w Work, in io.Reader, out io.Writer) error {
	run := workers[w.What]
	if run == nil {
		return fmt.Errorf("no worker is called %q", w.What)
	}
	enc := json.NewEncoder(out)
	orders := func(do func(o order) (any, error)) error {
		if err := enc.Encode(map[string]bool{"ready": true}); err != nil {
			return err
		}
		s := bufio.NewScanner(in)
		s.Buffer(nil, 16<<20)
		for s.Scan() {
			var o order
			if err := json.Unmarshal(s.Bytes(), &o); err != nil {
				return err
			}
			v, err := do(o)
			if err != nil {
				enc.Encode(map[string]string{"error": err.Error()})
				return err
			}
			if v == nil {
				continue
			}
			if err := enc.Encode(v); err != nil {
				return err
			}
		}
		return s.Err()
	}
	return run(ctx, w, orders)
}

var workers = map[string]func(ctx context.Context, w Work, orders func(func(order) (any, error)) error) error{
	"send": sendWorker, "receive": receiveWorker,
}

// engine connects the worker's engine.
func (w Work) engine(ctx context.Context) (c *client.Client, done func(), err error) {
	layout, shape := layoutOf(w.Slot)
	hello := client.Hello{Part: client.Worker, EngineID: "bench", Layout: layout, Shape: shape}
	if w.Agent == nil {
		c, err = client.Dial(ctx, w.Socket, hello)
		return c, func() { c.Close() }, err
	}
	cfg, err := berth.LoadConfig(berth.Sources{Flags: w.Agent})
	if err != nil {
		return nil, nil, err
	}
	a, err := berth.StartAgent(ctx, cfg, slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})))
	if err != nil {
		return nil, nil, err
	}
	if c, err = a.Engine(ctx, hello); err != nil {
		return nil, nil, errors.Join(err, a.Close())
	}
	return c, func() { c.Close(); a.Close() }, nil
}

func sendWorker(ctx context.Context, w Work, orders func(func(order) (any, error)) error) error {
	c, done, err := w.engine(ctx)
	if err != nil {
		return err
	}
	defer done()
	if err := c.Touch(ctx); err != nil {
		return err
	}
	return orders(func(o order) (any, error) {
		var at []time.Duration
		for _, s := range o.Arrivals {
			at = append(at, time.Duration(s*1e9))
		}
		var lat []float64
		before, _ := usageOf(os.Getpid())
		result, err := drive(o.Inflight, o.Count, at, func(_, i int) error {
			return send(ctx, c, "s"+strconv.Itoa(w.ID)+"-"+strconv.Itoa(o.First+i), o.Chunks, o.Receiver)
		})
		if err != nil {
			return nil, err
		}
		after, _ := usageOf(os.Getpid())
		for _, b := range result.hist.Distribution() {
			for range b.Count {
				lat = append(lat, float64(b.To)/1e9)
			}
		}
		return answer{result.seconds, lat, (after.cpu - before.cpu).Seconds()}, nil
	})
}

// send is one request, from Begin to its ending. Nobody writes the chunks: the
// time of a model is not Berth's, nor the reference's.
func send(ctx context.Context, c *client.Client, req string, n, port int) error {
	tr, err := c.Begin(ctx, client.Begin{Req: req, TotalChunks: n, Host: "127.0.0.1", AllocPort: port, Stage: n, BerthProxy: true})
	if err != nil {
		return err
	}
	select {
	case <-tr.Granted():
	case <-tr.Ended():
		return fmt.Errorf("%s: %w", req, tr.Ending().Err())
	}
	slots := tr.Slots()
	if len(slots) == 0 && n > 0 {
		if slots, err = tr.Stage(ctx, n); err != nil {
			return err
		}
	}
	chunks := make([]client.Staged, len(slots))
	for i, s := range slots {
		chunks[i] = client.Staged{Index: int64(i), Key: "k" + strconv.Itoa(i), Slot: s, Tokens: chunkTokens}
	}
	if n > 0 {
		if err := tr.Submit(ctx, chunks, n); err != nil {
			return err
		}
	}
	<-tr.Ended()
	if err := tr.Ending().Err(); err != nil {
		return fmt.Errorf("%s: %w", req, err)
	}
	return nil
}

// receiveWorker is a decode engine that reads nothing: it waits for each request
// of an order, claims it and releases it.
func receiveWorker(ctx context.Context, w Work, orders func(func(order) (any, error)) error) error {
	c, done, err := w.engine(ctx)
	if err != nil {
		return err
	}
	defer done()
	return orders(func(o order) (any, error) {
		for from := range 2 * o.Inflight {
			go func() {
				for i := o.First + from; i < o.First+o.Count; i += 2 * o.Inflight {
					req := "s" + strconv.Itoa(o.Sender) + "-" + strconv.Itoa(i)
					if err := read(ctx, c, req); err != nil {
						fmt.Fprintln(os.Stderr, req, err)
						return // its sender will miss the room
					}
				}
			}()
		}
		return nil, nil
	})
}

func read(ctx context.Context, c *client.Client, req string) error {
	e, err := c.Wait(ctx, req, 5*time.Minute)
	if err == nil {
		err = e.Err()
	}
	if err != nil {
		return err
	}
	if _, err := c.Claim(ctx, req, req); err != nil {
		return err
	}
	return c.Release(ctx, req, req)
}
