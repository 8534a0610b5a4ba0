package memlink

import (
	"hash/crc32"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
	"github.com/berthkv/berth/internal/link/gate"
)

// ReceiverConfig is what a receiver needs.
type ReceiverConfig struct {
	Incarnation kv.Incarnation
	Pool        link.Pool
	Checksum    bool // compute Landing.Sum
}

// Receiver implements link.Receiver.
type Receiver struct {
	n           *Network
	cfg         ReceiverConfig
	ev          link.ReceiverEvents
	gate        *gate.Gate
	addr        string
	owners      map[kv.Incarnation]kv.Secret
	interrupted []*transfer // told by the gate to leave
	closed      bool
}

// Receiver adds a receiver to the network.
func (n *Network) Receiver(cfg ReceiverConfig, ev link.ReceiverEvents) *Receiver {
	r := &Receiver{n: n, cfg: cfg, ev: ev, gate: gate.New(cfg.Pool.Slots()), addr: "mem:" + cfg.Incarnation.Short(),
		owners: map[kv.Incarnation]kv.Secret{}}
	n.receivers[r.addr] = r
	return r
}

// Caps implements link.Receiver.
func (r *Receiver) Caps() link.Caps { return r.n.Caps() }

// Offer implements link.Receiver.
func (r *Receiver) Offer() string { return r.addr }

// Allow implements link.Receiver.
func (r *Receiver) Allow(owner kv.Incarnation, secret kv.Secret) { r.owners[owner] = secret }

// Disallow implements link.Receiver.
func (r *Receiver) Disallow(owner kv.Incarnation) {
	if _, ok := r.owners[owner]; ok {
		delete(r.owners, owner)
		for _, c := range r.n.between(owner, r.cfg.Incarnation) {
			c.end(errClosed, true, false)
		}
	}
}

// Open implements link.Receiver.
func (r *Receiver) Open(owner kv.Incarnation, gen kv.Generation, slots []kv.SlotID) {
	r.gate.Open(owner, gen, slots)
}

// Pull implements link.Receiver.
func (r *Receiver) Pull(owner kv.Incarnation, gen kv.Generation, items []link.PullItem) {
	if r.n.mode != link.Pull {
		panic("memlink: Pull on a link of another mode")
	}
	conns := r.n.between(owner, r.cfg.Incarnation)
	for _, it := range items {
		if v := r.gate.Ask(owner, gen, it.Slot); v != gate.Entered {
			r.ev.Failed(it.Slot, gen, fault.New(fault.BadRequest, "slot %d is not open and empty under generation %d", it.Slot, gen))
			continue
		}
		if len(conns) == 0 {
			r.ev.Failed(it.Slot, gen, fault.New(fault.BadRequest, "no link from %s", owner.Short()))
			continue
		}
		from := conns[0].s.cfg
		if int64(it.Src) >= int64(from.Pool.Slots()) || it.Bytes < 0 || it.Bytes > from.Pool.SlotBytes {
			r.ev.Failed(it.Slot, gen, fault.New(fault.BadRequest, "%d bytes of staging slot %d are not in the pool", it.Bytes, it.Src))
			continue
		}
		r.n.queue = append(r.n.queue, &transfer{n: r.n, to: r, owner: owner, dst: it.Slot, gen: gen, bytes: it.Bytes,
			from: from.Pool, src: it.Src, srcGen: it.SrcGen, word: from.Generation})
	}
}

// Revoke implements link.Receiver.
func (r *Receiver) Revoke(gen kv.Generation, slots []kv.SlotID) {
	fenced := r.gate.Revoke(gen, slots)
	if r.n.mode == link.OneSided {
		return // who writes is not known here
	}
	if len(fenced) > 0 {
		r.ev.Fenced(gen, fenced)
	}
	r.letGo()
}

// letGo makes the transfers that the gate has interrupted leave their slots.
func (r *Receiver) letGo() {
	for len(r.interrupted) > 0 {
		t := r.interrupted[0]
		r.interrupted = r.interrupted[1:]
		if t.inside {
			t.leave(false)
		}
	}
}

// Close implements link.Receiver.
func (r *Receiver) Close() error {
	if r.closed {
		return nil
	}
	r.closed = true
	delete(r.n.receivers, r.addr)
	r.ev = link.ReceiverEvents{ // nothing comes after Close
		Landed: func([]link.Landing) {},
		Failed: func(kv.SlotID, kv.Generation, *fault.Error) {},
		Fenced: func(kv.Generation, []kv.SlotID) {},
		Lost:   func(kv.Incarnation, error) {},
		Late:   func(kv.SlotID, kv.Generation) {},
	}
	for _, c := range append([]*conn(nil), r.n.conns...) {
		if c.to == r {
			c.end(errClosed, true, false)
		}
	}
	return nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func (r *Receiver) landing(t *transfer) link.Landing {
	l := link.Landing{Slot: t.dst, Generation: t.gen, Bytes: t.bytes}
	if r.cfg.Checksum {
		l.Sum, l.HasSum = crc32.Checksum(r.cfg.Pool.Slot(t.dst)[:t.bytes], castagnoli), true
	}
	return l
}
