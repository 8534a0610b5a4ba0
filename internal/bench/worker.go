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
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/berthkv/berth"
	"github.com/berthkv/berth/client"
	"github.com/berthkv/berth/internal/link"
	"github.com/berthkv/berth/internal/link/faultlink"
)

// Work is what a worker process is: an engine, with the agent inside its process
// or beside it.
type Work struct {
	What   string            // a key of workers
	Agent  map[string]string // options of the agent to start inside; nil: dial Socket
	Socket string
	Slot   int64 // bytes
	ID     int   // of a sender: its requests are called s<ID>-<n>
	Limit  int64 // of the agent's links: bytes a second to a receiver; 0: none
	Ports  []int // of HTTP servers
}

const chunkTokens = 256

// order is a line that a sending or a receiving worker gets.
type order struct {
	First    int       `json:"first"`
	Count    int       `json:"count"`
	Chunks   int       `json:"chunks"`
	Inflight int       `json:"inflight"`
	Arrivals []float64 `json:"arrivals,omitempty"` // seconds
	Keys     int       `json:"keys,omitempty"`     // for the pyzmq client
	Senders  []int     `json:"senders,omitempty"`  // whose requests a receiver reads
	Receiver int       `json:"receiver,omitempty"` // alloc port, on loopback
	Announce bool      `json:"announce,omitempty"` // a sender says when its one request is granted
}

// answer is what a worker says of an order. Times are Unix nanoseconds.
type answer struct {
	Seconds float64
	Latency []float64 // seconds, of a sender: begin to ending
	Begun   []int64   // of a sender
	Ready   [][]int64 // of a receiver, by sender
}

// RunWorker is the main of a worker process: JSON lines in, JSON lines out. It
// ends with its input.
func RunWorker(ctx context.Context, w Work, in io.Reader, out io.Writer) error {
	work := workers[w.What]
	if work == nil {
		return fmt.Errorf("no worker is called %q", w.What)
	}
	do, done, err := work(ctx, w)
	if err != nil {
		return err
	}
	defer done()
	enc := json.NewEncoder(out)
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
		v, err := do(o, enc.Encode)
		if err != nil {
			v = map[string]string{"error": err.Error()}
		}
		if err := enc.Encode(v); err != nil {
			return err
		}
	}
	return s.Err()
}

// obey carries out an order and returns the answer; say gives one before.
type obey func(o order, say func(any) error) (any, error)

// workers start what they are.
var workers = map[string]func(ctx context.Context, w Work) (do obey, done func(), err error){
	"send": sendWorker, "receive": receiveWorker, "stub": stubWorker, "reverse": reverseWorker,
}

// engine connects the worker's engine.
func (w Work) engine(ctx context.Context) (c *client.Client, done func(), err error) {
	hello := client.Hello{Part: client.Worker, EngineID: "bench", Shape: []int64{chunkTokens, w.Slot / chunkTokens},
		Layout: client.Layout{SlotBytes: w.Slot, Format: 3, DType: "uint8", ChunkTokens: chunkTokens, TPSize: 1}}
	if w.Agent == nil {
		c, err = client.Dial(ctx, w.Socket, hello)
		return c, func() { c.Close() }, err
	}
	cfg, err := berth.LoadConfig(berth.Sources{Flags: w.Agent})
	if err != nil {
		return nil, nil, err
	}
	if w.Limit > 0 {
		cfg.Decorate = func(s link.Sender) link.Sender { return faultlink.Sender(s, faultlink.Plan{BytesPerSecond: w.Limit}) }
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

func sendWorker(ctx context.Context, w Work) (obey, func(), error) {
	c, done, err := w.engine(ctx)
	if err != nil {
		return nil, nil, err
	}
	if err := c.Touch(ctx); err != nil {
		done()
		return nil, nil, err
	}
	st := &stager{submitted: make(chan struct{})}
	return func(o order, say func(any) error) (any, error) {
		granted := func() error { return nil }
		if o.Announce {
			granted = func() error { return say(map[string]bool{"granted": true}) }
		}
		var at []time.Duration
		for _, s := range o.Arrivals {
			at = append(at, time.Duration(s*1e9))
		}
		t, err := drive(ctx, o.Inflight, o.Count, at, func(ctx context.Context, _, i int) (time.Time, error) {
			err := st.send(ctx, c, requestName(w.ID, o.First+i), o.Chunks, o.Receiver, granted)
			return time.Now(), err
		})
		a := answer{Seconds: t.elapsed.Seconds()}
		for i, l := range t.latency {
			a.Latency = append(a.Latency, l.Seconds())
			a.Begun = append(a.Begun, t.begun[i].UnixNano())
		}
		return a, err
	}, done, nil
}

func requestName(sender, n int) string { return "s" + strconv.Itoa(sender) + "-" + strconv.Itoa(n) }

// stager lets the requests of one engine stage beside each other. An engine that
// holds staged slots may not wait for more, so one that is told so waits for a
// submission of the others.
type stager struct {
	mu        sync.Mutex
	submitted chan struct{} // closed at the next one
}

func (s *stager) next() chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.submitted
}

func (s *stager) submit(ctx context.Context, tr *client.Transfer, chunks []client.Staged, end int) error {
	err := tr.Submit(ctx, chunks, end)
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.submitted)
	s.submitted = make(chan struct{})
	return err
}

func (s *stager) stage(ctx context.Context, tr *client.Transfer, n int) ([]client.Slot, error) {
	for {
		submitted := s.next()
		slots, err := tr.Stage(ctx, n)
		if !errors.Is(err, &client.Error{Code: client.Holding}) {
			return slots, err
		}
		select {
		case <-submitted:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// send is one request, from Begin to its ending. Nobody writes the chunks: the
// time of a model is not Berth's, nor the reference's.
func (s *stager) send(ctx context.Context, c *client.Client, req string, n, port int, granted func() error) error {
	tr, err := c.Begin(ctx, client.Begin{Req: req, TotalChunks: n, Host: "127.0.0.1", AllocPort: port, Stage: n, BerthProxy: true})
	if err != nil {
		return err
	}
	select {
	case <-tr.Granted():
		if err := granted(); err != nil {
			return err
		}
	case <-ctx.Done():
		return ctx.Err()
	case <-tr.Ended():
		return fmt.Errorf("%s: %w", req, tr.Ending().Err())
	}
	slots := tr.Slots()
	if len(slots) == 0 {
		if slots, err = s.stage(ctx, tr, n); err != nil {
			return err
		}
	}
	chunks := make([]client.Staged, len(slots))
	for i, slot := range slots {
		chunks[i] = client.Staged{Index: int64(i), Key: "k" + strconv.Itoa(i), Slot: slot, Tokens: chunkTokens}
	}
	if err := s.submit(ctx, tr, chunks, n); err != nil {
		return err
	}
	<-tr.Ended()
	if err := tr.Ending().Err(); err != nil {
		return fmt.Errorf("%s: %w", req, err)
	}
	return nil
}

// receiveWorker is a decode engine that reads nothing: it waits for each request
// of an order, claims it and releases it.
func receiveWorker(ctx context.Context, w Work) (obey, func(), error) {
	c, done, err := w.engine(ctx)
	if err != nil {
		return nil, nil, err
	}
	return func(o order, _ func(any) error) (any, error) {
		a := answer{Ready: make([][]int64, len(o.Senders))}
		g, ctx := errgroup.WithContext(ctx)
		readers := min(2*o.Inflight, 64) // some wait for what is not begun yet
		for k, sender := range o.Senders {
			a.Ready[k] = make([]int64, o.Count)
			for from := range readers {
				g.Go(func() error {
					for i := from; i < o.Count; i += readers {
						req := requestName(sender, o.First+i)
						e, err := c.Wait(ctx, req, turnTimeout)
						a.Ready[k][i] = time.Now().UnixNano()
						if err == nil {
							err = e.Err()
						}
						if err == nil {
							_, err = c.Claim(ctx, req, req)
						}
						if err == nil {
							err = c.Release(ctx, req, req)
						}
						if err != nil {
							return fmt.Errorf("%s: %w", req, err)
						}
					}
					return nil
				})
			}
		}
		return a, g.Wait()
	}, done, nil
}
