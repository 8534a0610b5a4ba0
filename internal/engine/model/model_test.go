package model

import (
	"math"
	"math/rand"
	"slices"
	"testing"

	"github.com/berthkv/berth/internal/engine/kvcache"
	"github.com/berthkv/berth/internal/kv"
)

var small = Config{Layers: 2, Heads: 4, KVHeads: 2, HeadSize: 8, FFN: 48, Context: 256, Seed: 7}

func newModel(t testing.TB, c Config) *Model {
	t.Helper()
	m, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func randomPrompt(rng *rand.Rand, n int) []int {
	p := make([]int, n)
	for i := range p {
		p[i] = rng.Intn(256)
	}
	return p
}

// answer continues a sequence whose first `have` positions are stored.
func answer(m *Model, s *kvcache.Sequence, prompt []int, have, n int, cut func() int) []int {
	w := m.NewWorker()
	next := 0
	for have < len(prompt) {
		step := min(cut(), len(prompt)-have)
		next = w.Extend(s, have, prompt[have:have+step])
		have += step
	}
	out := []int{next}
	for len(out) < n && next != EOS {
		next = w.Extend(s, have, []int{next})
		have++
		out = append(out, next)
	}
	return out
}

func whole() int { return math.MaxInt }

func bits(s *kvcache.Sequence, layers int) (b []uint32) {
	for l := range layers {
		for _, v := range append(slices.Clone(s.Keys(l)), s.Values(l)...) {
			b = append(b, math.Float32bits(v))
		}
	}
	return b
}

// However a prompt is cut into steps, each bit of the KV and each token of the
// answer is the same.
func TestCutsChangeNothing(t *testing.T) {
	m := newModel(t, small)
	rng := rand.New(rand.NewSource(1))
	for _, dtype := range []kv.DType{kvcache.BFloat16, kvcache.Float32} {
		layout := small.Layout(dtype, 1)
		for range 8 {
			prompt := randomPrompt(rng, 1+rng.Intn(80))
			one := kvcache.NewSequence(layout, len(prompt)+16)
			want := answer(m, one, prompt, 0, 16, whole)
			for _, cut := range []func() int{func() int { return 1 }, func() int { return 16 }, func() int { return 1 + rng.Intn(20) }} {
				other := kvcache.NewSequence(layout, len(prompt)+16)
				if got := answer(m, other, prompt, 0, 16, cut); !slices.Equal(got, want) {
					t.Fatalf("%s: answer %v, want %v", dtype, got, want)
				}
				if !slices.Equal(bits(one, small.Layers), bits(other, small.Layers)) {
					t.Fatalf("%s: the KV differs", dtype)
				}
			}
		}
	}
}

// KV that went through chunks gives the same answer, for each way to share the
// hidden dimension between ranks.
func TestMovedKVGivesTheSameAnswer(t *testing.T) {
	m := newModel(t, small)
	rng := rand.New(rand.NewSource(2))
	for _, dtype := range []kv.DType{kvcache.BFloat16, kvcache.Float32} {
		for _, ranks := range []int{1, 2} {
			layout := small.Layout(dtype, ranks)
			for _, n := range []int{1, 15, 16, 17, 60} { // r16
				prompt := randomPrompt(rng, n)
				from := kvcache.NewSequence(layout, n+24)
				want := answer(m, from, prompt, 0, 24, whole)
				to := kvcache.NewSequence(layout, n+24)
				move(from, to, ranks, n, nil)
				if got := answer(m, to, prompt, n-1, 24, whole); !slices.Equal(got, want) {
					t.Fatalf("%s, %d ranks, %d tokens: %v, want %v", dtype, ranks, n, got, want)
				}
			}
		}
	}
}

// move copies n positions in chunks of 16; spoil may change chunk i's bytes.
func move(from, to *kvcache.Sequence, ranks, n int, spoil func(i int, chunk []byte)) {
	slot := make([]byte, 1<<20)
	for rank := range ranks {
		for at := 0; at < n; at += 16 {
			size := from.Gather(rank, at, min(16, n-at), slot)
			if spoil != nil {
				spoil(at/16, slot[:size])
			}
			to.Scatter(rank, at, min(16, n-at), slot[:size])
		}
	}
}

// One flipped bit of one chunk changes the answer, whichever chunk it is. The
// bit is the highest of a value's exponent: a wrong sign or mantissa of one
// value among thousands is often, and rightly, lost in the argmax.
func TestOneFlippedBitChangesTheAnswer(t *testing.T) {
	m := newModel(t, Default)
	rng := rand.New(rand.NewSource(3))
	layout := Default.Layout(kvcache.BFloat16, 1)
	prompt := randomPrompt(rng, 70)
	from := kvcache.NewSequence(layout, len(prompt)+24)
	want := answer(m, from, prompt, 0, 24, whole)
	for flipped := range 5 {
		to := kvcache.NewSequence(layout, len(prompt)+24)
		move(from, to, 1, len(prompt), func(i int, chunk []byte) {
			if i == flipped {
				chunk[len(chunk)/2+1] ^= 0x40 // the first value of the first layer
			}
		})
		if got := answer(m, to, prompt, len(prompt)-1, 24, whole); slices.Equal(got, want) {
			t.Errorf("chunk %d: a flipped bit left the answer %v unchanged", flipped, got)
		}
	}
}

// Every chunk has a say: without one of them the answer is another.
func TestEveryChunkMatters(t *testing.T) {
	m := newModel(t, Default)
	rng := rand.New(rand.NewSource(4))
	layout := Default.Layout(kvcache.BFloat16, 1)
	prompt := randomPrompt(rng, 100)
	from := kvcache.NewSequence(layout, len(prompt)+32)
	want := answer(m, from, prompt, 0, 32, whole)
	for missing := range 7 {
		to := kvcache.NewSequence(layout, len(prompt)+32)
		move(from, to, 1, len(prompt), func(i int, chunk []byte) {
			if i == missing {
				clear(chunk)
			}
		})
		if got := answer(m, to, prompt, len(prompt)-1, 32, whole); slices.Equal(got, want) {
			t.Errorf("the answer does not depend on chunk %d", missing)
		}
	}
}

func TestAnswersVary(t *testing.T) {
	m := newModel(t, Default)
	rng := rand.New(rand.NewSource(5))
	layout := Default.Layout(kvcache.BFloat16, 1)
	seen := map[string]bool{}
	for range 20 {
		prompt := randomPrompt(rng, 20)
		out := answer(m, kvcache.NewSequence(layout, 60), prompt, 0, 32, whole)
		for _, tok := range out {
			if !answerable(tok) {
				t.Fatalf("answered with token %d", tok)
			}
		}
		seen[Decode(out)] = true
	}
	if len(seen) != 20 {
		t.Errorf("%d different answers to 20 prompts", len(seen))
	}
}

// The weights and the arithmetic are a contract: two builds must agree.
func TestGolden(t *testing.T) {
	m := newModel(t, Default)
	prompt := Encode("A ship books a berth before it enters the harbour.")
	out := answer(m, kvcache.NewSequence(Default.Layout(kvcache.BFloat16, 1), 100), prompt, 0, 24, whole)
	if got, want := Decode(out), `kt&U4{&t,CU4SS!GU~t9XhA\`; got != want {
		t.Errorf("answer %q, want %q", got, want)
	}
}

func TestConfigFaults(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"layers":    func(c *Config) { c.Layers = 0 },
		"kv_heads":  func(c *Config) { c.KVHeads = 3 },
		"head_size": func(c *Config) { c.HeadSize = 7 },
		"ffn":       func(c *Config) { c.FFN = -1 },
		"context":   func(c *Config) { c.Context = 0 },
	} {
		c := small
		change(&c)
		if _, err := New(c); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestExp(t *testing.T) {
	for v := float32(-90); v < 90; v += 0.013 {
		want := math.Exp(float64(v))
		if v > 88 {
			want = math.Exp(88)
		}
		if got := float64(exp(v)); math.Abs(got-want) > 2e-7*want+1e-37 {
			t.Fatalf("exp(%g) = %g, want %g", v, got, want)
		}
	}
	if nan := float32(math.NaN()); exp(nan) == exp(nan) {
		t.Error("exp(NaN) is a number")
	}
}

func TestMultiply(t *testing.T) {
	rng := random(1)
	for _, rows := range []int{1, 3, 4, 6, 9} {
		in, matrix := rng.matrix(1, 5, 1), rng.matrix(rows, 5, 1)
		out := make([]float32, rows)
		multiply(out, matrix, in)
		for r := range out {
			if want := dot(in, matrix[r*5:]); out[r] != want {
				t.Errorf("%d rows: row %d is %g, want %g", rows, r, out[r], want)
			}
		}
	}
}

func TestChatTokens(t *testing.T) {
	got, _, ok := EncodeChat([]Message{{"system", "a"}, {"user", "bc"}})
	want := []int{BOS, System, 'a', EndTurn, User, 'b', 'c', EndTurn, Assistant}
	if !ok || !slices.Equal(got, want) {
		t.Errorf("EncodeChat = %v, want %v", got, want)
	}
	if _, i, ok := EncodeChat([]Message{{"user", ""}, {"tool", ""}}); ok || i != 1 {
		t.Error("an unknown role was accepted")
	}
	if got := Decode(append(Encode("héllo"), EOS)); got != "héllo" {
		t.Errorf("Decode = %q", got)
	}
}

func BenchmarkExtend(b *testing.B) {
	m := newModel(b, Default)
	w := m.NewWorker()
	s := kvcache.NewSequence(Default.Layout(kvcache.BFloat16, 1), 256)
	prompt := randomPrompt(rand.New(rand.NewSource(1)), 256)
	b.ReportAllocs()
	for b.Loop() {
		w.Extend(s, 0, prompt)
	}
	b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N*256), "µs/token")
}
