package kv

import (
	"encoding/binary"
	"math/big"
	"testing"
)

// FuzzChunkBytes computes a chunk's size a second time, with numbers that do not
// overflow: what a peer names in a message is never taken for less than it is.
func FuzzChunkBytes(f *testing.F) {
	dims := func(ds ...int64) (b []byte) {
		for _, d := range ds {
			b = binary.LittleEndian.AppendUint64(b, uint64(d))
		}
		return b
	}
	f.Add(int64(Format2LTD), "bfloat16", dims(2, 32, 256, 1024), int64(256))
	f.Add(int64(FormatMLA), "uint8", dims(1, 61, 256, 576), int64(1))
	f.Add(int64(Format2TD), "double", dims(1<<31, 1<<31, 2), int64(1<<31))
	f.Add(int64(FormatT2D), "half", dims(-1, 1<<62, -4), int64(-1))
	f.Add(int64(99), "float16", dims(), int64(0))
	f.Fuzz(func(t *testing.T, format int64, dtype string, raw []byte, tokens int64) {
		var shape []int64
		for ; len(raw) >= 8 && len(shape) < 10; raw = raw[8:] {
			shape = append(shape, int64(binary.LittleEndian.Uint64(raw)))
		}
		got, err := ChunkBytes(Format(format), DType(dtype), shape, tokens)
		size, known := DType(dtype).Size()
		dim, ok := Format(format).TokenDim()
		valid := known && ok && dim < len(shape) && len(shape) <= MaxDims && tokens >= 1 && tokens <= shape[dim]
		want := big.NewInt(size)
		for i, d := range shape {
			if i == dim {
				d = tokens
			}
			valid = valid && d >= 1
			want.Mul(want, big.NewInt(d))
		}
		valid = valid && want.IsInt64()
		if (err == nil) != valid || valid && got != want.Int64() {
			t.Fatalf("fmt %d, %q, %v, %d tokens: %d, %v; should be %v, valid %v", format, dtype, shape, tokens, got, err, want, valid)
		}
	})
}
