package shmlink

import (
	"errors"
	"fmt"
	"hash/crc32"
	"runtime"
	"runtime/debug"
	"sync/atomic"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
	"github.com/berthkv/berth/internal/link/gate"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// A copier takes this much at a time, so that small chunks are reported
// together and large ones spread over the copiers.
const (
	batchBytes = 1 << 20
	batchJobs  = 16
)

// job is one chunk to copy.
type job struct {
	owner   kv.Incarnation
	gen     kv.Generation
	revoked bool // nobody waits for it any more
	link.PullItem
}

// Pull implements link.Receiver. The copiers are woken when all is there, so that
// they share it evenly and report it in a few batches.
func (r *Receiver) Pull(id kv.Incarnation, gen kv.Generation, items []link.PullItem) {
	var few [batchJobs]link.PullItem
	taken := few[:0]
	for _, it := range items {
		switch r.gate.Ask(id, gen, it.Slot) {
		case gate.Closed:
			r.ev.Failed(it.Slot, gen, fault.New(fault.BadRequest, "slot %d is not open under generation %d", it.Slot, gen))
		case gate.Landed, gate.Busy:
			r.ev.Failed(it.Slot, gen, fault.New(fault.BadRequest, "slot %d has been filled already under generation %d", it.Slot, gen))
		case gate.Entered:
			taken = append(taken, it)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, it := range taken {
		if _, ok := r.pending[it.Slot]; !ok {
			r.order = append(r.order, it.Slot)
		}
		r.pending[it.Slot] = job{owner: id, gen: gen, PullItem: it}
	}
	for range min(len(taken), r.cfg.Copiers) {
		r.work.Signal()
	}
}

// copier is one copying goroutine.
type copier struct {
	r      *Receiver
	fence  atomic.Uint32 // only to order memory accesses around it
	jobs   []job
	landed []link.Landing
}

// Interrupt implements gate.Filler: a copy is over soon anyway.
func (*copier) Interrupt() {}

func (c *copier) run() {
	defer c.r.wg.Done()
	debug.SetPanicOnFault(true) // of this goroutine: see copyChunk
	for c.take() {
		for _, j := range c.jobs {
			c.do(j)
		}
		if len(c.landed) > 0 {
			c.r.ev.Landed(c.landed)
			c.landed = nil // the callee's
			// Whoever was told starts more copies: now, on this processor, rather
			// than when the copiers have run dry and one of them must be woken.
			runtime.Gosched()
		}
	}
}

// take waits for jobs and takes this copier's share of them; false at the end.
func (c *copier) take() bool {
	r := c.r
	r.mu.Lock()
	defer r.mu.Unlock()
	c.jobs = c.jobs[:0]
	for {
		if r.closed {
			return false
		}
		share := min((len(r.pending)+r.cfg.Copiers-1)/r.cfg.Copiers, batchJobs)
		for bytes := int64(0); len(r.order) > 0 && len(c.jobs) < share && bytes < batchBytes; {
			s := r.order[0]
			r.order = r.order[1:]
			j := r.pending[s]
			delete(r.pending, s)
			if !j.revoked {
				c.jobs = append(c.jobs, j)
				bytes += j.Bytes
			}
		}
		if len(c.jobs) > 0 {
			return true
		}
		r.work.Wait()
	}
}

// do copies one chunk, unless its slot was revoked meanwhile.
func (c *copier) do(j job) {
	r := c.r
	if r.gate.Enter(j.owner, j.gen, j.Slot, c) != gate.Entered {
		return // Fenced was reported, or another pull of the slot
	}
	l, err := c.pull(j)
	switch r.gate.Leave(j.Slot, err == nil) {
	case gate.Full:
		c.landed = append(c.landed, l)
	case gate.Fenced:
		r.ev.Fenced(j.gen, []kv.SlotID{j.Slot})
	case gate.Empty:
		r.ev.Failed(j.Slot, j.gen, failure(err))
	}
}

// failure gives an error of pull its code: without one it is of the peer's
// connection or memory.
func failure(err error) *fault.Error {
	var f *fault.Error
	if errors.As(err, &f) {
		return f
	}
	return fault.New(fault.PeerLost, "%v", err)
}

// pull copies a chunk into its slot, which has been entered.
func (c *copier) pull(j job) (l link.Landing, err error) {
	r := c.r
	r.mu.Lock()
	o := r.owners[j.owner]
	if o == nil || o.peer == nil {
		r.mu.Unlock()
		return l, fmt.Errorf("no shm link from %s", j.owner.Short())
	}
	p := o.peer
	p.users++
	m := p.m
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		p.users--
		r.releaseLocked(p)
	}()
	if int64(j.Src) >= m.slots || j.Bytes < 0 || j.Bytes > m.slotBytes {
		return l, fault.New(fault.BadRequest, "%d bytes of staging slot %d; there are %d slots of %d bytes", j.Bytes, j.Src, m.slots, m.slotBytes)
	}
	dst := r.cfg.Pool.Slot(j.Slot)[:j.Bytes]
	if err := c.copyChunk(m, dst, j); err != nil {
		if errors.As(err, new(faultError)) {
			r.broken(p, err)
		}
		return l, err
	}
	l = link.Landing{Slot: j.Slot, Generation: j.gen, Bytes: j.Bytes}
	if r.cfg.Checksum {
		l.Sum, l.HasSum = crc32.Checksum(dst, castagnoli), true
	}
	return l, nil
}

// broken closes the connection of a peer whose memory faulted; its end is
// reported as that of any other.
func (r *Receiver) broken(p *peer, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p.fault == nil {
		p.fault = err
	}
	p.nc.Close()
}

// faultError is a fault in a sender's memory.
type faultError struct{ addr uintptr }

func (e faultError) Error() string { return "a fault in the sender's memory" }

// copyChunk copies a chunk and makes sure that it is the expected one. The
// bytes may be anything when it is not.
func (c *copier) copyChunk(m *mapping, dst []byte, j job) (err error) {
	defer func() {
		p := recover()
		if p == nil {
			return
		}
		if f, ok := p.(interface {
			runtime.Error
			Addr() uintptr
		}); ok && m.holds(f.Addr()) {
			err = faultError{f.Addr()}
			return
		}
		panic(p)
	}()
	word := m.word(j.Src)
	if now := word.Load(); now != uint64(j.SrcGen) {
		return reused(j, now)
	}
	copy(dst, m.slot(j.Src, j.Bytes))
	// A read-modify-write is a full barrier, which a load is not: every byte
	// has been read when the word is read again.
	c.fence.Add(1)
	if now := word.Load(); now != uint64(j.SrcGen) {
		return reused(j, now)
	}
	return nil
}

func reused(j job, now uint64) error {
	return fault.New(fault.StaleGeneration, "staging slot %d holds generation %d, not %d", j.Src, now, j.SrcGen)
}
