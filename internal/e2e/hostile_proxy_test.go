package e2e

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/berthkv/berth"
	"github.com/berthkv/berth/client"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/proxy"
	"github.com/berthkv/berth/internal/wire"
	"github.com/berthkv/berth/internal/zmtp"
)

// proxyFlags are what a proxy process is told.
type proxyFlags struct {
	Prefill, Decode proxy.Addr
	Alloc, Init     int
}

// proxyMain is a proxy process: it serves until SIGTERM.
func proxyMain(flags string) int {
	var f proxyFlags
	if err := json.Unmarshal([]byte(flags), &f); err != nil {
		panic(err)
	}
	ctx, stop := signalContext()
	defer stop()
	p, err := berth.StartProxy(ctx, berth.ProxyConfig{Addr: "127.0.0.1:0", NotifyAddr: "127.0.0.1:0", HTTPAddr: "127.0.0.1:0",
		DialTimeout: 2 * time.Second, Nodes: proxy.Config{Prefillers: []proxy.Addr{f.Prefill},
			Decoders: []proxy.Decoder{{Addr: f.Decode, Receivers: []proxy.Receiver{{Host: "127.0.0.1", InitPort: f.Init, AllocPort: f.Alloc}}}},
			Timeouts: proxy.Timeouts{Watch: 15 * time.Second, Body: 2 * time.Second, Write: 2 * time.Second}}},
		slog.New(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError})))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	json.NewEncoder(os.Stdout).Encode(p.Addrs())
	<-ctx.Done()
	p.Close()
	return 0
}

// front is a proxy process and what is behind it: real agents, and engines over
// HTTP that move the KV of each prompt and compare every byte of it.
type front struct {
	t          *testing.T
	v          *victim // the proxy
	addrs      berth.ProxyAddrs
	http       *http.Client
	turn       sync.Mutex // to stage
	send, recv *client.Client
	recomputed atomic.Int64 // prompts whose KV did not come
	wrong      atomic.Pointer[error]
	n          int
}

// promptTokens is the prompt of an honest client: pairChunks chunks.
const promptTokens = pairChunks * chunkTokens

func nextToken(tokens []int) int {
	h := 7
	for _, t := range tokens {
		h = (h*31 + t) % 99_991
	}
	return 1 + h%997
}

// engineAsk is what the engines read of a body.
type engineAsk struct {
	Prompt    []int `json:"prompt"`
	MaxTokens int   `json:"max_tokens"`
	Stream    bool  `json:"stream"`
	N         int   `json:"n"`
	Transfer  struct {
		Spec *struct {
			ReqID string `json:"req_id"`
			Ports []int  `json:"receiver_alloc_port"`
		} `json:"disagg_spec"`
	} `json:"kv_transfer_params"`
}

func (f *front) engine() *httptest.Server {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, `{"object":"list","data":[{"id":"m","object":"model","max_model_len":4096}]}`)
	})
	mux.HandleFunc("POST /v1/completions", func(w http.ResponseWriter, r *http.Request) {
		var a engineAsk
		if err := json.NewDecoder(r.Body).Decode(&a); err != nil {
			http.Error(w, `{"error":{"message":"body"}}`, http.StatusBadRequest)
			return
		}
		switch {
		case a.N > 1:
			flood(w, r)
		case a.Stream:
			f.decode(w, r, a)
		case a.MaxTokens > 1: // all of a request, since its KV did not come
			f.recomputed.Add(1)
			http.Error(w, `{"error":{"message":"this is the prefill engine's"}}`, http.StatusBadRequest)
		default:
			f.prefill(w, r, a)
		}
	})
	return httptest.NewServer(mux)
}

// flood is an answer without an end, for clients that do not read it.
func flood(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "text/event-stream")
	text := bytes.Repeat([]byte("x"), 32<<10)
	for r.Context().Err() == nil {
		if _, err := fmt.Fprintf(w, "data: {\"choices\":[{\"index\":0,\"text\":%q}]}\n\n", text); err != nil {
			return
		}
	}
}

func (f *front) prefill(w http.ResponseWriter, r *http.Request, a engineAsk) {
	if spec := a.Transfer.Spec; spec != nil && len(spec.Ports) == 1 {
		if err := f.ship(r.Context(), spec.ReqID, spec.Ports[0]); err != nil {
			f.wrong.CompareAndSwap(nil, &err)
		}
	}
	f.first(w, a)
}

// first answers with the first token.
func (f *front) first(w http.ResponseWriter, a engineAsk) {
	token := nextToken(a.Prompt)
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprintf(w, `{"id":"c","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"x","logprobs":null,"finish_reason":"length","token_ids":[%d]}],"usage":{"prompt_tokens":%d,"completion_tokens":1,"total_tokens":%d}}`,
		token, len(a.Prompt), len(a.Prompt)+1)
}

// ship moves the chunks of a prompt, named by its request.
func (f *front) ship(ctx context.Context, req string, port int) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	tr, err := f.send.Begin(ctx, client.Begin{Req: req, TotalChunks: pairChunks, Host: "127.0.0.1", AllocPort: port, BerthProxy: true})
	if err != nil {
		return err
	}
	select {
	case <-tr.Granted():
	case <-tr.Ended():
		return tr.Ending().Err()
	case <-ctx.Done():
		return ctx.Err()
	}
	f.turn.Lock()
	defer f.turn.Unlock()
	slots, err := tr.Stage(ctx, pairChunks)
	if err != nil {
		return err
	}
	var chunks []client.Staged
	for i, s := range slots {
		copy(f.send.Staging(s), chunkData(req, i))
		chunks = append(chunks, client.Staged{Index: int64(i), Key: fmt.Sprintf("%s/%d", req, i), Slot: s, Tokens: chunkTokens})
	}
	return tr.Submit(ctx, chunks, pairChunks)
}

func (f *front) decode(w http.ResponseWriter, r *http.Request, a engineAsk) {
	if spec := a.Transfer.Spec; spec == nil {
		f.recomputed.Add(1)
	} else if err := f.read(r.Context(), spec.ReqID); err != nil {
		f.wrong.CompareAndSwap(nil, &err)
	}
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	all := slices.Clone(a.Prompt)
	for i := range a.MaxTokens {
		finish := "null"
		if i == a.MaxTokens-1 {
			finish = `"length"`
		}
		token := nextToken(all)
		all = append(all, token)
		fmt.Fprintf(w, "data: {\"id\":\"c\",\"object\":\"text_completion\",\"created\":1,\"model\":\"m\",\"choices\":[{\"index\":0,\"text\":\"x\",\"logprobs\":null,\"finish_reason\":%s,\"token_ids\":[%d]}]}\n\n", finish, token)
	}
	io.WriteString(w, "data: [DONE]\n\n")
}

// read claims what came for a prompt and compares every byte of it.
func (f *front) read(ctx context.Context, req string) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if e, err := f.recv.Wait(ctx, req, limit); err != nil || e.Err() != nil {
		return errors.Join(err, e.Err())
	}
	got, err := f.recv.Claim(ctx, "by-"+req, req)
	if err != nil || len(got.Chunks) != pairChunks {
		return fmt.Errorf("claim of %q: %d chunks: %w", req, len(got.Chunks), err)
	}
	for i, ch := range got.Chunks {
		if !bytes.Equal(f.recv.Receive(ch.Slot)[:ch.Bytes], chunkData(req, i)) {
			return fmt.Errorf("%s: chunk %d in slot %d has other bytes than were sent", req, i, ch.Slot)
		}
	}
	return f.recv.Release(ctx, "by-"+req, req)
}

// ask is one request of an honest client; its answer must be right, and its KV
// have come.
func (f *front) ask() time.Duration {
	f.t.Helper()
	took := f.answered()
	if n := f.recomputed.Load(); n > 0 {
		f.t.Fatalf("request %d: its KV did not come", f.n)
	}
	return took
}

// answered is one request whose answer must be right.
func (f *front) answered() time.Duration {
	f.t.Helper()
	f.n++
	const tokens = 5
	prompt := make([]int, promptTokens)
	for i := range prompt {
		prompt[i] = 1 + (f.n*7+i*13)%900
	}
	body, err := json.Marshal(map[string]any{"model": "m", "prompt": prompt, "max_tokens": tokens, "return_token_ids": true})
	if err != nil {
		f.t.Fatal(err)
	}
	began := time.Now()
	req, err := http.NewRequestWithContext(ctxFor(f.t), http.MethodPost, "http://"+f.addrs.HTTP+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		f.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := f.http.Do(req)
	if err != nil {
		f.t.Fatalf("request %d: %v", f.n, err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	var answer struct {
		Choices []struct {
			TokenIDs []int `json:"token_ids"`
		} `json:"choices"`
	}
	if err == nil {
		err = json.Unmarshal(b, &answer)
	}
	if err != nil || resp.StatusCode != http.StatusOK || len(answer.Choices) != 1 {
		f.t.Fatalf("request %d: %s: %v: %s", f.n, resp.Status, err, b)
	}
	want := slices.Clone(prompt)
	for range tokens {
		want = append(want, nextToken(want))
	}
	if !slices.Equal(answer.Choices[0].TokenIDs, want[promptTokens:]) {
		f.t.Fatalf("request %d: tokens %v, want %v", f.n, answer.Choices[0].TokenIDs, want[promptTokens:])
	}
	if err := f.wrong.Load(); err != nil {
		f.t.Fatalf("request %d: %v", f.n, *err)
	}
	return time.Since(began)
}

func newFront(t *testing.T) *front {
	t.Helper()
	// A busy machine must not be taken for a lost peer: leases are as in production.
	r := startAgent(t, receiving(t, 64).with(settings{"log_level": "error", "lease_sec": "15"}))
	s := startAgent(t, sending(64).with(settings{"log_level": "error", "lease_sec": "15"}))
	f := &front{t: t, send: s.engine(t), recv: r.engine(t), http: &http.Client{Transport: &http.Transport{}}}
	t.Cleanup(f.http.CloseIdleConnections)
	var flags proxyFlags
	for _, a := range []*proxy.Addr{&flags.Prefill, &flags.Decode} {
		srv := f.engine()
		t.Cleanup(srv.Close)
		host, port, err := net.SplitHostPort(srv.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		a.Host = host
		if a.Port, err = strconv.Atoi(port); err != nil {
			t.Fatal(err)
		}
	}
	flags.Alloc, flags.Init = r.port(), r.port()+1 // nobody here asks the init port
	b, err := json.Marshal(flags)
	if err != nil {
		t.Fatal(err)
	}
	c := startChild(t, "E2E_PROXY="+string(b), &f.addrs)
	c.addrs.HTTP = f.addrs.Admin
	f.v = &victim{child: c, t: t}
	return f
}

// settled waits until the proxy has nothing in flight and no more descriptors
// and goroutines than before.
func (f *front) settled(before usage) {
	f.t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(limit)
	for {
		var s struct {
			Requests []json.RawMessage `json:"requests"`
		}
		if err := json.Unmarshal([]byte(get(f.t, f.addrs.Admin, "/v1/status")), &s); err != nil {
			f.t.Fatal(err)
		}
		u := f.v.usage()
		// Connections to engines are kept for a while.
		if len(s.Requests) == 0 && (before == usage{} || u.descriptors <= before.descriptors+6 && u.goroutines <= before.goroutines+12) {
			return
		}
		select {
		case <-tick.C:
		case <-f.v.done:
			f.t.Fatal("the proxy is gone")
		case <-deadline:
			f.t.Fatalf("not as before after %v: %+v, it was %+v; %d requests", limit, u, before, len(s.Requests))
		}
	}
}

// frontAttack is one way to be a bad client or a bad peer of a proxy.
type frontAttack struct {
	name  string
	holds int64 // bytes of the proxy's memory that its limits let it take
	run   func(ctx context.Context, f *front, begun func()) error
}

// What the proxy's limits let clients and peers hold.
const (
	clientConn = 96 << 10  // a goroutine or two, buffers, a header of up to 64 KiB
	bodies     = 512 << 20 // proxy.Config.MaxBodies
	earlyWords = 4096 * (kv.MaxReqID + 4<<10 + 512)
)

var frontAttacks = []frontAttack{
	{"connections that say nothing, on both ports", 3000 * clientConn, frontSilent},
	{"more idle clients than may connect", int64(crowd()) * clientConn, frontCrowd},
	{"headers one byte at a time", 400 * clientConn, frontLoris},
	{"headers without an end", 64 * clientConn, frontHeaders},
	{"bodies that are too large, never end or lie about their length", 100*clientConn + 64<<20, frontBodies},
	{"large bodies that stay, until there is room for no more", 2*bodies + 100*clientConn, frontHeld},
	{"answers that are never read", 60 * (clientConn + 1<<20), frontDeaf},
	{"garbage, and requests that are none", 100 * clientConn, frontGarbage},
	{"words for requests that nobody knows, as many as go", earlyWords + mailbox, frontWords},
	{"garbage and frames of 2^32 bytes, on the notify port", 64*fullConn + mailbox, frontNotify},
}

// TestHostileProxy sets each attack on a proxy process, while honest clients go
// on: each gets the right answer, and its KV came, every byte of it; the proxy's
// memory stays within what its limits let the attack hold; and afterwards
// descriptors and goroutines are back.
func TestHostileProxy(t *testing.T) {
	f := newFront(t)
	for range 10 {
		f.ask()
	}
	if *hostileReport {
		t.Log("| attack on the proxy | p99 without it, ms | p99 with it, ms | ratio | memory, MiB | at most |")
		t.Log("| --- | --- | --- | --- | --- | --- |")
	}
	for _, a := range frontAttacks {
		t.Run(a.name, func(t *testing.T) {
			f.t, f.v.t = t, t
			f.settled(usage{})
			before := f.v.usage()
			n := 12
			var calm []time.Duration
			if *hostileReport {
				n = 400
				for range n / 2 {
					calm = append(calm, f.ask())
				}
			}
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			on, failed := make(chan struct{}), make(chan error, 1)
			go func() { failed <- a.run(ctx, f, func() { close(on) }) }()
			select {
			case <-on:
			case err := <-failed:
				t.Fatalf("the attack did not begin: %v", err)
			case <-time.After(2 * limit):
				t.Fatal("the attack does not begin")
			}
			peak := before.memory
			var under []time.Duration
			for began := time.Now(); len(under) < n || time.Since(began) < attackTime; {
				under = append(under, f.ask())
				if len(under)%8 == 1 {
					peak = max(peak, f.v.usage().memory)
				}
			}
			stop()
			if err := <-failed; err != nil && !errors.Is(err, context.Canceled) {
				t.Fatalf("the attack broke off: %v", err)
			}
			peak = max(peak, f.v.usage().memory)
			if bound := before.memory + shadow*(2*a.holds+64<<20); peak > bound {
				t.Errorf("%d MiB of memory, at most %d may be: %d before, %d held by the attack", peak>>20, bound>>20, before.memory>>20, a.holds>>20)
			}
			f.settled(before)
			t.Logf("memory: %d MiB more than before, at most %d may be", (peak-before.memory)>>20, (2*a.holds+64<<20)>>20)
			if *hostileReport {
				for range n / 2 {
					calm = append(calm, f.ask())
				}
				without, with := p99(calm), p99(under)
				t.Logf("| %s | %.1f | %.1f | %.2f | %d | %d |", a.name, without, with, with/without, (peak-before.memory)>>20, (2*a.holds+64<<20)>>20)
			}
		})
		if t.Failed() {
			return
		}
	}
}

func frontSilent(ctx context.Context, f *front, begun func()) error {
	var all conns
	defer func() { all.close() }()
	for i := range 3000 {
		nc, err := knock(ctx, []string{f.addrs.HTTP, f.addrs.HTTP, f.addrs.Notify}[i%3])
		if err != nil {
			return err
		}
		all = append(all, nc)
	}
	begun()
	<-ctx.Done()
	return nil
}

// crowd is as many connections as a proxy has, and some.
func crowd() int {
	var files syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files); err != nil {
		panic(err)
	}
	return int(min(16384, files.Cur/2)) + 50
}

// frontCrowd takes every connection that there is, each with a request that was
// answered, and more. Newcomers are welcome all the same.
func frontCrowd(ctx context.Context, f *front, begun func()) error {
	var all conns
	defer func() { all.close() }()
	ask := func() error {
		nc, err := knock(ctx, f.addrs.HTTP)
		if err != nil {
			return err
		}
		nc.SetDeadline(time.Now().Add(limit))
		if _, err = io.WriteString(nc, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n"); err == nil {
			_, err = nc.Read(make([]byte, 4<<10))
		}
		if err != nil {
			nc.Close()
			return err
		}
		all = append(all, nc)
		return nil
	}
	for range crowd() {
		if err := ask(); err != nil && len(all) < crowd()/2 {
			return err
		}
	}
	for end := time.Now().Add(limit); ; { // a second after the last one there is room again
		err := ask()
		if err == nil {
			break
		}
		if time.Now().After(end) {
			return fmt.Errorf("a newcomer is kept out: %w", err)
		}
	}
	begun()
	return pace(ctx, 200, func(int) error {
		all[0].Close()
		all = all[1:]
		return ask()
	})
}

func frontLoris(ctx context.Context, f *front, begun func()) error {
	var all conns
	defer func() { all.close() }()
	for range 400 {
		nc, err := knock(ctx, f.addrs.HTTP)
		if err != nil {
			return err
		}
		all = append(all, nc)
	}
	begun()
	text := "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
	return pace(ctx, 4000, func(i int) error {
		nc := all[i%len(all)]
		nc.SetWriteDeadline(time.Now().Add(time.Second))
		nc.Write([]byte{text[i/len(all)%len(text)]}) // it may have been closed
		return nil
	})
}

// each opens connections one after the other and lets talk have them.
func (f *front) each(ctx context.Context, perSecond int, addr string, talk func(i int, nc net.Conn)) error {
	return pace(ctx, perSecond, func(i int) error {
		nc, err := knock(ctx, addr)
		if err != nil {
			return nil
		}
		defer nc.Close()
		nc.SetDeadline(time.Now().Add(50 * time.Millisecond))
		talk(i, nc)
		return nil
	})
}

func frontHeaders(ctx context.Context, f *front, begun func()) error {
	begun()
	line := append(append([]byte("X-Long: "), bytes.Repeat([]byte("y"), 8<<10)...), "\r\n"...)
	return f.each(ctx, 50, f.addrs.HTTP, func(i int, nc net.Conn) {
		io.WriteString(nc, "POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
		for range 200 {
			if _, err := nc.Write(line[:len(line)-i%2]); err != nil {
				return
			}
		}
	})
}

func frontBodies(ctx context.Context, f *front, begun func()) error {
	begun()
	heads := []string{"Content-Length: 1099511627776", "Content-Length: 16777217", "Transfer-Encoding: chunked", "Content-Length: 10", "Content-Length: -1"}
	part := bytes.Repeat([]byte(" "), 64<<10)
	return f.each(ctx, 50, f.addrs.HTTP, func(i int, nc net.Conn) {
		fmt.Fprintf(nc, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n%s\r\n\r\n", heads[i%len(heads)])
		for range 40 {
			if i%len(heads) == 2 {
				fmt.Fprintf(nc, "%x\r\n", len(part))
			}
			if _, err := nc.Write(part); err != nil {
				return
			}
		}
	})
}

// frontHeld sends bodies of almost the limit and withholds their last byte.
func frontHeld(ctx context.Context, f *front, begun func()) error {
	var all conns
	defer func() { all.close() }()
	const size = 16 << 20
	part := bytes.Repeat([]byte(" "), 1<<20)
	open := func() error {
		nc, err := knock(ctx, f.addrs.HTTP)
		if err != nil {
			return err
		}
		all = append(all, nc)
		nc.SetWriteDeadline(time.Now().Add(time.Second))
		fmt.Fprintf(nc, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", size)
		for range size/len(part) - 1 {
			if _, err := nc.Write(part); err != nil {
				return nil
			}
		}
		return nil
	}
	for range 40 {
		if err := open(); err != nil {
			return err
		}
	}
	begun()
	return pace(ctx, 4, func(int) error {
		all[0].Close()
		all = all[1:]
		return open()
	})
}

func frontDeaf(ctx context.Context, f *front, begun func()) error {
	var all conns
	defer func() { all.close() }()
	body := `{"model":"m","prompt":"x","stream":true,"n":2}`
	for range 60 {
		nc, err := knock(ctx, f.addrs.HTTP)
		if err != nil {
			return err
		}
		nc.(*net.TCPConn).SetReadBuffer(4 << 10)
		all = append(all, nc)
		fmt.Fprintf(nc, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	}
	begun()
	<-ctx.Done()
	return nil
}

func frontGarbage(ctx context.Context, f *front, begun func()) error {
	begun()
	nested := string(bytes.Repeat([]byte("["), 100_000))
	texts := []string{"\x16\x03\x01\x02\x00\x01", "GET / HTTP/9.9\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "DELETE /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n"}
	for _, body := range []string{`{"prompt":`, `{"prompt":[1e999]}`, `{"model":"m","prompt":[-1,2.5,"x"]}`, `{"prompt":` + nested, `{"prompt":"x","max_tokens":99999999999999999999}`,
		`{"prompt":"x","kv_transfer_params":{"disagg_spec":{"req_id":"mine"}}}x`, "\xff\xfe"} {
		texts = append(texts, fmt.Sprintf("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body))
	}
	return f.each(ctx, 200, f.addrs.HTTP, func(i int, nc net.Conn) {
		io.WriteString(nc, texts[i%len(texts)])
		io.Copy(io.Discard, nc)
	})
}

func frontWords(ctx context.Context, f *front, begun func()) error {
	var all []*zmtp.Conn
	for range 8 {
		c, err := zmtp.DialPush(ctx, f.addrs.Notify, func(zmtp.Event) {}, zmtp.Options{})
		if err != nil {
			return err
		}
		defer c.Close()
		all = append(all, c)
	}
	begun()
	name, text := string(bytes.Repeat([]byte("w"), kv.MaxReqID-20)), string(bytes.Repeat([]byte("t"), 4000))
	return pace(ctx, 8000, func(i int) error {
		var m msg.Message = &msg.ProxyNotif{ReqID: fmt.Sprint(name, i)}
		if i%2 == 1 {
			m = &msg.EndingNotice{ReqID: fmt.Sprint(name, i), Rank: int64(i), Ending: msg.EndFailed, Reason: "internal", Text: text}
		}
		b, err := wire.Append(nil, m)
		if err != nil {
			return err
		}
		return all[i%len(all)].SendWait(ctx, b)
	})
}

func frontNotify(ctx context.Context, f *front, begun func()) error {
	begun()
	hello := zmtpHello("x")
	hello = bytes.Replace(hello, []byte("DEALER"), []byte("PUSH"), 1)
	hello = bytes.Replace(hello, []byte{0, 0, 0, 6, 'P', 'U', 'S', 'H'}, []byte{0, 0, 0, 4, 'P', 'U', 'S', 'H'}, 1)
	hello[65] -= 2 // the command is two bytes shorter
	frames := [][]byte{
		binary.BigEndian.AppendUint64([]byte{2}, 1<<32),
		binary.BigEndian.AppendUint64([]byte{2}, 1<<63),
		append(binary.BigEndian.AppendUint64([]byte{2}, 16<<20), make([]byte, 1<<20)...),
		{0, 5, 0xdf, 0xff, 0xff, 0xff, 0xff},
		append([]byte{0, 100}, bytes.Repeat([]byte{0x91}, 100)...),
		bytes.Repeat([]byte{1, 0}, 5000),
		[]byte("GET / HTTP/1.1\r\n\r\n"),
	}
	return f.each(ctx, 100, f.addrs.Notify, func(i int, nc net.Conn) {
		if i%len(frames) < len(frames)-1 {
			nc.Write(hello)
		}
		nc.Write(frames[i%len(frames)])
		io.Copy(io.Discard, nc)
	})
}
