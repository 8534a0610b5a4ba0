package tcplink

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/berthkv/berth/internal/arena"
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
	"github.com/berthkv/berth/internal/link/gate"
)

const (
	testSlots     = 4
	testSlotBytes = 64 << 10
)

var (
	self   = kv.Incarnation{1}
	owner1 = kv.Incarnation{2}
	secret = kv.Secret{3}
)

// stand is a receiver to which tests speak byte by byte, and what it reported.
type stand struct {
	t      testing.TB
	recv   *Receiver
	pool   link.Pool
	landed chan link.Landing
	fenced chan kv.SlotID
	late   chan kv.SlotID
	lost   chan error
}

func newStand(t testing.TB, edit func(*ReceiverConfig)) *stand {
	t.Helper()
	before := goleak.IgnoreCurrent()
	t.Cleanup(func() { goleak.VerifyNone(t, before) })
	p, err := arena.New(arena.Config{Name: "test pool", Slots: testSlots, SlotBytes: testSlotBytes, Anonymous: true})
	must(t, err)
	t.Cleanup(func() { p.Close() })
	s := &stand{t: t, pool: link.Pool{Bytes: p.Bytes(), SlotBytes: testSlotBytes, FD: -1}, landed: make(chan link.Landing, 1000),
		fenced: make(chan kv.SlotID, 1000), late: make(chan kv.SlotID, 1000), lost: make(chan error, 10)}
	cfg := ReceiverConfig{Incarnation: self, Pool: s.pool, Listen: "127.0.0.1:0", LostGrace: time.Millisecond}
	if edit != nil {
		edit(&cfg)
	}
	s.recv, err = NewReceiver(cfg, link.ReceiverEvents{
		Landed: func(ls []link.Landing) { s.landed <- ls[0] },
		Failed: func(kv.SlotID, kv.Generation, *fault.Error) {},
		Fenced: func(_ kv.Generation, ss []kv.SlotID) {
			for _, x := range ss {
				s.fenced <- x
			}
		},
		Lost: func(_ kv.Incarnation, err error) { s.lost <- err },
		Late: func(x kv.SlotID, _ kv.Generation) { s.late <- x },
	})
	must(t, err)
	t.Cleanup(func() { s.recv.Close() })
	s.recv.Allow(owner1, secret)
	return s
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func next[T any](t testing.TB, c <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-c:
	case <-time.After(20 * time.Second):
		t.Fatalf("no %T came", v)
	}
	return v
}

// raw is a data connection on which a test writes bytes.
type raw struct {
	t testing.TB
	net.Conn
}

func (s *stand) dial() raw {
	s.t.Helper()
	nc, err := net.Dial("tcp", s.recv.Offer())
	must(s.t, err)
	s.t.Cleanup(func() { nc.Close() })
	nc.SetDeadline(time.Now().Add(20 * time.Second))
	return raw{s.t, nc}
}

// hello says hello and returns the answer's status.
func (c raw) hello(h hello) status {
	c.t.Helper()
	_, err := c.Write(h.append(nil))
	must(c.t, err)
	var b [answerBytes]byte
	_, err = io.ReadFull(c, b[:])
	must(c.t, err)
	a, ok := parseAnswer(&b)
	if !ok || a.receiver != self {
		c.t.Fatalf("answer %x", b)
	}
	return a.status
}

func (s *stand) connect() raw {
	s.t.Helper()
	c := s.dial()
	if st := c.hello(hello{self, owner1, secret}); st != statusOK {
		s.t.Fatal(st)
	}
	return c
}

func (c raw) put(f frame, data []byte) {
	c.t.Helper()
	var b [frameBytes]byte
	f.put(&b)
	_, err := c.Write(append(b[:], data...))
	must(c.t, err)
}

// closed reports whether the receiver closes the connection.
func (c raw) closed() bool {
	_, err := c.Read(make([]byte, 1))
	return err != nil && !errors.Is(err, os.ErrDeadlineExceeded)
}

func filled(b byte, n int) []byte { return bytes.Repeat([]byte{b}, n) }

// arrived waits until the first byte of a slot is b.
func (s *stand) arrived(i kv.SlotID, b byte) {
	s.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); s.pool.Slot(i)[0] != b; runtime.Gosched() {
		if time.Now().After(deadline) {
			s.t.Fatal("the first byte did not come")
		}
	}
}

// Two readers for one slot: who comes last fills it, from byte 0, and the other
// one's frame is thrown away, wherever it was.
func TestTwoReadersForOneSlot(t *testing.T) {
	s := newStand(t, nil)
	a, b := s.connect(), s.connect()
	for gen := kv.Generation(1); gen <= 50; gen++ {
		s.recv.Open(owner1, gen, []kv.SlotID{0, 1})
		const n = 5000
		a.put(frame{0, gen, n}, filled(1, 100))
		s.arrived(0, 1)
		b.put(frame{0, gen, n}, filled(2, 10))
		s.arrived(0, 2)
		a.put(frame{}, nil) // 16 bytes more of its frame
		must2(a.Write(filled(1, n-100-frameBytes)))
		must2(b.Write(filled(2, n-10)))
		if l := next(t, s.landed); l.Slot != 0 || l.Bytes != n || !bytes.Equal(s.pool.Slot(0)[:n], filled(2, n)) {
			t.Fatalf("landed %+v, %x...", l, s.pool.Slot(0)[:200])
		}
		a.put(frame{1, gen, 3}, filled(4, 3)) // its connection goes on
		next(t, s.landed)
		s.recv.Revoke(gen, []kv.SlotID{0, 1})
		next(t, s.fenced)
		next(t, s.fenced)
		s.pool.Slot(0)[0] = 0
	}
}

func must2(_ int, err error) {
	if err != nil {
		panic(err)
	}
}

func TestLengthsAndSlots(t *testing.T) {
	for _, c := range []struct {
		name   string
		f      frame
		closes bool
	}{
		{"a byte", frame{0, 1, 1}, false},
		{"nothing", frame{0, 1, 0}, false}, // the core compares lengths
		{"a slot", frame{testSlots - 1, 1, testSlotBytes}, false},
		{"a byte more than a slot", frame{0, 1, testSlotBytes + 1}, true},
		{"4 GiB", frame{0, 1, 1<<32 - 1}, true},
		{"a byte too much for a slot that is not open", frame{0, 2, testSlotBytes + 1}, true},
		{"past the last slot", frame{testSlots, 1, 1}, true},
		{"no slot at all", frame{1<<32 - 1, 1, 1}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newStand(t, nil)
			conn := s.connect()
			s.recv.Open(owner1, 1, []kv.SlotID{0, 1, 2, 3})
			conn.put(c.f, filled(9, int(min(c.f.length, testSlotBytes))))
			if c.closes {
				if !conn.closed() {
					t.Error("the connection was not closed")
				}
				next(t, s.lost)
				return
			}
			if l := next(t, s.landed); l.Bytes != int64(c.f.length) || l.Slot != c.f.slot {
				t.Errorf("landed %+v", l)
			}
		})
	}
}

func TestHellos(t *testing.T) {
	good := hello{self, owner1, secret}
	for _, c := range []struct {
		name string
		h    hello
		want status
	}{
		{"good", good, statusOK},
		{"other receiver", hello{kv.Incarnation{7}, owner1, secret}, statusOtherReceiver},
		{"unknown owner", hello{self, kv.Incarnation{7}, secret}, statusRefused},
		{"unknown owner, no secret", hello{self, kv.Incarnation{7}, kv.Secret{}}, statusRefused},
		{"wrong secret", hello{self, owner1, kv.Secret{4}}, statusRefused},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newStand(t, nil)
			conn := s.dial()
			if st := conn.hello(c.h); st != c.want {
				t.Errorf("%v, want %v", st, c.want)
			}
			if c.want != statusOK && !conn.closed() {
				t.Error("the connection was not closed")
			}
		})
	}
}

// Garbage costs only its own connection.
func TestGarbage(t *testing.T) {
	s := newStand(t, nil)
	good := s.connect()
	for _, b := range []string{"GET / HTTP/1.1\r\nHost: berth.example\r\n\r\nxxxxxxxxxxxxxxxx", strings.Repeat("\x00", 100), "BTD2" + strings.Repeat("x", 48)} {
		c := s.dial()
		must2(c.Write([]byte(b)))
		if !c.closed() {
			t.Errorf("%q was not refused", b)
		}
	}
	s.recv.Open(owner1, 1, []kv.SlotID{0})
	good.put(frame{0, 1, 5}, filled(1, 5))
	next(t, s.landed)
}

// At the limit of connections, and one past it.
func TestConnectionsOfOneOwner(t *testing.T) {
	s := newStand(t, func(c *ReceiverConfig) { c.MaxConnections = 3 })
	first := s.connect()
	s.connect()
	s.connect()
	if st := s.dial().hello(hello{self, owner1, secret}); st != statusTooMany {
		t.Errorf("the fourth of three: %v", st)
	}
	other := kv.Incarnation{8}
	s.recv.Allow(other, secret)
	if st := s.dial().hello(hello{self, other, secret}); st != statusOK {
		t.Errorf("another owner: %v", st)
	}
	first.Close()
	for st := statusTooMany; st != statusOK; { // as soon as the end is noticed
		if st = s.dial().hello(hello{self, owner1, secret}); st != statusOK && st != statusTooMany {
			t.Fatal(st)
		}
	}
}

// At the limit of all owners' connections nobody gets a second one, and everybody
// a first; what ends makes room.
func TestConnectionsOfAllOwners(t *testing.T) {
	s := newStand(t, func(c *ReceiverConfig) { c.MaxTotal = 3 })
	other := kv.Incarnation{8}
	s.recv.Allow(other, secret)
	last := s.connect()
	s.connect()
	s.connect()
	for _, step := range []struct {
		owner kv.Incarnation
		want  status
	}{{owner1, statusTooMany}, {other, statusOK}, {other, statusTooMany}} {
		if st := s.dial().hello(hello{self, step.owner, secret}); st != step.want {
			t.Errorf("another connection of %s: %v, want %v", step.owner.Short(), st, step.want)
		}
	}
	last.Close()
	s.recv.Disallow(other)
	for st := statusTooMany; st != statusOK; { // as soon as the end is noticed
		if st = s.dial().hello(hello{self, owner1, secret}); st != statusOK && st != statusTooMany {
			t.Fatal(st)
		}
	}
}

// An owner without a connection is lost, but not while it dials again.
func TestLostAfterGrace(t *testing.T) {
	s := newStand(t, nil)
	for range 3 {
		s.connect().Close()
		if err := next(t, s.lost); !strings.Contains(err.Error(), owner1.Short()) {
			t.Errorf("lost: %v", err)
		}
	}
	patient := newStand(t, func(c *ReceiverConfig) { c.LostGrace = 300 * time.Millisecond })
	var conn raw
	for range 50 {
		c := patient.connect()
		if conn.Conn != nil {
			conn.Close()
		}
		conn = c
	}
	select {
	case err := <-patient.lost:
		t.Errorf("lost with a connection: %v", err)
	default:
	}
}

func TestPermitAndAddresses(t *testing.T) {
	asked := make(chan netip.Addr, 1)
	s := newStand(t, func(c *ReceiverConfig) {
		c.Permit = func(a netip.Addr) bool { asked <- a; return false }
	})
	if !s.dial().closed() {
		t.Error("served without permission")
	}
	if a := next(t, asked); a != netip.MustParseAddr("127.0.0.1") {
		t.Errorf("asked about %v", a)
	}
}

// r63: IPv6, in brackets where a port follows.
func TestIPv6(t *testing.T) {
	s := newStand(t, func(c *ReceiverConfig) { c.Listen = "[::1]:0" })
	if !strings.HasPrefix(s.recv.Offer(), "[::1]:") {
		t.Errorf("offer %q", s.recv.Offer())
	}
	sender := NewSender(SenderConfig{Pool: s.pool})
	defer sender.Close()
	c, err := sender.Connect(t.Context(), link.Peer{Incarnation: self, Addr: s.recv.Offer(), Self: owner1, Secret: secret}, link.SenderEvents{
		Sent: func([]link.WriteID) {}, Lost: func([]link.WriteID, error) {}, Down: func(error) {}})
	must(t, err)
	s.recv.Open(owner1, 1, []kv.SlotID{0})
	c.Write([]link.Write{{ID: 1, Src: 2, Dst: 0, Generation: 1, Bytes: 100}})
	next(t, s.landed)
	must(t, c.Close())
}

func TestListen(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer taken.Close()
	pool := link.Pool{Bytes: make([]byte, 1), SlotBytes: 1}
	for _, c := range []struct{ listen, advertise, err string }{
		{taken.Addr().String(), "", taken.Addr().String()}, // r59
		{"0.0.0.0:0", "", "advertise"},
		{"[::]:0", "", "advertise"},
		{"0.0.0.0:0", "kv1.example", ""},
		{"", "", "advertise"},
		{"127.0.0.1:99999", "", "99999"},
	} {
		r, err := NewReceiver(ReceiverConfig{Listen: c.listen, Advertise: c.advertise, Pool: pool}, link.ReceiverEvents{})
		if err == nil {
			if !strings.HasPrefix(r.Offer(), "kv1.example:") {
				t.Errorf("offer %q", r.Offer())
			}
			r.Close()
		}
		if c.err == "" && err != nil || c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)) {
			t.Errorf("listen on %q: error %v, want %q", c.listen, err, c.err)
		}
	}
}

// At the limit of what a frame can carry, and one byte past it.
func TestLargestSlot(t *testing.T) {
	for size, ok := range map[int64]bool{1<<32 - 1: true, 1 << 32: false} {
		r, err := NewReceiver(ReceiverConfig{Listen: "127.0.0.1:0", Pool: link.Pool{SlotBytes: size}}, link.ReceiverEvents{})
		if err == nil {
			r.Close()
		}
		if (err == nil) != ok {
			t.Errorf("slots of %d bytes: %v", size, err)
		}
	}
}

// r57: a receiver that accepts and never answers costs a bounded time.
func TestSilentReceiver(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer l.Close()
	s := NewSender(SenderConfig{Pool: link.Pool{Bytes: make([]byte, 1), SlotBytes: 1}, DialTimeout: 20 * time.Millisecond})
	defer s.Close()
	if _, err := s.Connect(t.Context(), link.Peer{Addr: l.Addr().String()}, link.SenderEvents{}); err == nil {
		t.Error("connected to a silent peer")
	}
}

// A receiver that reads nothing breaks the connection after the write timeout,
// and the write is lost; the kernel keeps the time.
func TestWriteTimeout(t *testing.T) {
	t.Cleanup(func() { goleak.VerifyNone(t) })
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	pool, err := arena.New(arena.Config{Name: "test pool", Slots: 1, SlotBytes: 64 << 20, Anonymous: true})
	must(t, err)
	defer pool.Close()
	over := make(chan struct{})
	served := make(chan error, 1)
	go func() {
		nc, err := l.Accept()
		l.Close() // the sender cannot dial again
		if err == nil {
			defer nc.Close()
			var b [helloBytes]byte
			if _, err = io.ReadFull(nc, b[:]); err == nil {
				_, err = nc.Write(answer{statusOK, self}.append(nil))
			}
		}
		served <- err
		<-over
	}()
	lost, down := make(chan error, 1), make(chan error, 1)
	s := NewSender(SenderConfig{Pool: link.Pool{Bytes: pool.Bytes(), SlotBytes: 64 << 20}, Connections: 1, WriteTimeout: 50 * time.Millisecond})
	c, err := s.Connect(t.Context(), link.Peer{Incarnation: self, Addr: l.Addr().String()}, link.SenderEvents{
		Sent: func([]link.WriteID) { t.Error("sent") },
		Lost: func(_ []link.WriteID, err error) { lost <- err },
		Down: func(err error) { down <- err },
	})
	must(t, err)
	must(t, next(t, served))
	c.Write([]link.Write{{ID: 1, Bytes: 64 << 20}})
	if err := next(t, lost); !strings.Contains(err.Error(), "timed out") {
		t.Errorf("lost: %v", err)
	}
	next(t, down)
	close(over)
	must(t, s.Close())
}

// Any stream of bytes: what lands is what a second, simple reader says.
func FuzzFrames(f *testing.F) {
	var b [frameBytes]byte
	frame{0, 1, 5}.put(&b)
	f.Add(append(b[:], "hello"...))
	frame{1, 2, 0}.put(&b)
	f.Add(append(append([]byte(nil), b[:]...), b[:]...))
	frame{3, 1, testSlotBytes + 1}.put(&b)
	f.Add(b[:])
	f.Add([]byte("short"))
	f.Fuzz(func(t *testing.T, in []byte) {
		pool := link.Pool{Bytes: make([]byte, testSlots*testSlotBytes), SlotBytes: testSlotBytes, FD: -1}
		landed := 0
		r := &Receiver{cfg: ReceiverConfig{Pool: pool}, gate: gate.New(testSlots), ev: link.ReceiverEvents{
			Landed: func([]link.Landing) { landed++ },
			Late:   func(kv.SlotID, kv.Generation) {},
		}}
		r.Open(owner1, 1, []kv.SlotID{0, 1})
		err := (&reader{r: r, nc: &bytesConn{r: bytes.NewReader(in)}, owner: owner1}).frames()
		if err == nil {
			t.Fatal("a finite stream has no end")
		}
		// A deliberately simple second reader of the same bytes.
		want, open := 0, map[kv.SlotID]bool{0: true, 1: true}
		for rest := in; len(rest) >= frameBytes; {
			h := parseFrame((*[frameBytes]byte)(rest))
			rest = rest[frameBytes:]
			if h.slot >= testSlots || h.length > testSlotBytes || int(h.length) > len(rest) {
				break
			}
			if h.gen == 1 && open[h.slot] {
				open[h.slot] = false
				want++
				if !bytes.Equal(pool.Slot(h.slot)[:h.length], rest[:h.length]) {
					t.Errorf("slot %d does not hold its frame", h.slot)
				}
			}
			rest = rest[h.length:]
		}
		if landed != want {
			t.Errorf("%d chunks landed, want %d (%v)", landed, want, err)
		}
	})
}

// bytesConn is a connection from which bytes come until they end.
type bytesConn struct {
	net.Conn
	r io.Reader
}

func (c *bytesConn) Read(b []byte) (int, error)      { return c.r.Read(b) }
func (c *bytesConn) SetReadDeadline(time.Time) error { return nil }
func (c *bytesConn) Close() error                    { return nil }

func FuzzHello(f *testing.F) {
	f.Add(hello{self, owner1, secret}.append(nil))
	f.Add(answer{statusRefused, self}.append(make([]byte, 30)))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < helloBytes {
			return
		}
		in := [helloBytes]byte(b)
		if h, ok := parseHello(&in); ok && !bytes.Equal(h.append(nil), in[:]) {
			t.Errorf("%x is not what it was parsed from", h.append(nil))
		}
		out := [answerBytes]byte(b)
		if a, ok := parseAnswer(&out); ok && !bytes.Equal(a.append(nil), out[:]) {
			t.Errorf("%x is not what it was parsed from", a.append(nil))
		}
	})
}

// The layouts of PROTOCOL.md, byte by byte.
func TestLayouts(t *testing.T) {
	var b [frameBytes]byte
	frame{0x01020304, 0x1112131415161718, 0x21222324}.put(&b)
	for _, c := range []struct{ got, want string }{
		{fmt.Sprintf("%x", b), "04030201" + "1817161514131211" + "24232221"},
		{fmt.Sprintf("%x", hello{kv.Incarnation{0xa}, kv.Incarnation{0xb}, kv.Secret{0xc}}.append(nil)),
			"42544431" + "0a" + strings.Repeat("00", 15) + "0b" + strings.Repeat("00", 15) + "0c" + strings.Repeat("00", 15)},
		{fmt.Sprintf("%x", answer{statusTooMany, kv.Incarnation{0xd}}.append(nil)), "42544431" + "03000000" + "0d" + strings.Repeat("00", 15)},
	} {
		if c.got != c.want {
			t.Errorf("%s, want %s", c.got, c.want)
		}
	}
}
