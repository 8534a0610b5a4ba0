package nixllink

import (
	"bytes"
	"context"
	"encoding/binary"
	"strings"
	"testing"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
	"golang.org/x/sys/unix"
)

const testSlot = 64 << 10

func testPool(t *testing.T, slots int) link.Pool {
	t.Helper()
	b, err := unix.Mmap(-1, 0, slots*testSlot, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(b) })
	return link.Pool{Bytes: b, SlotBytes: testSlot, FD: -1}
}

func metadataOf(name string) []byte {
	return append(appendField([]byte(serialStart), "Agent", []byte(name)), "Conns"...)
}

// An LMCache sender's list, often of a GPU and with its own number of pages,
// must have our page length; ours comes back in the module that it has named.
func TestHandshake_receiver(t *testing.T) {
	pool := testPool(t, 10)
	r, err := NewReceiver(ReceiverConfig{Library: newLibrary()(t), Agent: newAgentName(), Backends: []string{"UCX"}, Incarnation: kv.Incarnation{1}, Pool: pool,
		Listen: "127.0.0.1:0", Advertise: "127.0.0.1"}, link.ReceiverEvents{})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()

	agent, ours, err := r.Init(metadataOf("peer-7"))
	if err != nil || string(agent) != "peer-7" {
		t.Errorf("%q, %v", agent, err)
	}
	if name, err := agentName(ours); err != nil || !strings.HasPrefix(name, "test-") {
		t.Errorf("our metadata names %q, %v", name, err)
	}
	for _, b := range [][]byte{nil, []byte("junk"), metadataOf(strings.Repeat("x", maxAgentName+1)), metadataOf("a\x00b")} {
		if _, _, err := r.Init(b); err == nil {
			t.Errorf("metadata %.20q is taken", b)
		}
	}

	for _, module := range modules {
		theirs := listOf(module, 37)
		theirs.memory, theirs.pages[4].device = vram, 3
		answer, err := r.Register(appendPages(nil, theirs))
		if err != nil {
			t.Fatal(err)
		}
		l, err := parsePages(answer)
		if err != nil || l.module != module || l.memory != dram || len(l.pages) != 10 || l.pages[0].addr != uint64(address(pool.Bytes)) {
			t.Errorf("%s is answered with %+v, %v", module, l, err)
		}
		if err := l.checkMapping(testSlot); err != nil {
			t.Error(err)
		}
	}
	short := listOf(modules[0], 3)
	short.pages[2].length = 4096
	if _, err := r.Register(appendPages(nil, short)); err == nil || !strings.Contains(err.Error(), "4096") || !strings.Contains(err.Error(), "65536") {
		t.Errorf("pages of 4096 bytes: %v", err)
	}
}

// initPort answers a handshake as it is told to.
type initPort struct {
	metadata, pages []byte
	module          *string
	closed          chan struct{}
}

func (p *initPort) Init(context.Context, []byte) (self, theirs []byte, err error) {
	return []byte("me"), p.metadata, nil
}

func (p *initPort) Register(_ context.Context, self []byte, _ string, pages []byte) ([]byte, error) {
	l, err := parsePages(pages)
	if err == nil {
		*p.module = l.module
	}
	return p.pages, err
}
func (p *initPort) Done() <-chan struct{} { return p.closed }
func (p *initPort) Close() error          { close(p.closed); return nil }

// A receiver's list is checked fully: it is where our writes go.
func TestHandshake_sender(t *testing.T) {
	library := newLibrary()
	peer, err := NewSender(SenderConfig{Library: library(t), Agent: newAgentName(), Backends: []string{"UCX"}, Pool: testPool(t, 2)})
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close() // an agent whose metadata is real
	good := func() *pageList { return listOf(modules[1], 5) }
	for _, c := range []struct {
		name string
		edit func(*initPort)
		want []string // in the error; nil: connected
	}{
		{"good", func(*initPort) {}, nil},
		{"other length", func(p *initPort) {
			l := good()
			l.pages[1].length = 77
			p.pages = appendPages(nil, l)
		}, []string{"77", "65536"}},
		{"not one mapping", func(p *initPort) {
			l := good()
			l.pages[3].addr += 4096
			p.pages = appendPages(nil, l)
		}, []string{"page 3"}},
		{"another pickle", func(p *initPort) { p.pages = []byte("\x80\x04\x95\x0d\x00\x00\x00\x00\x00\x00\x00cos\nsystem\n.") }, []string{"page list"}},
		{"no metadata", func(p *initPort) { p.metadata = []byte("junk") }, []string{"agent metadata"}},
	} {
		var module string
		port := &initPort{metadata: peer.metadata, pages: appendPages(nil, good()), module: &module, closed: make(chan struct{})}
		c.edit(port)
		s, err := NewSender(SenderConfig{Library: library(t), Agent: newAgentName(), Backends: []string{"UCX"}, Pool: testPool(t, 4), Module: "nixl_cu12._bindings",
			DialInit: func(context.Context, string) (InitPort, error) { return port, nil }})
		if err != nil {
			t.Fatal(err)
		}
		conn, err := s.Connect(t.Context(), link.Peer{Addr: "init"}, link.SenderEvents{Down: func(error) {}})
		switch {
		case c.want == nil && (err != nil || module != "nixl_cu12._bindings" || !fivePages(conn)):
			t.Errorf("%s: %v, %q", c.name, err, module)
		case c.want != nil && err == nil:
			t.Errorf("%s: connected", c.name)
		}
		for _, w := range c.want {
			if err != nil && !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %v does not name %s", c.name, err, w)
			}
		}
		if conn != nil {
			conn.Close()
		}
		<-port.closed
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
}

func fivePages(c link.Conn) bool { return len(c.(*conn).pages.pages) == 5 }

// Bounds on what a Berth receiver answers to a hello.
func TestAnswer(t *testing.T) {
	good := answer{receiver: kv.Incarnation{1}, slots: 4, addr: 1 << 20, metadata: metadataOf("x")}
	b := good.append(nil)
	if a, err := readAnswer(bytes.NewReader(b)); err != nil || a.slots != 4 || !bytes.Equal(a.metadata, good.metadata) {
		t.Errorf("%+v, %v", a, err)
	}
	for n := range b {
		if _, err := readAnswer(bytes.NewReader(b[:n])); err == nil {
			t.Fatalf("the first %d of %d bytes are taken", n, len(b))
		}
	}
	huge := bytes.Clone(b)
	binary.LittleEndian.PutUint32(huge[answerBytes-4:], maxMetadata+1)
	if _, err := readAnswer(bytes.NewReader(huge)); err == nil || !strings.Contains(err.Error(), "1048577") {
		t.Errorf("metadata above the limit: %v", err)
	}
	huge[0] ^= 1
	if _, err := readAnswer(bytes.NewReader(huge)); err == nil {
		t.Error("another protocol is taken")
	}
}
