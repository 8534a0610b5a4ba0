//go:build interop && nixl

package interop

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berthkv/berth"
	"github.com/berthkv/berth/client"
	"github.com/berthkv/berth/internal/freeport"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/wire"
	"github.com/berthkv/berth/internal/zmtp"
)

// limit bounds every wait.
const limit = 60 * time.Second

// layout is one shape of chunks, as each side names it.
type layout struct {
	dtype string
	mla   bool
	elem  int
}

var plain = layout{dtype: "bfloat16", elem: 2}

const (
	layers = 4
	tokens = 256
	hidden = 64
)

func (l layout) first() int {
	if l.mla {
		return 1
	}
	return 2
}

func (l layout) shape() []int64  { return []int64{int64(l.first()), layers, tokens, hidden} }
func (l layout) bytes(n int) int { return l.first() * layers * n * hidden * l.elem }
func (l layout) kvShape() string {
	return fmt.Sprintf("%d,%d,%d,1,%d", layers, l.first(), tokens, hidden)
}
func (l layout) key(i int) string { return fmt.Sprintf("m@1@0@%x@%s", i, l.dtype) }

func (l layout) client() client.Layout {
	f := client.Layout{SlotBytes: int64(l.bytes(tokens)), Format: 1, DType: kv.DType(l.dtype), ChunkTokens: tokens, TPSize: 1}
	if l.mla {
		f.Format = 6
	}
	return f
}

// keyNumbers make keys that no other request has.
var keyNumbers atomic.Int64

func (l layout) keys(n int) (out []string) {
	for range n {
		out = append(out, l.key(int(keyNumbers.Add(1))))
	}
	return out
}

func ctxFor(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	t.Cleanup(cancel)
	return ctx
}

func freePort(t testing.TB) int {
	t.Helper()
	ports, err := freeport.Take(1)
	if err != nil {
		t.Fatal(err)
	}
	return ports[0]
}

// ---- the proxy's PULL socket ----

// words collects what senders push to a proxy.
type words struct {
	t    testing.TB
	port int
	mu   sync.Mutex
	got  map[string]int
	bad  map[string]msg.EndingNotice
	wake chan struct{} // closed by the next word
}

func listenWords(t testing.TB) *words {
	t.Helper()
	w := &words{t: t, got: map[string]int{}, bad: map[string]msg.EndingNotice{}, wake: make(chan struct{})}
	p, err := zmtp.ListenPull(ctxFor(t), "127.0.0.1:0", func(e zmtp.Event) {
		if e.Kind != zmtp.Message {
			return
		}
		m, err := wire.Decode(e.Frames[len(e.Frames)-1])
		w.mu.Lock()
		switch m := m.(type) {
		case *msg.ProxyNotif:
			w.got[m.ReqID]++
		case *msg.EndingNotice:
			w.bad[m.ReqID] = *m
		default:
			t.Errorf("the proxy got %T, %v", m, err)
		}
		close(w.wake)
		w.wake = make(chan struct{})
		w.mu.Unlock()
	}, zmtp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	w.port = int(p.Addr().Port())
	return w
}

func (w *words) count(req string) int {
	n, _ := w.look(req)
	return n
}

// look returns how many words came, and what the next one closes.
func (w *words) look(req string) (int, <-chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.got[req], w.wake
}

// within waits a moment for a word that may be on its way.
func (w *words) within(req string) bool {
	deadline := time.After(300 * time.Millisecond)
	for {
		n, wake := w.look(req)
		if n > 0 {
			break
		}
		select {
		case <-wake:
		case <-deadline:
			return false
		}
	}
	return true
}

// await waits for the word about a request.
func (w *words) await(req string) {
	w.t.Helper()
	deadline := time.After(limit)
	for {
		n, wake := w.look(req)
		if n > 0 {
			break
		}
		select {
		case <-wake:
		case <-deadline:
			w.t.Fatalf("no ProxyNotif for %s after %v", req, limit)
		}
	}
}

// ---- Berth ----

type settings map[string]string

// agent is a Berth agent in this process, with an engine attached.
type agent struct {
	*berth.Agent
	t      testing.TB
	l      layout
	cfg    *berth.Config
	logs   *logBuffer
	engine *client.Client
	stage  sync.Mutex // an engine submits what it has staged before it stages more
}

func startAgent(t testing.TB, l layout, slots int, s settings) *agent {
	t.Helper()
	dir, err := os.MkdirTemp("", "berth")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	all := settings{"links": "nixl", "kv_shape": l.kvShape(), "kv_dtype": l.dtype, "pd_buffer_size": strconv.Itoa(slots * l.bytes(tokens)),
		"http_addr": "127.0.0.1:0", "local_socket": filepath.Join(dir, "a.sock"), "log_level": "debug", "lease_sec": "3", "quarantine_sec": "2",
		"pd_allocation_timeout_sec": "20"}
	for k, v := range s {
		all[k] = v
	}
	cfg, err := berth.LoadConfig(berth.Sources{Flags: all})
	if err != nil {
		t.Fatal(err)
	}
	a := &agent{t: t, l: l, cfg: cfg, logs: &logBuffer{}}
	if a.Agent, err = berth.StartAgent(t.Context(), cfg, slog.New(slog.NewJSONHandler(a.logs, &slog.HandlerOptions{Level: slog.LevelDebug}))); err != nil {
		t.Fatal(err)
	}
	facts := l.client()
	facts.TPSize, facts.TPRank = cfg.TPSize, cfg.Rank
	a.engine, err = client.Dial(ctxFor(t), a.Addrs().Local, client.Hello{Part: client.Worker, EngineID: "e", Rank: int(cfg.Rank), Layout: facts, Shape: l.shape()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		a.engine.Close()
		if err := a.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
		if t.Failed() {
			t.Logf("log of Berth's %s:\n%s", cfg.Role, a.logs.tail())
		}
	})
	return a
}

func receiving(t testing.TB, l layout, slots int, s settings) *agent {
	t.Helper()
	to := newTarget(t)
	all := settings{"pd_role": "receiver", "pd_peer_host": "127.0.0.1", "pd_peer_init_port": strconv.Itoa(to.init), "pd_peer_alloc_port": strconv.Itoa(to.alloc)}
	for k, v := range s {
		all[k] = v
	}
	return startAgent(t, l, slots, all)
}

func sending(t testing.TB, l layout, slots int, notify int, s settings) *agent {
	t.Helper()
	all := settings{"pd_role": "sender", "pd_proxy_host": "127.0.0.1", "pd_proxy_port": strconv.Itoa(notify)}
	for k, v := range s {
		all[k] = v
	}
	return startAgent(t, l, slots, all)
}

func (a *agent) target() target { return target{a.cfg.InitPort(), a.cfg.AllocPort()} }

// status checks R1.
func (a *agent) status() berth.Status {
	a.t.Helper()
	s, err := a.Status(ctxFor(a.t))
	if err != nil {
		a.t.Fatal(err)
	}
	if p := s.Pool; p != nil && p.Free+p.Reserved+p.Granted+p.Committed+p.Claimed+p.Quarantined != p.Capacity {
		a.t.Fatalf("R1: the terms of %+v do not sum to the capacity", *p)
	}
	return s
}

func (a *agent) until(what string, ok func(berth.Status) bool) {
	a.t.Helper()
	poll(a.t, what, func() (any, bool) {
		s := a.status()
		b, _ := json.Marshal(s)
		return string(b), ok(s)
	})
}

func (a *agent) untilFree() {
	a.t.Helper()
	a.until("all free", func(s berth.Status) bool {
		return (s.Pool == nil || s.Pool.Free == s.Pool.Capacity) && (s.Staging == nil || s.Staging.Free == s.Staging.Capacity)
	})
}

// find finds, claims, and returns the digests; the chunks stay claimed.
func (a *agent) find(by string, keys []string) (req string, digests []string) {
	a.t.Helper()
	req, n, err := a.engine.Find(ctxFor(a.t), by, keys)
	if err != nil {
		a.t.Fatal(err)
	}
	if n == 0 {
		return "", nil
	}
	return req, a.claim(by, req)
}

func (a *agent) claim(by, req string) (digests []string) {
	a.t.Helper()
	got, err := a.engine.Claim(ctxFor(a.t), by, req)
	if err != nil {
		a.t.Fatalf("claim %s: %v", req, err)
	}
	for _, c := range got.Chunks {
		digests = append(digests, digest(a.engine.Receive(c.Slot)[:c.Bytes]))
	}
	return digests
}

func (a *agent) release(by, req string) {
	a.t.Helper()
	if err := a.engine.Release(ctxFor(a.t), by, req); err != nil {
		a.t.Fatal(err)
	}
}

// take waits for the proxy's word on a request, finds it by its keys, compares
// its digests with the sender's, and releases it.
func (a *agent) take(w *words, req string, keys, want []string) {
	a.t.Helper()
	w.await(req)
	got, digests := a.find("by-"+req, keys)
	if got != req {
		a.t.Fatalf("found %q by the keys of %s", got, req)
	}
	same(a.t, req, digests, want)
	a.release("by-"+req, req)
}

func digest(b []byte) string {
	s := sha256.Sum256(b)
	return hex.EncodeToString(s[:])
}

func same(t testing.TB, req string, got, want []string) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d chunks arrived, %d were sent", req, len(got), len(want))
	}
	for i := range got {
		if got[i] != want[i] {
			t.Errorf("%s: chunk %d arrived as %.12s, was sent as %.12s", req, i, got[i], want[i])
		}
	}
}

// begin begins a request of a Berth sender at a receiver.
func (a *agent) begin(to target, req string, total int) *client.Transfer {
	a.t.Helper()
	tr, err := a.tryBegin(to, req, total)
	if err != nil {
		a.t.Fatal(err)
	}
	return tr
}

func (a *agent) tryBegin(to target, req string, total int) (*client.Transfer, error) {
	return a.engine.Begin(ctxFor(a.t), client.Begin{Req: req, TotalChunks: total, Host: "127.0.0.1", InitPort: to.init, AllocPort: to.alloc})
}

func (a *agent) granted(tr *client.Transfer) {
	a.t.Helper()
	select {
	case <-tr.Granted():
	case <-tr.Ended():
		a.t.Fatalf("%s ended instead of being granted: %+v", tr.Req(), tr.Ending())
	case <-time.After(limit):
		a.t.Fatalf("%s is not granted after %v", tr.Req(), limit)
	}
}

func (a *agent) ended(tr *client.Transfer) client.Ending {
	a.t.Helper()
	select {
	case <-tr.Ended():
		return tr.Ending()
	case <-time.After(limit):
		b, _ := json.Marshal(a.status())
		a.t.Fatalf("%s has not ended after %v: %s", tr.Req(), limit, b)
		panic("unreachable")
	}
}

// submit stages and submits chunks [from, from+len(keys)) as one batch; the last
// has lastToks tokens, if not 0. It returns their digests.
func (a *agent) submit(tr *client.Transfer, from int, keys []string, end, lastToks int) ([]string, error) {
	a.stage.Lock()
	defer a.stage.Unlock()
	slots, err := tr.Stage(ctxFor(a.t), len(keys))
	if err != nil {
		return nil, err
	}
	var out []client.Staged
	var digests []string
	for i, s := range slots {
		n := tokens
		if i == len(keys)-1 && lastToks > 0 {
			n = lastToks
		}
		b := a.engine.Staging(s)[:a.l.bytes(n)]
		fill(b)
		digests = append(digests, digest(b))
		out = append(out, client.Staged{Index: int64(from + i), Key: keys[i], Slot: s, Tokens: int64(n)})
	}
	if err := tr.Submit(ctxFor(a.t), out, end); err != nil { // it has taken nothing
		return nil, errors.Join(err, tr.Unstage(ctxFor(a.t), slots))
	}
	return digests, nil
}

// send submits all chunks in batches of at most n.
func (a *agent) send(tr *client.Transfer, keys []string, n, lastToks int) (digests []string) {
	a.t.Helper()
	n = min(n, a.engine.Info().MaxStage)
	for from := 0; from < len(keys); from += n {
		to := min(from+n, len(keys))
		end, toks := client.NoEnd, 0
		if to == len(keys) {
			end, toks = len(keys), lastToks
		}
		d, err := a.submit(tr, from, keys[from:to], end, toks)
		if err != nil {
			a.t.Fatalf("%s: %v", tr.Req(), err)
		}
		digests = append(digests, d...)
	}
	return digests
}

var fills atomic.Uint64

// fill writes bytes that no other chunk has.
func fill(b []byte) {
	x := fills.Add(1) * 0x9e3779b97f4a7c15
	for i := range b {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		b[i] = byte(x >> 24)
	}
}

// ---- logs ----

// logBuffer keeps the end of a log and lets a test wait for a line.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

const logKept = 1 << 20

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.b.Len() > logKept {
		l.b.Next(logKept / 2)
	}
	return l.b.Write(p)
}

func (l *logBuffer) contains(words ...string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
lines:
	for line := range strings.Lines(l.b.String()) {
		for _, w := range words {
			if !strings.Contains(line, w) {
				continue lines
			}
		}
		return true
	}
	return false
}

func (l *logBuffer) tail() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.b.String()
	return s[max(0, len(s)-12000):]
}

func contextFor(d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), d)
}

func cancelNotif(req string, keys []string) []byte {
	b, err := wire.Append(nil, &msg.CancelNotif{ReqID: req, Keys: keys})
	if err != nil {
		panic(err)
	}
	return b
}
