package engine_test

import (
	"context"
	"fmt"
	"math/rand"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berthkv/berth/internal/engine"
	"github.com/berthkv/berth/internal/engine/enginetest"
)

// phases stops the first call of one operation, or all of them, so that a test
// can act in the middle of it.
type phases struct {
	op      string
	all     bool
	once    atomic.Bool
	reached chan struct{}
	goOn    chan struct{}
}

func phase(op string) *phases {
	return &phases{op: op, reached: make(chan struct{}), goOn: make(chan struct{})}
}

func (p *phases) at(op string) error {
	if op != p.op {
		return nil
	}
	first := p.once.CompareAndSwap(false, true)
	if first {
		close(p.reached)
	}
	if first || p.all {
		<-p.goOn
	}
	return nil
}

func (p *phases) hook(f *enginetest.Fleet, _, _ *engine.Config) {
	f.Fault = func(op, _ string) error { return p.at(op) }
	f.BeforeWrite = func(string, int) error { return p.at("write") }
}

// r70, r75, r90: the client leaves in the middle of each operation. Everything
// comes back, and the next request is served.
func TestAbortInEachPhase(t *testing.T) {
	for _, ranks := range []int{1, 2} {
		for _, op := range []string{"begin", "stage", "submit", "write", "wait", "claim", "find"} {
			t.Run(fmt.Sprintf("%s/ranks=%d", op, ranks), func(t *testing.T) {
				p := phase(op)
				u, v := undivided(t), divide(t, ranks, 4, 20, p.hook)
				prompt := randomPrompt(rand.New(rand.NewSource(1)), 60)
				ctx, leave := context.WithCancel(context.Background())
				defer leave()
				done := make(chan struct{})
				side := v.p
				if slices.Contains([]string{"wait", "claim", "find"}, op) {
					side = v.d
				}
				go func() {
					defer close(done)
					// A long answer: the client leaves before it is complete.
					v.p.postCtx(ctx, "/v1/completions", object{"prompt": prompt, "max_tokens": 100, "ignore_eos": true,
						"kv_transfer_params": spec("r", decodeHost, v.ports...)})
					body := object{"prompt": prompt, "max_tokens": 100, "ignore_eos": true}
					if op != "find" {
						body["kv_transfer_params"] = object{"disagg_spec": object{"req_id": "r"}}
					}
					if ctx.Err() == nil {
						v.d.postCtx(ctx, "/v1/completions", body)
					}
				}()
				await(t, op, p.reached)
				if side == v.d {
					await(t, "the prefill's answer", v.p.left)
				}
				leave()
				await(t, "that the server notices", side.left)
				close(p.goOn)
				await(t, "the end of the client", done)
				for _, n := range v.dn {
					n.Free("r") // as the proxy does when its client has left
				}
				v.fleet.Check(t)

				got, err := v.answer("next", prompt, 8)
				if want := u.answer(prompt, 8); err != nil || !slices.Equal(got, want) {
					t.Errorf("next: %v, want %v (%v)", got, want, err)
				}
			})
		}
	}
}

// Clients leave while their prompts wait for a grant and in the queue: neither
// is ever computed.
func TestAbortBeforeGrant(t *testing.T) {
	v := divide(t, 1, 4, 8, func(_ *enginetest.Fleet, p, _ *engine.Config) { p.Begun = 1 })
	rng := rand.New(rand.NewSource(2))
	if _, err := v.prefill("first", randomPrompt(rng, 8*chunk)); err != nil {
		t.Fatal(err)
	}
	v.fleet.Until(t, "ready first", 1)
	await(t, "the first request", v.p.came)
	await(t, "the first answer", v.p.left)
	before := v.p.Stats().PromptTokensComputed
	ctx, leave := context.WithCancel(context.Background())
	defer leave()
	var clients sync.WaitGroup
	for i := range 3 {
		prompt := randomPrompt(rng, 60)
		clients.Go(func() {
			v.p.postCtx(ctx, "/v1/completions", object{"prompt": prompt, "kv_transfer_params": spec(fmt.Sprint("r", i), decodeHost, v.ports...)})
		})
		await(t, "the request", v.p.came)
		if i == 0 {
			v.fleet.Until(t, "begin r0", 1)
		}
	}
	leave()
	clients.Wait()
	for range 3 {
		await(t, "that the server notices", v.p.left)
	}
	await(t, "the drain", drained(v.p))
	v.dn[0].Free("first")
	v.fleet.Check(t)
	if n := v.p.Stats().PromptTokensComputed; n != before {
		t.Errorf("%d tokens of prompts without a grant were computed", n-before)
	}
}

// r13, r79, r91: a hundred requests whose clients leave at random moments, in
// every phase; then everything is free, and the engines still serve.
func TestRandomAborts(t *testing.T) {
	v := divide(t, 2, 4, 20, nil)
	var wg sync.WaitGroup
	for i := range 100 {
		rng := rand.New(rand.NewSource(int64(i)))
		prompt := randomPrompt(rng, 1+rng.Intn(100))
		stay := time.Duration(rng.Intn(30_000)) * time.Microsecond
		wg.Go(func() {
			ctx, leave := context.WithTimeout(context.Background(), stay)
			defer leave()
			req := fmt.Sprint("r", i)
			status, _ := v.p.postCtx(ctx, "/v1/completions", object{"prompt": prompt, "max_tokens": 1, "kv_transfer_params": spec(req, decodeHost, v.ports...)})
			if status == http.StatusOK {
				v.d.postCtx(ctx, "/v1/completions", object{"prompt": prompt, "max_tokens": 20,
					"kv_transfer_params": object{"disagg_spec": object{"req_id": req}}})
			}
		})
	}
	wg.Wait()
	await(t, "the engine's drain", drained(v.p))
	for i := range 100 {
		for _, n := range v.dn {
			n.Free(fmt.Sprint("r", i))
		}
	}
	await(t, "the engine's drain", drained(v.d))
	v.fleet.Check(t)
	for _, s := range []*server{v.p, v.d} {
		if st := s.Stats(); st.Waiting != 0 || st.Running != 0 {
			t.Errorf("%+v", st)
		}
	}
}

func drained(s *server) <-chan error {
	ch := make(chan error, 1)
	go func() { ch <- s.Drain(context.Background()) }()
	return ch
}

// A proxy cancels at the receiver while the prompt is being written: the
// engine stops, and the other rank is cancelled.
func TestCancelledAtTheReceiver(t *testing.T) {
	for _, op := range []string{"stage", "submit", "write"} {
		p := phase(op)
		p.all = true // no rank gets ahead of the cancel
		v := divide(t, 2, 4, 20, p.hook)
		done := make(chan error, 1)
		go func() {
			_, err := v.prefill("r", randomPrompt(rand.New(rand.NewSource(3)), 100))
			done <- err
		}()
		await(t, op, p.reached)
		v.dn[1].CancelAt("r")
		close(p.goOn)
		if err := await(t, "the prefill's answer", done); err != nil {
			t.Error(err)
		}
		v.fleet.Check(t) // nobody else gives back what the other rank holds
	}
}

// The agent goes away in the middle of each operation, on either side. The
// answer is the undivided one, and when the agent is back, so is the transfer.
func TestAgentLost(t *testing.T) {
	for _, ranks := range []int{1, 2} {
		for _, op := range []string{"begin", "stage", "submit", "write", "wait", "claim"} {
			t.Run(fmt.Sprintf("%s/ranks=%d", op, ranks), func(t *testing.T) {
				p := phase(op)
				p.all = op == "stage" || op == "submit" // so that no rank is through before the loss
				u, v := undivided(t), divide(t, ranks, 4, 20, p.hook)
				prompt := randomPrompt(rand.New(rand.NewSource(4)), 60)
				lost := v.pn[ranks-1]
				side := v.p
				if op == "wait" || op == "claim" {
					lost, side = v.dn[ranks-1], v.d
				}
				type result struct {
					tokens []int
					err    error
				}
				done := make(chan result, 1)
				go func() {
					first, err := v.prefill("r", prompt)
					if err != nil {
						done <- result{err: err}
						return
					}
					if op == "begin" {
						v.dn[0].CancelAt("r") // what was begun at the other rank, if it was
					}
					body := object{"prompt": append(slices.Clone(prompt), first), "max_tokens": 7, "return_token_ids": true}
					if op != "begin" {
						body["kv_transfer_params"] = object{"disagg_spec": object{"req_id": "r"}}
					}
					c, err := v.d.complete(body)
					if err == nil {
						done <- result{append([]int{first}, c.Choices[0].TokenIDs...), nil}
						return
					}
					done <- result{err: err}
				}()
				await(t, op, p.reached)
				lost.Cut()
				close(p.goOn)
				got := await(t, "the answer", done)
				if want := u.answer(prompt, 8); got.err != nil || !slices.Equal(got.tokens, want) {
					t.Fatalf("%v, want %v (%v)", got.tokens, want, got.err)
				}
				if status, body := side.get("/health"); status != http.StatusOK || !strings.Contains(body, fmt.Sprintf("rank %d", ranks-1)) {
					t.Errorf("/health: %d %s", status, body)
				}
				if status, _ := side.get("/ready"); status != http.StatusServiceUnavailable {
					t.Errorf("/ready: %d", status)
				}
				for _, n := range v.dn {
					n.Free("r")
				}
				lost.Mend()
				side.connected()
				if p.all { // earlier the answer tells it, later it may have become ready
					v.fleet.Until(t, "given up r", 1)
				}
				v.fleet.Check(t)
				before := v.d.Stats().Loaded
				got.tokens, got.err = v.answer("next", prompt, 8)
				if want := u.answer(prompt, 8); got.err != nil || !slices.Equal(got.tokens, want) || v.d.Stats().Loaded != before+1 {
					t.Errorf("next: %v, want %v (%v)", got.tokens, want, got.err)
				}
			})
		}
	}
}

// Close in the middle of each operation: the client gets an error, nothing is
// left behind.
func TestCloseInEachPhase(t *testing.T) {
	for _, op := range []string{"begin", "stage", "submit", "write", "wait", "claim"} {
		p := phase(op)
		v := divide(t, 1, 4, 20, p.hook)
		prompt := randomPrompt(rand.New(rand.NewSource(5)), 60)
		side := v.p
		if op == "wait" || op == "claim" {
			side = v.d
			if _, err := v.prefill("r", prompt); err != nil {
				t.Fatal(err)
			}
		}
		body := object{"prompt": prompt, "max_tokens": 100, "ignore_eos": true, "kv_transfer_params": object{"disagg_spec": object{"req_id": "r"}}}
		if side == v.p {
			body["kv_transfer_params"] = spec("r", decodeHost, v.ports...)
		}
		status := make(chan int, 1)
		go func() {
			s, _ := side.post("/v1/completions", body)
			status <- s
		}()
		await(t, op, p.reached)
		closed := make(chan struct{})
		go func() {
			side.Close()
			close(closed)
		}()
		// What is blocked in the agent's call of a handler can answer only then.
		if op == "wait" {
			close(p.goOn)
		}
		// Where the answer does not hang on the operation it may have been faster.
		hangs := op == "begin" || op == "claim"
		if s := await(t, "the answer", status); s != http.StatusServiceUnavailable && (hangs || s != http.StatusOK) {
			t.Errorf("%s: status %d", op, s)
		}
		if op != "wait" {
			close(p.goOn)
		}
		await(t, "the end of Close", closed)
		v.dn[0].Free("r")
		if s, _ := side.post("/v1/completions", object{"prompt": "x"}); s != http.StatusServiceUnavailable {
			t.Errorf("after Close: status %d", s)
		}
	}
}

// Drain waits for what is in flight and takes nothing new.
func TestDrain(t *testing.T) {
	p := phase("begin")
	v := divide(t, 1, 4, 20, p.hook)
	done := make(chan error, 1)
	go func() {
		_, err := v.prefill("r", []int{1, 2, 3})
		done <- err
	}()
	await(t, "begin", p.reached)
	ended, end := context.WithCancel(context.Background())
	end()
	if err := v.p.Drain(ended); err == nil {
		t.Error("drained with a request in flight")
	}
	if s, _ := v.p.post("/v1/completions", object{"prompt": "x"}); s != http.StatusServiceUnavailable {
		t.Errorf("while draining: status %d", s)
	}
	drain := drained(v.p)
	close(p.goOn)
	if err := await(t, "the answer", done); err != nil {
		t.Error(err)
	}
	if err := await(t, "the drain", drain); err != nil {
		t.Error(err)
	}
	v.dn[0].Free("r")
}
