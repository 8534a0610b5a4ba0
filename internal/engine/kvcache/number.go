package kvcache

import (
	"encoding/binary"
	"math"
)

// toBFloat16 rounds to the nearest bfloat16, ties to even; a NaN stays one.
func toBFloat16(v float32) uint16 {
	b := math.Float32bits(v)
	if v != v {
		return uint16(b>>16) | 0x40
	}
	return uint16((b + 0x7fff + b>>16&1) >> 16)
}

func fromBFloat16(b uint16) float32 { return math.Float32frombits(uint32(b) << 16) }

func putUint16(b []byte, v uint16) { binary.LittleEndian.PutUint16(b, v) }
func putUint32(b []byte, v uint32) { binary.LittleEndian.PutUint32(b, v) }
func uint16At(b []byte) uint16     { return binary.LittleEndian.Uint16(b) }
func uint32At(b []byte) uint32     { return binary.LittleEndian.Uint32(b) }
