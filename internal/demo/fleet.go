package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/berthkv/berth"
	"github.com/berthkv/berth/internal/freeport"
)

// The demo's sizes: seeds of the design, small enough for pure Go.
const (
	chunkTokens = 16
	poolSlots   = 10
	stageSlots  = 10
	tokenBudget = 64 // tokens of a prefill step: long prompts make several batches
	leaseSec    = 2
	// kvShape and kvDType are the demo engine's: layers, 2, tokens, kv_heads,
	// head_size.
	kvShape = "[4, 2, 16, 2, 16]"
	kvDType = "bfloat16"
	slot    = 2 * 4 * chunkTokens * 2 * 16 * 2 // bytes
)

// node is one machine's worth: an agent and an engine.
type node struct {
	name   string
	role   string // of the engine: prefill or decode
	agent  *process
	engine *process

	agentAddrs  berth.Addrs
	engineAddrs struct{ HTTP string }
	relay       *relay // what the proxy dials in place of the engine
}

// fleet is every process of the demo.
type fleet struct {
	dir     string
	spawn   *spawner
	nodes   []*node // the prefill nodes, then the decode node
	proxy   *process
	proxyAt berth.ProxyAddrs
	http    *http.Client
	undo    []func()
}

// startFleet starts two prefill nodes, one decode node and the proxy. If strict,
// a transfer that fails is an error answer, and not made up for by computing the
// prompt at the decode node.
func startFleet(ctx context.Context, binary, dir, link string, strict bool) (*fleet, error) {
	p, err := freeport.Take(9)
	if err != nil {
		return nil, err
	}
	sctx, cancel := context.WithCancel(context.Background())
	f := &fleet{dir: dir, spawn: newSpawner(sctx, binary, dir), http: &http.Client{Timeout: 2 * time.Second}}
	f.undo = append(f.undo, cancel)
	alloc, initPort, notify := p[0], p[1], p[2]
	links := link
	if link == "" {
		links = "shm, tcp"
	}
	common := fmt.Sprintf("links: [%s]\nkv_shape: %s\nkv_dtype: %s\nchunk_size: %d\nlease_sec: %d\nquarantine_sec: 3\nunclaimed_ttl_sec: 10\npd_shutdown_timeout_sec: 3\nlog_level: debug\n",
		links, kvShape, kvDType, chunkTokens, leaseSec)
	for i, name := range []string{"decode", "prefill-1", "prefill-2"} {
		own := fmt.Sprintf("node: %s\nhttp_addr: 127.0.0.1:%d\nlocal_socket: %s\n", name, p[3+i], filepath.Join(dir, name+".sock"))
		if name == "decode" {
			own += fmt.Sprintf("pd_role: receiver\npd_buffer_size: %d\npd_peer_host: 127.0.0.1\npd_peer_alloc_port: %d\npd_peer_init_port: %d\n",
				poolSlots*slot, alloc, initPort)
		} else {
			own += fmt.Sprintf("pd_role: sender\npd_buffer_size: %d\npd_proxy_host: 127.0.0.1\npd_proxy_port: %d\n", stageSlots*slot, notify)
		}
		file := filepath.Join(dir, name+".yaml")
		if err := os.WriteFile(file, []byte(common+own), 0o600); err != nil {
			return f, err
		}
		role, _, _ := strings.Cut(name, "-")
		n := &node{name: name, role: role,
			agent: &process{name: name + " agent", log: filepath.Join(dir, name+"-agent.log"), args: []string{"agent", "--config", file, "--announce"}},
			engine: &process{name: name + " engine", log: filepath.Join(dir, name+"-engine.log"), args: []string{"engine", "--role", role,
				"--socket", filepath.Join(dir, name+".sock"), "--http", fmt.Sprintf("127.0.0.1:%d", p[6+i]), "--chunk-size", strconv.Itoa(chunkTokens),
				"--token-budget", strconv.Itoa(tokenBudget), "--fail-on-transfer=" + strconv.FormatBool(strict), "--announce"}},
		}
		f.nodes = append(f.nodes, n)
	}
	f.nodes = append(f.nodes[1:], f.nodes[0]) // the decode node last
	var wg sync.WaitGroup
	errs := make([]error, len(f.nodes))
	for i, n := range f.nodes {
		wg.Go(func() { errs[i] = f.startNode(ctx, n) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return f, err
	}
	proxyPort, err := freeport.Take(2)
	if err != nil {
		return f, err
	}
	var prefillers []string
	for _, n := range f.prefill() {
		prefillers = append(prefillers, strconv.Itoa(n.relay.port()))
	}
	onFailure := "recompute"
	if strict {
		onFailure = "error"
	}
	f.proxy = &process{name: "proxy", log: filepath.Join(dir, "proxy.log"), args: []string{"proxy", "--host", "127.0.0.1", "--port", strconv.Itoa(proxyPort[0]),
		"--prefiller-host", "127.0.0.1", "--prefiller-port", strings.Join(prefillers, ","), "--num-prefillers", strconv.Itoa(len(prefillers)),
		"--decoder-host", "127.0.0.1", "--decoder-port", strconv.Itoa(f.decode().relay.port()), "--num-decoders", "1",
		"--decoder-init-port", strconv.Itoa(initPort), "--decoder-alloc-port", strconv.Itoa(alloc),
		"--proxy-host", "127.0.0.1", "--proxy-port", strconv.Itoa(notify), "--http-addr", "127.0.0.1:" + strconv.Itoa(proxyPort[1]), "--on-transfer-failure", onFailure, "--show-nodes", "--announce"}}
	if err := f.spawn.start(ctx, f.proxy, &f.proxyAt); err != nil {
		return f, err
	}
	return f, f.allReady(ctx)
}

func (f *fleet) prefill() []*node { return f.nodes[:len(f.nodes)-1] }
func (f *fleet) decode() *node    { return f.nodes[len(f.nodes)-1] }

func (f *fleet) startNode(ctx context.Context, n *node) error {
	if err := f.spawn.start(ctx, n.agent, &n.agentAddrs); err != nil {
		return err
	}
	if err := f.spawn.start(ctx, n.engine, &n.engineAddrs); err != nil {
		return err
	}
	r, err := newRelay(n.engineAddrs.HTTP)
	if err != nil {
		return err
	}
	n.relay = r
	return nil
}

// restart starts a process again after a kill, at the same addresses.
func (f *fleet) restart(ctx context.Context, p *process) error {
	var addrs json.RawMessage
	return f.spawn.start(ctx, p, &addrs)
}

// allReady returns when every server says that it can serve.
func (f *fleet) allReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	for _, addr := range f.servers() {
		if err := f.ready(ctx, addr); err != nil {
			return err
		}
	}
	return nil
}

func (f *fleet) servers() []string {
	var out []string
	for _, n := range f.nodes {
		out = append(out, n.agentAddrs.HTTP, n.engineAddrs.HTTP)
	}
	return append(out, f.proxyAt.HTTP)
}

// ready asks addr until it answers 200 to /ready.
func (f *fleet) ready(ctx context.Context, addr string) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	var last string
	for {
		resp, err := f.get(ctx, "http://"+addr+"/ready")
		switch {
		case err != nil:
			last = err.Error()
		case resp.status == http.StatusOK:
			return nil
		default:
			last = strings.TrimSpace(string(resp.body))
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready: %s", addr, last)
		}
	}
}

// admit lets the proxy send new requests to a node, or not.
func (f *fleet) admit(ctx context.Context, n *node, yes bool) error {
	action := "drain"
	if yes {
		action = "resume"
	}
	resp, err := f.do(ctx, http.MethodPost, fmt.Sprintf("http://%s/admin/nodes/%s/%s", f.proxyAt.Admin, n.relayAddr(), action))
	if err == nil && resp.status/100 != 2 {
		err = fmt.Errorf("HTTP %d: %s", resp.status, resp.body)
	}
	if err != nil {
		return fmt.Errorf("%s %s: %w", action, n.name, err)
	}
	return nil
}

// status asks an agent for its state.
func (f *fleet) status(ctx context.Context, n *node) (berth.Status, error) {
	var s berth.Status
	resp, err := f.get(ctx, "http://"+n.agentAddrs.HTTP+"/v1/status")
	if err == nil {
		err = json.Unmarshal(resp.body, &s)
	}
	return s, err
}

// stop ends every process, the front door first.
func (f *fleet) stop() {
	if f.proxy != nil {
		f.proxy.stop()
	}
	var wg sync.WaitGroup
	for _, n := range f.nodes {
		wg.Go(func() {
			n.engine.stop()
			n.agent.stop()
			if n.relay != nil {
				n.relay.close()
			}
		})
	}
	wg.Wait()
	for _, u := range f.undo {
		u()
	}
	f.http.CloseIdleConnections()
}

func (n *node) relayAddr() string { return fmt.Sprintf("127.0.0.1:%d", n.relay.port()) }

// got is an answer of a server that is small.
type got struct {
	status int
	body   []byte
}

func (f *fleet) get(ctx context.Context, url string) (got, error) {
	return f.do(ctx, http.MethodGet, url)
}

func (f *fleet) do(ctx context.Context, method, url string) (got, error) {
	req, err := http.NewRequestWithContext(ctx, method, url, nil)
	if err != nil {
		return got{}, err
	}
	resp, err := f.http.Do(req)
	if err != nil {
		return got{}, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 4<<20))
	return got{resp.StatusCode, b}, err
}
