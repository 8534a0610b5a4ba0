package bench

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/berthkv/berth/internal/freeport"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/wire"
	"github.com/berthkv/berth/internal/zmtp"
)

// Control is `berth bench control`: pairs of an AllocRequest, whose answer is
// timed, and the CancelNotif that gives the slots back, in LMCache's dialect.
type Control struct {
	Options
	Load    Load // of the open loop; Rate 0: half of what the slower side took without a rate
	Clients int  // connections
	Keys    int  // of a request
	Count   int  // pairs in a turn
}

// The pool of the receivers, and what a chunk is.
const (
	controlSlots = 400
	maxClients   = 256
	controlSlot  = 2 * 4 * chunkTokens * 64 * 2
)

var controlShape = []int64{2, 4, chunkTokens, 64}

const controlChecks = "generations and fences on; no bytes move"

// Run measures.
func (c Control) Run(ctx context.Context) (_ *Report, err error) {
	if err := check([]bound{{"clients", int64(c.Clients), maxClients}, {"keys", int64(c.Keys), controlSlots}, {"count", int64(c.Count), maxCount}}); err != nil {
		return nil, err
	}
	if c.Clients*c.Keys > controlSlots {
		return nil, refuse("%d clients with %d keys each need %d slots; the pools have %d", c.Clients, c.Keys, c.Clients*c.Keys, controlSlots)
	}
	load := c.Load
	if load.Rate == 0 {
		load.Rate = 1
	}
	if _, err := load.arrivals(1); err != nil {
		return nil, err
	}
	r, err := c.begin(ctx, "control")
	if err != nil {
		return nil, err
	}
	return r.end(c.measure(r))
}

// receiver is one that clients of the LMCache dialect can ask.
type receiver struct {
	name   string
	addr   string
	paused []*child
	conns  []*zmtp.Conn
	next   int // number of the next request: names are never used twice
}

func (c Control) measure(r *run) error {
	berths, err := c.berth(r)
	if err != nil {
		return err
	}
	receivers := []*receiver{berths}
	if c.Against != "" {
		theirs, err := c.reference(r)
		if err != nil {
			return err
		}
		receivers = append(receivers, theirs)
	}
	for _, x := range receivers {
		defer x.close()
		if err := x.dial(r.ctx, c.Clients); err != nil {
			return err
		}
	}
	sides := func(clients int, arrivals []time.Duration) (out []side) {
		for _, x := range receivers {
			out = append(out, side{x.name, x.paused, func() (sample, error) {
				t, err := x.pairs(r.ctx, clients, c.Keys, c.Count, arrivals)
				return timedSample(t), err
			}})
		}
		return out
	}
	means, err := r.compare(fmt.Sprintf("%d connections, %d keys, closed", c.Clients, c.Keys), controlChecks, timed, sides(c.Clients, nil)...)
	if err != nil {
		return err
	}
	load := c.Load
	if load.Rate == 0 {
		load.Rate = means[0][0] / 2
		for _, m := range means {
			load.Rate = min(load.Rate, m[0]/2)
		}
	}
	if load.Pattern != Closed {
		arrivals, err := load.arrivals(c.Count)
		if err != nil {
			return err
		}
		what := fmt.Sprintf("%d connections, %d keys, %s", c.Clients, c.Keys, load)
		if _, err := r.compare(what, controlChecks, timed, sides(c.Clients, arrivals)...); err != nil {
			return err
		}
	}
	if _, err := r.compare(fmt.Sprintf("1 connection, %d keys, closed", c.Keys), controlChecks, timed, sides(1, nil)...); err != nil {
		return err
	}
	if c.Against == "" && c.Python == "" {
		return nil
	}
	return c.pyzmq(r, receivers)
}

// pyzmq measures with one client that is LMCache's kind.
func (c Control) pyzmq(r *run, receivers []*receiver) error {
	var sides []side
	for _, x := range receivers {
		_, port, _ := net.SplitHostPort(x.addr)
		kid, err := r.python("pyzmq-client-of-"+x.name, "client", "--alloc", port)
		if err != nil {
			return err
		}
		next := 0
		sides = append(sides, side{x.name, x.paused, func() (sample, error) {
			var a answer
			err := kid.ask(order{First: next, Count: c.Count, Keys: c.Keys}, &a)
			next += c.Count
			return timedSample(a.timing()), err
		}})
	}
	_, err := r.compare(fmt.Sprintf("1 pyzmq client, %d keys, closed", c.Keys), controlChecks, timed, sides...)
	return err
}

// timing is the answer of a sender or client as drive gives it.
func (a answer) timing() timing {
	t := timing{elapsed: time.Duration(a.Seconds * 1e9)}
	for _, l := range a.Latency {
		t.latency = append(t.latency, time.Duration(l*1e9))
	}
	return t
}

func (c Control) berth(r *run) (*receiver, error) {
	o := r.agentOptions("receiver", controlSlots, controlSlot)
	port, err := o.receiving()
	if err != nil {
		return nil, err
	}
	delete(o, "slot_bytes")
	o["kv_shape"], o["kv_dtype"] = "4,2,256,1,64", "bfloat16"
	_, _, err = r.agent("receiver", o)
	return &receiver{name: "berth", addr: net.JoinHostPort("127.0.0.1", strconv.Itoa(port))}, err
}

func (c Control) reference(r *run) (*receiver, error) {
	p, err := freeport.Take(2)
	if err != nil {
		return nil, err
	}
	kid, err := r.python("lmcache-receiver", "control", "--init", strconv.Itoa(p[0]), "--alloc", strconv.Itoa(p[1]), "--slots", strconv.Itoa(controlSlots))
	return &receiver{name: Lmcache, addr: net.JoinHostPort("127.0.0.1", strconv.Itoa(p[1])), paused: []*child{kid}}, err
}

// dial makes connections. They send no heartbeats: a stopped peer would miss them.
func (x *receiver) dial(ctx context.Context, n int) error {
	for i := range n {
		conn, err := zmtp.DialDealer(ctx, x.addr, nil, zmtp.Options{Identity: fmt.Appendf(nil, "bench-to-%s#%d", x.addr, i), HeartbeatInterval: -1})
		if err != nil {
			return fmt.Errorf("%s at %s: %w", x.name, x.addr, err)
		}
		x.conns = append(x.conns, conn)
	}
	return nil
}

func (x *receiver) close() {
	for _, c := range x.conns {
		c.Close()
	}
}

// pairs makes count pairs over so many connections.
func (x *receiver) pairs(ctx context.Context, clients, keys, count int, arrivals []time.Duration) (timing, error) {
	first := x.next
	x.next += count
	return drive(ctx, clients, count, arrivals, func(ctx context.Context, w, i int) (time.Time, error) {
		return x.pair(ctx, x.conns[w], first+i, keys)
	})
}

// answerTimeout bounds one answer of a receiver.
const answerTimeout = 30 * time.Second

func (x *receiver) pair(ctx context.Context, conn *zmtp.Conn, n, keys int) (answered time.Time, err error) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	names := make([]string, keys)
	for k := range names {
		names[k] = fmt.Sprintf("m@1@0@%x@bfloat16", n<<12+k)
	}
	req := "b" + strconv.Itoa(n)
	got, err := x.call(ctx, conn, &msg.AllocRequest{Keys: names, Fmt: kv.Format2LTD, Shape: controlShape, DType: "bfloat16",
		LastChunkToks: chunkTokens, ReqID: req, TotalChunks: int64(keys)})
	if err != nil {
		return answered, err
	}
	answered = time.Now()
	if len(got) != keys {
		return answered, fmt.Errorf("%s answers a request of %d keys with %v", x.name, keys, got)
	}
	for _, slot := range got {
		if slot < 0 {
			return answered, fmt.Errorf("%s refuses a request of %d keys", x.name, keys)
		}
	}
	_, err = x.call(ctx, conn, &msg.CancelNotif{ReqID: req, Keys: names})
	return answered, err
}

func (x *receiver) call(ctx context.Context, conn *zmtp.Conn, m msg.Message) ([]int64, error) {
	b, err := wire.Append(nil, m)
	if err != nil {
		return nil, err
	}
	if err := conn.SendWait(ctx, nil, b); err != nil {
		return nil, fmt.Errorf("%s: %w", x.name, err)
	}
	frames, err := conn.Recv(ctx)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", x.name, err)
	}
	got, err := wire.Decode(frames[len(frames)-1])
	if err != nil {
		return nil, fmt.Errorf("%s: %w", x.name, err)
	}
	a, ok := got.(*msg.AllocResponse)
	if !ok {
		return nil, fmt.Errorf("%s answers with %T", x.name, got)
	}
	return a.RemoteIndexes, nil
}
