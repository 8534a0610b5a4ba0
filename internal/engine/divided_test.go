package engine_test

import (
	"errors"
	"fmt"
	"math/rand"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/berthkv/berth/internal/engine"
	"github.com/berthkv/berth/internal/engine/enginetest"
	"github.com/berthkv/berth/internal/engine/kvcache"
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
)

// Many prompts at once, of all lengths, over one and two ranks and both storage
// types: each answer equals the undivided engine's, and the decode side
// computed nothing that arrived.
func TestDividedEqualsUndivided(t *testing.T) {
	for _, c := range []struct {
		ranks int
		dtype kv.DType
	}{{1, kvcache.BFloat16}, {2, kvcache.BFloat16}, {1, kvcache.Float32}} {
		t.Run(fmt.Sprintf("ranks=%d/%s", c.ranks, c.dtype), func(t *testing.T) {
			u := start(t, engine.Config{DType: c.dtype})
			v := divide(t, c.ranks, 6, 30, func(f *enginetest.Fleet, p, d *engine.Config) {
				p.DType, d.DType = c.dtype, c.dtype
				p.TokenBudget = 40 // long prompts make several batches
				*f = *enginetest.New(tiny.Layout(c.dtype, c.ranks), chunk)
			})
			rng := rand.New(rand.NewSource(1))
			var total atomic.Uint64
			var wg sync.WaitGroup
			// r16: around the chunk size; r71: the longest that fits.
			for i, n := range []int{1, 15, 16, 17, 31, 32, 33, 48, tiny.Context - 12, 64, 100, 5, 81, 2} {
				prompt := randomPrompt(rng, n)
				wg.Go(func() {
					req := fmt.Sprint("r", i)
					got, err := v.answer(req, prompt, 12)
					if want := u.answer(prompt, 12); err != nil || !slices.Equal(got, want) {
						t.Errorf("%d tokens: %v, want %v (%v)", len(prompt), got, want, err)
					}
					if len(got) > 1 {
						total.Add(uint64(len(prompt)))
					}
				})
			}
			wg.Wait()
			s := v.d.Stats()
			if s.PromptTokensLoaded != total.Load() || s.ArrivedTokensComputed != 0 || s.LoadFailed != 0 {
				t.Errorf("%d prompt tokens came: %+v", total.Load(), s)
			}
			if s.PromptTokensComputed != s.Loaded {
				t.Errorf("%d prompts came, and the decode side computed %d of their tokens: more than each one's new one", s.Loaded, s.PromptTokensComputed)
			}
		})
	}
}

// r71: the longest prompt that the context allows, and r27: one token is all
// the answer, so nobody decodes.
func TestLongestPrompt(t *testing.T) {
	u, v := undivided(t), divide(t, 1, 4, 20, nil)
	prompt := randomPrompt(rand.New(rand.NewSource(9)), tiny.Context-1)
	got, err := v.answer("r", prompt, 1)
	if want := u.answer(prompt, 1); err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, want %v (%v)", got, want, err)
	}
	if n := v.d.Stats().Requests; n != 0 {
		t.Errorf("%d requests at the decode side", n)
	}
}

// r37: when the whole prompt has arrived, exactly one token is left to compute,
// and it counts as arrived and computed.
func TestFullHitLeavesOneToken(t *testing.T) {
	u, v := undivided(t), divide(t, 1, 4, 10, nil)
	prompt := randomPrompt(rand.New(rand.NewSource(3)), 40)
	if _, err := v.prefill("r", prompt); err != nil {
		t.Fatal(err)
	}
	c, err := v.d.complete(object{"prompt": prompt, "max_tokens": 8, "return_token_ids": true,
		"kv_transfer_params": object{"disagg_spec": object{"req_id": "r"}}})
	if want := u.answer(prompt, 8); err != nil || !slices.Equal(c.Choices[0].TokenIDs, want) {
		t.Fatalf("%+v, want %v (%v)", c, want, err)
	}
	if s := v.d.Stats(); s.PromptTokensComputed != 1 || s.PromptTokensLoaded != 39 || s.ArrivedTokensComputed != 1 {
		t.Errorf("%+v", s)
	}
}

// LMCache's proxy names no request to the decode side: the engine finds it by
// its keys, whether the first token was appended or not; r23: the same prompt
// again and again.
func TestFindsWhatNobodyNames(t *testing.T) {
	for _, ranks := range []int{1, 2} {
		u, v := undivided(t), divide(t, ranks, 4, 10, nil)
		for i, n := range []int{16, 16, 16, 33, 33, 1} {
			for _, appended := range []bool{true, false} {
				prompt := randomPrompt(rand.New(rand.NewSource(int64(n))), n)
				first, err := v.prefill(fmt.Sprint(i, appended), prompt)
				if err != nil {
					t.Fatal(err)
				}
				for number := range ranks {
					v.fleet.Until(t, "ready "+fmt.Sprint(i, appended), number+1)
				}
				before := v.d.Stats()
				want := u.answer(prompt, 8)
				if appended {
					if prompt, want = append(prompt, first), want[1:]; len(want) == 0 {
						t.Fatal("the answer is too short for this test")
					}
				}
				if got := v.d.answer(prompt, len(want)); !slices.Equal(got, want) {
					t.Errorf("%d tokens: %v, want %v", n, got, want)
				}
				if s := v.d.Stats(); s.PromptTokensComputed != before.PromptTokensComputed+1 {
					t.Errorf("%d tokens, appended %v: %d computed", n, appended, s.PromptTokensComputed-before.PromptTokensComputed)
				}
			}
		}
	}
}

// A prompt that shares only its beginning with what has come uses that, and no
// more.
func TestFindsCommonPrefix(t *testing.T) {
	u, v := undivided(t), divide(t, 1, 4, 10, nil)
	rng := rand.New(rand.NewSource(5))
	prompt := randomPrompt(rng, 60)
	if _, err := v.prefill("r", prompt); err != nil {
		t.Fatal(err)
	}
	v.fleet.Until(t, "ready r", 1)
	other := append(slices.Clone(prompt[:40]), randomPrompt(rng, 30)...)
	if got, want := v.d.answer(other, 8), u.answer(other, 8); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if s := v.d.Stats(); s.PromptTokensLoaded != 32 || s.PromptTokensComputed != 38 {
		t.Errorf("%+v", s)
	}
}

// A request that names another prompt's KV is not fooled: the keys differ.
func TestWrongKVIsNotUsed(t *testing.T) {
	u, v := undivided(t), divide(t, 1, 4, 10, nil)
	rng := rand.New(rand.NewSource(6))
	if _, err := v.prefill("r", randomPrompt(rng, 40)); err != nil {
		t.Fatal(err)
	}
	prompt := randomPrompt(rng, 40)
	got, err := v.decode("r", prompt, 'x', 9)
	if want := u.answer(append(slices.Clone(prompt), 'x'), 8); err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, want %v (%v)", got, want, err)
	}
	if s := v.d.Stats(); s.LoadFailed != 1 || s.PromptTokensLoaded != 0 {
		t.Errorf("%+v", s)
	}
}

// The seeds' case: a pool of 10 slots and two prompts of 8 chunks each from one
// engine. The second is granted after the first's slots are released, and the
// first is computed while it waits.
func TestGrantedNeverWaitsForUngranted(t *testing.T) {
	for _, ranks := range []int{1, 2} {
		u, v := undivided(t), divide(t, ranks, 4, 10, nil)
		rng := rand.New(rand.NewSource(7))
		a, b := randomPrompt(rng, 8*chunk), randomPrompt(rng, 8*chunk)
		firstA, err := v.prefill("a", a)
		if err != nil {
			t.Fatal(err)
		}
		v.fleet.Until(t, "ready a", ranks)
		second := make(chan error, 1)
		var firstB int
		go func() {
			var err error
			firstB, err = v.prefill("b", b)
			second <- err
		}()
		v.fleet.Until(t, "begin b", 1)
		// b waits for its grant; a third prompt for another receiver, and a
		// local one, are not held up by that.
		if got, want := v.p.answer(a, 4), u.answer(a, 4); !slices.Equal(got, want) {
			t.Errorf("local: %v, want %v", got, want)
		}
		if slices.Contains(v.fleet.Log(), "granted b") {
			t.Error("b was granted although 8 of 10 slots are taken")
		}
		rest, err := v.decode("a", a, firstA, 8)
		if want := u.answer(a, 8); err != nil || !slices.Equal(append([]int{firstA}, rest...), want) {
			t.Errorf("a: %v, want %v (%v)", rest, want, err)
		}
		if err := <-second; err != nil {
			t.Fatal(err)
		}
		rest, err = v.decode("b", b, firstB, 8)
		if want := u.answer(b, 8); err != nil || !slices.Equal(append([]int{firstB}, rest...), want) {
			t.Errorf("b: %v, want %v (%v)", rest, want, err)
		}
	}
}

// Both prompts at once from one engine, and from two, a staging pool of a few
// slots, and two ranks: everything completes.
func TestCrowdedReceiver(t *testing.T) {
	for _, ranks := range []int{1, 2} {
		u, v := undivided(t), divide(t, ranks, 2, 10, nil)
		rng := rand.New(rand.NewSource(8))
		var wg sync.WaitGroup
		for i := range 10 {
			prompt := randomPrompt(rng, 8*chunk)
			wg.Go(func() {
				got, err := v.answer(fmt.Sprint(i), prompt, 6)
				if want := u.answer(prompt, 6); err != nil || !slices.Equal(got, want) {
					t.Errorf("%v, want %v (%v)", got, want, err)
				}
			})
		}
		wg.Wait()
	}
}

// r81, r88: a receiver whose writes are stuck delays no prompt for another one.
func TestStuckReceiverDelaysNobody(t *testing.T) {
	release := make(chan struct{})
	v := divide(t, 1, 8, 40, func(f *enginetest.Fleet, p, d *engine.Config) {
		f.BeforeWrite = func(req string, _ int) error {
			if strings.HasPrefix(req, "stuck") {
				<-release
			}
			return nil
		}
	})
	rng := rand.New(rand.NewSource(10))
	other := v.fleet.Node("other", 1, 0, 40)
	for i := range 3 {
		prompt := randomPrompt(rng, 20) // 2 chunks each: 6 of 8 staging slots
		if _, err := v.prefill(fmt.Sprint("stuck", i), prompt); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 5 {
		req := fmt.Sprint("free", i)
		_, err := v.p.complete(object{"prompt": randomPrompt(rng, 90), "max_tokens": 1, "kv_transfer_params": spec(req, "other", 1)})
		if err != nil {
			t.Fatal(err)
		}
		other.Free(req)
	}
	close(release)
	for i := range 3 {
		v.dn[0].Free(fmt.Sprint("stuck", i))
	}
}

// r38, r66, r83: whatever fails on the way, the answer is the undivided one,
// and the next request is served as if nothing had been.
func TestFailuresRecompute(t *testing.T) {
	for _, ranks := range []int{1, 2} {
		for _, op := range []string{"begin", "stage", "submit", "write", "wait", "claim"} {
			t.Run(fmt.Sprintf("%s/ranks=%d", op, ranks), func(t *testing.T) {
				var failing atomic.Bool
				failing.Store(true)
				fail := func(at string) error {
					if at == op && failing.Swap(false) { // at one rank only
						return fault.New(fault.PeerLost, "as ordered")
					}
					return nil
				}
				u := undivided(t)
				v := divide(t, ranks, 4, 20, func(f *enginetest.Fleet, p, d *engine.Config) {
					f.Fault = func(op, _ string) error { return fail(op) }
					f.BeforeWrite = func(string, int) error { return fail("write") }
				})
				rng := rand.New(rand.NewSource(11))
				for i := range 2 {
					prompt := randomPrompt(rng, 50)
					// Not answer(): when begin fails nobody ever hears of the request.
					req := fmt.Sprint("r", i)
					first, err := v.prefill(req, prompt)
					if err != nil {
						t.Fatal(err)
					}
					if op == "begin" && i == 0 {
						req = "" // the proxy was told
					}
					body := object{"prompt": append(slices.Clone(prompt), first), "max_tokens": 7, "return_token_ids": true}
					if req != "" {
						body["kv_transfer_params"] = object{"disagg_spec": object{"req_id": req}}
					}
					c, err := v.d.complete(body)
					if want := u.answer(prompt, 8); err != nil || !slices.Equal(append([]int{first}, c.Choices[0].TokenIDs...), want) {
						t.Errorf("request %d: %+v, want %v (%v)", i, c, want, err)
					}
					if failing.Load() {
						t.Errorf("%s never failed", op)
					}
				}
				for _, n := range v.dn {
					n.Free("r0") // what the decode side could not claim
				}
				if s, d := v.p.Stats(), v.d.Stats(); s.SendFailed+d.LoadFailed == 0 || d.Loaded != 1 {
					t.Errorf("prefill %+v, decode %+v", s, d)
				}
			})
		}
	}
}

// With FailOnTransfer the client hears of it.
func TestFailuresFail(t *testing.T) {
	fails := errors.New("as ordered")
	v := divide(t, 1, 4, 20, func(f *enginetest.Fleet, p, d *engine.Config) {
		p.FailOnTransfer, d.FailOnTransfer = true, true
		f.BeforeWrite = func(string, int) error { return fails }
	})
	prompt := randomPrompt(rand.New(rand.NewSource(12)), 50)
	first, err := v.prefill("r", prompt)
	if err != nil {
		t.Fatal(err)
	}
	v.fleet.Until(t, "failed r", 1)
	if _, err := v.decode("r", prompt, first, 8); err == nil || !strings.Contains(err.Error(), "as ordered") {
		t.Errorf("decode: %v", err)
	}
	// r1: 21 chunks and a pool of 20.
	v.dn[0].Resize(3)
	if _, err := v.prefill("big", prompt); err == nil || !strings.Contains(err.Error(), "4 chunks, capacity 3") {
		t.Errorf("prefill: %v", err)
	}
}

// What is known not to be sent is told with the answer: nobody else could tell the
// proxy where no receiver has heard of it.
func TestAnswerTellsThatNothingIsSent(t *testing.T) {
	for _, ranks := range []int{1, 2} {
		refuse := fault.New(fault.Busy, "draining: nothing new is begun")
		var refused atomic.Bool
		v := divide(t, ranks, 4, 20, func(f *enginetest.Fleet, _, _ *engine.Config) {
			f.Fault = func(op, _ string) error {
				if op == "begin" && refused.Load() {
					return refuse
				}
				return nil
			}
		})
		rng := rand.New(rand.NewSource(13))
		ask := func(req string, tokens int) string {
			c, err := v.p.complete(object{"prompt": randomPrompt(rng, tokens), "max_tokens": 1, "kv_transfer_params": spec(req, decodeHost, v.ports...)})
			if err != nil {
				t.Fatal(err)
			}
			for _, n := range v.dn {
				n.Free(req)
			}
			if c.KV.Failed == nil {
				return ""
			}
			return c.KV.Failed.Code + "|" + c.KV.Failed.Text
		}
		if got := ask("good", 50); got != "" {
			t.Errorf("sent: %q", got)
		}
		v.dn[0].Resize(3)
		if got := ask("big", 50); got != "too_large|4 chunks, capacity 3" {
			t.Errorf("too large: %q", got)
		}
		refused.Store(true)
		if got := ask("refused", 20); got != "busy|"+refuse.Text {
			t.Errorf("refused: %q", got)
		}
		v.pn[ranks-1].Cut()
		if got := ask("gone", 20); !strings.HasPrefix(got, "peer_lost|") && ranks == 1 || got == "" {
			t.Errorf("without an agent: %q", got)
		}
	}
}
