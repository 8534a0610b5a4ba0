package shmlink

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/berthkv/berth/internal/arena"
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
)

const (
	testSlots     = 4
	testSlotBytes = 256 << 10
)

// stand is a receiver with a staging pool beside it, and what it reported.
type stand struct {
	t       *testing.T
	recv    *Receiver
	rpool   *arena.Pool
	staging *arena.Pool
	gens    *arena.Generations
	stageFD int
	wordsFD int
	landed  chan link.Landing
	failed  chan string
	fenced  chan kv.SlotID
	lost    chan error
}

var (
	self   = kv.Incarnation{1}
	owner1 = kv.Incarnation{2}
	secret = kv.Secret{3}
)

func newStand(t *testing.T, slotBytes int64) *stand {
	t.Helper()
	t.Cleanup(func() { goleak.VerifyNone(t) })
	s := &stand{t: t, landed: make(chan link.Landing, 100), failed: make(chan string, 100), fenced: make(chan kv.SlotID, 100), lost: make(chan error, 100)}
	s.rpool, s.staging = newPool(t, false, slotBytes), newPool(t, true, slotBytes)
	var err error
	s.gens, err = arena.NewGenerations(testSlots)
	must(t, err)
	t.Cleanup(func() { s.gens.Close() })
	s.stageFD, err = s.staging.ReadOnlyFD()
	must(t, err)
	s.wordsFD, err = s.gens.ReadOnlyFD()
	must(t, err)
	t.Cleanup(func() { closeAll([]int{s.stageFD, s.wordsFD}) })
	s.recv, err = NewReceiver(ReceiverConfig{Incarnation: self, Path: newPath(), Copiers: 2,
		Pool: link.Pool{Bytes: s.rpool.Bytes(), SlotBytes: slotBytes, FD: -1}}, s.events())
	must(t, err)
	t.Cleanup(func() { s.recv.Close() })
	s.recv.Allow(owner1, secret)
	return s
}

func (s *stand) events() link.ReceiverEvents {
	return link.ReceiverEvents{
		Landed: func(ls []link.Landing) {
			for _, l := range ls {
				s.landed <- l
			}
		},
		Failed: func(_ kv.SlotID, _ kv.Generation, err *fault.Error) { s.failed <- err.Error() },
		Fenced: func(_ kv.Generation, ss []kv.SlotID) {
			for _, x := range ss {
				s.fenced <- x
			}
		},
		Lost: func(_ kv.Incarnation, err error) { s.lost <- err },
		Late: func(kv.SlotID, kv.Generation) {},
	}
}

func newPool(t *testing.T, writable bool, slotBytes int64) *arena.Pool {
	t.Helper()
	p, err := arena.New(arena.Config{Name: "test pool", Slots: testSlots, SlotBytes: slotBytes, Writable: writable})
	must(t, err)
	t.Cleanup(func() { p.Close() })
	return p
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func next[T any](t *testing.T, c <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-c:
	case <-time.After(20 * time.Second):
		t.Fatalf("no %T came", v)
	}
	return v
}

// say sends a hello with descriptors as they are and returns the answer.
func (s *stand) say(h hello, fds ...int) (status, net.Conn) {
	s.t.Helper()
	nc, err := net.Dial("unix", s.recv.Offer())
	must(s.t, err)
	s.t.Cleanup(func() { nc.Close() })
	nc.SetDeadline(time.Now().Add(20 * time.Second))
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	_, _, err = nc.(*net.UnixConn).WriteMsgUnix(h.append(nil), rights, nil)
	must(s.t, err)
	var b [answerBytes]byte
	if n, err := nc.Read(b[:]); err != nil || n != len(b) {
		return 0xffff, nc
	}
	a, ok := parseAnswer(&b)
	if !ok || a.receiver != self {
		s.t.Fatalf("answer %x", b)
	}
	return a.status, nc
}

func goodHello(slotBytes uint64) hello { return hello{self, owner1, secret, testSlots, slotBytes} }

func memfile(t *testing.T, size int64, seals int) int {
	t.Helper()
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	must(t, err)
	defer unix.Close(fd)
	must(t, unix.Ftruncate(fd, size))
	if seals != 0 {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
		must(t, err)
	}
	ro, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	must(t, err)
	t.Cleanup(func() { unix.Close(ro) })
	return ro
}

func openFDs(t *testing.T) int {
	e, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return len(e)
}

// What a sender passes is checked before it is mapped, and no descriptor of a
// refused hello stays open.
func TestHelloIsChecked(t *testing.T) {
	const shrink, write = unix.F_SEAL_SHRINK, unix.F_SEAL_FUTURE_WRITE
	size := int64(testSlots * testSlotBytes)
	for _, c := range []struct {
		name string
		edit func(*hello)
		fds  func(*stand) []int
		want status
	}{
		{"ok", nil, nil, statusOK},
		{"other receiver", func(h *hello) { h.receiver[0]++ }, nil, statusOtherReceiver},
		{"unknown owner", func(h *hello) { h.owner[0]++ }, nil, statusRefused},
		{"wrong secret", func(h *hello) { h.secret[15]++ }, nil, statusRefused},
		{"no slots", func(h *hello) { h.slots = 0 }, nil, statusLayout},
		{"one slot too many", func(h *hello) { h.slots++ }, nil, statusMemory},
		{"above the limit of slots", func(h *hello) { h.slots = kv.MaxSlots + 1 }, nil, statusLayout},
		{"other slot_bytes", func(h *hello) { h.slotBytes++ }, nil, statusLayout},
		{"slot_bytes that overflow", func(h *hello) { h.slotBytes = 1 << 63 }, nil, statusLayout},
		{"no descriptors", nil, func(s *stand) []int { return nil }, statusMemory},
		{"one descriptor", nil, func(s *stand) []int { return []int{s.stageFD} }, statusMemory},
		{"three descriptors", nil, func(s *stand) []int { return []int{s.stageFD, s.wordsFD, s.wordsFD} }, 0xffff},
		{"forty descriptors", nil, func(s *stand) []int { return slicesRepeat(s.wordsFD, 40) }, 0xffff},
		{"swapped", nil, func(s *stand) []int { return []int{s.wordsFD, s.stageFD} }, statusMemory},
		{"writable", nil, func(s *stand) []int { return []int{s.staging.FD(), s.wordsFD} }, statusMemory},
		{"not sealed", nil, func(s *stand) []int { return []int{memfile(t, size, 0), s.wordsFD} }, statusMemory},
		{"sealed", nil, func(s *stand) []int { return []int{memfile(t, size, shrink), s.wordsFD} }, statusOK},
		{"too short", nil, func(s *stand) []int { return []int{memfile(t, size-1, shrink), s.wordsFD} }, statusMemory},
		{"far too long", nil, func(s *stand) []int { return []int{memfile(t, size+maxExcess+1, shrink), s.wordsFD} }, statusMemory},
		{"words writable by others", nil, func(s *stand) []int { return []int{s.stageFD, memfile(t, 4096, shrink)} }, statusMemory},
		{"words may shrink", nil, func(s *stand) []int { return []int{s.stageFD, memfile(t, 4096, write)} }, statusMemory},
		{"words too short", nil, func(s *stand) []int { return []int{s.stageFD, memfile(t, 8*testSlots-1, shrink|write)} }, statusMemory},
		{"not a memfd", nil, func(s *stand) []int {
			f, err := os.Open("/proc/self/exe")
			must(t, err)
			t.Cleanup(func() { f.Close() })
			return []int{int(f.Fd()), s.wordsFD}
		}, statusMemory},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newStand(t, testSlotBytes)
			h, fds := goodHello(testSlotBytes), []int{s.stageFD, s.wordsFD}
			if c.edit != nil {
				c.edit(&h)
			}
			if c.fds != nil {
				fds = c.fds(s)
			}
			before := openFDs(t)
			got, nc := s.say(h, fds...)
			if got != c.want {
				t.Fatalf("answered %v, want %v", got, c.want)
			}
			if (s.recv.Mapped() > 0) != (c.want == statusOK) {
				t.Errorf("%d bytes are mapped", s.recv.Mapped())
			}
			nc.Close()
			if c.want == statusOK {
				next(t, s.lost)
			}
			must(t, s.recv.Close())
			if s.recv.Mapped() != 0 {
				t.Errorf("%d bytes are mapped after Close", s.recv.Mapped())
			}
			if now := openFDs(t); now > before {
				t.Errorf("%d descriptors are open, %d were before", now, before)
			}
		})
	}
}

func slicesRepeat(fd, n int) []int {
	s := make([]int, n)
	for i := range s {
		s[i] = fd
	}
	return s
}

// A newer connection of the same owner replaces the older one, without a loss.
func TestConnectionIsReplaced(t *testing.T) {
	s := newStand(t, testSlotBytes)
	_, first := s.say(goodHello(testSlotBytes), s.stageFD, s.wordsFD)
	mapped := s.recv.Mapped()
	if st, _ := s.say(goodHello(testSlotBytes), s.stageFD, s.wordsFD); st != statusOK {
		t.Fatal(st)
	}
	if _, err := first.Read(make([]byte, 1)); err == nil {
		t.Error("the older connection is still open")
	}
	if s.recv.Mapped() != mapped {
		t.Errorf("%d bytes are mapped, %d by one connection", s.recv.Mapped(), mapped)
	}
	s.recv.Open(owner1, 1, []kv.SlotID{0})
	s.recv.Pull(owner1, 1, []link.PullItem{{Slot: 0, Src: 1, SrcGen: 0, Bytes: 10}})
	next(t, s.landed)
	select {
	case err := <-s.lost:
		t.Errorf("lost: %v", err)
	default:
	}
}

// A fault in a sender's memory ends that sender's link, and nothing else. The
// seals keep it from happening; here the checks are passed by.
func TestFaultEndsOneLink(t *testing.T) {
	s := newStand(t, testSlotBytes)
	_, nc := s.say(goodHello(testSlotBytes), s.stageFD, s.wordsFD)
	other := goodHello(testSlotBytes)
	other.owner = kv.Incarnation{9}
	s.recv.Allow(other.owner, secret)
	if st, _ := s.say(other, s.stageFD, s.wordsFD); st != statusOK {
		t.Fatal(st)
	}

	fd, err := unix.MemfdCreate("short", unix.MFD_CLOEXEC)
	must(t, err)
	defer unix.Close(fd)
	must(t, unix.Ftruncate(fd, testSlots*testSlotBytes))
	bad, err := unix.Mmap(fd, 0, testSlots*testSlotBytes, unix.PROT_READ, unix.MAP_SHARED)
	must(t, err)
	must(t, unix.Ftruncate(fd, 0))
	s.recv.mu.Lock()
	p := s.recv.owners[owner1].peer
	p.m.staging, bad = bad, p.m.staging
	s.recv.mu.Unlock()
	defer unix.Munmap(bad)

	s.recv.Open(owner1, 1, []kv.SlotID{0})
	s.recv.Pull(owner1, 1, []link.PullItem{{Slot: 0, Src: 0, Bytes: 100}})
	if text := next(t, s.failed); !strings.Contains(text, "fault") {
		t.Errorf("failed: %s", text)
	}
	if err := next(t, s.lost); !strings.Contains(err.Error(), "fault") {
		t.Errorf("lost: %v", err)
	}
	if _, err := nc.Read(make([]byte, 1)); err == nil {
		t.Error("the connection is still open")
	}
	s.recv.Pull(owner1, 1, []link.PullItem{{Slot: 0, Src: 0, Bytes: 100}})
	if text := next(t, s.failed); !strings.Contains(text, "no shm link") {
		t.Errorf("failed: %s", text)
	}
	s.recv.Revoke(1, []kv.SlotID{0})
	s.recv.Open(other.owner, 2, []kv.SlotID{0})
	s.recv.Pull(other.owner, 2, []link.PullItem{{Slot: 0, Src: 0, Bytes: 100}})
	next(t, s.landed)
}

// The staging slot is handed out again, and filled by its next user, while it
// is being copied: what lands is whole and of the generation asked for.
func TestSourceReusedUnderACopy(t *testing.T) {
	const size = 16 << 20
	s := newStand(t, size)
	s.say(goodHello(size), s.stageFD, s.wordsFD)
	src, dst := s.staging.Bytes()[:size], s.rpool.Bytes()[:size]
	seen := func() bool { // the first word of the slot has been copied
		return (*atomic.Uint32)(unsafe.Pointer(&dst[0])).Load() != 0
	}
	failed := 0
	for round := kv.Generation(1); round < 20 || failed == 0; round++ {
		first, second := bytes.Repeat([]byte{1}, size), bytes.Repeat([]byte{2}, size)
		s.gens.Store(0, 2*round)
		copy(src, first)
		clear(dst)
		s.recv.Open(owner1, round, []kv.SlotID{0})
		s.recv.Pull(owner1, round, []link.PullItem{{Slot: 0, Src: 0, SrcGen: 2 * round, Bytes: size}})
		for !seen() && len(s.landed) == 0 {
			runtime.Gosched()
		}
		s.gens.Store(0, 2*round+1)
		copy(src, second)
		select {
		case <-s.landed:
			if !bytes.Equal(dst, first) {
				t.Fatal("a chunk landed that is not what was staged under its generation")
			}
		case text := <-s.failed:
			failed++
			if want := fmt.Sprintf("holds generation %d, not %d", 2*round+1, 2*round); !strings.Contains(text, want) {
				t.Errorf("failed with %q, want %q", text, want)
			}
		case <-time.After(20 * time.Second):
			t.Fatal("neither landed nor failed")
		}
		s.recv.Revoke(round, []kv.SlotID{0})
		next(t, s.fenced)
	}
}

// Slots that are revoked before a copier comes to them are fenced at once, and
// cost nothing afterwards, however often.
func TestRevokeBeforeTheCopy(t *testing.T) {
	s := newStand(t, testSlotBytes)
	s.say(goodHello(testSlotBytes), s.stageFD, s.wordsFD)
	for gen := kv.Generation(1); gen <= 2000; gen++ {
		s.recv.Open(owner1, gen, []kv.SlotID{0})
		s.recv.Pull(owner1, gen, []link.PullItem{{Slot: 0, Src: 0, SrcGen: 0, Bytes: 64}})
		s.recv.Revoke(gen, []kv.SlotID{0})
		next(t, s.fenced)
		s.recv.mu.Lock()
		if p, o := len(s.recv.pending), len(s.recv.order); p > 1 || o > 1 {
			t.Errorf("%d jobs, %d in order, of one slot", p, o)
		}
		s.recv.mu.Unlock()
		for len(s.landed) > 0 {
			<-s.landed
		}
	}
}

func TestPath(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct {
		name, path, err string
		before          func(path string)
	}{
		{"free", filepath.Join(dir, "a"), "", nil},
		{"left behind", filepath.Join(dir, "b"), "", func(p string) {
			l, err := net.ListenUnix("unix", &net.UnixAddr{Name: p})
			must(t, err)
			l.SetUnlinkOnClose(false)
			l.Close()
		}},
		{"taken", filepath.Join(dir, "c"), "c\"", func(p string) {
			l, err := net.Listen("unix", p)
			must(t, err)
			t.Cleanup(func() { l.Close() })
		}},
		{"not a socket", filepath.Join(dir, "d"), "d\"", func(p string) { must(t, os.WriteFile(p, nil, 0o600)) }},
		{"none", "", "0 bytes", nil},
		{"107 bytes", "@" + strings.Repeat("x", 106), "", nil},
		{"108 bytes", "@" + strings.Repeat("x", 107), "108 bytes", nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.before != nil {
				c.before(c.path)
			}
			p := newPool(t, false, testSlotBytes)
			r, err := NewReceiver(ReceiverConfig{Path: c.path, Pool: link.Pool{Bytes: p.Bytes(), SlotBytes: testSlotBytes}}, link.ReceiverEvents{})
			if err == nil {
				r.Close()
			}
			if c.err == "" && err != nil || c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)) {
				t.Errorf("error %v, want %q", err, c.err)
			}
		})
	}
}

// r57: a path where nobody answers costs a bounded time.
func TestConnectIsCancelled(t *testing.T) {
	l, err := net.Listen("unix", newPath())
	must(t, err)
	defer l.Close()
	s := NewSender(SenderConfig{Slots: 1, SlotBytes: 1, Staging: 0, Generations: 0})
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		nc, err := l.Accept()
		if err == nil {
			defer nc.Close()
			nc.Read(make([]byte, 1))
		}
		cancel()
	}()
	if _, err := s.Connect(ctx, link.Peer{Addr: l.Addr().String()}, link.SenderEvents{}); err == nil {
		t.Error("connected to a silent peer")
	}
}

func FuzzHello(f *testing.F) {
	f.Add(goodHello(testSlotBytes).append(nil))
	f.Add(hello{}.append(nil))
	f.Add(answer{statusMemory, self}.append(make([]byte, 0, helloBytes))[:helloBytes])
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

func FuzzRights(f *testing.F) {
	f.Add(unix.UnixRights(3, 4))
	f.Add(unix.UnixRights())
	f.Add(append(unix.UnixRights(1), unix.UnixRights(2, 3, 4)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		if fds, _ := parseRights(b); len(fds) > len(b)/4 {
			t.Errorf("%d descriptors from %d bytes", len(fds), len(b))
		}
	})
}
