package chaos

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
)

// tag says whose bytes a chunk has. It is the start of the chunk, and every
// later word follows from it, so that a reader knows of each byte whether it
// belongs there.
type tag struct {
	attempt uint64 // one Begin: its generation, seen from outside
	index   uint32 // of the chunk
	length  uint32 // bytes of the chunk
	prompt  uint32 // checksum of the chunk's tokens, where there are any
}

const (
	tagMagic = 0x4b56_6368_616f_73_01
	tagBytes = 32
)

// fill writes the whole chunk.
func fill(b []byte, t tag) {
	binary.LittleEndian.PutUint64(b, tagMagic)
	binary.LittleEndian.PutUint64(b[8:], t.attempt)
	binary.LittleEndian.PutUint32(b[16:], t.index)
	binary.LittleEndian.PutUint32(b[20:], t.length)
	binary.LittleEndian.PutUint32(b[24:], t.prompt)
	binary.LittleEndian.PutUint32(b[28:], crc32.ChecksumIEEE(b[:28]))
	x := t.seed()
	for at := tagBytes; at < len(b); at += 8 {
		binary.LittleEndian.PutUint64(b[at:], mix(&x))
	}
}

func (t tag) seed() uint64 {
	return t.attempt*0x9e37_79b9_7f4a_7c15 ^ uint64(t.index)<<32 ^ uint64(t.prompt)
}

// mix is splitmix64.
func mix(x *uint64) uint64 {
	*x += 0x9e37_79b9_7f4a_7c15
	z := *x
	z = (z ^ z>>30) * 0xbf58_476d_1ce4_e5b9
	z = (z ^ z>>27) * 0x94d0_49bb_1331_11eb
	return z ^ z>>31
}

// verify returns the tag of a chunk, and an error if not every byte is of that
// one tag.
func verify(b []byte) (tag, error) {
	t := tag{
		attempt: binary.LittleEndian.Uint64(b[8:]),
		index:   binary.LittleEndian.Uint32(b[16:]),
		length:  binary.LittleEndian.Uint32(b[20:]),
		prompt:  binary.LittleEndian.Uint32(b[24:]),
	}
	switch {
	case binary.LittleEndian.Uint64(b) != tagMagic || binary.LittleEndian.Uint32(b[28:]) != crc32.ChecksumIEEE(b[:28]):
		return t, fmt.Errorf("no tag: % x", b[:tagBytes])
	case int(t.length) != len(b):
		return t, fmt.Errorf("%d bytes were claimed, its tag says %d", len(b), t.length)
	}
	x := t.seed()
	for at := tagBytes; at < len(b); at += 8 {
		if got, want := binary.LittleEndian.Uint64(b[at:]), mix(&x); got != want {
			return t, fmt.Errorf("byte %d and those after it are not of attempt %d: %#x, want %#x", at, t.attempt, got, want)
		}
	}
	return t, nil
}
