package explore

import "encoding/binary"

// codec writes a state to bytes, or reads one back, by the same walk over its
// fields.
type codec struct {
	b       []byte
	reading bool
}

// num walks over a number.
func num[T ~int | ~int64 | ~uint8 | ~uint32 | ~uint64](c *codec, v *T) {
	if !c.reading {
		c.b = binary.AppendUvarint(c.b, uint64(*v))
		return
	}
	n, size := binary.Uvarint(c.b)
	*v, c.b = T(n), c.b[size:]
}

// flags walks over up to eight flags.
func flags(c *codec, vs ...*bool) {
	var n uint8
	for i, v := range vs {
		if *v {
			n |= 1 << i
		}
	}
	num(c, &n)
	for i, v := range vs {
		*v = n&(1<<i) != 0
	}
}

// nums walks over a list of numbers.
func nums[T ~int | ~int64 | ~uint8 | ~uint32 | ~uint64](c *codec, v *[]T) {
	list(c, v, func(c *codec, e *T) { num(c, e) })
}

// list walks over a list.
func list[T any](c *codec, v *[]T, walk func(*codec, *T)) {
	n := len(*v)
	num(c, &n)
	if c.reading {
		*v = make([]T, n)
	}
	for i := range *v {
		walk(c, &(*v)[i])
	}
}
