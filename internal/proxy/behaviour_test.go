package proxy

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/msg"
)

// open sends a request and returns the answer, whose body the test reads.
func (f *fleet) open(ctx context.Context, path, body string) *http.Response {
	f.t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, f.srv.URL+path, strings.NewReader(body))
	if err != nil {
		f.t.Fatal(err)
	}
	resp, err := f.http.Do(req)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { resp.Body.Close() })
	return resp
}

func soon(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// reqID returns the name of the newest transfer.
func (w *fakeWatcher) reqID(i int) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.order[i].req.ReqID
}

// TestReadyComesFirst (r26): the first token is out, the transfer takes its time,
// and the decode engine is asked only after every rank was ready.
func TestReadyComesFirst(t *testing.T) {
	f := newFleet(t, 1, 1, false, nil)
	f.decodes[0].setHook(func(_ http.ResponseWriter, _ *http.Request, body gjson.Result) bool {
		spec := body.Get("kv_transfer_params.disagg_spec.req_id")
		if spec.Exists() && !f.watcher.wasTold(spec.Str) {
			t.Errorf("the decode engine is asked to go on with %q, which is not ready", spec.Str)
		}
		return false
	})
	resp := f.open(soon(t), "/v1/completions", `{"prompt":"hello","max_tokens":3,"stream":true}`)
	r := bufio.NewReader(resp.Body)
	first, err := r.ReadString('\n')
	if err != nil || gjson.Get(first[len("data: "):], "choices.0.text").Str == "" {
		t.Fatalf("the first token: %q, %v", first, err)
	}
	// Time passes: others are answered meanwhile, by the same decode engine.
	const others = 20
	for range others {
		if status, _, answer := f.post("/v1/completions", `{"prompt":"hello","n":2}`); status != 200 {
			t.Errorf("another request: %d %s", status, answer)
		}
	}
	if n := len(f.decodes[0].asked("/v1/completions")); n != others {
		t.Errorf("the decode engine was asked %d times before the KV was ready", n-others)
	}
	// What was watched is what the engines are told.
	w := f.watcher.order[0].req
	if want := []Receiver{{"10.0.0.9", 8300, 8400}, {"10.0.0.9", 8301, 8401}}; !slices.Equal(w.Receivers, want) {
		t.Errorf("watched %v, want %v", w.Receivers, want)
	}
	after := defaults.Timeouts
	if want := after.Tokenize + after.Watch + after.Prefill + after.Transfer; w.Deadline != want {
		t.Errorf("the deadline is %v, want %v", w.Deadline, want)
	}
	params := f.prefills[0].asked("/v1/completions")[0].body.Get("kv_transfer_params").Raw
	want := fmt.Sprintf(`{"ret_first_tok":true,"disagg_spec":{"req_id":"%s","receiver_host":"10.0.0.9",`+
		`"receiver_init_port":[8300,8301],"receiver_alloc_port":[8400,8401],"berth_proxy":true}}`, w.ReqID)
	if params != want {
		t.Errorf("the prefill engine was told %s, want %s", params, want)
	}
	f.watcher.ready(w.ReqID)
	rest, err := io.ReadAll(r)
	if err != nil || !strings.HasSuffix(string(rest), "data: [DONE]\n\n") {
		t.Errorf("the rest: %q, %v", rest, err)
	}
	f.settled()
}

// TestTransferFailsAfterFirstToken (r76, r95): with policy error the client gets
// an error event and no [DONE]; else the decode engine goes on without the KV.
func TestTransferFailsAfterFirstToken(t *testing.T) {
	for _, policy := range []Policy{Fail, Recompute} {
		t.Run(string(policy), func(t *testing.T) {
			f := newFleet(t, 1, 1, false, func(c *Config) { c.Policy = policy })
			resp := f.open(soon(t), "/v1/completions", `{"prompt":"hello","max_tokens":3,"stream":true}`)
			r := bufio.NewReader(resp.Body)
			if _, err := r.ReadString('\n'); err != nil {
				t.Fatal(err)
			}
			f.watcher.settle(f.watcher.reqID(0), Ending{Ending: msg.EndFailed, Reason: fault.PeerLost, Text: "sender lost", Rank: 1})
			raw, err := io.ReadAll(r)
			if err != nil {
				t.Fatal(err)
			}
			rest := strings.TrimSpace(string(raw))
			s := f.settled()
			if policy == Fail {
				want := `data: {"error":{"message":"the KV transfer failed: rank 1: sender lost","type":"server_error","param":null,"code":"peer_lost"}}`
				if rest != want || s.Requests[TransferFailed] != 1 {
					t.Errorf("got %s; %v", rest, s.Requests)
				}
			} else {
				asked := f.decodes[0].asked("/v1/completions")
				if !strings.HasSuffix(rest, "data: [DONE]") || len(asked) != 1 || asked[0].body.Get("kv_transfer_params").Exists() ||
					len(asked[0].body.Get("prompt").Array()) != 6 || s.Recomputed[Failure{StepTransfer, fault.PeerLost}] != 1 {
					t.Errorf("got %s; %v", rest, s.Recomputed)
				}
			}
			if got := f.watcher.endings(); !slices.Equal(got, []string{"cancelled peer_lost"}) {
				t.Errorf("the watch: %v", got)
			}
		})
	}
}

// holdAt makes a fleet get stuck at a step; reached is told when it is there, and
// left when the engine sees that its caller is gone.
func (f *fleet) holdAt(step Step, reached, left func()) {
	hold := func(_ http.ResponseWriter, r *http.Request, _ gjson.Result) bool {
		reached()
		<-r.Context().Done()
		left()
		return true
	}
	at := func(path string, h hook, otherwise hook) hook {
		return func(w http.ResponseWriter, r *http.Request, body gjson.Result) bool {
			if r.URL.Path == path {
				return h(w, r, body)
			}
			return otherwise != nil && otherwise(w, r, body)
		}
	}
	for _, e := range f.prefills {
		switch step {
		case StepTokenize:
			e.setHook(at("/tokenize", hold, f.deliver))
		case StepPrefill:
			e.setHook(at("/v1/completions", hold, nil))
		case StepTransfer: // stuck in the proxy alone
			e.setHook(at("/v1/completions", func(http.ResponseWriter, *http.Request, gjson.Result) bool {
				reached()
				left()
				return false
			}, nil))
		}
	}
	for _, e := range f.decodes {
		switch step {
		case StepDecode:
			e.setHook(func(w http.ResponseWriter, r *http.Request, body gjson.Result) bool {
				w.Header().Set("Content-Type", eventType)
				fmt.Fprint(w, "data: {\"choices\":[{\"index\":0,\"text\":\"x\",\"finish_reason\":null}]}\n\n")
				http.NewResponseController(w).Flush()
				return hold(w, r, body)
			})
		case StepWhole:
			e.setHook(hold)
		}
	}
}

// TestClientLeaves: wherever a request is when its client goes, its engine is let
// go, its transfer cancelled, and nothing of it is left.
func TestClientLeaves(t *testing.T) {
	for _, step := range Steps {
		if step == StepRead {
			continue // nothing has begun
		}
		t.Run(string(step), func(t *testing.T) {
			f := newFleet(t, 1, 1, true, nil)
			reached, left := make(chan struct{}), make(chan struct{})
			f.holdAt(step, func() { close(reached) }, func() { close(left) })
			if step == StepWatch {
				f.watcher.be(receivers{stall: true})
				close(left)
				go func() {
					defer close(reached)
					f.watcher.until(soon(t), func(all []*fakeWatch) bool { return len(all) == 1 && all[0].awaited })
				}()
			}
			body := `{"prompt":"hello","max_tokens":3,"stream":true}`
			if step == StepWhole {
				body = `{"prompt":"hello","n":2,"stream":true}`
			}
			ctx, leave := context.WithCancel(soon(t))
			gone := make(chan error, 1)
			if step == StepTransfer { // it is there once the first token is out
				resp := f.open(ctx, "/v1/completions", body)
				if _, err := resp.Body.Read(make([]byte, 1)); err != nil {
					t.Fatal(err)
				}
				gone <- context.Canceled
			} else {
				go func() {
					_, _, _, err := ask(ctx, f.http, f.srv.URL+"/v1/completions", body)
					gone <- err
				}()
			}
			<-reached
			leave()
			if err := <-gone; !errors.Is(err, context.Canceled) {
				t.Errorf("the client: %v", err)
			}
			select {
			case <-left:
			case <-soon(t).Done():
				t.Fatal("the engine was not let go")
			}
			s := f.settled()
			if s.Requests[ClientGone] != 1 || s.Failures[Failure{step, fault.Cancelled}] != 1 {
				t.Errorf("%v %v", s.Requests, s.Failures)
			}
			for _, how := range f.watcher.endings() {
				if how != "cancelled cancelled" {
					t.Errorf("the watch: %s", how)
				}
			}
			if prefills := len(f.prefills[0].asked("/v1/completions")); step == StepWatch && prefills > 0 {
				t.Errorf("%d prefills began before the receivers watched", prefills)
			}
		})
	}
}

// TestWatchDuringTokenize: the receivers are asked while the prompt is tokenized,
// and asked no more of when it cannot be.
func TestWatchDuringTokenize(t *testing.T) {
	for _, status := range []int{200, 400} {
		f := newFleet(t, 1, 1, true, nil)
		f.prefills[0].setHook(func(w http.ResponseWriter, r *http.Request, body gjson.Result) bool {
			if r.URL.Path != "/tokenize" {
				return f.deliver(w, r, body)
			}
			if err := f.watcher.until(soon(t), func(all []*fakeWatch) bool { return len(all) == 1 }); err != nil {
				t.Errorf("the prompt is tokenized, and nothing watched: %v", err)
			}
			if status != 200 {
				w.WriteHeader(status)
			}
			return status != 200
		})
		got, _, answer := f.post("/v1/completions", `{"prompt":"hello","max_tokens":3}`)
		if got != status {
			t.Errorf("%d %s", got, answer)
		}
		f.settled()
		if got, want := f.watcher.endings(), map[int]string{200: "closed", 400: "cancelled cancelled"}[status]; !slices.Equal(got, []string{want}) {
			t.Errorf("status %d: the watch: %v", status, got)
		}
	}
}

// TestDisconnectStorm (r91): 200 clients leave in every step at once; all is
// given back, descriptors too, and the next request is answered.
func TestDisconnectStorm(t *testing.T) {
	f := newFleet(t, 2, 2, true, nil)
	f.post("/v1/completions", `{"prompt":"hello","max_tokens":3}`)
	f.http.CloseIdleConnections()
	f.settled()
	before := descriptors(t)

	const clients = 200
	stuck := newGauge()
	held := map[Step]int{}
	steps := []Step{StepTokenize, StepPrefill, StepTransfer, StepDecode, StepWhole}
	var mu sync.Mutex
	var wg sync.WaitGroup
	ctx, leave := context.WithCancel(soon(t))
	// Each client's prompt says where it gets stuck.
	hold := func(step Step) hook {
		return func(w http.ResponseWriter, r *http.Request, body gjson.Result) bool {
			mine := r.Header.Get("X-Stuck-At")
			at := map[Step]string{StepTokenize: "/tokenize", StepPrefill: "/v1/completions", StepDecode: "/v1/completions", StepWhole: "/v1/completions"}
			if mine == string(StepTransfer) && step == StepPrefill && r.URL.Path == "/v1/completions" {
				mu.Lock()
				held[StepTransfer]++
				mu.Unlock()
				stuck.add(1)
				return false // and never deliver
			}
			if mine != string(step) || r.URL.Path != at[step] {
				return false
			}
			mu.Lock()
			held[step]++
			mu.Unlock()
			stuck.add(1)
			<-r.Context().Done()
			return true
		}
	}
	for _, e := range f.prefills {
		tokenize, prefill := hold(StepTokenize), hold(StepPrefill)
		e.setHook(func(w http.ResponseWriter, r *http.Request, body gjson.Result) bool {
			if tokenize(w, r, body) || prefill(w, r, body) {
				return true
			}
			if r.Header.Get("X-Stuck-At") != string(StepTransfer) {
				f.deliver(w, r, body)
			}
			return false
		})
	}
	for _, e := range f.decodes {
		decode, whole := hold(StepDecode), hold(StepWhole)
		e.setHook(func(w http.ResponseWriter, r *http.Request, body gjson.Result) bool {
			return decode(w, r, body) || whole(w, r, body)
		})
	}
	for i := range clients {
		step := steps[i%len(steps)]
		body := fmt.Sprintf(`{"prompt":"hello %d","max_tokens":3,"stream":%v}`, i, i%2 == 0)
		if step == StepWhole {
			body = fmt.Sprintf(`{"prompt":"hello %d","n":2,"stream":%v}`, i, i%2 == 0)
		}
		wg.Go(func() {
			_, _, _, err := ask(ctx, f.http, f.srv.URL+"/v1/completions", body, "X-Stuck-At", string(step))
			if !errors.Is(err, context.Canceled) {
				t.Errorf("client %d: %v", i, err)
			}
		})
	}
	if err := stuck.until(soon(t), clients); err != nil {
		t.Fatalf("waiting for the clients to be stuck: %v", err)
	}
	leave()
	wg.Wait()
	s := f.settled()
	if s.Requests[ClientGone] != clients || s.InFlight != 0 {
		t.Errorf("%v, held %v", s.Requests, held)
	}
	for _, n := range s.Nodes {
		if n.InFlight != 0 {
			t.Errorf("%+v", n)
		}
	}
	status, _, answer := f.post("/v1/completions", `{"prompt":"hello","max_tokens":3}`)
	if status != 200 {
		t.Errorf("the next request: %d %s", status, answer)
	}
	f.http.CloseIdleConnections()
	f.proxy.client.transport.CloseIdleConnections()
	for _, e := range append(f.prefills, f.decodes...) {
		e.srv.CloseClientConnections()
	}
	if after := descriptors(t); after > before+16 {
		t.Errorf("%d descriptors, %d before", after, before)
	}
}

func descriptors(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

// TestClientReadsNothing: an engine that writes without end and a client that
// takes none of it: memory stays bounded by the sockets, and the write's deadline
// ends it.
func TestClientReadsNothing(t *testing.T) {
	for _, body := range []string{`{"prompt":"hello","max_tokens":3,"stream":true}`, `{"prompt":"hello","n":2,"stream":true}`} {
		f := newFleet(t, 1, 1, true, func(c *Config) { c.Timeouts.Write = 50 * time.Millisecond })
		left := make(chan struct{})
		f.decodes[0].setHook(func(w http.ResponseWriter, r *http.Request, _ gjson.Result) bool {
			defer close(left)
			w.Header().Set("Content-Type", eventType)
			event := "data: {\"choices\":[{\"index\":0,\"text\":\"" + strings.Repeat("x", 32<<10) + "\",\"finish_reason\":null}]}\n\n"
			for r.Context().Err() == nil {
				if _, err := io.WriteString(w, event); err != nil {
					break
				}
			}
			return true
		})
		c, err := net.Dial("tcp", f.srv.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		fmt.Fprintf(c, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
		select {
		case <-left:
		case <-soon(t).Done():
			t.Fatal("the engine was not let go")
		}
		if s := f.settled(); s.Requests[ClientGone] != 1 {
			t.Errorf("%v", s.Requests)
		}
	}
}

// TestConnectionsAreKept: requests one after the other use few connections.
func TestConnectionsAreKept(t *testing.T) {
	f := newFleet(t, 1, 1, true, nil)
	for i := range 50 {
		f.post("/v1/completions", fmt.Sprintf(`{"prompt":"hello","max_tokens":3,"stream":%v}`, i%2 == 0))
	}
	for _, e := range append(f.prefills, f.decodes...) {
		e.mu.Lock()
		if e.conns > 5 {
			t.Errorf("50 requests took %d connections to an engine", e.conns)
		}
		e.mu.Unlock()
	}
}

// flushes counts how often an answer is handed to the network.
type flushes struct {
	*httptest.ResponseRecorder
	n int
}

func (w *flushes) FlushError() error { w.n++; return nil }

// TestEventsAtOnce: events that an engine sends at once reach the client in few
// writes.
func TestEventsAtOnce(t *testing.T) {
	const events = 100
	f := newFleet(t, 1, 1, true, nil)
	w := &flushes{ResponseRecorder: httptest.NewRecorder()}
	f.decodes[0].setHook(func(out http.ResponseWriter, _ *http.Request, _ gjson.Result) bool {
		out.Header().Set("Content-Type", eventType)
		for i := range events {
			fmt.Fprintf(out, "data: {\"choices\":[{\"index\":0,\"text\":\"%d\"}]}\n\n", i)
		}
		io.WriteString(out, "data: [DONE]\n\n")
		return true
	})
	r := httptest.NewRequest("POST", "/v1/completions", strings.NewReader(`{"prompt":"hello","n":2,"stream":true}`))
	f.proxy.Handler().ServeHTTP(w, r)
	if got := strings.Count(w.Body.String(), "data: "); got != events+1 || w.n > events/4 {
		t.Errorf("%d events in %d writes, want %d in few", got, w.n, events+1)
	}
	f.settled()
}

// TestEventsOneByOne: an event goes out before the next one is awaited, also when
// a part of that is there already.
func TestEventsOneByOne(t *testing.T) {
	for _, body := range []string{`{"prompt":"hello","max_tokens":9,"stream":true}`, `{"prompt":"hello","n":2,"stream":true}`} {
		f := newFleet(t, 1, 1, true, nil)
		seen := make(chan struct{})
		f.decodes[0].setHook(func(out http.ResponseWriter, r *http.Request, _ gjson.Result) bool {
			out.Header().Set("Content-Type", eventType)
			for range 8 {
				io.WriteString(out, "data: {\"choices\":[{\"index\":0,\"text\":\"x\",\"finish_reason\":null}]}\n\ndata: ")
				http.NewResponseController(out).Flush()
				select {
				case <-seen:
				case <-r.Context().Done():
				}
				io.WriteString(out, "{\"choices\":[]}\n\n")
			}
			io.WriteString(out, "data: {\"choices\":[{\"index\":0,\"text\":\"x\",\"finish_reason\":\"length\"}]}\n\ndata: [DONE]\n\n")
			return true
		})
		resp := f.open(soon(t), "/v1/completions", body)
		lines, got := bufio.NewScanner(resp.Body), 0
		for lines.Scan() {
			if gjson.Get(strings.TrimPrefix(lines.Text(), "data: "), "choices.0.text").Str == "x" {
				if got++; got <= 8 {
					seen <- struct{}{}
				}
			}
		}
		if lines.Err() != nil || got != 9 {
			t.Errorf("%s: %d events, %v", body, got, lines.Err())
		}
		f.settled()
	}
}
