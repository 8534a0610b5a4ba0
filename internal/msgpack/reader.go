// Package msgpack reads and writes maps as tables of fields describe them,
// strictly and within limits. It is what the control messages and the local
// API have in common: one table a message gives both directions, so that the
// two cannot disagree. The bytes themselves are tinylib/msgp's.
//
// Reading never allocates by a length that the bytes do not back, copies what
// it keeps, and works in time linear in the bytes.
package msgpack

import (
	"encoding/binary"
	"fmt"
	"math"
	"unicode/utf8"

	"github.com/tinylib/msgp/msgp"
)

// Error says what is wrong with a message, and in which field.
type Error struct {
	Path string // field, as in chunks[3].key; "" for the message itself
	Text string
}

func (e *Error) Error() string {
	if e.Path == "" {
		return e.Text
	}
	return e.Path + ": " + e.Text
}

// within returns e for a field inside the named one.
func (e *Error) within(name string) {
	switch {
	case e.Path == "":
		e.Path = name
	case e.Path[0] == '[':
		e.Path = name + e.Path
	default:
		e.Path = name + "." + e.Path
	}
}

// Reader reads values from a buffer. The first error sticks: what is read
// after it is zero, so that callers check Err once.
type Reader struct {
	b   []byte
	off int // of what is to be read: moving it, unlike b, stores no pointer
	err *Error
}

// NewReader returns a reader of b, which it does not copy.
func NewReader(b []byte) *Reader { return &Reader{b: b} }

// Err returns the first error, an *Error, or nil.
func (r *Reader) Err() error {
	if r.err == nil {
		return nil
	}
	return r.err
}

// Rest returns what has not been read.
func (r *Reader) Rest() []byte { return r.b[r.off:] }

// left goes on at rest, an end of the buffer.
func (r *Reader) left(rest []byte) { r.off = len(r.b) - len(rest) }

// Fail records an error, if it is the first.
func (r *Reader) Fail(format string, args ...any) {
	if r.err == nil {
		r.err = &Error{Text: fmt.Sprintf(format, args...)}
		r.off = len(r.b)
	}
}

// End records an error if bytes are left.
func (r *Reader) End() {
	if n := len(r.Rest()); n > 0 {
		r.Fail("%d bytes after the message", n)
	}
}

// want records why a value is not of the type that was to be read.
func (r *Reader) want(what string) {
	if r.err != nil {
		return
	}
	if len(r.Rest()) == 0 {
		r.Fail("truncated")
		return
	}
	if got := typeName(r.Rest()); got != what {
		r.Fail("want %s, got %s", what, got)
		return
	}
	r.Fail("truncated")
}

// typeName names the type of the first value of b as messages call it.
func typeName(b []byte) string {
	switch msgp.NextType(b) {
	case msgp.StrType:
		return "str"
	case msgp.BinType:
		return "bin"
	case msgp.MapType:
		return "map"
	case msgp.ArrayType:
		return "array"
	case msgp.IntType, msgp.UintType:
		return "int"
	case msgp.Float32Type, msgp.Float64Type:
		return "float"
	case msgp.BoolType:
		return "bool"
	case msgp.NilType:
		return "nil"
	case msgp.InvalidType:
		return "an invalid byte"
	}
	return "ext"
}

// Map reads the header of a map and returns its number of entries, which the
// remaining bytes can hold.
func (r *Reader) Map() int {
	n, rest, err := msgp.ReadMapHeaderBytes(r.Rest())
	if err != nil {
		r.want("map")
		return 0
	}
	if uint64(n)*2 > uint64(len(rest)) {
		r.Fail("truncated")
		return 0
	}
	r.left(rest)
	return int(n)
}

// Array reads the header of an array of at most max elements.
func (r *Reader) Array(max int) int {
	n, rest, err := msgp.ReadArrayHeaderBytes(r.Rest())
	if err != nil {
		r.want("array")
		return 0
	}
	if uint64(n) > uint64(len(rest)) {
		r.Fail("truncated")
		return 0
	}
	if int(n) > max {
		r.Fail("%d elements, at most %d", n, max)
		return 0
	}
	r.left(rest)
	return int(n)
}

// Key reads the key of a map's entry; it aliases the buffer.
func (r *Reader) Key() []byte {
	// The two short forms here, since most are short.
	if b := r.b[r.off:]; len(b) > 1 {
		switch c := b[0]; {
		case c&0xe0 == 0xa0:
			if end := 1 + int(c&0x1f); end <= len(b) {
				r.off += end
				return b[1:end]
			}
		case c == 0xd9:
			if end := 2 + int(b[1]); end <= len(b) {
				r.off += end
				return b[2:end]
			}
		}
	}
	return r.anyStr()
}

func (r *Reader) anyStr() []byte {
	v, rest, err := msgp.ReadStringZC(r.Rest())
	if err != nil {
		r.want("str")
		return nil
	}
	r.left(rest)
	return v
}

// validUTF8 is utf8.Valid, faster for ASCII, as keys and names are.
func validUTF8(b []byte) bool {
	const high = 0x8080808080808080
	bits, rest := uint64(0), b
	for ; len(rest) >= 32; rest = rest[32:] {
		bits |= binary.LittleEndian.Uint64(rest) | binary.LittleEndian.Uint64(rest[8:]) |
			binary.LittleEndian.Uint64(rest[16:]) | binary.LittleEndian.Uint64(rest[24:])
	}
	for ; len(rest) >= 8; rest = rest[8:] {
		bits |= binary.LittleEndian.Uint64(rest)
	}
	for _, c := range rest {
		bits |= uint64(c)
	}
	return bits&high == 0 || utf8.Valid(b)
}

// StrZC is Str without a copy: it aliases the buffer.
func (r *Reader) StrZC(max int) []byte {
	v := r.Key()
	if len(v) > max {
		r.Fail("%d bytes, at most %d", len(v), max)
		return nil
	}
	if !validUTF8(v) {
		r.Fail("invalid UTF-8")
		return nil
	}
	return v
}

// Str reads a string of at most max bytes.
func (r *Reader) Str(max int) string { return string(r.StrZC(max)) }

// Strs reads an array of at most n strings of at most max bytes each.
func (r *Reader) Strs(n, max int) []string {
	n = r.Array(n)
	start := r.off
	for i := range n {
		if r.StrZC(max); r.err != nil {
			r.err.within(fmt.Sprintf("[%d]", i))
			return nil
		}
	}
	if n == 0 {
		return nil
	}
	// One copy for all, cut into pieces: the strings live and die together.
	text := string(r.b[start:r.off])
	out := make([]string, n)
	r.off = start
	for i := range out {
		v := r.Key()
		end := r.off - start
		out[i] = text[end-len(v) : end]
	}
	return out
}

// Bin reads a bin of at most max bytes; it aliases the buffer.
func (r *Reader) Bin(max int) []byte {
	v, rest, err := msgp.ReadBytesZC(r.Rest())
	if err != nil || msgp.NextType(r.Rest()) != msgp.BinType {
		r.want("bin")
		return nil
	}
	if len(v) > max {
		r.Fail("%d bytes, at most %d", len(v), max)
		return nil
	}
	r.left(rest)
	return v
}

// Int reads an integer; above 2^63-1 it saturates.
func (r *Reader) Int() int64 {
	b := r.Rest()
	if len(b) > 0 && b[0] <= 0x7f { // most are small
		r.off++
		return int64(b[0])
	}
	if len(b) >= 9 && b[0] == 0xcf {
		r.off += 9
		return int64(min(binary.BigEndian.Uint64(b[1:]), math.MaxInt64))
	}
	v, rest, err := msgp.ReadInt64Bytes(b)
	if err != nil {
		r.want("int")
		return 0
	}
	r.left(rest)
	return v
}

// Uint reads an integer from 0 to max.
func (r *Reader) Uint(max uint64) uint64 {
	if t := msgp.NextType(r.Rest()); t != msgp.IntType && t != msgp.UintType {
		r.want("int")
		return 0
	}
	if b := r.Rest(); len(b) >= 9 && b[0] == 0xcf {
		u := binary.BigEndian.Uint64(b[1:])
		if u > max {
			r.Fail("%d, at most %d", u, max)
			return 0
		}
		r.off += 9
		return u
	}
	v := r.Int()
	if v < 0 {
		r.Fail("%d, at least 0", v)
		return 0
	}
	if uint64(v) > max {
		r.Fail("%d, at most %d", v, max)
		return 0
	}
	return uint64(v)
}

// Ints reads an array of at most n integers.
func (r *Reader) Ints(n int) []int64 {
	n = r.Array(n)
	if n == 0 {
		return nil
	}
	out := make([]int64, n)
	for i := range out {
		if out[i] = r.Int(); r.err != nil {
			r.err.within(fmt.Sprintf("[%d]", i))
			return nil
		}
	}
	return out
}

// Bool reads a boolean.
func (r *Reader) Bool() bool {
	v, rest, err := msgp.ReadBoolBytes(r.Rest())
	if err != nil {
		r.want("bool")
		return false
	}
	r.left(rest)
	return v
}

// Nil reads a nil if the next value is one and reports whether it was.
func (r *Reader) Nil() bool {
	if !msgp.IsNil(r.Rest()) {
		return false
	}
	r.off++
	return true
}

// Skip passes over one value of any type, however deeply nested: it counts the
// values still to come instead of remembering where it is.
func (r *Reader) Skip() {
	for left := uint64(1); left > 0; left-- {
		b := r.Rest()
		if uint64(len(b)) < left { // each value has a byte at least
			r.Fail("truncated")
			return
		}
		size, inner := extent(b)
		if size == 0 {
			r.Fail("an invalid byte 0x%02x", b[0])
			return
		}
		if uint64(len(b)) < size {
			r.Fail("truncated")
			return
		}
		r.off += int(size)
		left += inner
	}
}

// extent returns the bytes of the first value of b without the values inside
// it, and their number. The size is 0 for a byte that begins no value, and
// may be more than b has.
func extent(b []byte) (size, inner uint64) {
	u8 := func() uint64 {
		if len(b) < 2 {
			return math.MaxUint32
		}
		return uint64(b[1])
	}
	u16 := func() uint64 {
		if len(b) < 3 {
			return math.MaxUint32
		}
		return uint64(binary.BigEndian.Uint16(b[1:]))
	}
	u32 := func() uint64 {
		if len(b) < 5 {
			return math.MaxUint32
		}
		return uint64(binary.BigEndian.Uint32(b[1:]))
	}
	switch c := b[0]; {
	case c <= 0x7f || c >= 0xe0: // fixint
		return 1, 0
	case c <= 0x8f: // fixmap
		return 1, 2 * uint64(c&0x0f)
	case c <= 0x9f: // fixarray
		return 1, uint64(c & 0x0f)
	case c <= 0xbf: // fixstr
		return 1 + uint64(c&0x1f), 0
	case c == 0xc0 || c == 0xc2 || c == 0xc3: // nil, bool
		return 1, 0
	case c == 0xc4 || c == 0xd9: // bin8, str8
		return 2 + u8(), 0
	case c == 0xc5 || c == 0xda:
		return 3 + u16(), 0
	case c == 0xc6 || c == 0xdb:
		return 5 + u32(), 0
	case c == 0xc7: // ext8
		return 3 + u8(), 0
	case c == 0xc8:
		return 4 + u16(), 0
	case c == 0xc9:
		return 6 + u32(), 0
	case c == 0xcc || c == 0xd0: // 8 bit integers
		return 2, 0
	case c == 0xcd || c == 0xd1:
		return 3, 0
	case c == 0xca || c == 0xce || c == 0xd2: // 32 bit
		return 5, 0
	case c == 0xcb || c == 0xcf || c == 0xd3: // 64 bit
		return 9, 0
	case c >= 0xd4 && c <= 0xd8: // fixext
		return 2 + 1<<(c-0xd4), 0
	case c == 0xdc: // array16
		return 3, u16()
	case c == 0xdd:
		return 5, u32()
	case c == 0xde: // map16
		return 3, 2 * u16()
	case c == 0xdf:
		return 5, 2 * u32()
	}
	return 0, 0 // 0xc1
}
