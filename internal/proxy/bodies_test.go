package proxy

import (
	"bytes"
	"errors"
	"io"
	"testing"
	"testing/iotest"
	"time"
)

// Bodies of every size around a piece's end come out as they went in, however
// they come, and no more than their bytes stay counted.
func TestReadAll(t *testing.T) {
	const most = firstPiece + 3*nextPiece + 1
	want := make([]byte, most)
	for i := range want {
		want[i] = byte(i * 7 / 3)
	}
	for _, size := range []int{0, 1, firstPiece - 1, firstPiece, firstPiece + 1, firstPiece + nextPiece - 1, firstPiece + nextPiece, firstPiece + nextPiece + 1, most} {
		for name, through := range map[string]func(io.Reader) io.Reader{
			"at once": func(r io.Reader) io.Reader { return r }, "by halves": iotest.HalfReader, "with the error": iotest.DataErrReader,
		} {
			all := &bodies{max: 1 << 20}
			b := all.open(nil)
			got, err := b.readAll(through(bytes.NewReader(want[:size])))
			if err != nil || !bytes.Equal(got, want[:size]) {
				t.Errorf("%d bytes %s: %d bytes, %v", size, name, len(got), err)
			}
			if b.read() || all.held != int64(size) {
				t.Errorf("%d bytes %s: %d counted", size, name, all.held)
			}
			b.close()
			if all.held != 0 {
				t.Errorf("%d bytes %s: %d counted at the end", size, name, all.held)
			}
		}
	}
}

// What a body may take is counted before it is taken; one that has to go is told,
// and so is one that breaks off.
func TestReadAll_fails(t *testing.T) {
	broken := errors.New("broken off")
	for _, size := range []int{0, 1, firstPiece, firstPiece + nextPiece + 5} {
		b := (&bodies{max: 1 << 20}).open(nil)
		r := io.MultiReader(bytes.NewReader(make([]byte, size)), iotest.ErrReader(broken))
		if _, err := b.readAll(r); !errors.Is(err, broken) {
			t.Errorf("broken off after %d bytes: %v", size, err)
		}
	}
	all := &bodies{max: firstPiece + nextPiece}
	if _, err := all.open(nil).readAll(bytes.NewReader(make([]byte, 2*nextPiece))); !errors.Is(err, errBodies) || all.held != 0 {
		t.Errorf("a body larger than all may be: %v, %d counted", err, all.held)
	}
	// The oldest goes for a newcomer, with what it holds.
	interrupted := false
	old := all.open(func(time.Time) error { interrupted = true; return nil })
	if err := old.add(nextPiece); err != nil {
		t.Fatal(err)
	}
	if _, err := all.open(nil).readAll(bytes.NewReader(make([]byte, firstPiece+1))); err != nil || !interrupted || !old.read() {
		t.Errorf("a newcomer: %v, the old one interrupted %v", err, interrupted)
	}
}

func BenchmarkBodies(b *testing.B) {
	body := bytes.Repeat([]byte(" "), 16<<20-1)
	end := io.ErrUnexpectedEOF // the last byte is withheld
	all := &bodies{max: 512 << 20}
	for _, c := range []struct {
		name string
		read func(io.Reader) ([]byte, error)
	}{
		{"pieces", func(r io.Reader) ([]byte, error) { x := all.open(nil); defer x.close(); return x.readAll(r) }},
		{"io.ReadAll", io.ReadAll},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.SetBytes(int64(len(body)))
			for b.Loop() {
				if _, err := c.read(io.MultiReader(bytes.NewReader(body), iotest.ErrReader(end))); !errors.Is(err, end) {
					b.Fatal(err)
				}
			}
		})
	}
}
