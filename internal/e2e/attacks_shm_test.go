package e2e

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"math"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/wire"
)

// lyingMemory is the staging pool and the generation words that a peer over shm
// shares, which it goes on writing as it likes.
type lyingMemory struct {
	staging, words     *os.File // writable
	stagingRO, wordsRO *os.File
	bytes, gens        []byte // mapped
}

const lyingSlots = 8

func newLyingMemory() (m *lyingMemory, err error) {
	m = &lyingMemory{}
	make := func(size, seals int) (f, ro *os.File, b []byte) {
		if err != nil {
			return
		}
		var fd int
		if fd, err = unix.MemfdCreate("lies", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING); err != nil {
			return
		}
		f = os.NewFile(uintptr(fd), "lies")
		if err = f.Truncate(int64(size)); err != nil {
			return
		}
		if b, err = unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
			return
		}
		if _, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err == nil {
			ro, err = os.Open(fmt.Sprint("/proc/self/fd/", fd))
		}
		return
	}
	m.staging, m.stagingRO, m.bytes = make(lyingSlots*slotBytes, unix.F_SEAL_SHRINK)
	m.words, m.wordsRO, m.gens = make(4096, unix.F_SEAL_SHRINK|unix.F_SEAL_FUTURE_WRITE)
	if err != nil {
		m.close()
	}
	return m, err
}

func (m *lyingMemory) close() {
	for _, f := range []*os.File{m.staging, m.words, m.stagingRO, m.wordsRO} {
		if f != nil {
			f.Close()
		}
	}
	for _, b := range [][]byte{m.bytes, m.gens} {
		if b != nil {
			unix.Munmap(b)
		}
	}
}

// scribble writes bytes and generations, tears holes and tries to take the memory
// away, while the victim reads.
func (m *lyingMemory) scribble(ctx context.Context) {
	var noise [4096]byte
	rand.Read(noise[:])
	pace(ctx, 20_000, func(i int) error { // not as fast as it goes: that would only take the victim's processors
		gen := uint64(1) // the first half keeps its generation, and is copied whole
		if i%lyingSlots >= lyingSlots/2 {
			gen = []uint64{1, uint64(i % 3), math.MaxUint64}[i%3]
		}
		binary.NativeEndian.PutUint64(m.gens[i%lyingSlots*8:], gen)
		copy(m.bytes[i*613%(len(m.bytes)-len(noise)):], noise[:])
		if i%64 == 0 {
			unix.Fallocate(int(m.staging.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(i%lyingSlots)*slotBytes, slotBytes)
			m.staging.Truncate(0)                    // the seals forbid it
			m.words.Truncate(0)                      //
			m.staging.Truncate(2 * lyingSlots << 16) // it may grow
		}
		return nil
	})
}

// shmHello opens a link with whatever descriptors; the caller closes the
// connection.
func shmHello(path string, s *session, slots uint32, size uint64, fds ...int) (net.Conn, uint32, error) {
	nc, err := net.DialTimeout("unix", path, limit)
	if err != nil {
		return nil, 0, err
	}
	nc.SetDeadline(time.Now().Add(limit))
	h := append([]byte("BSM1"), s.reply.Incarnation[:]...)
	h = append(append(h, s.self[:]...), s.secret[:]...)
	h = binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint32(h, slots), size)
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	if _, _, err := nc.(*net.UnixConn).WriteMsgUnix(h, rights, nil); err != nil {
		return nc, 0, err
	}
	var answer [24]byte
	if _, err := nc.Read(answer[:]); err != nil {
		return nc, math.MaxUint32, nil // closed without a word
	}
	return nc, binary.LittleEndian.Uint32(answer[4:]), nil
}

// shmLies are peers in another process than the victim that share memory with it
// and change all of it while it copies: bytes, generations, holes; whose Commits
// name slots and generations that are none; and others that pass descriptors of
// every wrong kind.
func shmLies(ctx context.Context, w *world) error {
	var all sync.WaitGroup
	defer all.Wait()
	stop, cancel := context.WithCancel(ctx)
	defer cancel()
	for i := range 3 {
		s, err := w.hello("shm-liar", kv.Incarnation{0xf1, byte(i)})
		if err != nil {
			return err
		}
		defer s.conn.Close()
		m, err := newLyingMemory()
		if err != nil {
			return err
		}
		nc, status, err := shmHello(w.v.shm, s, lyingSlots, slotBytes, int(m.stagingRO.Fd()), int(m.wordsRO.Fd()))
		if err == nil && status != 0 {
			err = fmt.Errorf("the link is refused with status %d", status)
		}
		if err != nil {
			return err
		}
		defer nc.Close()
		var using sync.WaitGroup
		using.Go(func() { m.scribble(stop) })
		all.Go(func() { using.Wait(); m.close() })
		all.Go(func() { s.lieAbout(stop) })
	}
	scout, err := w.hello("shm-scout", kv.Incarnation{0xf2})
	if err != nil {
		return err
	}
	defer scout.conn.Close()
	all.Go(func() { scout.drain(stop) })
	w.begun()
	return pace(ctx, 100, func(i int) error {
		scout.send(&msg.Heartbeat{Seq: scout.next()})
		fds, undo := wrongDescriptors(i)
		defer undo()
		nc, status, err := shmHello(w.v.shm, scout, []uint32{lyingSlots, math.MaxUint32, 1, 0}[i%4], []uint64{slotBytes, slotBytes, 1 << 63, slotBytes}[i/4%4], fds...)
		if nc != nil {
			defer nc.Close()
		}
		if err == nil && status == 0 {
			return fmt.Errorf("descriptors of kind %d were taken", i)
		}
		return nil
	})
}

// lieAbout begins requests over shm and commits what is not so; never the last
// chunk, so that nothing is ready and stays.
func (s *session) lieAbout(ctx context.Context) {
	go pace(ctx, 300, func(i int) error {
		s.send(&msg.Begin{Seq: s.next(), Begin: uint64(i) + 1, ReqID: fmt.Sprintf("lie-%x-%d", s.self[:2], i), Link: "shm", TotalChunks: 4, DeadlineMS: 1000})
		for f := range []int{3, 8}[i%2] {
			src := msg.Source{Slot: kv.SlotID((i + f) % lyingSlots), Generation: kv.Generation(f % 3)}
			switch {
			case i%2 == 0:
				src = msg.Source{Slot: kv.SlotID((i + f) % (lyingSlots / 2)), Generation: 1}
			case i%4 == 1: // of a slot that is in use for something else now, or not
			case f == 6:
				src.Slot = lyingSlots + kv.SlotID(i%3)
			case f == 7:
				src.Slot = math.MaxUint32
			}
			s.send(&msg.Commit{Seq: s.next(), Begin: uint64(i) + 1, Chunks: []msg.Chunk{{Index: int64(f % 3), Key: "k", Tokens: chunkTokens, Src: &src}},
				Fmt: layout.Format, DType: layout.DType, Shape: shape})
		}
		if i < 4 { // the copies of the last few go on
			return nil
		}
		return s.send(&msg.Cancel{Seq: s.next(), Begin: uint64(i) - 3})
	})
	for ctx.Err() == nil {
		f, err := s.conn.Recv(ctx)
		if err != nil {
			return
		}
		if m, err := wire.Decode(f[len(f)-1]); err == nil {
			if e, ok := m.(*msg.Ended); ok && e.Seq != 0 {
				s.send(&msg.Drained{Re: e.Seq, Begin: e.Begin})
			}
		}
	}
}

// wrongDescriptors are two descriptors that no receiver may map.
func wrongDescriptors(i int) (fds []int, undo func()) {
	var files []*os.File
	open := func(f *os.File, err error) {
		if err == nil {
			files = append(files, f)
		}
	}
	switch i % 6 {
	case 0: // a pipe
		r, w, err := os.Pipe()
		open(r, err)
		open(w, err)
	case 1:
		open(os.Open("/dev/zero"))
		open(os.Open("/"))
	case 2: // no more than names
		for range 2 {
			fd, err := unix.Open("/proc/self/exe", unix.O_PATH|unix.O_CLOEXEC, 0)
			open(os.NewFile(uintptr(fd), "path"), err)
		}
	case 3: // files that are truncated once they are there
		for range 2 {
			f, err := os.CreateTemp("", "lies")
			open(f, err)
			if err == nil {
				os.Remove(f.Name())
				f.Truncate(lyingSlots * slotBytes)
				defer f.Truncate(0)
			}
		}
	case 4: // memfds without seals
		for range 2 {
			fd, err := unix.MemfdCreate("lies", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
			open(os.NewFile(uintptr(fd), "memfd"), err)
			if err == nil {
				unix.Ftruncate(fd, lyingSlots*slotBytes)
			}
		}
	case 5: // sealed, and writable
		for range 2 {
			fd, err := unix.MemfdCreate("lies", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
			open(os.NewFile(uintptr(fd), "memfd"), err)
			if err == nil {
				unix.Ftruncate(fd, lyingSlots*slotBytes)
				unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_FUTURE_WRITE)
			}
		}
	}
	for _, f := range files {
		fds = append(fds, int(f.Fd()))
	}
	return fds, func() {
		for _, f := range files {
			f.Close()
		}
	}
}
