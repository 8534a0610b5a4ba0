package slot

import (
	"math/bits"
	"slices"
)

// bitmap is a set of small integers that knows its least member: each bit of a
// level says whether the 64 bits below it have one. Every operation takes a
// step a level, four for 2^20 members.
type bitmap struct {
	levels [][]uint64 // the members first, the single top word last
}

func newBitmap(n int) bitmap {
	var b bitmap
	for {
		n = (n + 63) / 64
		b.levels = append(b.levels, make([]uint64, max(n, 1)))
		if n <= 1 {
			return b
		}
	}
}

func (b *bitmap) set(i uint32) {
	for _, l := range b.levels {
		w := &l[i>>6]
		empty := *w == 0
		*w |= 1 << (i & 63)
		if !empty {
			return
		}
		i >>= 6
	}
}

func (b *bitmap) clear(i uint32) {
	for _, l := range b.levels {
		w := &l[i>>6]
		*w &^= 1 << (i & 63)
		if *w != 0 {
			return
		}
		i >>= 6
	}
}

func (b *bitmap) has(i uint32) bool { return b.levels[0][i>>6]&(1<<(i&63)) != 0 }

// first returns the least member of a set that is not empty.
func (b *bitmap) first() uint32 {
	var i uint32
	for l := len(b.levels) - 1; l >= 0; l-- {
		i = i<<6 + uint32(bits.TrailingZeros64(b.levels[l][i]))
	}
	return i
}

func (b *bitmap) clone() bitmap {
	c := bitmap{levels: slices.Clone(b.levels)}
	for i, l := range c.levels {
		c.levels[i] = slices.Clone(l)
	}
	return c
}
