package chaos

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/berthkv/berth"
)

// Sizes and times of a fleet: small, so that everything that can run out does,
// and what a timeout ends ends soon.
const (
	receiveSlots = 24
	stagingSlots = 16
	lease        = time.Second
	quarantine   = 2 * time.Second
	unclaimedTTL = 6 * time.Second
)

// node is an agent, the engine beside it, and their place.
type node struct {
	name   string
	sends  bool
	place  *place
	agent  *process
	engine *process
	socket string
}

// fleet is every process of a run.
type fleet struct {
	dir       string
	net       network
	senders   []*node
	receivers []*node
	front     *place // of the proxy and its clients
	proxy     *process
}

func (f *fleet) nodes() []*node {
	return append(append([]*node{}, f.senders...), f.receivers...)
}

func (f *fleet) processes() []*process {
	var out []*process
	for _, n := range f.nodes() {
		out = append(out, n.agent, n.engine)
	}
	return append(out, f.proxy)
}

// byKind returns the processes of a kind.
func (f *fleet) byKind(kind string) []*process {
	var out []*process
	for _, p := range f.processes() {
		if p.kind == kind {
			out = append(out, p)
		}
	}
	return out
}

// newFleet lays out a fleet; start starts it. lines gets the engines' histories,
// gone hears of each end of an engine process.
func newFleet(dir, berthBinary string, n network, p plant, lines func(string, []byte), gone func(string)) (*fleet, error) {
	f := &fleet{dir: dir, net: n}
	names := map[string]string{} // of receivers, for the engines' histories
	for _, name := range []string{"prefill-1", "prefill-2", "decode-tcp", "decode-shm"} {
		pl, err := n.place(name)
		if err != nil {
			return f, err
		}
		nd := &node{name: name, sends: strings.HasPrefix(name, "prefill"), place: pl, socket: filepath.Join(dir, name+".sock")}
		if nd.sends {
			f.senders = append(f.senders, nd)
		} else {
			f.receivers = append(f.receivers, nd)
			names[net.JoinHostPort(pl.ip.String(), strconv.Itoa(allocPort))] = name
		}
	}
	var err error
	if f.front, err = n.place("front"); err != nil {
		return f, err
	}
	for _, nd := range f.nodes() {
		if err := f.layOut(nd, berthBinary, p, names, lines, gone); err != nil {
			return f, err
		}
	}
	pre, dec := []string{}, []string{}
	for _, s := range f.senders {
		pre = append(pre, s.place.ip.String())
	}
	for _, r := range f.receivers {
		dec = append(dec, r.place.ip.String())
	}
	f.proxy = &process{name: "proxy", kind: "proxy", place: f.front, log: filepath.Join(dir, "proxy.log"), make: func(int) *exec.Cmd {
		return exec.Command(berthBinary, "proxy", "--host", f.front.bind, "--port", strconv.Itoa(proxyPort),
			"--prefiller-host", strings.Join(pre, ","), "--prefiller-port", strconv.Itoa(webPort),
			"--num-prefillers", strconv.Itoa(len(pre)),
			"--decoder-host", strings.Join(dec, ","), "--decoder-port", strconv.Itoa(webPort), "--num-decoders", strconv.Itoa(len(dec)),
			"--decoder-init-port", strconv.Itoa(initPort), "--decoder-alloc-port", strconv.Itoa(allocPort),
			"--proxy-host", f.front.bind, "--proxy-port", strconv.Itoa(notifyPort), "--peer-allow", "10.88.0.0/24,127.0.0.0/8",
			"--http-addr", net.JoinHostPort(f.front.loop, strconv.Itoa(httpPort)), "--watch-timeout", (2 * lease).String(),
			"--transfer-timeout", deadline.String(), "--announce")
	}}
	return f, nil
}

func (f *fleet) layOut(nd *node, berthBinary string, p plant, names map[string]string, lines func(string, []byte), gone func(string)) error {
	pl := nd.place
	conf := fmt.Sprintf("node: %s\nhttp_addr: %s:%d\nlocal_socket: %s\nslot_bytes: %d\nchunk_size: %d\nbind_address: %s\npeer_allow: [10.88.0.0/24, 127.0.0.0/8]\n",
		nd.name, pl.loop, httpPort, nd.socket, slotBytes, chunkTokens, pl.bind)
	conf += fmt.Sprintf("lease_sec: %g\nquarantine_sec: %g\nunclaimed_ttl_sec: %g\nrequest_timeout_sec: 20\nwrite_timeout_sec: 2\ndial_timeout_sec: 2\nending_ttl_sec: 30\npd_shutdown_timeout_sec: 2\nlog_level: debug\nchecksum: %t\n",
		lease.Seconds(), quarantine.Seconds(), unclaimedTTL.Seconds(), nd.name != "prefill-2")
	kinds := []string{"sender agent", "prefill engine"}
	if nd.sends {
		conf += fmt.Sprintf("pd_role: sender\npd_buffer_size: %d\nlinks: [shm, tcp]\npd_proxy_host: %s\npd_proxy_port: %d\n", stagingSlots*slotBytes, f.front.ip, notifyPort)
	} else {
		kinds = []string{"receiver agent", "decode engine"}
		conf += fmt.Sprintf("pd_role: receiver\npd_buffer_size: %d\nlinks: [%s]\npd_peer_host: %s\npd_peer_alloc_port: %d\npd_peer_init_port: %d\ntcp_port: %d\n",
			receiveSlots*slotBytes, strings.TrimPrefix(nd.name, "decode-"), pl.ip, allocPort, initPort, dataPort)
	}
	file := filepath.Join(f.dir, nd.name+".yaml")
	if err := os.WriteFile(file, []byte(conf), 0o600); err != nil {
		return err
	}
	nd.agent = &process{name: nd.name + "/agent", kind: kinds[0], place: pl, log: filepath.Join(f.dir, nd.name+"-agent.log"),
		make: func(int) *exec.Cmd { return exec.Command(berthBinary, "agent", "--config", file, "--announce") }}
	nd.engine = &process{name: nd.name + "/engine", kind: kinds[1], place: pl, log: filepath.Join(f.dir, nd.name+"-engine.log"), lines: lines, gone: gone}
	nd.engine.make = func(start int) *exec.Cmd {
		b, err := json.Marshal(engineConfig{Process: nd.engine.id(start), Socket: nd.socket, HTTP: net.JoinHostPort(pl.bind, strconv.Itoa(webPort)),
			Sends: nd.sends, Plant: p, Names: names})
		if err != nil {
			panic(err)
		}
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), engineEnv+"="+string(b))
		return cmd
	}
	return nil
}

// engineEnv makes this program an engine.
const engineEnv = "BERTH_CHAOS_ENGINE"

// start starts everything and waits until all of it serves.
func (f *fleet) start(ctx context.Context) error {
	ps := f.processes()
	errs := make([]error, len(ps))
	var wg sync.WaitGroup
	for i, p := range ps {
		wg.Go(func() { errs[i] = p.start(ctx) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return f.allReady(ctx)
}

// allReady returns when every agent has its engine and every receiver can be
// reached again by those that knew it.
func (f *fleet) allReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	for _, n := range f.nodes() {
		if err := f.until(ctx, n.name+" is ready", func() error {
			code, body, err := f.get(ctx, n.place, httpPort, "/ready")
			if err == nil && code != http.StatusOK {
				err = errors.New(strings.TrimSpace(body))
			}
			return err
		}); err != nil {
			return err
		}
	}
	return f.until(ctx, "the proxy serves", func() error {
		_, _, err := f.get(ctx, f.front, httpPort, "/health")
		return err
	})
}

// poll is how often something is looked at that cannot tell.
const poll = 20 * time.Millisecond

// until asks until there is no error.
func (f *fleet) until(ctx context.Context, what string, ask func() error) error {
	for {
		err := ask()
		if err == nil {
			return nil
		}
		pause(ctx, poll)
		if ctx.Err() != nil {
			return fmt.Errorf("not so in time: %s: %w", what, err)
		}
	}
}

// get asks an operator's endpoint of a place.
func (f *fleet) get(ctx context.Context, p *place, port int, path string) (code int, body string, err error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://%s%s", net.JoinHostPort(p.loop, strconv.Itoa(port)), path), nil)
	if err != nil {
		return 0, "", err
	}
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: p.dial}}
	resp, err := c.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 8<<20))
	return resp.StatusCode, string(b), err
}

// status asks an agent for its state, and checks that its pools add up.
func (f *fleet) status(ctx context.Context, n *node) (berth.Status, error) {
	var s berth.Status
	_, body, err := f.get(ctx, n.place, httpPort, "/v1/status")
	if err == nil {
		err = json.Unmarshal([]byte(body), &s)
	}
	if err != nil {
		return s, err
	}
	if p := s.Pool; p != nil && p.Free+p.Reserved+p.Granted+p.Committed+p.Claimed+p.Quarantined != p.Capacity {
		return s, fmt.Errorf("%s: R1: the terms of %+v do not sum to the capacity", n.name, *p)
	}
	if p := s.Staging; p != nil && p.Free+p.Staged+p.Writing+p.Quarantined != p.Capacity {
		return s, fmt.Errorf("%s: the terms of %+v do not sum to the capacity", n.name, *p)
	}
	return s, nil
}

// busy says what of an agent is not at rest; "" when all is free.
func busy(s berth.Status) string {
	switch {
	case s.Pool != nil && s.Pool.Free != s.Pool.Capacity:
		return fmt.Sprintf("receive pool %+v", *s.Pool)
	case s.Staging != nil && s.Staging.Free != s.Staging.Capacity:
		return fmt.Sprintf("staging pool %+v", *s.Staging)
	case s.Waiting > 0 || len(s.Requests) > 0:
		return fmt.Sprintf("%d requests waiting, %d live: %+v", s.Waiting, len(s.Requests), s.Requests)
	}
	return ""
}

// footprint measures a process.
func (f *fleet) footprint(ctx context.Context, p *process) footprint {
	pid := p.pid()
	out := footprint{RSS: statusField(pid, "VmRSS"), FDs: openFDs(pid), Goroutines: -1}
	if strings.HasSuffix(p.kind, "engine") {
		return out
	}
	_, body, err := f.get(ctx, p.place, httpPort, "/metrics")
	if err != nil {
		return out
	}
	for line := range strings.Lines(body) {
		if rest, ok := strings.CutPrefix(line, "go_goroutines "); ok {
			v, _ := strconv.ParseFloat(strings.TrimSpace(rest), 64)
			out.Goroutines = int(v)
		}
	}
	return out
}

// stop ends every process and says which of them did not end well.
func (f *fleet) stop() []string {
	var mu sync.Mutex
	var bad []string
	var wg sync.WaitGroup
	if f.proxy == nil { // it was not laid out whole
		f.closePlaces()
		return nil
	}
	for _, p := range append(f.byKind("prefill engine"), f.byKind("decode engine")...) {
		wg.Go(p.kill)
	}
	wg.Wait()
	for _, p := range append(append(f.byKind("sender agent"), f.byKind("receiver agent")...), f.proxy) {
		if !p.running() {
			continue
		}
		wg.Go(func() {
			if how := p.stop(); how != "exit status 0" {
				mu.Lock()
				bad = append(bad, fmt.Sprintf("%s on SIGTERM: %s", p.name, how))
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	f.closePlaces()
	return bad
}

func (f *fleet) closePlaces() {
	for _, n := range f.nodes() {
		n.place.close()
	}
	if f.front != nil {
		f.front.close()
	}
}
