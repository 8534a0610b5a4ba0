// Package kvcache is the demo engine's KV memory: the keys and values of one
// sequence, and their way into and out of chunks in LMCache's layout.
//
// Every value is rounded to the storage type when it is stored, whether it was
// computed here or arrived from elsewhere. So a sequence that was filled by
// Scatter holds the same bits as one that the same model filled itself, and
// gives the same answer.
package kvcache

import (
	"fmt"
	"math"

	"github.com/berthkv/berth/internal/kv"
)

// The storage types of the demo engine, by their names on LMCache's wire.
const (
	BFloat16 kv.DType = "bfloat16"
	Float32  kv.DType = "float"
)

// Layout is the shape of one token's KV. All ranks together hold Hidden values
// a layer; the engine simulates tensor parallelism by giving rank r the r-th of
// Ranks equal parts.
type Layout struct {
	Layers int
	Hidden int // kv_heads x head_size, of all ranks together
	Ranks  int // at least 1; divides Hidden
	DType  kv.DType
}

// Validate reports the first fault, naming the field.
func (l Layout) Validate() error {
	switch {
	case l.Layers < 1:
		return fmt.Errorf("layers is %d, must be at least 1", l.Layers)
	case l.Hidden < 1:
		return fmt.Errorf("hidden is %d, must be at least 1", l.Hidden)
	case l.Ranks < 1 || l.Hidden%l.Ranks != 0:
		return fmt.Errorf("%d ranks do not divide %d KV values a layer", l.Ranks, l.Hidden)
	case l.DType != BFloat16 && l.DType != Float32:
		return fmt.Errorf("dtype %q is neither %q nor %q", l.DType, BFloat16, Float32)
	}
	return nil
}

// Shape returns a rank's chunk shape, [2, layers, tokens, hidden/ranks].
func (l Layout) Shape(tokens int) []int64 {
	return []int64{2, int64(l.Layers), int64(tokens), int64(l.Hidden / l.Ranks)}
}

// ChunkBytes returns the bytes of a rank's chunk of `tokens` tokens.
func (l Layout) ChunkBytes(tokens int) int {
	return 2 * l.Layers * tokens * (l.Hidden / l.Ranks) * l.elem()
}

func (l Layout) elem() int {
	if l.DType == Float32 {
		return 4
	}
	return 2
}

// Sequence holds the KV of one sequence of at most a fixed number of tokens.
// Storing a position and reading others may run concurrently; nobody may read
// a position before its store is known to be done.
type Sequence struct {
	layout Layout
	tokens int
	kv     [2][]float32 // keys, values: [layer][token][hidden]
}

// NewSequence returns an empty sequence with room for `tokens` tokens. The
// layout must be valid.
func NewSequence(l Layout, tokens int) *Sequence {
	n := l.Layers * tokens * l.Hidden
	return &Sequence{layout: l, tokens: tokens, kv: [2][]float32{make([]float32, n), make([]float32, n)}}
}

// Capacity returns the number of tokens that the sequence has room for.
func (s *Sequence) Capacity() int { return s.tokens }

// Keys returns the keys of a layer, token after token, Hidden values each.
// Only positions that have been stored may be read; none may be written.
func (s *Sequence) Keys(layer int) []float32 { return s.plane(0, layer) }

// Values is Keys for the values.
func (s *Sequence) Values(layer int) []float32 { return s.plane(1, layer) }

func (s *Sequence) plane(which, layer int) []float32 {
	n := s.tokens * s.layout.Hidden
	return s.kv[which][layer*n : (layer+1)*n : (layer+1)*n]
}

// Store rounds the key and the value of one position to the storage type and
// keeps them. Each has Hidden values.
func (s *Sequence) Store(layer, pos int, key, value []float32) {
	at := pos * s.layout.Hidden
	s.round(s.Keys(layer)[at:at+s.layout.Hidden], key)
	s.round(s.Values(layer)[at:at+s.layout.Hidden], value)
}

func (s *Sequence) round(dst, src []float32) {
	if s.layout.DType == Float32 {
		copy(dst, src)
		return
	}
	for i, v := range src[:len(dst)] {
		dst[i] = fromBFloat16(toBFloat16(v))
	}
}

// Gather writes a rank's part of positions [from, from+tokens) as one compact
// chunk into dst and returns its bytes. It panics when dst is shorter than the
// chunk: the caller knows the slot's size.
func (s *Sequence) Gather(rank, from, tokens int, dst []byte) int {
	n := s.layout.ChunkBytes(tokens)
	dst = dst[:n]
	s.rows(rank, from, tokens, func(row []float32) {
		if s.layout.DType == Float32 {
			for i, v := range row {
				putUint32(dst[4*i:], math.Float32bits(v))
			}
			dst = dst[4*len(row):]
			return
		}
		for i, v := range row {
			putUint16(dst[2*i:], toBFloat16(v))
		}
		dst = dst[2*len(row):]
	})
	return n
}

// Scatter is the inverse of Gather: it reads one compact chunk from src into
// positions [from, from+tokens). It panics when src is shorter than the chunk.
func (s *Sequence) Scatter(rank, from, tokens int, src []byte) {
	src = src[:s.layout.ChunkBytes(tokens)]
	s.rows(rank, from, tokens, func(row []float32) {
		if s.layout.DType == Float32 {
			for i := range row {
				row[i] = math.Float32frombits(uint32At(src[4*i:]))
			}
			src = src[4*len(row):]
			return
		}
		for i := range row {
			row[i] = fromBFloat16(uint16At(src[2*i:]))
		}
		src = src[2*len(row):]
	})
}

// rows calls f with a rank's part of each row in the order of a chunk: keys
// before values, then by layer, then by token.
func (s *Sequence) rows(rank, from, tokens int, f func(row []float32)) {
	h := s.layout.Hidden
	part := h / s.layout.Ranks
	for which := range s.kv {
		for layer := range s.layout.Layers {
			plane := s.plane(which, layer)
			for t := from; t < from+tokens; t++ {
				at := t*h + rank*part
				f(plane[at : at+part])
			}
		}
	}
}
