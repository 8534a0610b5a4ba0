// Package model is a real, small decoder-only transformer in plain Go, of
// Llama's shape: RMSNorm, rotary positions, grouped-query attention, SwiGLU,
// and byte tokens. Its weights come from a seed; it was never trained, so its
// answers are noise, but noise in which every token of the prompt has a say.
//
// It is exact: the values of a position are computed by one fixed sequence of
// float operations that depends on nothing but the tokens before it. How a
// prompt was cut into steps, what else was in a step, and which thread ran it
// change no bit. No operation may be fused (each product is rounded by an
// explicit conversion), so this also holds between builds for one
// architecture.
package model

import (
	"fmt"
	"math"

	"github.com/berthkv/berth/internal/engine/kvcache"
	"github.com/berthkv/berth/internal/kv"
)

// Config is the shape of a model. Two models of one Config are equal.
type Config struct {
	Layers   int
	Heads    int // attention heads; Heads x HeadSize is the width of the model
	KVHeads  int // divides Heads
	HeadSize int // even
	FFN      int // width of the feed-forward layer
	Context  int // most tokens of a sequence, prompt and answer together
	Seed     uint64
}

// Default is the demo's model: about 0.2 million weights.
var Default = Config{Layers: 4, Heads: 4, KVHeads: 2, HeadSize: 16, FFN: 176, Context: 4096, Seed: 1}

func (c Config) width() int    { return c.Heads * c.HeadSize }
func (c Config) kvHidden() int { return c.KVHeads * c.HeadSize }

// Layout returns the layout of the model's KV, stored as dtype and shared by
// `ranks` ranks.
func (c Config) Layout(dtype kv.DType, ranks int) kvcache.Layout {
	return kvcache.Layout{Layers: c.Layers, Hidden: c.kvHidden(), Ranks: ranks, DType: dtype}
}

func (c Config) validate() error {
	for _, f := range []struct {
		name string
		v    int
	}{{"layers", c.Layers}, {"heads", c.Heads}, {"kv_heads", c.KVHeads}, {"head_size", c.HeadSize}, {"ffn", c.FFN}, {"context", c.Context}} {
		if f.v < 1 {
			return fmt.Errorf("model: %s is %d, must be at least 1", f.name, f.v)
		}
	}
	if c.Heads%c.KVHeads != 0 {
		return fmt.Errorf("model: %d kv_heads do not divide %d heads", c.KVHeads, c.Heads)
	}
	if c.HeadSize%2 != 0 {
		return fmt.Errorf("model: head_size %d is odd", c.HeadSize)
	}
	return nil
}

// Model is a model's weights. It is never changed; any number of Workers may
// use it at once.
type Model struct {
	cfg    Config
	embed  []float32 // [VocabSize][width], also the output head
	layers []layer
	sin    []float32 // [Context][HeadSize/2]
	cos    []float32
}

// layer holds one block's matrices, each [out][in]. The gains of RMSNorm are
// all 1, as at the start of a training, and therefore not stored.
type layer struct {
	q, k, v, o     []float32
	gate, up, down []float32
}

// Scales of the random weights. Attention is made sharp, so that an answer
// hangs on single tokens of the prompt and not on their mean alone.
const (
	scaleAttention = 3
	scaleResidual  = 3
	scaleEOS       = 1.1
)

// New makes a model from its seed. It errs on a shape that is no model.
func New(c Config) (*Model, error) {
	if err := c.validate(); err != nil {
		return nil, err
	}
	rng := random(c.Seed)
	d, kvd := c.width(), c.kvHidden()
	m := &Model{cfg: c, embed: rng.matrix(VocabSize, d, 1)}
	for range c.Layers {
		m.layers = append(m.layers, layer{
			q:    rng.matrix(d, d, scaleAttention),
			k:    rng.matrix(kvd, d, scaleAttention),
			v:    rng.matrix(kvd, d, 1),
			o:    rng.matrix(d, d, scaleResidual),
			gate: rng.matrix(c.FFN, d, 1),
			up:   rng.matrix(c.FFN, d, 1),
			down: rng.matrix(d, c.FFN, scaleResidual),
		})
	}
	eos := m.embed[EOS*d : (EOS+1)*d]
	for i := range eos {
		eos[i] *= scaleEOS
	}
	m.rotary()
	return m, nil
}

// rotary fills the tables of the rotary embedding.
func (m *Model) rotary() {
	half := m.cfg.HeadSize / 2
	m.sin = make([]float32, m.cfg.Context*half)
	m.cos = make([]float32, m.cfg.Context*half)
	for i := range half {
		freq := math.Pow(10000, -float64(i)/float64(half))
		for pos := range m.cfg.Context {
			sin, cos := math.Sincos(float64(pos) * freq)
			m.sin[pos*half+i], m.cos[pos*half+i] = float32(sin), float32(cos)
		}
	}
}

// Config returns the model's shape.
func (m *Model) Config() Config { return m.cfg }

// Worker is a model and the memory that one computation needs. It is not safe
// for concurrent use.
type Worker struct {
	m                *Model
	x, norm, q, att  []float32
	k, v             []float32
	gate, up, scores []float32
	logits           []float32
}

// NewWorker returns a worker of m.
func (m *Model) NewWorker() *Worker {
	c := m.cfg
	d := c.width()
	return &Worker{
		m: m,
		x: make([]float32, d), norm: make([]float32, d), q: make([]float32, d), att: make([]float32, d),
		k: make([]float32, c.kvHidden()), v: make([]float32, c.kvHidden()),
		gate: make([]float32, c.FFN), up: make([]float32, c.FFN),
		scores: make([]float32, c.Context), logits: make([]float32, VocabSize),
	}
}

// Extend computes the KV of tokens, which stand at positions pos, pos+1, ... of
// a sequence whose earlier positions are stored, and stores it. It returns the
// greedy choice for the token after the last. Every token must be below
// VocabSize and every position below Context and the sequence's capacity.
func (w *Worker) Extend(s *kvcache.Sequence, pos int, tokens []int) (next int) {
	for i, t := range tokens {
		w.position(s, pos+i, t)
	}
	return w.choose()
}

// position runs one token through all layers. w.x holds the result.
func (w *Worker) position(s *kvcache.Sequence, pos, token int) {
	d := w.m.cfg.width()
	copy(w.x, w.m.embed[token*d:(token+1)*d])
	for i := range w.m.layers {
		l := &w.m.layers[i]

		normalize(w.norm, w.x)
		multiply(w.q, l.q, w.norm)
		multiply(w.k, l.k, w.norm)
		multiply(w.v, l.v, w.norm)
		w.rotate(w.q, pos)
		w.rotate(w.k, pos)
		s.Store(i, pos, w.k, w.v)
		w.attend(s.Keys(i), s.Values(i), pos+1)
		multiply(w.norm, l.o, w.att)
		add(w.x, w.norm)

		normalize(w.norm, w.x)
		multiply(w.gate, l.gate, w.norm)
		multiply(w.up, l.up, w.norm)
		for j, g := range w.gate {
			w.up[j] = silu(g) * w.up[j]
		}
		multiply(w.norm, l.down, w.up)
		add(w.x, w.norm)
	}
}

// rotate turns each head of v by the angles of a position.
func (w *Worker) rotate(v []float32, pos int) {
	size := w.m.cfg.HeadSize
	half := size / 2
	sin := w.m.sin[pos*half : (pos+1)*half]
	cos := w.m.cos[pos*half : (pos+1)*half]
	for ; len(v) > 0; v = v[size:] {
		lo, hi := v[:half], v[half:size]
		for i, c := range cos {
			a, b := lo[i], hi[i]
			lo[i] = float32(a*c) - float32(b*sin[i])
			hi[i] = float32(b*c) + float32(a*sin[i])
		}
	}
}

// attend sets w.att to the attention of w.q over the first n positions.
func (w *Worker) attend(keys, values []float32, n int) {
	c := w.m.cfg
	size, stride := c.HeadSize, c.kvHidden()
	scale := float32(1 / math.Sqrt(float64(size)))
	scores := w.scores[:n]
	for h := range c.Heads {
		q := w.q[h*size : (h+1)*size]
		offset := h / (c.Heads / c.KVHeads) * size
		for t := range scores {
			scores[t] = dot(q, keys[t*stride+offset:]) * scale
		}
		sum := softmax(scores)
		out := w.att[h*size : (h+1)*size]
		clear(out)
		for t, p := range scores {
			for i, v := range values[t*stride+offset : t*stride+offset+size] {
				out[i] += float32(p * v)
			}
		}
		for i := range out {
			out[i] /= sum
		}
	}
}

// choose returns the answerable token with the highest logit, the lowest
// number among equals.
func (w *Worker) choose() int {
	normalize(w.norm, w.x)
	multiply(w.logits, w.m.embed, w.norm)
	best := EOS
	for t, v := range w.logits {
		if answerable(t) && (v > w.logits[best] || v == w.logits[best] && t < best) {
			best = t
		}
	}
	return best
}
