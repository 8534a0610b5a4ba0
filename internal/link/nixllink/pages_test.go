package nixllink

import (
	"bytes"
	"encoding/hex"
	"reflect"
	"strings"
	"testing"

	"github.com/berthkv/berth/internal/kv"
)

// Lists that NIXL 1.5.1's own bindings have written: 64 KiB pages from address
// 0x7fbdee100000 on device 0, DRAM.
const (
	onePage  = "80049598000000000000008c136e69786c5f637531332e5f62696e64696e6773948c0d6e69786c58666572444c69737494939429819443686e69786c5365724465737c6e69786c444c6973740a000000000000006e69786c42444c6973747c740400000000000000000000007c6e080000000000000001000000000000007c1800000000000000000010eebd7f0000000001000000000000000000000000007c94622e"
	twoPages = "800495b0000000000000008c136e69786c5f637531332e5f62696e64696e6773948c0d6e69786c58666572444c69737494939429819443806e69786c5365724465737c6e69786c444c6973740a000000000000006e69786c42444c6973747c740400000000000000000000007c6e080000000000000002000000000000007c3000000000000000000010eebd7f000000000100000000000000000000000000000011eebd7f0000000001000000000000000000000000007c94622e"
)

func unhex(t testing.TB, s string) []byte {
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func listOf(module string, n int) *pageList {
	l := &pageList{module: module}
	for i := range uint64(n) {
		l.pages = append(l.pages, page{0x7fbdee100000 + i<<16, 1 << 16, 0})
	}
	return l
}

func TestPages_as_the_library_writes_them(t *testing.T) {
	for n, text := range map[int]string{1: onePage, 2: twoPages} {
		want := unhex(t, text)
		if got := appendPages(nil, listOf("nixl_cu13._bindings", n)); !bytes.Equal(got, want) {
			t.Errorf("%d pages are written as\n%x, want\n%x", n, got, want)
		}
		l, err := parsePages(want)
		if err != nil {
			t.Fatal(err)
		}
		if l.module != "nixl_cu13._bindings" || l.memory != dram || len(l.pages) != n || l.pages[n-1] != (page{0x7fbdee100000 + uint64(n-1)<<16, 1 << 16, 0}) {
			t.Errorf("%d pages are read as %+v", n, l)
		}
		if err := l.checkMapping(1 << 16); err != nil {
			t.Error(err)
		}
	}
}

func TestPages_round_trip(t *testing.T) {
	for _, n := range []int{1, 2, 3, 7, 8, 255, 256, 257, 5000} {
		for _, m := range modules {
			in := listOf(m, n)
			in.memory = memory(n % 2)
			got, err := parsePages(appendPages(nil, in))
			if err != nil {
				t.Fatalf("%d pages: %v", n, err)
			}
			if got.module != m || got.memory != in.memory || len(got.pages) != n || got.pages[n-1] != in.pages[n-1] {
				t.Errorf("%d pages of %s: %d of %s come back", n, m, len(got.pages), got.module)
			}
		}
	}
}

// Whatever is not the one shape is refused, whole and every prefix of it, and
// with any byte changed but those of the pages and their kind.
func TestPages_refused(t *testing.T) {
	good := unhex(t, twoPages)
	for n := range good {
		if _, err := parsePages(good[:n]); err == nil {
			t.Fatalf("the first %d of %d bytes are taken", n, len(good))
		}
	}
	pages := bytes.Index(good, unhex(t, "000010eebd7f"))
	for i := range good {
		b := bytes.Clone(good)
		b[i] ^= 0x40
		if _, err := parsePages(b); err == nil && (i < pages || i >= pages+2*pageBytes) {
			t.Errorf("byte %d changed: taken", i)
		}
	}
	for name, b := range map[string][]byte{
		"another pickle":  []byte("\x80\x04\x95\x0d\x00\x00\x00\x00\x00\x00\x00cos\nsystem\n."),
		"another module":  appendPages(nil, listOf("os.path", 1)),
		"no pages":        appendPages(nil, listOf(modules[0], 0)),
		"a trailing byte": append(bytes.Clone(good), 0),
		"memory type 2":   appendPages(nil, &pageList{module: modules[0], memory: 2, pages: listOf("", 1).pages}),
	} {
		if _, err := parsePages(b); err == nil {
			t.Errorf("%s is taken", name)
		}
	}
}

func TestPages_check(t *testing.T) {
	for _, c := range []struct {
		name string
		edit func(*pageList)
		want []string // in the error
	}{
		{"length", func(l *pageList) { l.pages[1].length = 77 }, []string{"77", "65536"}},
		{"gap", func(l *pageList) { l.pages[2].addr += 4096 }, []string{"0x7fbdee121000", "0x7fbdee120000"}},
		{"device", func(l *pageList) { l.pages[2].device = 5 }, []string{"device 5"}},
		{"null", func(l *pageList) { l.pages[0].addr = 0 }, []string{"0x0"}},
		{"wraps", func(l *pageList) { l.pages[0].addr = 1<<64 - 4096 }, []string{"0xfffffffffffff000"}},
	} {
		l := listOf(modules[0], 3)
		c.edit(l)
		err := l.checkMapping(1 << 16)
		if err == nil {
			t.Errorf("%s: taken", c.name)
			continue
		}
		for _, w := range c.want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %q does not name %s", c.name, err, w)
			}
		}
	}
}

func TestAgentName(t *testing.T) {
	meta := appendField([]byte(serialStart), "Agent", []byte("peer-7"))
	if name, err := agentName(append(meta, "Conns..."...)); err != nil || name != "peer-7" {
		t.Errorf("%q, %v", name, err)
	}
	for _, b := range []string{"", "nixlSerDes|", "nixlSerDes|Agent\xff\xff\xff\xff\xff\xff\xff\xff", string(appendField([]byte(serialStart), "Agent", nil)),
		string(appendField([]byte(serialStart), "Agent", make([]byte, 5))), string(meta[:len(meta)-1]), "junk"} {
		if name, err := agentName([]byte(b)); err == nil {
			t.Errorf("%q names %q", b, name)
		}
	}
}

// A list that is taken is written back as the same bytes, but for the form of a
// short one's length. testdata has what has to be refused, too.
func FuzzPages(f *testing.F) {
	f.Add(unhex(f, onePage))
	f.Add(unhex(f, twoPages))
	f.Add(appendPages(nil, listOf(modules[2], 300)))
	f.Fuzz(func(t *testing.T, b []byte) {
		l, err := parsePages(b)
		if err != nil {
			return
		}
		l.checkMapping(1 << 16)
		back := appendPages(nil, l)
		if got, err := parsePages(back); err != nil || !reflect.DeepEqual(got, l) {
			t.Fatalf("written back as something else: %v", err)
		}
		if len(back) == len(b) && !bytes.Equal(back, b) {
			t.Fatalf("written back as %x", back)
		}
	})
}

func FuzzAgentName(f *testing.F) {
	f.Add(appendField([]byte(serialStart), "Agent", []byte("peer-7")))
	f.Fuzz(func(t *testing.T, b []byte) { agentName(b) })
}

func FuzzHello(f *testing.F) {
	f.Add(hello{kv.Incarnation{1}, kv.Incarnation{2}, kv.Secret{3}, 4096}.append(nil))
	f.Add(answer{statusOK, kv.Incarnation{1}, 8, 1 << 40, []byte("metadata")}.append(nil))
	f.Add(append(answer{receiver: kv.Incarnation{1}}.append(nil)[:answerBytes-4], 255, 255, 255, 255))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= helloBytes {
			in := [helloBytes]byte(b)
			if h, ok := parseHello(&in); ok && !bytes.Equal(h.append(nil), in[:]) {
				t.Errorf("%x is not what it was parsed from", h.append(nil))
			}
		}
		a, err := readAnswer(bytes.NewReader(b))
		if err == nil && !bytes.Equal(a.append(nil), b[:answerBytes+len(a.metadata)]) {
			t.Errorf("%x is not what it was read from", a.append(nil))
		}
	})
}
