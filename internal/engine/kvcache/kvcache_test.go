package kvcache

import (
	"bytes"
	"encoding/binary"
	"math"
	"math/rand"
	"testing"

	"github.com/berthkv/berth/internal/kv"
)

func fill(s *Sequence, rng *rand.Rand) {
	k, v := make([]float32, s.layout.Hidden), make([]float32, s.layout.Hidden)
	for layer := range s.layout.Layers {
		for pos := range s.tokens {
			for i := range k {
				k[i], v[i] = float32(rng.NormFloat64()), float32(rng.NormFloat64())
			}
			s.Store(layer, pos, k, v)
		}
	}
}

// chunkSlow builds a chunk index by index from the definition of the layout.
func chunkSlow(s *Sequence, rank, from, tokens int) []byte {
	l := s.layout
	part := l.Hidden / l.Ranks
	out := make([]byte, l.ChunkBytes(tokens))
	for which, get := range []func(int) []float32{s.Keys, s.Values} {
		for layer := range l.Layers {
			for t := range tokens {
				for h := range part {
					v := math.Float32bits(get(layer)[(from+t)*l.Hidden+rank*part+h])
					at := ((which*l.Layers+layer)*tokens+t)*part + h
					if l.DType == Float32 {
						binary.LittleEndian.PutUint32(out[4*at:], v)
					} else {
						binary.LittleEndian.PutUint16(out[2*at:], uint16(v>>16))
					}
				}
			}
		}
	}
	return out
}

func TestGatherScatter(t *testing.T) {
	for _, dtype := range []kv.DType{BFloat16, Float32} {
		for _, ranks := range []int{1, 2, 4} {
			l := Layout{Layers: 3, Hidden: 8, Ranks: ranks, DType: dtype}
			if err := l.Validate(); err != nil {
				t.Fatal(err)
			}
			from := NewSequence(l, 11)
			fill(from, rand.New(rand.NewSource(1)))
			to := NewSequence(l, 11)
			for rank := range ranks {
				for start := 0; start < 11; start += 4 {
					n := min(4, 11-start) // the last chunk is partial and compact
					want, err := kv.ChunkBytes(kv.Format2LTD, dtype, l.Shape(4), int64(n))
					if err != nil || int(want) != l.ChunkBytes(n) {
						t.Fatalf("ChunkBytes(%d) = %d, want %d (%v)", n, l.ChunkBytes(n), want, err)
					}
					slot := bytes.Repeat([]byte{0xee}, l.ChunkBytes(4))
					if got := from.Gather(rank, start, n, slot); got != l.ChunkBytes(n) {
						t.Fatalf("Gather = %d bytes, want %d", got, l.ChunkBytes(n))
					}
					if !bytes.Equal(slot[:l.ChunkBytes(n)], chunkSlow(from, rank, start, n)) {
						t.Fatalf("%s ranks %d rank %d start %d: not the layout", dtype, ranks, rank, start)
					}
					for _, b := range slot[l.ChunkBytes(n):] {
						if b != 0xee {
							t.Fatal("Gather wrote behind the chunk")
						}
					}
					to.Scatter(rank, start, n, slot)
				}
			}
			for i := range from.kv {
				for j := range from.kv[i] {
					if math.Float32bits(from.kv[i][j]) != math.Float32bits(to.kv[i][j]) {
						t.Fatalf("%s ranks %d: value %d differs after the round trip", dtype, ranks, j)
					}
				}
			}
		}
	}
}

func TestBFloat16(t *testing.T) {
	for _, c := range []struct {
		in   uint32
		want uint16
	}{
		{0x3f800000, 0x3f80},            // 1
		{0x3f808000, 0x3f80},            // a tie goes to the even neighbour below
		{0x3f818000, 0x3f82},            // a tie goes to the even neighbour above
		{0x3f808001, 0x3f81},            // just above a tie
		{0x3f807fff, 0x3f80},            // just below a tie
		{0x80000000, 0x8000},            // -0
		{0x7f7fffff, 0x7f80},            // the largest float becomes infinite
		{0x7f800000, 0x7f80},            // infinity
		{0x7f800001, 0x7fc0},            // a NaN stays one
		{0xffc00000, 0xffc0},            // and keeps its sign
		{0x00000001, 0x0000},            // the smallest subnormal
		{0xc2f6e979, 0xc2f7},            // -123.456
		{math.Float32bits(2.5), 0x4020}, // exact
	} {
		if got := toBFloat16(math.Float32frombits(c.in)); got != c.want {
			t.Errorf("toBFloat16(%#08x) = %#04x, want %#04x", c.in, got, c.want)
		}
	}
	for b := range 1 << 16 {
		v := fromBFloat16(uint16(b))
		if v == v && toBFloat16(v) != uint16(b) {
			t.Fatalf("%#04x does not survive", b)
		}
	}
}

func TestValidate(t *testing.T) {
	ok := Layout{Layers: 1, Hidden: 4, Ranks: 2, DType: Float32}
	for name, change := range map[string]func(*Layout){
		"layers": func(l *Layout) { l.Layers = 0 },
		"hidden": func(l *Layout) { l.Hidden = 0 },
		"ranks0": func(l *Layout) { l.Ranks = 0 },
		"ranks3": func(l *Layout) { l.Ranks = 3 },
		"dtype":  func(l *Layout) { l.DType = "half" },
	} {
		l := ok
		change(&l)
		if l.Validate() == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
