package shmlink

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/berthkv/berth/internal/kv"
)

// mapping is a sender's staging pool and its generation words, for reading.
type mapping struct {
	staging   []byte
	words     []byte
	slots     int64
	slotBytes int64
}

// mapSender checks what a sender has passed and maps it. The descriptors stay
// the caller's.
func mapSender(stagingFD, wordsFD int, slots, slotBytes int64) (*mapping, error) {
	m := &mapping{slots: slots, slotBytes: slotBytes}
	var err error
	if m.staging, err = mapSealed(stagingFD, slots*slotBytes, unix.F_SEAL_SHRINK); err != nil {
		return nil, fmt.Errorf("staging pool: %w", err)
	}
	if m.words, err = mapSealed(wordsFD, slots*8, unix.F_SEAL_SHRINK|unix.F_SEAL_FUTURE_WRITE); err != nil {
		m.close()
		return nil, fmt.Errorf("generation words: %w", err)
	}
	// Advice: the first costs core dumps their size, the second speed.
	_ = unix.Madvise(m.staging, unix.MADV_DONTDUMP)
	_ = unix.Madvise(m.staging, unix.MADV_HUGEPAGE)
	return m, nil
}

// mapSealed maps a whole memfd of at least need bytes, if it was opened for
// reading only and has the seals: so it cannot get shorter under the mapping.
func mapSealed(fd int, need int64, want int) ([]byte, error) {
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	if err != nil {
		return nil, err
	}
	if flags&unix.O_ACCMODE != unix.O_RDONLY {
		return nil, fmt.Errorf("the descriptor is not read-only")
	}
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return nil, fmt.Errorf("the descriptor is no memfd: %w", err)
	}
	if seals&want != want {
		return nil, fmt.Errorf("the seals are %#x, %#x are needed", seals, want)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	// More than a huge page too much would only cost address space; but why?
	if st.Size < need || st.Size > need+maxExcess {
		return nil, fmt.Errorf("%d bytes, %d are needed", st.Size, need)
	}
	return unix.Mmap(fd, 0, int(st.Size), unix.PROT_READ, unix.MAP_SHARED)
}

// maxExcess is the largest huge page: a pool may be rounded up to one.
const maxExcess = 1 << 30

// slot returns the first n bytes of a staging slot.
func (m *mapping) slot(s kv.SlotID, n int64) []byte {
	off := int64(s) * m.slotBytes
	return m.staging[off : off+n]
}

// word returns the generation word of a staging slot.
func (m *mapping) word(s kv.SlotID) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&m.words[int64(s)*8]))
}

// holds reports whether an address is in the mapping.
func (m *mapping) holds(addr uintptr) bool {
	in := func(b []byte) bool {
		p := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
		return addr >= p && addr < p+uintptr(len(b))
	}
	return in(m.staging) || in(m.words)
}

// bytes is what the mapping may add to the process's resident size.
func (m *mapping) bytes() int64 { return int64(len(m.staging) + len(m.words)) }

func (m *mapping) close() {
	for _, b := range [][]byte{m.staging, m.words} {
		if b != nil {
			if err := unix.Munmap(b); err != nil {
				panic(fmt.Sprintf("shmlink: munmap: %v", err))
			}
		}
	}
	m.staging, m.words = nil, nil
}
