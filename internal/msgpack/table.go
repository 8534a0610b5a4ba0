package msgpack

import (
	"encoding/binary"
	"fmt"
	"math"
	"strings"
	"unicode/utf8"

	"github.com/tinylib/msgp/msgp"
)

// Field describes one field of a map that holds a T: its key, its type and
// limit, and where in T it is.
type Field[T any] struct {
	name   string
	key    []byte        // the name, encoded
	absent bool          // a reader does without it
	zero   func(*T) bool // if set: a writer leaves it out when this holds
	get    func(*Reader, *T)
	put    func(*Writer, *T)
	unset  func(*T) bool // holds when the value is its type's zero
}

// Default returns the field with a default, its zero: always written, but a
// reader does without it.
func (f Field[T]) Default() Field[T] {
	f.absent = true
	return f
}

// Optional returns the field as one that is left out when it has no value, its
// zero.
func (f Field[T]) Optional() Field[T] {
	f.absent, f.zero = true, f.unset
	return f
}

// Present returns the field as one that is there if has(m), which reading it
// sets.
func (f Field[T]) Present(has func(*T) *bool) Field[T] {
	get := f.get
	f.absent = true
	f.zero = func(m *T) bool { return !*has(m) }
	f.get = func(r *Reader, m *T) {
		get(r, m)
		*has(m) = true
	}
	return f
}

// Table is the fields of a T in the order in which they are written, at most
// 64.
type Table[T any] struct {
	fields   []Field[T]
	required uint64
	check    func(*T) string
}

// NewTable returns a table. Field names must differ.
func NewTable[T any](fields ...Field[T]) *Table[T] {
	t := &Table[T]{fields: fields}
	for i := range fields {
		f := &fields[i]
		f.key = msgp.AppendString(nil, f.name)
		if !f.absent {
			t.required |= 1 << i
		}
	}
	return t
}

// Check adds a condition on the whole that the fields alone do not express,
// for both directions: it returns what is wrong, or "".
func (t *Table[T]) Check(check func(*T) string) *Table[T] {
	t.check = check
	return t
}

// Len returns the number of entries that Put writes for m.
func (t *Table[T]) Len(m *T) int {
	n := 0
	for i := range t.fields {
		if f := &t.fields[i]; f.zero == nil || !f.zero(m) {
			n++
		}
	}
	return n
}

// Put writes m's entries; the header is the caller's, who may add entries.
func (t *Table[T]) Put(w *Writer, m *T) {
	if t.check != nil {
		if text := t.check(m); text != "" {
			w.Fail("%s", text)
		}
	}
	for i := range t.fields {
		f := &t.fields[i]
		if f.zero != nil && f.zero(m) {
			continue
		}
		w.Raw(f.key)
		bad := w.err != nil
		f.put(w, m)
		if w.err != nil && !bad {
			w.err.within(f.name)
		}
	}
}

// PutMap writes m as a map.
func (t *Table[T]) PutMap(w *Writer, m *T) {
	w.Map(t.Len(m))
	t.Put(w, m)
}

// Get reads a map into m, which should be zero: keys in any order, the last
// of equal ones counts, unknown ones are skipped. An entry tag, if tag is not
// "", must be the string value whenever it comes.
func (t *Table[T]) Get(r *Reader, m *T, tag, value string) {
	var seen uint64
	next := 0 // keys usually come in order
	for range r.Map() {
		key := r.Key()
		if r.err != nil {
			return
		}
		i := t.find(key, next)
		switch {
		case i >= 0:
			t.fields[i].get(r, m)
			if r.err != nil {
				r.err.within(t.fields[i].name)
				return
			}
			seen |= 1 << i
			next = i + 1
		case tag != "" && string(key) == tag:
			if string(r.Key()) != value {
				r.Fail("another %s than %q", tag, value)
			}
		default:
			r.Skip()
		}
	}
	if r.err != nil {
		return
	}
	if missing := t.required &^ seen; missing != 0 {
		var names []string
		for i, f := range t.fields {
			if missing&(1<<i) != 0 {
				names = append(names, f.name)
			}
		}
		r.Fail("missing %s", strings.Join(names, ", "))
		return
	}
	if t.check != nil {
		if text := t.check(m); text != "" {
			r.Fail("%s", text)
		}
	}
}

func (t *Table[T]) find(key []byte, next int) int {
	if next < len(t.fields) && string(key) == t.fields[next].name {
		return next
	}
	for i := range t.fields {
		if string(key) == t.fields[i].name {
			return i
		}
	}
	return -1
}

// Str is a string of at most max bytes.
func Str[T any, S ~string](name string, max int, at func(*T) *S) Field[T] {
	return Field[T]{name: name,
		get:   func(r *Reader, m *T) { *at(m) = S(r.Str(max)) },
		put:   func(w *Writer, m *T) { w.Str(string(*at(m)), max) },
		unset: func(m *T) bool { return *at(m) == "" }}
}

// Text is a string for people: a writer cuts it to max bytes.
func Text[T any](name string, max int, at func(*T) *string) Field[T] {
	f := Str(name, max, at)
	f.put = func(w *Writer, m *T) { w.Text(*at(m), max) }
	return f
}

// Strs is a list of at most n strings of at most max bytes each.
func Strs[T any](name string, n, max int, at func(*T) *[]string) Field[T] {
	return Field[T]{name: name,
		get: func(r *Reader, m *T) { *at(m) = r.Strs(n, max) },
		put: func(w *Writer, m *T) {
			w.Array(len(*at(m)), n)
			for i, s := range *at(m) {
				if w.Str(s, max); w.err != nil {
					w.err.within(fmt.Sprintf("[%d]", i))
					return
				}
			}
		},
		unset: func(m *T) bool { return len(*at(m)) == 0 }}
}

// Int is an integer.
func Int[T any, I ~int64](name string, at func(*T) *I) Field[T] {
	return Field[T]{name: name,
		get:   func(r *Reader, m *T) { *at(m) = I(r.Int()) },
		put:   func(w *Writer, m *T) { w.Int(int64(*at(m))) },
		unset: func(m *T) bool { return *at(m) == 0 }}
}

// Ints is a list of at most n integers.
func Ints[T any](name string, n int, at func(*T) *[]int64) Field[T] {
	return Field[T]{name: name,
		get: func(r *Reader, m *T) { *at(m) = r.Ints(n) },
		put: func(w *Writer, m *T) {
			w.Array(len(*at(m)), n)
			for _, v := range *at(m) {
				w.Int(v)
			}
		},
		unset: func(m *T) bool { return len(*at(m)) == 0 }}
}

// Uint is an integer from 0 to 2^64-1.
func Uint[T any, U ~uint64](name string, at func(*T) *U) Field[T] {
	return Field[T]{name: name,
		get:   func(r *Reader, m *T) { *at(m) = U(r.Uint(math.MaxUint64)) },
		put:   func(w *Writer, m *T) { w.Uint(uint64(*at(m)), math.MaxUint64) },
		unset: func(m *T) bool { return *at(m) == 0 }}
}

// Number is an integer from 1 to 2^64-1.
func Number[T any, U ~uint64](name string, at func(*T) *U) Field[T] {
	f := Uint(name, at)
	f.get = func(r *Reader, m *T) {
		if *at(m) = U(r.Uint(math.MaxUint64)); *at(m) == 0 {
			r.Fail("0, at least 1")
		}
	}
	f.put = func(w *Writer, m *T) {
		if *at(m) == 0 {
			w.Fail("0, at least 1")
		}
		w.Uint(uint64(*at(m)), math.MaxUint64)
	}
	return f
}

// Uint32 is an integer from 0 to 2^32-1.
func Uint32[T any, U ~uint32](name string, at func(*T) *U) Field[T] {
	return Field[T]{name: name,
		get:   func(r *Reader, m *T) { *at(m) = U(r.Uint(math.MaxUint32)) },
		put:   func(w *Writer, m *T) { w.Uint(uint64(*at(m)), math.MaxUint32) },
		unset: func(m *T) bool { return *at(m) == 0 }}
}

// Uint32s is a list of at most n integers from 0 to 2^32-1.
func Uint32s[T any, U ~uint32](name string, n int, at func(*T) *[]U) Field[T] {
	return Field[T]{name: name,
		get: func(r *Reader, m *T) {
			*at(m) = nil
			n := r.Array(n)
			if n == 0 {
				return
			}
			out := make([]U, n)
			for i := range out {
				if out[i] = U(r.Uint(math.MaxUint32)); r.err != nil {
					r.err.within(fmt.Sprintf("[%d]", i))
					return
				}
			}
			*at(m) = out
		},
		put: func(w *Writer, m *T) {
			w.Array(len(*at(m)), n)
			for _, v := range *at(m) {
				w.Uint(uint64(v), math.MaxUint32)
			}
		},
		unset: func(m *T) bool { return len(*at(m)) == 0 }}
}

// PackedUint32s is a list of at most n integers as one bin of little-endian
// u32.
func PackedUint32s[T any, U ~uint32](name string, n int, at func(*T) *[]U) Field[T] {
	return Field[T]{name: name,
		get: func(r *Reader, m *T) {
			*at(m) = nil
			b := r.Bin(4 * n)
			if len(b)%4 != 0 {
				r.Fail("%d bytes, not a multiple of 4", len(b))
			}
			if r.err != nil || len(b) == 0 {
				return
			}
			out := make([]U, len(b)/4)
			for i := range out {
				out[i] = U(binary.LittleEndian.Uint32(b[4*i:]))
			}
			*at(m) = out
		},
		put: func(w *Writer, m *T) {
			s := *at(m)
			if len(s) > n {
				w.Fail("%d elements, at most %d", len(s), n)
				return
			}
			w.binHeader(4 * len(s))
			for _, v := range s {
				w.b = binary.LittleEndian.AppendUint32(w.b, uint32(v))
			}
		},
		unset: func(m *T) bool { return len(*at(m)) == 0 }}
}

// Bool is a boolean.
func Bool[T any](name string, at func(*T) *bool) Field[T] {
	return Field[T]{name: name,
		get:   func(r *Reader, m *T) { *at(m) = r.Bool() },
		put:   func(w *Writer, m *T) { w.Bool(*at(m)) },
		unset: func(m *T) bool { return !*at(m) }}
}

// Bin16 is a bin of 16 bytes.
func Bin16[T any, B ~[16]byte](name string, at func(*T) *B) Field[T] {
	return Field[T]{name: name,
		get: func(r *Reader, m *T) {
			v := r.Bin(16)
			if r.err == nil && len(v) != 16 {
				r.Fail("%d bytes, must be 16", len(v))
				return
			}
			if r.err == nil {
				*at(m) = B([16]byte(v))
			}
		},
		put:   func(w *Writer, m *T) { v := [16]byte(*at(m)); w.Bin(v[:], 16) },
		unset: func(m *T) bool { return [16]byte(*at(m)) == [16]byte{} }}
}

// Bin is a bin of at most max bytes.
func Bin[T any](name string, max int, at func(*T) *[]byte) Field[T] {
	return Field[T]{name: name,
		get:   func(r *Reader, m *T) { *at(m) = append([]byte(nil), r.Bin(max)...) },
		put:   func(w *Writer, m *T) { w.Bin(*at(m), max) },
		unset: func(m *T) bool { return len(*at(m)) == 0 }}
}

// Map is a map inside, nil when it is missing. It is an optional field.
func Map[T, E any](name string, inner *Table[E], at func(*T) **E) Field[T] {
	f := Field[T]{name: name,
		get: func(r *Reader, m *T) {
			e := new(E)
			inner.Get(r, e, "", "")
			*at(m) = e
		},
		put:   func(w *Writer, m *T) { inner.PutMap(w, *at(m)) },
		unset: func(m *T) bool { return *at(m) == nil }}
	return f.Optional()
}

// Maps is a list of at most n maps inside.
func Maps[T, E any](name string, n int, inner *Table[E], at func(*T) *[]E) Field[T] {
	return Field[T]{name: name,
		get: func(r *Reader, m *T) {
			*at(m) = nil
			n := r.Array(n)
			if n == 0 {
				return
			}
			// What the bytes can hold: each has its header and its required keys.
			out := make([]E, 0, min(n, len(r.Rest())/inner.least()))
			for i := range n {
				var e E
				inner.Get(r, &e, "", "")
				if r.err != nil {
					r.err.within(fmt.Sprintf("[%d]", i))
					return
				}
				out = append(out, e)
			}
			*at(m) = out
		},
		put: func(w *Writer, m *T) {
			s := *at(m)
			w.Array(len(s), n)
			for i := range s {
				if inner.PutMap(w, &s[i]); w.err != nil {
					w.err.within(fmt.Sprintf("[%d]", i))
					return
				}
			}
		},
		unset: func(m *T) bool { return len(*at(m)) == 0 }}
}

// least returns the fewest bytes that a map of this table has.
func (t *Table[T]) least() int {
	n := 1
	for _, f := range t.fields {
		if !f.absent {
			n += 1 + len(f.name) + 1
		}
	}
	return n
}

// Cut returns s as a message carries it: valid UTF-8 of at most max bytes, cut
// at a character.
func Cut(s string, max int) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= max {
		return s
	}
	for max > 0 && !utf8.RuneStart(s[max]) {
		max--
	}
	return s[:max]
}

// NilStr is a string of at most max bytes or nil, when the boolean does not
// hold.
func NilStr[T any](name string, max int, at func(*T) (*bool, *string)) Field[T] {
	return Field[T]{name: name,
		get: func(r *Reader, m *T) {
			has, s := at(m)
			*has, *s = !r.Nil(), ""
			if *has {
				*s = r.Str(max)
			}
		},
		put: func(w *Writer, m *T) {
			if has, s := at(m); *has {
				w.Str(*s, max)
			} else {
				w.Nil()
			}
		}}
}
