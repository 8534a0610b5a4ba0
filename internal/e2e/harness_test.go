// Package e2e tests agents as their users meet them: engines through the
// client, operators over HTTP, peers over real sockets, and processes that are
// really killed.
package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/berthkv/berth"
	"github.com/berthkv/berth/client"
	"github.com/berthkv/berth/internal/freeport"
)

// The layout of every test: small slots of 10 tokens.
const (
	slotBytes   = 64 << 10
	chunkTokens = 16
	limit       = 20 * time.Second // bounds every wait in these tests
)

var layout = client.Layout{SlotBytes: slotBytes, Format: 3, DType: "uint8", ChunkTokens: chunkTokens, TPSize: 1}
var shape = []int64{chunkTokens, slotBytes / chunkTokens}

// TestMain runs an agent instead of the tests when a test has started this
// binary as one.
func TestMain(m *testing.M) {
	if flags := os.Getenv("E2E_AGENT"); flags != "" {
		os.Exit(agentMain(flags))
	}
	if flags := os.Getenv("E2E_PROXY"); flags != "" {
		os.Exit(proxyMain(flags))
	}
	if socket := os.Getenv("E2E_ENGINE"); socket != "" {
		os.Exit(engineMain(socket))
	}
	goleak.VerifyTestMain(m)
}

// settings are an agent's options.
type settings map[string]string

func (s settings) with(more settings) settings {
	out := settings{}
	for k, v := range s {
		out[k] = v
	}
	for k, v := range more {
		out[k] = v
	}
	return out
}

// defaults are short, so that what a timeout ends ends soon.
var defaults = settings{
	"chunk_size": strconv.Itoa(chunkTokens), "slot_bytes": strconv.Itoa(slotBytes), "http_addr": "127.0.0.1:0",
	"lease_sec": "1.5", "quarantine_sec": "2", "pd_shutdown_timeout_sec": "2", "legacy_data": "none", "log_level": "debug",
	"pd_skip_proxy_notification": "true",
}

func sending(slots int) settings {
	return defaults.with(settings{"pd_role": "sender", "pd_buffer_size": strconv.Itoa(slots * slotBytes)})
}

func receiving(t testing.TB, slots int) settings {
	return defaults.with(settings{"pd_role": "receiver", "pd_buffer_size": strconv.Itoa(slots * slotBytes), "pd_peer_host": "127.0.0.1",
		"pd_peer_alloc_port": strconv.Itoa(freePort(t)), "pd_peer_init_port": strconv.Itoa(freePort(t))})
}

func freePort(t testing.TB) int {
	t.Helper()
	ports, err := freeport.Take(1)
	if err != nil {
		t.Fatal(err)
	}
	return ports[0]
}

// socketDir is short: a unix socket's path is.
func socketDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "berth") //nolint:usetesting // t.TempDir has the test's name in it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func config(t testing.TB, s settings) *berth.Config {
	t.Helper()
	cfg, err := berth.LoadConfig(berth.Sources{Flags: s})
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

// agent is an agent in this process.
type agent struct {
	*berth.Agent
	t    testing.TB
	cfg  *berth.Config
	logs *logBuffer
}

func startAgent(t testing.TB, s settings) *agent {
	t.Helper()
	s = s.with(settings{"local_socket": filepath.Join(socketDir(t), "a.sock")})
	a := &agent{t: t, cfg: config(t, s), logs: &logBuffer{}}
	var err error
	a.Agent, err = berth.StartAgent(t.Context(), a.cfg, slog.New(slog.NewJSONHandler(a.logs, &slog.HandlerOptions{Level: slog.LevelDebug})))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
		if t.Failed() {
			t.Logf("log of %s:\n%s", s["pd_role"], a.logs.String())
		}
	})
	return a
}

// logBuffer keeps log lines and lets a test wait for one.
type logBuffer struct {
	mu    sync.Mutex
	b     bytes.Buffer
	waits []chan struct{}
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range l.waits {
		close(w)
	}
	l.waits = nil
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// await returns the first line that contains all of words.
func (l *logBuffer) await(t testing.TB, words ...string) string {
	t.Helper()
	deadline := time.After(limit)
	for {
		l.mu.Lock()
		text := l.b.String()
		w := make(chan struct{})
		l.waits = append(l.waits, w)
		l.mu.Unlock()
		for line := range strings.Lines(text) {
			if containsAll(line, words) {
				return line
			}
		}
		select {
		case <-w:
		case <-deadline:
			t.Fatalf("no log line with %q in:\n%s", words, text)
		}
	}
}

func containsAll(s string, words []string) bool {
	for _, w := range words {
		if !strings.Contains(s, w) {
			return false
		}
	}
	return true
}

func ctxFor(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	t.Cleanup(cancel)
	return ctx
}

// port is the receiver's alloc port.
func (a *agent) port() int { return a.cfg.AllocPort() }

var engines struct {
	sync.Mutex
	n int
}

// engine connects an engine to the agent.
func (a *agent) engine(t testing.TB) *client.Client {
	t.Helper()
	engines.Lock()
	engines.n++
	id := fmt.Sprintf("engine-%d", engines.n)
	engines.Unlock()
	c, err := dialEngine(a.Addrs().Local, id, layout, int(a.cfg.Rank))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func dialEngine(socket, id string, l client.Layout, rank int) (*client.Client, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	l.TPRank = int64(rank)
	return client.Dial(ctx, socket, client.Hello{Part: client.Worker, EngineID: id, Rank: rank, Layout: l, Shape: shape})
}

// status takes a snapshot and checks R1 in it.
func (a *agent) status(t testing.TB) berth.Status {
	t.Helper()
	s, err := a.Status(ctxFor(t))
	if err != nil {
		t.Fatal(err)
	}
	checkR1(t, s)
	return s
}

func checkR1(t testing.TB, s berth.Status) {
	t.Helper()
	if p := s.Pool; p != nil && p.Free+p.Reserved+p.Granted+p.Committed+p.Claimed+p.Quarantined != p.Capacity {
		t.Fatalf("R1: the terms of %+v do not sum to the capacity", *p)
	}
	if p := s.Staging; p != nil && p.Free+p.Staged+p.Writing+p.Quarantined != p.Capacity {
		t.Fatalf("the terms of %+v do not sum to the capacity", *p)
	}
}

// until asks for the status until ok, at most `limit` long.
func (a *agent) until(t testing.TB, what string, ok func(berth.Status) bool) berth.Status {
	t.Helper()
	return until(t, what, func() (berth.Status, error) { return a.Status(ctxFor(t)) }, ok)
}

func until(t testing.TB, what string, get func() (berth.Status, error), ok func(berth.Status) bool) berth.Status {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(limit)
	var s berth.Status
	var err error
	for {
		if s, err = get(); err == nil {
			checkR1(t, s)
			if ok(s) {
				return s
			}
		}
		select {
		case <-tick.C:
		case <-deadline:
			b, _ := json.MarshalIndent(s, "", " ")
			t.Fatalf("not %s after %v: %v\n%s", what, limit, err, b)
		}
	}
}

func allFree(s berth.Status) bool {
	return (s.Pool == nil || s.Pool.Free == s.Pool.Capacity) && (s.Staging == nil || s.Staging.Free == s.Staging.Capacity)
}

// chunkData is the content of a chunk, different for each.
func chunkData(req string, index int) []byte {
	seed := sha256.Sum256(fmt.Appendf(nil, "%s/%d", req, index))
	b := make([]byte, slotBytes)
	rand.NewChaCha8(seed).Read(b)
	return b
}

// begin begins a request at the receiver.
func begin(t testing.TB, c *client.Client, req string, total, port int) *client.Transfer {
	t.Helper()
	tr, err := c.Begin(ctxFor(t), client.Begin{Req: req, TotalChunks: total, Host: "127.0.0.1", AllocPort: port, BerthProxy: true})
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

func granted(t testing.TB, tr *client.Transfer) {
	t.Helper()
	select {
	case <-tr.Granted():
	case <-tr.Ended():
		t.Fatalf("%s ended instead of being granted: %+v", tr.Req(), tr.Ending())
	case <-time.After(limit):
		t.Fatalf("%s is not granted after %v", tr.Req(), limit)
	}
}

func ended(t testing.TB, tr *client.Transfer) client.Ending {
	t.Helper()
	select {
	case <-tr.Ended():
		return tr.Ending()
	case <-time.After(limit):
		t.Fatalf("%s has not ended after %v", tr.Req(), limit)
		panic("unreachable")
	}
}

// stage fills slots with chunks [from, to) of the request.
func stage(t testing.TB, c *client.Client, tr *client.Transfer, from, to int) []client.Staged {
	t.Helper()
	slots, err := tr.Stage(ctxFor(t), to-from)
	if err != nil {
		t.Fatal(err)
	}
	var out []client.Staged
	for i, s := range slots {
		copy(c.Staging(s), chunkData(tr.Req(), from+i))
		out = append(out, client.Staged{Index: int64(from + i), Key: fmt.Sprintf("%s/%d", tr.Req(), from+i), Slot: s, Tokens: chunkTokens})
	}
	return out
}

// send stages and submits all chunks, as many at a time as max_stage allows.
func send(t testing.TB, c *client.Client, tr *client.Transfer, total int) {
	t.Helper()
	for from := 0; from < total; {
		to := min(from+c.Info().MaxStage, total)
		end := client.NoEnd
		if to == total {
			end = total
		}
		if err := tr.Submit(ctxFor(t), stage(t, c, tr, from, to), end); err != nil {
			t.Fatal(err)
		}
		from = to
	}
}

// receive waits for a request, claims it, compares every byte, and releases it.
func receive(t testing.TB, c *client.Client, req string, total int) {
	t.Helper()
	e, err := c.Wait(ctxFor(t), req, limit)
	if err != nil || e.Err() != nil {
		t.Fatalf("wait %s: %v %v", req, err, e)
	}
	claimAndCompare(t, c, req, total)
	if err := c.Release(ctxFor(t), "by-"+req, req); err != nil {
		t.Fatal(err)
	}
}

func claimAndCompare(t testing.TB, c *client.Client, req string, total int) {
	t.Helper()
	got, err := c.Claim(ctxFor(t), "by-"+req, req)
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Chunks) != total {
		t.Fatalf("%s: %d chunks claimed, %d sent", req, len(got.Chunks), total)
	}
	for i, ch := range got.Chunks {
		if !bytes.Equal(c.Receive(ch.Slot)[:ch.Bytes], chunkData(req, i)) {
			t.Errorf("%s: chunk %d in slot %d has other bytes than were sent", req, i, ch.Slot)
		}
	}
}

// ---- child processes ----

// child is an agent or engine as a process of its own.
type child struct {
	cmd   *exec.Cmd
	addrs berth.Addrs
	log   *logBuffer
	stdin io.WriteCloser
	out   *json.Decoder
	done  chan struct{}
	state *os.ProcessState // after done
}

// startChild runs this binary again with one more environment variable and
// reads its first line.
func startChild(t testing.TB, env string, first any) *child {
	t.Helper()
	c := &child{log: &logBuffer{}, done: make(chan struct{})}
	c.cmd = exec.Command(os.Args[0])
	c.cmd.Env = append(os.Environ(), env)
	c.cmd.Stderr = c.log
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var err error
	if c.stdin, err = c.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	pr, pw, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	c.cmd.Stdout = pw
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pw.Close()
	c.out = json.NewDecoder(pr)
	go func() {
		c.cmd.Wait()
		c.state = c.cmd.ProcessState
		close(c.done)
	}()
	t.Cleanup(func() {
		c.signal(syscall.SIGCONT)
		c.kill()
		c.stdin.Close()
		pr.Close()
		if t.Failed() {
			t.Logf("log of child:\n%s", c.log.String())
		}
	})
	pr.SetReadDeadline(time.Now().Add(limit))
	if err := c.out.Decode(first); err != nil {
		t.Fatalf("child did not start: %v\n%s", err, c.log.String())
	}
	pr.SetReadDeadline(time.Time{})
	return c
}

func (c *child) signal(s syscall.Signal) { syscall.Kill(c.cmd.Process.Pid, s) }

// kill is kill -9, and waits.
func (c *child) kill() {
	select {
	case <-c.done:
	default:
		c.signal(syscall.SIGKILL)
		<-c.done
	}
}

func startAgentProcess(t testing.TB, s settings) *child {
	t.Helper()
	s = s.with(settings{"local_socket": filepath.Join(socketDir(t), "a.sock")})
	b, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	var addrs berth.Addrs
	c := startChild(t, "E2E_AGENT="+string(b), &addrs)
	c.addrs = addrs
	return c
}

// agentMain is an agent process: it serves until SIGTERM, and drains.
func agentMain(flags string) int {
	var s settings
	if err := json.Unmarshal([]byte(flags), &s); err != nil {
		panic(err)
	}
	cfg, err := berth.LoadConfig(berth.Sources{Flags: s})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	ctx, stop := signalContext()
	defer stop()
	var level slog.Level
	if err := level.UnmarshalText([]byte(cfg.LogLevel)); err != nil {
		panic(err)
	}
	a, err := berth.StartAgent(ctx, cfg, slog.New(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: level})))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	json.NewEncoder(os.Stdout).Encode(a.Addrs())
	<-ctx.Done()
	dctx, cancel := context.WithTimeout(context.Background(), time.Duration(cfg.ShutdownTimeout))
	defer cancel()
	a.Drain(dctx)
	a.Close()
	return 0
}

// engine dials the child's local API.
func (c *child) engine(t testing.TB, id string) *client.Client {
	t.Helper()
	e, err := dialEngine(c.addrs.Local, id, layout, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })
	return e
}

func unstage(t testing.TB, tr *client.Transfer, chunks []client.Staged) {
	t.Helper()
	var slots []client.Slot
	for _, c := range chunks {
		slots = append(slots, c.Slot)
	}
	if err := tr.Unstage(ctxFor(t), slots); err != nil {
		t.Fatal(err)
	}
}

// get reads a page of an agent.
func get(t testing.TB, addr, path string) string {
	t.Helper()
	_, body := getStatus(t, addr, path)
	return body
}

func getStatus(t testing.TB, addr, path string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(ctxFor(t), http.MethodGet, "http://"+addr+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// beginFor is a begin that no Berth proxy watches.
func beginFor(req string, total, port int) client.Begin {
	return client.Begin{Req: req, TotalChunks: total, Host: "127.0.0.1", AllocPort: port}
}
