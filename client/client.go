package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/localapi"
)

// Hello says who connects.
type Hello struct {
	Part      Part
	EngineID  string // the same for all processes of an engine, another after a restart
	Rank      int
	Layout    Layout
	Shape     []int64 // of a full chunk
	TokensKey string  // key of the fixed token list: PROTOCOL.md, 4.2
}

// Info is what the agent answered.
type Info struct {
	Incarnation     string // in hex
	SlotBytes       int64
	StagingCapacity int // slots; 0: the agent is no sender
	ReceiveCapacity int // slots; 0: it is no receiver
	MaxStage        int // most slots of one Stage
}

// Client is one connection to an agent. Its methods may be called
// concurrently, but for Close.
//
// Goroutines: over a socket one reads and one writes (in Pipe), inside the
// agent's process none. Lock: mu, a leaf.
type Client struct {
	// Constant.
	info    Info
	pipe    *localapi.Pipe   // nil inside the agent's process
	inside  *localapi.Inside // nil over a socket
	staging []byte           // mappings, nil where there is none
	receive []byte
	done    chan struct{} // closed when the connection is gone
	close   sync.Once

	mu        sync.Mutex
	lastID    uint64
	calls     map[uint64]*call
	transfers map[string]*Transfer
	err       error // why done was closed
}

// call is one request that waits for its answer.
type call struct {
	req  localapi.Request
	done chan struct{} // closed when the result is there

	// Guarded by Client.mu.
	finished bool
	ans      localapi.Answer
	err      error
	late     func(localapi.Answer, error) // gets the result if the caller gave up; may be nil
}

// Dial connects to the agent's socket at path, says hello and maps the pools
// that come with the answer. ctx bounds all of it.
func Dial(ctx context.Context, path string, h Hello) (*Client, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("agent at %s: %w", path, err)
	}
	c := &Client{
		pipe:      localapi.NewPipe(conn.(*net.UnixConn)),
		done:      make(chan struct{}),
		calls:     map[uint64]*call{},
		transfers: map[string]*Transfer{},
	}
	stop := context.AfterFunc(ctx, func() { c.pipe.Cut(ctx.Err()) })
	err = c.hello(h)
	if !stop() {
		err = ctx.Err()
	}
	if err != nil {
		c.pipe.Cut(nil)
		c.pipe.Wait(nil)
		c.unmap()
		return nil, fmt.Errorf("agent at %s: %w", path, err)
	}
	go c.read()
	return c, nil
}

func (h *Hello) request() *localapi.Hello {
	req := &localapi.Hello{Version: localapi.Version, Part: h.Part, EngineID: h.EngineID, Rank: int64(h.Rank), TokensKey: h.TokensKey}
	if h.Part != Tool {
		req.Layout, req.Shape = &h.Layout, h.Shape
	}
	return req
}

// hello is done before the reader runs, since descriptors come with it.
func (c *Client) hello(h Hello) error {
	req := h.request()
	err := c.pipe.Send(func(b []byte) ([]byte, error) { return localapi.AppendRequest(b, 0, req) })
	if err != nil {
		return err
	}
	oob := make([]byte, oobSpace)
	frame, n, err := c.pipe.Read(oob)
	fds, fdErr := descriptors(oob[:n])
	defer closeAll(fds)
	if err = errors.Join(err, fdErr); err != nil {
		return err
	}
	reply, err := localapi.DecodeReply(frame)
	switch {
	case err != nil:
		return err
	case !reply.HasID || reply.ID != 0:
		return errors.New("the agent's first frame is no answer to hello")
	case reply.Err != nil:
		return reply.Err
	}
	a, err := localapi.DecodeAnswer(frame, req)
	if err != nil {
		return err
	}
	return c.welcome(a.(*localapi.HelloAnswer), fds)
}

// welcome takes in the answer to hello.
func (c *Client) welcome(ans *localapi.HelloAnswer, fds []int) error {
	if ans.Version != localapi.Version {
		return fmt.Errorf("the agent speaks version %d of the local API, this client %d", ans.Version, localapi.Version)
	}
	c.info = Info{
		Incarnation:     ans.Incarnation.String(),
		SlotBytes:       ans.SlotBytes,
		StagingCapacity: int(ans.StagingCapacity),
		ReceiveCapacity: int(ans.ReceiveCapacity),
		MaxStage:        int(ans.MaxStage),
	}
	return c.mapPools(ans, fds)
}

// Info describes the agent.
func (c *Client) Info() Info { return c.info }

// Done is closed when the connection is gone. Every call returns then, with an
// error of code PeerLost.
func (c *Client) Done() <-chan struct{} { return c.done }

// Err returns why the connection is gone: nil while it is not.
func (c *Client) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// closeGrace is how long Close waits for the agent to read what was sent.
const closeGrace = time.Second

// Close closes the connection, after what was sent, and unmaps the pools. No
// other call may be running, and no slot may be touched any more. The second
// call is harmless.
func (c *Client) Close() error {
	c.close.Do(func() {
		if c.inside != nil {
			c.inside.Close()
			c.unmap()
			c.inside.Unmapped()
			return
		}
		c.pipe.Flush()
		impatient := time.AfterFunc(closeGrace, func() { c.pipe.Cut(nil) })
		<-c.done
		impatient.Stop()
		c.unmap()
	})
	return nil
}

// read is the reading goroutine.
func (c *Client) read() { c.lost(c.pipe.Wait(c.frames())) }

// lost ends everything that waits.
func (c *Client) lost(why error) {
	lost := fault.New(fault.PeerLost, "the connection to the agent is closed")
	if why != nil {
		lost.Text += ": " + why.Error()
	}
	c.mu.Lock()
	c.err = lost
	calls, transfers := c.calls, c.transfers
	c.calls, c.transfers = nil, nil
	c.mu.Unlock()
	for _, k := range calls {
		c.finish(k, nil, lost)
	}
	for _, t := range transfers {
		t.end(Ending{Ending: "failed", Reason: fault.PeerLost, Text: lost.Text})
	}
	close(c.done)
}

func (c *Client) frames() error {
	for {
		b, _, err := c.pipe.Read(nil)
		if err != nil {
			return err
		}
		reply, err := localapi.DecodeReply(b)
		if err != nil {
			return fmt.Errorf("a frame of the agent: %w", err)
		}
		if !reply.HasID {
			c.event(reply.Event)
			continue
		}
		switch k := c.take(reply.ID); {
		case k == nil:
			return fmt.Errorf("the agent answered call %d, which does not wait", reply.ID)
		case reply.Err != nil:
			c.finish(k, nil, reply.Err)
		default:
			ans, err := localapi.DecodeAnswer(b, k.req)
			if err != nil {
				c.finish(k, nil, err)
				return fmt.Errorf("an answer of the agent: %w", err)
			}
			c.finish(k, ans, nil)
		}
	}
}

// take ends the wait for a call; nil if there is none.
func (c *Client) take(id uint64) *call {
	c.mu.Lock()
	defer c.mu.Unlock()
	k := c.calls[id]
	delete(c.calls, id)
	return k
}

// finish hands the result over: to the caller, or to late if it gave up.
func (c *Client) finish(k *call, ans localapi.Answer, err error) {
	c.mu.Lock()
	k.finished, k.ans, k.err = true, ans, err
	late := k.late
	c.mu.Unlock()
	close(k.done)
	if late != nil {
		late(ans, err)
	}
}

// abandon makes late get the result, unless it is there already.
func (c *Client) abandon(k *call, late func(localapi.Answer, error)) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if k.finished {
		return false
	}
	k.late = late
	return true
}

// event tells a transfer. One that this client did not begin (of a connection
// of the same engine that is gone) is nobody's here.
func (c *Client) event(ev localapi.Event) {
	switch ev := ev.(type) {
	case *localapi.Granted:
		c.mu.Lock()
		t := c.transfers[ev.Req]
		c.mu.Unlock()
		switch {
		case t == nil:
		case t.abandoned:
			c.giveBack(ev.Req, ev.Slots)
		default:
			t.grant(ev.Slots)
		}
	case *localapi.Ended:
		c.mu.Lock()
		t := c.transfers[ev.Req]
		delete(c.transfers, ev.Req)
		c.mu.Unlock()
		if t != nil {
			t.end(Ending{Ending: string(ev.Ending), Reason: ev.Reason, Text: ev.Text})
		}
	}
}

// start sends a request.
func (c *Client) start(req localapi.Request) (uint64, *call, error) {
	k := &call{req: req, done: make(chan struct{})}
	c.mu.Lock()
	err := c.err
	if err == nil && len(c.calls) >= localapi.MaxCalls {
		err = fault.New(fault.Busy, "%d unanswered calls, at most %d", len(c.calls), localapi.MaxCalls)
	}
	if err != nil {
		c.mu.Unlock()
		return 0, nil, err
	}
	c.lastID++
	id := c.lastID
	c.calls[id] = k
	c.mu.Unlock()
	if c.inside != nil {
		err = c.inside.Send(id, req)
	} else {
		err = c.pipe.Send(func(b []byte) ([]byte, error) { return localapi.AppendRequest(b, id, req) })
	}
	if err == nil {
		return id, k, nil
	}
	c.mu.Lock()
	delete(c.calls, id)
	c.mu.Unlock()
	return 0, nil, err
}

// send sends a request whose answer interests nobody. It does not wait: it may
// be called by the agent's own goroutine.
func (c *Client) send(req localapi.Request) {
	if c.inside != nil {
		go c.start(req)
		return
	}
	c.start(req)
}

// do sends a request and waits for the answer. If ctx ends first, late, if not
// nil, gets the answer or the error once it is there; it must not block.
func do[A localapi.Answer](ctx context.Context, c *Client, req localapi.Request, late func(A, error)) (A, error) {
	var none A
	id, k, err := c.start(req)
	if err != nil {
		return none, err
	}
	select {
	case <-k.done:
	case <-ctx.Done():
		gone := c.abandon(k, func(ans localapi.Answer, err error) {
			if late != nil {
				a, _ := ans.(A)
				late(a, err)
			}
		})
		if gone {
			switch req.(type) {
			case *localapi.Stage, *localapi.Wait, *localapi.Cancel: // those that may wait for long
				c.send(&localapi.Hangup{Call: id})
			}
			return none, ctx.Err()
		}
	}
	if k.err != nil {
		return none, k.err
	}
	return k.ans.(A), nil
}

// Status returns the JSON of the agent's /v1/status.
func (c *Client) Status(ctx context.Context) (string, error) {
	a, err := do[*localapi.StatusAnswer](ctx, c, &localapi.Status{}, nil)
	if err != nil {
		return "", err
	}
	return a.Status, nil
}

// Drain asks the agent to take nothing new; Status shows what is left.
func (c *Client) Drain(ctx context.Context) error {
	_, err := do[*localapi.Done](ctx, c, &localapi.Drain{}, nil)
	return err
}

// Cancel ends a request of that name, in whatever state, and returns its ending
// once none of its writes is in flight.
func (c *Client) Cancel(ctx context.Context, req string, reason Code, text string) (Ending, error) {
	return ending(do[*localapi.Ending](ctx, c, &localapi.Cancel{Req: req, Reason: reason, Text: text}, nil))
}

func ending(a *localapi.Ending, err error) (Ending, error) {
	if err != nil {
		return Ending{}, err
	}
	return Ending{Ending: string(a.Ending), Reason: a.Reason, Text: a.Text}, nil
}
