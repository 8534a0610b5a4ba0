package msgpack

import (
	"bytes"
	"math"
	"math/rand"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/tinylib/msgp/msgp"
)

// FuzzSkip compares Skip with the library's, which recurses.
func FuzzSkip(f *testing.F) {
	for lead := range 256 {
		f.Add(append([]byte{byte(lead)}, "\x00\x02\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01"...))
	}
	f.Add([]byte("\x82\xa1a\x93\x01\xc0\xcb@\x04\x00\x00\x00\x00\x00\x00\xa1b\xd4\x01\x02rest"))
	f.Fuzz(compareSkip)
}

func compareSkip(t *testing.T, b []byte) {
	r := NewReader(b)
	r.Skip()
	rest, err := msgp.Skip(b)
	if (err == nil) != (r.Err() == nil) {
		t.Fatalf("%x: %v, the library says %v", b, r.Err(), err)
	}
	if err == nil && !bytes.Equal(rest, r.Rest()) {
		t.Fatalf("%x: %d bytes are left, the library leaves %d", b, len(r.Rest()), len(rest))
	}
}

func TestSkipRandom(t *testing.T) {
	const seed = 2
	rng := rand.New(rand.NewSource(seed))
	for range 100_000 {
		b := make([]byte, rng.Intn(24))
		for i := range b {
			// Mostly leads of short values, so that whole ones come about.
			b[i] = byte(rng.Intn(256))
			if rng.Intn(3) > 0 {
				b[i] = []byte{0x01, 0x81, 0x92, 0xa2, 0xc0, 0xc4, 0xd0, 0xd4, 0xdc, 0xde}[rng.Intn(10)]
			}
		}
		compareSkip(t, b)
	}
}

func TestIntegers(t *testing.T) {
	for _, row := range []struct {
		hex  string // as another encoder may write it
		want int64
	}{
		{"\x00", 0}, {"\x7f", 127}, {"\xcc\x01", 1}, {"\xcd\x00\x01", 1}, {"\xd1\x00\x80", 128}, {"\xff", -1}, {"\xd3\xff\xff\xff\xff\xff\xff\xff\xff", -1},
		{"\xcf\x7f\xff\xff\xff\xff\xff\xff\xff", math.MaxInt64}, {"\xcf\x80\x00\x00\x00\x00\x00\x00\x00", math.MaxInt64},
		{"\xcf\xff\xff\xff\xff\xff\xff\xff\xff", math.MaxInt64}, {"\xd3\x80\x00\x00\x00\x00\x00\x00\x00", math.MinInt64},
	} {
		r := NewReader([]byte(row.hex))
		if got := r.Int(); got != row.want || r.Err() != nil {
			t.Errorf("%x: %d, %v, want %d", row.hex, got, r.Err(), row.want)
		}
	}
	for _, v := range []int64{0, 1, 127, 128, 255, 256, 65535, 65536, math.MaxUint32, math.MaxUint32 + 1, math.MaxInt64,
		-1, -32, -33, -128, -129, -32768, -32769, math.MinInt32, math.MinInt32 - 1, math.MinInt64} {
		w := NewWriter(nil)
		w.Int(v)
		b, _ := w.Bytes()
		if r := NewReader(b); r.Int() != v || r.Err() != nil || len(r.Rest()) != 0 {
			t.Errorf("%d is written as %x", v, b)
		}
		if v < 0 {
			continue
		}
		if want := msgp.AppendUint64(nil, uint64(v)); !bytes.Equal(b, want) {
			t.Errorf("%d is written as %x, want %x", v, b, want)
		}
	}
}

func TestErrorSticks(t *testing.T) {
	r := NewReader([]byte("\x01\x02"))
	r.Str(10)
	first := r.Err()
	if r.Int() != 0 || r.Map() != 0 || r.Str(9) != "" || r.Bool() || r.Nil() || len(r.Strs(1, 1)) != 0 {
		t.Error("something is read after an error")
	}
	if r.Skip(); first == nil || r.Err() != first {
		t.Errorf("first %v, then %v", first, r.Err())
	}
	w := NewWriter(nil)
	w.Str("ab", 1)
	_, first = w.Bytes()
	w.Uint(2, 1)
	if b, err := w.Bytes(); first == nil || err != first || b != nil {
		t.Errorf("first %v, then %x, %v", first, b, err)
	}
}

func TestCut(t *testing.T) {
	for _, row := range []struct {
		in   string
		max  int
		want string
	}{
		{"", 0, ""}, {"abc", 3, "abc"}, {"abcd", 3, "abc"}, {"é", 2, "é"}, {"é", 1, ""}, {"aé", 2, "a"}, {"🚢🚢", 7, "🚢"},
		{"a\xff", 10, "a\uFFFD"}, {strings.Repeat("\xff", 9), 5, "\uFFFD"},
	} {
		if got := Cut(row.in, row.max); got != row.want || !utf8.ValidString(got) {
			t.Errorf("Cut(%q, %d) = %q, want %q", row.in, row.max, got, row.want)
		}
	}
}
