package bench

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/berthkv/berth"
	"github.com/berthkv/berth/internal/freeport"
)

// Proxy is `berth bench proxy`: streamed answers of engines that answer at once,
// through `berth proxy`, from the engine itself, and leg by leg through Go's
// httputil.ReverseProxy.
type Proxy struct {
	Options
	Load    Load
	Count   int // requests in a turn
	Prompt  int // bytes, which are the stub's tokens
	Tokens  int // of an answer
	Workers int // most requests in flight
}

const proxySlots = 256

// Run measures.
func (p Proxy) Run(ctx context.Context) (*Report, error) {
	if err := check([]bound{{"count", int64(p.Count), maxCount}, {"prompt", int64(p.Prompt), 1 << 20}, {"tokens", int64(p.Tokens), 1 << 16}, {"inflight", int64(p.Workers), proxySlots}}); err != nil {
		return nil, err
	}
	if p.Tokens < 2 {
		return nil, refuse("--tokens is 1; the decode engine writes from the second on")
	}
	arrivals, err := p.Load.arrivals(p.Count)
	if err != nil {
		return nil, err
	}
	r, err := p.begin(ctx, "proxy")
	if err != nil {
		return nil, err
	}
	return r.end(p.measure(r, arrivals))
}

// proxied are the metrics of both proxies.
var proxied = []metric{{"first token, p50", "µs"}, {"first token, p99", "µs"}, {"added to the engine's own, p50", "µs"}, {"added to the engine's own, p99", "µs"},
	{"proxy's CPU a request", "µs"}, {"proxy's wake-ups a request", "switches"}}

func (p Proxy) measure(r *run, arrivals []time.Duration) error {
	port, err := freeport.Take(4) // the engines', and where Go's proxy stands before them
	if err != nil {
		return err
	}
	engines, alloc, err := p.engines(r, port)
	if err != nil {
		return err
	}
	r.say("starting the proxies")
	var addrs berth.ProxyAddrs
	ours, err := r.start("proxy", &addrs, r.self, "proxy", "--host", "127.0.0.1", "--port", "0", "--proxy-host", "127.0.0.1", "--proxy-port", "0", "--http-addr", "127.0.0.1:0",
		"--prefiller-host", "127.0.0.1", "--prefiller-port", strconv.Itoa(port[0]), "--decoder-host", "127.0.0.1", "--decoder-port", strconv.Itoa(port[1]),
		"--decoder-init-port", strconv.Itoa(alloc[1]), "--decoder-alloc-port", strconv.Itoa(alloc[0]),
		"--on-transfer-failure", "error", "--log-level", "warn", "--announce")
	if err != nil {
		return err
	}
	theirs, err := r.worker("reverse-proxy", Work{What: "reverse", Ports: port})
	if err != nil {
		return err
	}
	_, text, err := net.SplitHostPort(addrs.HTTP)
	if err != nil {
		return err
	}
	front, _ := strconv.Atoi(text)
	c := newCaller()
	defer c.CloseIdleConnections()
	body := fmt.Sprintf(`{"model":"m","prompt":%q,"max_tokens":%d,"stream":true}`, strings.Repeat("berth ", p.Prompt/6+1)[:p.Prompt], p.Tokens)
	direct := func(ctx context.Context, _, _ int) (time.Time, error) {
		return c.post(ctx, port[1], "/v1/completions", body, "")
	}
	through := func(ctx context.Context, _, _ int) (time.Time, error) {
		return c.post(ctx, front, "/v1/completions", body, "")
	}
	if _, err := through(r.ctx, 0, 0); err != nil {
		return err
	}
	var seen bodies
	if err := engines.ask(order{}, &seen); err != nil {
		return err
	}
	if len(seen.Legs) != 3 {
		return fmt.Errorf("the proxy asked the engines %d times for one answer, not three", len(seen.Legs))
	}
	legs := func(ctx context.Context, _, _ int) (first time.Time, err error) {
		for i, l := range seen.Legs {
			at := 2
			if l.Port == port[1] {
				at = 3
			}
			t, err := c.post(ctx, port[at], l.Path, l.Body, replayed)
			if err != nil {
				return t, theirs.failed(fmt.Errorf("leg %d: %w", i+1, err))
			}
			if i == 1 { // the prefill's answer has the first token
				first = t
			}
		}
		return first, nil
	}
	turn := func(proxy *child, do func(context.Context, int, int) (time.Time, error)) func() (sample, error) {
		return func() (s sample, err error) {
			base, err := drive(r.ctx, p.Workers, p.Count, arrivals, direct)
			if err != nil {
				return s, err
			}
			before, err := usageOf(proxy.pid())
			if err != nil {
				return s, err
			}
			t, err := drive(r.ctx, p.Workers, p.Count, arrivals, do)
			if err != nil {
				return s, err
			}
			after, err := usageOf(proxy.pid())
			if err != nil {
				return s, err
			}
			if err := engines.ask(order{}, &bodies{}); err != nil { // a transfer that failed
				return s, err
			}
			h, b, n := histogram(t.latency), histogram(base.latency), float64(p.Count)
			return sample{[]float64{quantile(h, 50), quantile(h, 99), quantile(h, 50) - quantile(b, 50), quantile(h, 99) - quantile(b, 99),
				(after.cpu - before.cpu).Seconds() * 1e6 / n, float64(after.wakes(before)) / n}, h}, nil
		}
	}
	what := fmt.Sprintf("streamed, %s, prompt of %d bytes, %d tokens", p.Load, p.Prompt, p.Tokens)
	_, err = r.compare(what, "generations and fences on, checksums off; a prompt moves one chunk of 4 KiB", proxied,
		side{"berth", nil, turn(ours, through)}, side{"httputil.ReverseProxy", nil, turn(theirs, legs)})
	r.note("httputil.ReverseProxy carries the bodies of the three legs (tokenize, prefill, decode), asked one after another by the client: it watches no transfer, and reads and joins no answer")
	return err
}

// engines starts the agents and the stub. alloc are the receiver's ports.
func (p Proxy) engines(r *run, port []int) (k *child, alloc [2]int, err error) {
	const slot = 4 << 10
	o := r.agentOptions("receiver", proxySlots, slot)
	if alloc[0], err = o.receiving(); err != nil {
		return nil, alloc, err
	}
	alloc[1], _ = strconv.Atoi(o["pd_peer_init_port"])
	_, addrs, err := r.agent("receiver", o)
	if err != nil {
		return nil, alloc, err
	}
	k, err = r.worker("engines", Work{What: "stub", Slot: slot, Socket: addrs.Local, Agent: r.agentOptions("sender", proxySlots, slot), Ports: port})
	return k, alloc, err
}
