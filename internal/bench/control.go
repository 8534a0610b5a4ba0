package bench

import (
	"context"
	"fmt"
	"net"
	"os"
	"strconv"
	"time"

	"github.com/berthkv/berth/internal/freeport"
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
	kids   []*child // its process
	swarm  *swarm
}

// paired are the metrics of pairs from the generator of this process, which
// shares the cores with the receiver.
var paired = []metric{{"rate", "per second"}, {"p50", "µs"}, {"p99", "µs"}, {"CPU a pair, receiver", "µs"}, {"CPU a pair, generator", "µs"}}

// turn makes pairs over so many connections.
func (x *receiver) turn(ctx context.Context, clients, keys, count int, arrivals []time.Duration) (sample, error) {
	var spent [2][2]time.Duration // before and after, of the receiver and the generator
	look := func(at int) error {
		theirs, err := used(x.kids)
		if err != nil {
			return err
		}
		ours, err := usageOf(os.Getpid())
		spent[at] = [2]time.Duration{theirs.cpu, ours.cpu}
		return err
	}
	if err := look(0); err != nil {
		return sample{}, err
	}
	t, err := x.swarm.pairs(ctx, clients, keys, count, arrivals)
	if err == nil {
		err = look(1)
	}
	s := timedSample(t)
	for i := range spent[0] {
		s.figures = append(s.figures, float64((spent[1][i]-spent[0][i]).Nanoseconds())/1e3/float64(count))
	}
	return s, err
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
		if x.swarm, err = dialSwarm(r.ctx, x.name, x.addr, c.Clients, c.Keys); err != nil {
			return err
		}
		defer x.swarm.close()
	}
	sides := func(clients int, arrivals []time.Duration) (out []side) {
		for _, x := range receivers {
			out = append(out, side{x.name, x.paused, func() (sample, error) {
				return x.turn(r.ctx, clients, c.Keys, c.Count, arrivals)
			}})
		}
		return out
	}
	means, err := r.compare(fmt.Sprintf("%d connections, %d keys, closed", c.Clients, c.Keys), controlChecks, paired, sides(c.Clients, nil)...)
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
		if _, err := r.compare(what, controlChecks, paired, sides(c.Clients, arrivals)...); err != nil {
			return err
		}
	}
	if _, err := r.compare(fmt.Sprintf("1 connection, %d keys, closed", c.Keys), controlChecks, paired, sides(1, nil)...); err != nil {
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
	kid, _, err := r.agent("receiver", o)
	return &receiver{name: "berth", addr: net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), kids: []*child{kid}}, err
}

func (c Control) reference(r *run) (*receiver, error) {
	p, err := freeport.Take(2)
	if err != nil {
		return nil, err
	}
	kid, err := r.python("lmcache-receiver", "control", "--init", strconv.Itoa(p[0]), "--alloc", strconv.Itoa(p[1]), "--slots", strconv.Itoa(controlSlots))
	return &receiver{name: Lmcache, addr: net.JoinHostPort("127.0.0.1", strconv.Itoa(p[1])), paused: []*child{kid}, kids: []*child{kid}}, err
}
