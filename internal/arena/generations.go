package arena

import (
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
)

// Generations holds one word for each staging slot: the generation under which
// the slot was handed out last. It is a memfd that others can read and nobody
// but this mapping can write, so that a receiver which copies from the staging
// pool sees whether a slot was handed out anew meanwhile. Raise the word before
// the slot is handed out again. Its methods are safe for concurrent use.
type Generations struct {
	fd      int
	mapping []byte
	words   []atomic.Uint64 // in mapping
	close   sync.Once
}

// NewGenerations makes the words of a pool of that many slots, all 0.
func NewGenerations(slots int) (*Generations, error) {
	const name = "generation words"
	if slots < 1 || slots > kv.MaxSlots {
		return nil, fault.New(fault.BadRequest, "%s: %d slots; 1 to %d are possible", name, slots, kv.MaxSlots)
	}
	size := roundUp(int64(slots)*8, os.Getpagesize())
	fd, err := memfd(name, size, 0)
	if err != nil {
		return nil, explain(name, "create", size, err)
	}
	m, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		unix.Close(fd)
		return nil, explain(name, "map", size, err)
	}
	g := &Generations{fd: fd, mapping: m, words: unsafe.Slice((*atomic.Uint64)(unsafe.Pointer(&m[0])), slots)}
	if err := seal(fd, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_FUTURE_WRITE|unix.F_SEAL_SEAL); err != nil {
		g.Close()
		return nil, explain(name, "seal", size, err)
	}
	return g, nil
}

// Load returns the word of a slot.
func (g *Generations) Load(s kv.SlotID) kv.Generation { return kv.Generation(g.words[s].Load()) }

// Store sets the word of a slot. Bytes that are written to the slot afterwards
// are seen by others no earlier than the word: hence a swap, which is a full
// barrier, where a store is none.
func (g *Generations) Store(s kv.SlotID, gen kv.Generation) { g.words[s].Swap(uint64(gen)) }

// ReadOnlyFD opens the words anew for reading. The caller owns the descriptor.
func (g *Generations) ReadOnlyFD() (int, error) { return readOnly("generation words", g.fd) }

// Close unmaps the words. A second call does nothing.
func (g *Generations) Close() error {
	g.close.Do(func() {
		g.words = nil
		if err := unix.Munmap(g.mapping); err != nil {
			panic(fmt.Sprintf("arena: munmap of the generation words: %v", err))
		}
		unix.Close(g.fd)
	})
	return nil
}
