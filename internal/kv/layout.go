package kv

import (
	"fmt"
	"math"
)

// Format is LMCache's MemoryFormat number: how the dimensions of a chunk's
// shape are ordered.
type Format int64

const (
	Format2LTD         Format = 1 // [2, layers, tokens, hidden]
	FormatT2D          Format = 2 // [layers or tokens first ..., tokens at 1]
	Format2TD          Format = 3 // tokens at 0
	FormatBinary       Format = 4
	FormatBinaryBuffer Format = 5
	FormatMLA          Format = 6 // [1, layers, tokens, head]
	FormatECTD         Format = 7
	FormatHSTD         Format = 8
)

// TokenDim returns the index of the token dimension in a shape of this format;
// ok is false for a format that is not known.
func (f Format) TokenDim() (dim int, ok bool) {
	switch f {
	case Format2LTD, FormatMLA:
		return 2, true
	case FormatT2D:
		return 1, true
	case Format2TD, FormatBinary, FormatBinaryBuffer, FormatECTD, FormatHSTD:
		return 0, true
	}
	return 0, false
}

// DType is an element type by its name on LMCache's wire.
type DType string

// Size returns the bytes of one element; ok is false for a name that this wire
// does not accept.
func (d DType) Size() (bytes int64, ok bool) {
	switch d {
	case "half", "bfloat16", "int16":
		return 2, true
	case "float", "int32":
		return 4, true
	case "double", "int64":
		return 8, true
	case "int8", "uint8", "bool", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2", "fp8_e5m2fnuz":
		return 1, true
	}
	return 0, false
}

// MaxDims is the most dimensions a shape may have.
const MaxDims = 8

// ChunkBytes returns the bytes of a chunk of `tokens` tokens: the product of
// shape with its token dimension replaced by tokens, times the element size.
// It errs on an unknown format or dtype, a shape without that dimension, a
// dimension or token count below 1, tokens above the shape's own, and overflow.
func ChunkBytes(f Format, d DType, shape []int64, tokens int64) (int64, error) {
	dim, ok := f.TokenDim()
	if !ok {
		return 0, fmt.Errorf("fmt %d is not known", f)
	}
	n, ok := d.Size()
	if !ok {
		return 0, fmt.Errorf("dtype %q is not known", string(d))
	}
	if len(shape) <= dim || len(shape) > MaxDims {
		return 0, fmt.Errorf("shape has %d dimensions; fmt %d needs %d to %d", len(shape), f, dim+1, MaxDims)
	}
	if tokens < 1 || tokens > shape[dim] {
		return 0, fmt.Errorf("%d tokens in a chunk of %d", tokens, shape[dim])
	}
	for i, s := range shape {
		if i == dim {
			s = tokens
		}
		if s < 1 {
			return 0, fmt.Errorf("shape[%d] is %d", i, s)
		}
		if n > math.MaxInt64/s {
			return 0, fmt.Errorf("shape %v of %s overflows", shape, d)
		}
		n *= s
	}
	return n, nil
}

// Facts are the layout facts on which two agents must agree before they move
// bytes, and an engine with its agent.
type Facts struct {
	SlotBytes   int64 // bytes of a slot: one full chunk
	Format      Format
	DType       DType
	ChunkTokens int64 // tokens of a full chunk
	TPSize      int64 // tensor-parallel ranks of the engine
	TPRank      int64 // this rank, from 0
}

// Differs returns the name of the first fact on which f and g disagree and
// both values, or "" when they agree.
func (f Facts) Differs(g Facts) (name, mine, theirs string) {
	for _, p := range []struct {
		name string
		a, b any
	}{
		{"slot_bytes", f.SlotBytes, g.SlotBytes},
		{"fmt", f.Format, g.Format},
		{"dtype", f.DType, g.DType},
		{"chunk_tokens", f.ChunkTokens, g.ChunkTokens},
		{"tp_size", f.TPSize, g.TPSize},
		{"tp_rank", f.TPRank, g.TPRank},
	} {
		if p.a != p.b {
			return p.name, fmt.Sprint(p.a), fmt.Sprint(p.b)
		}
	}
	return "", "", ""
}
