package shmlink

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
	"github.com/berthkv/berth/internal/link/gate"
)

// The memory that a fuzzed peer has: it may write all of it at any time.
const (
	fuzzSlots     = 3
	fuzzSlotBytes = 64
)

// peerMemory is a sender's staging pool and generation words as its own
// process sees them, and the descriptors that it passes on.
type peerMemory struct {
	staging, words     []byte
	stagingFD, wordsFD int
}

func newPeerMemory(tb testing.TB) *peerMemory {
	tb.Helper()
	m := &peerMemory{}
	m.staging, m.stagingFD = sealed(tb, fuzzSlots*fuzzSlotBytes, unix.F_SEAL_SHRINK)
	m.words, m.wordsFD = sealed(tb, fuzzSlots*8, unix.F_SEAL_SHRINK|unix.F_SEAL_FUTURE_WRITE)
	return m
}

func (m *peerMemory) word(i int) []byte { return m.words[8*i : 8*i+8] }

// sealed makes a memfd, maps it writable and returns it open for reading.
func sealed(tb testing.TB, size int, seals int) ([]byte, int) {
	tb.Helper()
	check := func(err error) {
		if err != nil {
			tb.Fatal(err)
		}
	}
	fd, err := unix.MemfdCreate("fuzz", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	check(err)
	f := os.NewFile(uintptr(fd), "memfd")
	defer f.Close()
	check(f.Truncate(int64(size)))
	b, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	check(err)
	_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
	check(err)
	ro, err := os.Open(fmt.Sprint("/proc/self/fd/", fd))
	check(err)
	tb.Cleanup(func() { unix.Munmap(b); ro.Close() })
	return b, int(ro.Fd())
}

// FuzzPull is a peer that writes anything into the memory that it shares, and
// Commits that name anything: slots far outside its pool, other generations,
// lengths that are negative or huge. What lands is what the slot held under the
// generation asked for; no other byte of the receive pool changes; each slot
// that was opened is reported once.
func FuzzPull(f *testing.F) {
	f.Add([]byte{0, 0, 1, 1, 0, 7, 2, 0, 1, 3, 0, 0, 1, 0, 64, 4, 0})
	f.Add([]byte("anything at all may stand in memory that a peer can write"))
	for seed := range byte(10) {
		b := make([]byte, 160)
		for i := range b {
			b[i] = byte(i*int(2*seed+3)) ^ byte(i>>2)*seed
		}
		f.Add(b)
	}
	mem := newPeerMemory(f)
	f.Fuzz(func(t *testing.T, in []byte) {
		pick := func(n int) int {
			if len(in) == 0 {
				return 0
			}
			x := int(in[0]) % n
			in = in[1:]
			return x
		}
		clear(mem.staging)
		clear(mem.words)
		type outcome struct {
			slot kv.SlotID
			gen  kv.Generation
			ok   bool
		}
		var told []outcome
		var fenced []kv.SlotID
		pool := link.Pool{Bytes: make([]byte, testSlots*fuzzSlotBytes), SlotBytes: fuzzSlotBytes, FD: -1}
		r := &Receiver{cfg: ReceiverConfig{Incarnation: self, Pool: pool, Copiers: 1}, gate: gate.New(testSlots),
			owners: map[kv.Incarnation]*owner{}, pending: map[kv.SlotID]job{}, ev: link.ReceiverEvents{
				Landed: func(ls []link.Landing) {
					for _, l := range ls {
						told = append(told, outcome{l.Slot, l.Generation, true})
					}
				},
				Failed: func(s kv.SlotID, g kv.Generation, _ *fault.Error) { told = append(told, outcome{s, g, false}) },
				Fenced: func(_ kv.Generation, s []kv.SlotID) { fenced = append(fenced, s...) },
				Lost:   func(kv.Incarnation, error) {},
			}}
		r.work.L = &r.mu
		c := &copier{r: r}
		ours, theirs := net.Pipe()
		defer ours.Close()
		defer theirs.Close()
		connected := false
		defer r.Disallow(owner1)

		want := bytes.Clone(pool.Bytes) // the receive pool as it must be
		open := map[kv.SlotID]kv.Generation{}
		landed := map[kv.SlotID]bool{}
		next := kv.Generation(0)
		for len(in) > 0 {
			told, fenced = told[:0], fenced[:0]
			s := kv.SlotID(pick(testSlots))
			switch pick(7) {
			case 0: // the peer writes a generation word
				binary.NativeEndian.PutUint64(mem.word(pick(fuzzSlots)), uint64(pick(4)))
			case 1: // ... and a staging slot
				from := pick(len(mem.staging))
				for i := range mem.staging[from:] {
					mem.staging[from+i] = byte(pick(256))
					if pick(4) == 0 {
						break
					}
				}
			case 2:
				if _, ok := open[s]; !ok {
					next++
					open[s] = next
					r.Open(owner1, next, []kv.SlotID{s})
				}
			case 3, 4:
				it := link.PullItem{Slot: s, Src: kv.SlotID(pick(fuzzSlots + 1)), SrcGen: kv.Generation(pick(4)), Bytes: int64(pick(fuzzSlotBytes + 2))}
				switch pick(16) {
				case 0:
					it.Src = 1<<32 - 1
				case 1:
					it.Bytes = -it.Bytes
				case 2:
					it.Bytes = 1<<63 - 1
				case 3:
					it.Src = 1 << 31
				}
				gen := open[s]
				if pick(8) == 0 {
					gen++
				}
				valid := connected && gen == open[s] && gen != 0 && !landed[s] && it.Src < fuzzSlots && it.Bytes >= 0 && it.Bytes <= fuzzSlotBytes &&
					binary.NativeEndian.Uint64(mem.word(int(it.Src))) == uint64(it.SrcGen)
				r.Pull(owner1, gen, []link.PullItem{it})
				if len(r.pending) > 0 {
					c.take()
					for _, j := range c.jobs {
						c.do(j)
					}
					if len(c.landed) > 0 {
						r.ev.Landed(c.landed)
						c.landed = nil
					}
				}
				if len(told) != 1 || told[0] != (outcome{s, gen, valid}) {
					t.Fatalf("%+v under %d, valid %v, is told as %v", it, gen, valid, told)
				}
				if valid {
					landed[s] = true
					copy(want[int(s)*fuzzSlotBytes:], mem.staging[int(it.Src)*fuzzSlotBytes:][:it.Bytes])
				}
			case 5:
				if gen, ok := open[s]; ok {
					r.Revoke(gen, []kv.SlotID{s})
					delete(open, s)
					delete(landed, s)
					if len(fenced) != 1 || fenced[0] != s {
						t.Fatalf("slot %d is revoked, fenced are %v", s, fenced)
					}
				}
			case 6: // a hello, true or not
				r.Allow(owner1, secret)
				h := hello{self, owner1, secret, fuzzSlots, fuzzSlotBytes}
				fds := []int{mem.stagingFD, mem.wordsFD}
				good := true
				switch pick(9) {
				case 0:
					h.secret[3]++
					good = false
				case 1:
					h.slots = uint32(pick(256)) << 24
					good = false
				case 2:
					h.slotBytes = uint64(pick(256)) << 56
					good = false
				case 3:
					h.slots++
					good = false
				case 4:
					fds[0], fds[1] = fds[1], fds[0]
					good = false
				case 5:
					fds = fds[:pick(2)]
					good = false
				}
				// A net.Pipe stands for the connection, which register only keeps.
				if _, st := r.register(h, fds, ours); (st == statusOK) != good {
					t.Fatalf("hello %+v with %d descriptors: %v", h, len(fds), st)
				}
				connected = connected || good
			}
			if !bytes.Equal(pool.Bytes, want) {
				t.Fatal("the receive pool has other bytes than landed in it")
			}
		}
	})
}

// FuzzConn is what a peer may send over the socket: bytes in pieces, with any
// number of descriptors to each. A hello that is read is the one that was sent,
// and no descriptor stays open.
func FuzzConn(f *testing.F) {
	good := goodHello(testSlotBytes).append(nil)
	f.Add(good, []byte{2, 64})
	f.Add(good, []byte{0, 10, 1, 20, 1, 34})
	f.Add(good[:40], []byte{7, 40})
	f.Add(append(good, good...), []byte{3, 1, 0, 127})
	f.Add([]byte("BSM2"), []byte{})
	mem := newPeerMemory(f)
	f.Fuzz(func(t *testing.T, data, cuts []byte) {
		before := openFDs(t)
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		must(t, err)
		var ends [2]*net.UnixConn
		for i, fd := range pair {
			file := os.NewFile(uintptr(fd), "pair")
			c, err := net.FileConn(file)
			file.Close()
			must(t, err)
			ends[i] = c.(*net.UnixConn)
		}
		sent, passed, tooMany := 0, 0, false
		for len(cuts) >= 2 && sent < len(data) && sent < 1000 {
			fds := slicesRepeat(mem.stagingFD, int(cuts[0])%8)
			n := min(1+int(cuts[1]), len(data)-sent)
			var rights []byte
			if len(fds) > 0 {
				rights = unix.UnixRights(fds...)
			}
			if sent < helloBytes {
				passed += len(fds)
				tooMany = tooMany || passed > descriptors
			}
			_, _, err := ends[0].WriteMsgUnix(data[sent:sent+n], rights, nil)
			must(t, err)
			sent += n
			cuts = cuts[2:]
		}
		must(t, ends[0].Close())
		h, fds, err := readHello(ends[1])
		closeAll(fds)
		must(t, ends[1].Close())
		if want := sent >= helloBytes && !tooMany && string(data[:4]) == magic; (err == nil) != want {
			t.Errorf("%d bytes and %d descriptors: %v, want a hello: %v", sent, passed, err, want)
		}
		if err == nil && !bytes.Equal(h.append(nil), data[:helloBytes]) {
			t.Errorf("%x was read as %x", data[:helloBytes], h.append(nil))
		}
		if after := openFDs(t); after != before {
			t.Errorf("%d descriptors are open, %d were before", after, before)
		}
	})
}
