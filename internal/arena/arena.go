// Package arena maps the memory of the pools: slots of KV, and the words that
// hold the staging slots' generations. It is never Go heap: the collector does
// not see it, it can be given to other processes as a descriptor, and it stays
// out of core dumps.
//
// A pool belongs to whoever made it. Close it after everything that reads or
// writes it has been closed: links, engines' descriptors, the shell.
package arena

import (
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
)

// Config says what to map.
type Config struct {
	// Name stands in error texts and in /proc/<pid>/maps, e.g. "receive pool".
	Name string
	// Slots and SlotBytes fix the size, 1 to kv.MaxSlots and at least 1.
	Slots     int
	SlotBytes int64
	// Anonymous: a private mapping without a descriptor, for a pool that no
	// other process maps.
	Anonymous bool
	// Writable: other processes may map the pool writable (the staging pool,
	// by engines). Otherwise the descriptor is sealed against it.
	Writable bool
	// HugeTLB: take pages reserved by the system's administrator if there are
	// enough; if not, ordinary ones. Transparent huge pages are always asked for.
	HugeTLB bool
	// Lock: keep the pages out of swap. Counts against RLIMIT_MEMLOCK.
	Lock bool
	// Progress, if set, hears from the touching goroutine how many slots,
	// counted from 0, have been touched, and with the last call why it stopped
	// early, if it did. It must not call Close.
	Progress func(slots int, err error)
}

// Pool is one mapping of Slots slots; slot i is at i x SlotBytes.
type Pool struct {
	cfg     Config
	fd      int // -1 when anonymous
	mapping []byte
	page    int // bytes of a page of the mapping
	touched atomic.Int64
	stop    chan struct{}
	done    chan struct{}
	close   sync.Once
}

// New maps a pool and starts touching it, lowest slot first. The memory is
// zero. An error names what was needed and the limit in the way.
func New(cfg Config) (*Pool, error) {
	if cfg.Slots < 1 || cfg.Slots > kv.MaxSlots || cfg.SlotBytes < 1 || cfg.SlotBytes > maxPool/int64(cfg.Slots) {
		return nil, fault.New(fault.BadRequest, "%s: %d slots of %d bytes; 1 to %d slots and at most %d bytes are possible",
			cfg.Name, cfg.Slots, cfg.SlotBytes, kv.MaxSlots, int64(maxPool))
	}
	size := int64(cfg.Slots) * cfg.SlotBytes
	if err := readLimits().check(cfg.Name, uint64(size), cfg.Lock); err != nil {
		return nil, err
	}
	p := &Pool{cfg: cfg, fd: -1, stop: make(chan struct{}), done: make(chan struct{})}
	if err := p.create(size); err != nil {
		return nil, err
	}
	if err := p.prepare(); err != nil {
		p.unmap()
		return nil, err
	}
	go p.touch()
	return p, nil
}

// maxPool keeps sizes and their roundings far from overflow: 2^46, half of
// what a process can address on amd64.
const maxPool = 1 << 46

// create maps the memory, on reserved huge pages if asked for and to be had.
func (p *Pool) create(size int64) error {
	var err error
	if p.cfg.Anonymous {
		p.page = os.Getpagesize()
		p.mapping, err = unix.Mmap(-1, 0, int(roundUp(size, p.page)), unix.PROT_READ|unix.PROT_WRITE,
			unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
		return p.explain("map", err)
	}
	if p.cfg.HugeTLB {
		if p.page = hugePageSize(); p.page > 0 && p.createMemfd(size, unix.MFD_HUGETLB) == nil {
			return nil
		}
	}
	p.page = os.Getpagesize()
	return p.createMemfd(size, 0)
}

func (p *Pool) createMemfd(size int64, flags int) error {
	fd, err := memfd(p.cfg.Name, roundUp(size, p.page), flags)
	if err != nil {
		return p.explain("create", err)
	}
	// No MAP_NORESERVE: with it, missing huge pages would be found at the first
	// write, by a signal, instead of here.
	m, err := unix.Mmap(fd, 0, int(roundUp(size, p.page)), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		unix.Close(fd)
		return p.explain("map", err)
	}
	p.fd, p.mapping = fd, m
	return nil
}

// prepare sets the properties of the mapping and seals the descriptor.
func (p *Pool) prepare() error {
	if err := unix.Madvise(p.mapping, unix.MADV_DONTDUMP); err != nil {
		return p.explain("keep out of core dumps", err)
	}
	// Advice: a kernel without transparent huge pages refuses it, which costs
	// speed and nothing else.
	_ = unix.Madvise(p.mapping, unix.MADV_HUGEPAGE)
	if p.cfg.Lock {
		if err := mlockOnFault(p.mapping); err != nil {
			return p.explain("lock", err)
		}
	}
	if p.fd < 0 {
		return nil
	}
	seals := unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	if !p.cfg.Writable {
		seals |= unix.F_SEAL_FUTURE_WRITE // our own mapping exists and stays writable
	}
	return p.explain("seal", seal(p.fd, seals))
}

func (p *Pool) explain(doing string, err error) error {
	if err == nil {
		return nil
	}
	return explain(p.cfg.Name, doing, int64(p.cfg.Slots)*p.cfg.SlotBytes, err)
}

// Bytes is the memory of all slots, valid until Close.
func (p *Pool) Bytes() []byte {
	n := int64(p.cfg.Slots) * p.cfg.SlotBytes
	return p.mapping[:n:n]
}

// Slots returns the capacity.
func (p *Pool) Slots() int { return p.cfg.Slots }

// SlotBytes returns the size of a slot.
func (p *Pool) SlotBytes() int64 { return p.cfg.SlotBytes }

// FD is the memfd, opened for reading and writing, or -1. It stays the pool's.
func (p *Pool) FD() int { return p.fd }

// ReadOnlyFD opens the memfd anew for reading. The caller owns the descriptor.
func (p *Pool) ReadOnlyFD() (int, error) {
	if p.fd < 0 {
		return -1, fmt.Errorf("%s: an anonymous pool has no descriptor", p.cfg.Name)
	}
	return readOnly(p.cfg.Name, p.fd)
}

// HugeTLB reports whether the pool is on reserved huge pages.
func (p *Pool) HugeTLB() bool { return p.page > os.Getpagesize() }

// Touched returns how many slots, counted from 0, have all their pages.
func (p *Pool) Touched() int { return int(p.touched.Load()) }

// Close stops the touching, waits for it and unmaps. A second call does nothing.
func (p *Pool) Close() error {
	p.close.Do(func() {
		close(p.stop)
		<-p.done // no Progress after this, and nobody populates what goes
		p.unmap()
	})
	return nil
}

func (p *Pool) unmap() {
	if err := unix.Munmap(p.mapping); err != nil {
		panic(fmt.Sprintf("arena: munmap of %s: %v", p.cfg.Name, err))
	}
	p.mapping = nil
	if p.fd >= 0 {
		unix.Close(p.fd)
		p.fd = -1
	}
}

func roundUp(n int64, to int) int64 { return (n + int64(to) - 1) / int64(to) * int64(to) }
