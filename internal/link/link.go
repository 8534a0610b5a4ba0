// Package link is the contract of the data plane: what a link must offer to
// move chunks from a staging pool into a receive pool. Implementations are in
// the packages below it; package linktest is the suite that each passes.
//
// Two halves. The Receiver lives beside the receive pool and opens slots for
// writing; the Sender lives beside the staging pool and moves chunks. Both
// report through callbacks, which are called from the link's own goroutines or,
// before a method returns, from the goroutine that called it. They must not
// block, and may call back into the link, except Close; a slice handed to one
// is the callee's. What a link can do is asked (Caps), never stubbed.
//
// Ownership of slots. A staging slot named in a Write belongs to the link from
// Write until Lost or Settle has returned for it. A receive slot is the link's
// from Open until Fenced is reported for it; Landed alone does not end that,
// because a writer may still touch it where the fence is not exact.
package link

import (
	"context"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
)

// Mode is how a link moves bytes, which fixes what a Commit means.
type Mode uint8

const (
	// Stream: the sender writes, the receiver reads into the slot and reports
	// Landed. The Commit goes out with the data.
	Stream Mode = iota
	// Pull: the receiver copies from the sender's staging pool when a Commit
	// names the source. The sender writes nothing.
	Pull
	// OneSided: the sender writes into the receiver's memory and learns when
	// that is done; the receiver sees nothing. The Commit follows the write.
	OneSided
)

// Caps is what a link can do.
type Caps struct {
	Mode Mode
	// ExactFence: Fenced is reported as soon as nobody can write the slot any
	// more. Otherwise Revoke reports nothing and the caller waits for the
	// sender's word, its death or a time.
	ExactFence bool
}

// Pool is a mapped pool of slots. Slot i is Bytes[i*SlotBytes : (i+1)*SlotBytes].
type Pool struct {
	Bytes     []byte // never Go heap; outlives every link that uses it
	SlotBytes int64
	FD        int // memfd of the mapping, -1 for an anonymous one
}

// Slots returns the capacity of the pool.
func (p Pool) Slots() int { return int(int64(len(p.Bytes)) / p.SlotBytes) }

// Slot returns the memory of slot i.
func (p Pool) Slot(i kv.SlotID) []byte {
	off := int64(i) * p.SlotBytes
	return p.Bytes[off : off+p.SlotBytes : off+p.SlotBytes]
}

// Landing is a chunk whose bytes are in its slot and visible.
type Landing struct {
	Slot       kv.SlotID
	Generation kv.Generation
	Bytes      int64
	Sum        uint32 // CRC32C, when the receiver was built with Checksum
	HasSum     bool
}

// PullItem is one chunk to copy from the owner's staging pool.
type PullItem struct {
	Slot   kv.SlotID // receive slot
	Src    kv.SlotID // staging slot of the owner
	SrcGen kv.Generation
	Bytes  int64
}

// ReceiverEvents is where a Receiver reports. Every field must be set.
type ReceiverEvents struct {
	// Landed: these chunks are in their slots.
	Landed func([]Landing)
	// Failed: this slot will not be filled by the transfer under way. The code
	// is stale_generation for a pull whose source has been handed out again,
	// which its owner may do once it has given the request up; bad_request for
	// what no owner may do, such as a frame of a wrong length. The text names
	// both numbers.
	Failed func(slot kv.SlotID, gen kv.Generation, err *fault.Error)
	// Fenced: nobody writes these slots under gen any more. Only with
	// Caps.ExactFence, once for each revoked slot.
	Fenced func(gen kv.Generation, slots []kv.SlotID)
	// Lost: the owner's data path is gone (its last data connection broke and
	// no new one came within the time a sender needs to dial again; its memory
	// faulted). Its slots stay open until revoked. Not after Disallow.
	Lost func(owner kv.Incarnation, err error)
	// Late: a frame came for a slot that has landed or is not open to its sender
	// under its generation; it was discarded. For the counter.
	Late func(slot kv.SlotID, gen kv.Generation)
}

// Receiver is the receiving half, one for each link that an agent offers.
// Methods are safe for concurrent use and do not block on a peer.
type Receiver interface {
	Caps() Caps
	// Offer is the address for HelloReply.
	Offer() string
	// Allow lets the owner open data connections that prove secret; Disallow
	// refuses new ones and closes those it has.
	Allow(owner kv.Incarnation, secret kv.Secret)
	Disallow(owner kv.Incarnation)
	// Open opens slots for writing by owner under gen. They must not be open.
	Open(owner kv.Incarnation, gen kv.Generation, slots []kv.SlotID)
	// Pull copies chunks into slots that are open under gen and have not
	// landed; each is reported as Landed or Failed, or as Fenced if it is
	// revoked first. Only in mode Pull.
	Pull(owner kv.Incarnation, gen kv.Generation, items []PullItem)
	// Revoke closes slots that are open under gen, interrupting whoever fills
	// them. With an exact fence each is reported as Fenced, possibly before
	// Revoke returns; one that is not open under gen is passed over. It also
	// ends the normal life of a slot: before a committed slot is used again it
	// is revoked and fenced like any other.
	Revoke(gen kv.Generation, slots []kv.SlotID)
	// Close stops everything, interrupts and waits; no callback comes after it.
	Close() error
}

// Peer is a receiver to connect to.
type Peer struct {
	Incarnation kv.Incarnation // the receiver's
	Addr        string         // from its offer
	Self        kv.Incarnation // ours, with
	Secret      kv.Secret      // the secret of our Hello
}

// WriteID names a write for as long as its Sender lives; the caller numbers.
type WriteID uint64

// Write moves one chunk.
type Write struct {
	ID         WriteID
	Src        kv.SlotID // staging slot
	Dst        kv.SlotID // receive slot
	Generation kv.Generation
	Bytes      int64
}

// SenderEvents is where a connection to one receiver reports.
type SenderEvents struct {
	// Sent: the link has taken the chunk's bytes: into the kernel (Stream) or
	// to the peer's memory (OneSided). Progress for deadlines. The staging slot
	// is not free yet. One that is on its way while its write is settled or
	// aborted may still come.
	Sent func([]WriteID)
	// Lost: these writes, Sent or not, will not arrive, and the link's hand is
	// off their staging slots. The caller may write them again.
	Lost func([]WriteID, error)
	// Down: the link to this receiver is gone for good; every write that was
	// not settled has been reported as Lost.
	Down func(error)
}

// Sender is the sending half, one for each kind of link.
type Sender interface {
	Caps() Caps
	// Connect establishes the link to a receiver, its own hello included. It
	// returns when the link is usable or with the reason why not.
	Connect(ctx context.Context, p Peer, ev SenderEvents) (Conn, error)
	// Close closes every connection and waits.
	Close() error
}

// Conn is a link to one receiver.
type Conn interface {
	// Write queues chunks and returns at once; after Down they are reported as
	// Lost. At the bound of what may be unsettled (the slots of the staging
	// pool) it panics: the caller has broken the ownership rule. Not used in
	// mode Pull, where it panics too.
	Write([]Write)
	// Abort asks for the writes to be given up. Each that is known is reported
	// as Lost: at once what has not begun or is Sent, the rest when the frame
	// begun has been finished, from the slot.
	Abort([]WriteID)
	// Settle forgets writes that the receiver has answered for (committed, or
	// ended their request), so that it discards what still comes of them: a
	// frame begun is finished with filler, and the slots are the caller's when
	// Settle returns. Unknown ids (Lost before) are passed over.
	Settle([]WriteID)
	// Close ends the link; every write not settled is reported as Lost before
	// it returns, and nothing after.
	Close() error
}
