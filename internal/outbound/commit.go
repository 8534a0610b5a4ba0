package outbound

import (
	"fmt"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// phase is where a commit is. Which way it goes is fixed by its request's link:
//
//	                        ┌─ stream:    write + Commit ────────────┐
//	fresh ─► summing ─► windowed ─ pull:  Commit with src ───────────► asked ─► over
//	      (checksum only)   └─ one-sided: write ─► writing ─► Commit ┘
//
// A request that fails makes all of its commits over.
type phase uint8

const (
	fresh    phase = iota
	summing        // checksums are being computed
	windowed       // waits for the window, its link or the lease
	writing        // one-sided: its writes are under way
	asked          // the Commit is out
	over           // answered, or given up
)

// commit is some chunks of one batch that go together. Its staging slots are
// writing until it is over; those that a link still has are freed when that
// lets go.
type commit struct {
	req     *request
	phase   phase
	msg     msg.Commit
	items   []item // by position in msg.Chunks
	bytes   int64
	encoded int64 // bound of the encoded Commit
	unsent  int   // writes that the link has neither sent nor lost
	lost    int   // items to be written again
	sum     uint64
	owed    bool // the Commit is not answered

	prev, next *commit // in peer.window
}

// item is one chunk's way from its staging slot.
type item struct {
	src    kv.SlotID
	from   msg.Source // pull: what the Commit says of src
	srcGen kv.Generation
	dst    kv.SlotID // once written to
	bytes  int64
	write  uint64 // with the link, 0: none
	tries  uint8
	sent   bool // the link has taken the bytes
	lost   bool // to be written again
	freed  bool // its staging slot is free
	there  bool // an LMCache receiver has it
}

// writeRef finds the item of a write.
type writeRef struct {
	k *commit
	i int
}

func (c *Core) newCommit(r *request) *commit {
	var k *commit
	if n := len(c.spareCommit); n > 0 {
		k = c.spareCommit[n-1]
		c.spareCommit = c.spareCommit[:n-1]
		*k = commit{items: k.items[:0], msg: msg.Commit{Chunks: k.msg.Chunks[:0]}}
	} else {
		k = new(commit)
	}
	k.req, k.encoded = r, encodedCommit
	k.msg.Begin, k.msg.Fmt, k.msg.DType, k.msg.Shape = r.begin, c.cfg.Facts.Format, c.cfg.Facts.DType, c.cfg.Shape
	r.commits = append(r.commits, k)
	return k
}

// idle reports whether nothing is owed to a commit any more.
func (k *commit) idle() bool {
	return k.phase == over && k.unsent == 0 && k.sum == 0 && !k.owed
}

// reap lets the commits go to which nothing is owed.
func (c *Core) reap(r *request) {
	left := r.commits[:0]
	for _, k := range r.commits {
		if !k.idle() {
			left = append(left, k)
			continue
		}
		k.req = nil
		clear(k.msg.Chunks)
		if len(c.spareCommit) < maxSpare && cap(k.items) <= maxSpareChunks {
			c.spareCommit = append(c.spareCommit, k)
		}
	}
	clear(r.commits[len(left):])
	r.commits = left
}

// sumOrQueue starts a fresh commit.
func (c *Core) sumOrQueue(k *commit) {
	if !c.cfg.Checksum || len(k.items) == 0 {
		c.enqueue(k)
		return
	}
	k.phase = summing
	c.lastSum++
	k.sum = c.lastSum
	c.sums[k.sum] = k
	k.req.busy++
	items := carve(&c.heldSums, len(k.items))
	for i, it := range k.items {
		items[i] = SumItem{Slot: it.src, Bytes: it.bytes}
	}
	c.emit(Sum{Batch: k.sum, Items: items})
}

// summed takes the checksums in.
func (c *Core) summed(ev Summed) {
	k := c.sums[ev.Batch]
	if k == nil {
		return
	}
	r := k.req
	delete(c.sums, ev.Batch)
	k.sum = 0
	r.busy--
	if k.phase == over { // given up meanwhile; nobody reads its slots now
		c.freeItems(k)
		c.touch(r)
		return
	}
	for i := range k.msg.Chunks {
		k.msg.Chunks[i].HasChecksum, k.msg.Chunks[i].Checksum = true, ev.Sums[i]
	}
	c.enqueue(k)
	c.touch(r)
}

func (c *Core) enqueue(k *commit) {
	k.phase = windowed
	k.req.peer.window.add(k)
}

// startCommits starts what the window lets through, in order. Nothing is
// started without a connection, or when the lease may run out before it ends.
func (c *Core) startCommits(now kv.Instant, p *peer) {
	for k := p.window.first; k != nil && p.sess.Up() && p.sess.MayWrite(now); k = p.window.first {
		if p.unanswered > 0 && p.unanswered+k.bytes > c.cfg.Window {
			return
		}
		p.window.remove(k)
		c.underWay(now, k)
		l := k.req.link
		switch {
		case l.def.Pull:
			k.nameSources()
			c.ask(k)
		case l.def.OneSided && len(k.items) > 0:
			k.phase = writing
			c.writeItems(k, false)
		default:
			c.writeItems(k, false)
			c.ask(k)
		}
	}
}

// nameSources tells the receiver where to copy from. What the message points to
// is in the items, which do not change any more.
func (k *commit) nameSources() {
	for i := range k.items {
		it := &k.items[i]
		it.from = msg.Source{Slot: it.src, Generation: it.srcGen}
		k.msg.Chunks[i].Src = &it.from
	}
}

// underWay counts a commit from now on, until leaveWindow.
func (c *Core) underWay(now kv.Instant, k *commit) {
	k.req.peer.unanswered += k.bytes
	if l := k.req.link; l != nil {
		if l.commits == 0 && l.unsent == 0 {
			l.progress = now
		}
		l.commits++
		c.armLink(l)
	}
}

// ask sends the Commit.
func (c *Core) ask(k *commit) {
	k.phase, k.owed = asked, true
	c.request(k.req.peer, &k.msg, call{kind: callCommit, req: k.req, commit: k})
}

// writeItems gives items to the link: all, or those that were lost.
func (c *Core) writeItems(k *commit, again bool) {
	r, at := k.req, len(c.heldItems)
	for i := range k.items {
		it := &k.items[i]
		if it.there || (again && !it.lost) {
			continue
		}
		if !r.legacy.on {
			it.dst = r.slots[k.msg.Chunks[i].Index]
		}
		c.lastWrite++
		it.write, it.sent, it.lost = c.lastWrite, false, false
		it.tries++
		c.writes[it.write] = writeRef{k, i}
		k.unsent++
		c.heldItems = append(c.heldItems, WriteItem{ID: it.write, Src: it.src, Dst: it.dst, Generation: r.gen, Bytes: it.bytes})
	}
	n := len(c.heldItems) - at
	if n == 0 {
		return
	}
	k.lost = 0
	r.busy += n
	r.link.unsent += n
	c.emit(Write{Link: r.link.id, Writes: c.heldItems[at:len(c.heldItems):len(c.heldItems)]})
	if again {
		c.emit(Note{Kind: NoteRetry, Peer: r.peer.name, ReqID: r.id, Count: int64(n), Link: r.link.def.Name})
	}
}

// rewrite writes again what was lost, when that is allowed.
func (c *Core) rewrite(now kv.Instant, p *peer) {
	if p.lost == 0 {
		return
	}
	for r := p.reqs.first; r != nil && p.lost > 0; r = r.next {
		if r.link == nil || r.link.state != linkIsUp || !(r.legacy.on || p.sess.MayWrite(now)) {
			continue
		}
		for _, k := range r.commits {
			if k.lost > 0 {
				p.lost -= k.lost
				c.writeItems(k, true)
			}
		}
	}
}

// sent: a link has taken bytes over. Progress, and for a one-sided link the
// time to commit.
func (c *Core) sent(now kv.Instant, ev Sent) {
	l := c.links[ev.Link]
	if l == nil {
		return
	}
	at := len(c.heldIDs)
	for _, id := range ev.Writes {
		ref, ok := c.writes[id]
		if !ok || ref.k.items[ref.i].sent {
			continue
		}
		k, it := ref.k, &ref.k.items[ref.i]
		it.sent = true
		c.letGo(l, k)
		if k.phase == over || k.req.legacy.on {
			c.heldIDs = append(c.heldIDs, id)
			c.unwrite(it)
			c.freeItem(it)
			if k.phase != over {
				it.there = true
				c.committed(k.req, k, ref.i)
				c.legacyWritten(k)
			}
			c.touch(k.req)
			continue
		}
		if k.phase == writing && k.unsent == 0 && k.lost == 0 {
			c.ask(k)
		}
	}
	if len(c.heldIDs) > at {
		c.emit(Settle{Link: l.id, Writes: c.heldIDs[at:len(c.heldIDs):len(c.heldIDs)]})
	}
	l.progress = now
	c.armLink(l)
	c.touchPeer(l.p)
}

// letGo counts a write that the link has sent or lost.
func (c *Core) letGo(l *dataLink, k *commit) {
	k.unsent--
	k.req.busy--
	l.unsent--
}

// unwrite forgets an item's write.
func (c *Core) unwrite(it *item) {
	delete(c.writes, it.write)
	it.write = 0
}

// lost: a link has let go of writes that will not arrive. They are repeated
// over the connections that are left.
func (c *Core) lost(now kv.Instant, ev Lost) {
	l := c.links[ev.Link]
	if l == nil {
		return
	}
	for _, id := range ev.Writes {
		if ref, ok := c.writes[id]; ok {
			c.lose(now, l, ref.k, ref.i, ev.Text)
		}
	}
	c.armLink(l)
	c.touchPeer(l.p)
}

func (c *Core) lose(now kv.Instant, l *dataLink, k *commit, i int, text string) {
	it := &k.items[i]
	if !it.sent {
		c.letGo(l, k)
	}
	c.unwrite(it)
	if k.phase == over {
		c.freeItem(it)
		c.touch(k.req)
		return
	}
	if it.sent && l.def.OneSided {
		return // its bytes are there; once more they could meet who reads them
	}
	it.sent, it.lost = false, true
	k.lost++
	l.p.lost++
	if it.tries >= maxTries {
		c.fail(now, k.req, fault.PeerLost, fmt.Sprintf("chunk %d was lost %d times on link %s: %s", k.msg.Chunks[i].Index, it.tries, l.def.Name, text))
	}
}

// commitReply takes the answer to a Commit.
func (c *Core) commitReply(now kv.Instant, k *commit, m msg.Message) {
	r := k.req
	k.owed = false
	if r.link != nil {
		r.link.progress = now
	}
	switch m := m.(type) {
	case *msg.CommitReply:
		c.settle(k)
		if m.Complete {
			c.complete(now, r)
		}
	case *msg.Error:
		// The ending is on its way, or is asked for: the receiver decides.
		c.fail(now, r, m.Code, m.Text)
	default:
		c.violation(r.peer, r.id, fmt.Sprintf("%T answers Commit", m))
		c.fail(now, r, fault.Internal, fmt.Sprintf("the receiver answered Commit with %T", m))
	}
	c.touch(r)
}

// settle makes a commit over because the receiver has all of it; of one that was
// given up it takes back what the link still has.
func (c *Core) settle(k *commit) {
	r, counts := k.req, k.phase != over
	c.leaveWindow(k)
	k.phase = over
	at := len(c.heldIDs)
	for i := range k.items {
		it := &k.items[i]
		if it.write != 0 {
			if !it.sent {
				c.letGo(r.link, k)
			}
			c.heldIDs = append(c.heldIDs, it.write)
			c.unwrite(it)
		}
		it.lost = false
		if counts {
			c.committed(r, k, i)
		}
	}
	if len(c.heldIDs) > at {
		c.emit(Settle{Link: r.link.id, Writes: c.heldIDs[at:len(c.heldIDs):len(c.heldIDs)]})
	}
	c.freeItems(k)
	c.armLink(r.link)
	if len(r.repeats) > 0 {
		c.freeRepeats(r)
	}
}

func (c *Core) committed(r *request, k *commit, i int) {
	r.chunks[k.msg.Chunks[i].Index].state = done
	r.committed++
	r.bytes += k.items[i].bytes
}

// freeRepeats frees the slots of repeats whose chunk is committed, or of all
// when the request has ended.
func (c *Core) freeRepeats(r *request) {
	left := r.repeats[:0]
	for _, x := range r.repeats {
		if r.state == granted && r.chunks[x.index].state != done {
			left = append(left, x)
			continue
		}
		c.freed(x.slot)
	}
	r.repeats = left
}

// leaveWindow takes a commit out of what is counted as unanswered or waits.
func (c *Core) leaveWindow(k *commit) {
	p, l := k.req.peer, k.req.link
	switch k.phase {
	case windowed:
		p.window.remove(k)
	case writing, asked:
		p.unanswered -= k.bytes
		if l != nil {
			l.commits--
		}
		p.lost -= k.lost
		k.lost = 0
	}
}

// giveUp makes a commit over because its request failed. What the link has not
// begun is aborted; slots that nobody has are free at once.
func (c *Core) giveUp(k *commit) {
	if k.phase == over {
		return
	}
	l := k.req.link
	c.leaveWindow(k)
	k.phase = over
	if k.sum != 0 {
		return // being read; Summed frees
	}
	settled := len(c.heldIDs)
	for i := range k.items {
		it := &k.items[i]
		it.lost = false
		if it.write != 0 && it.sent {
			c.heldIDs = append(c.heldIDs, it.write)
			c.unwrite(it)
		}
	}
	if ids := c.heldIDs[settled:len(c.heldIDs):len(c.heldIDs)]; len(ids) > 0 {
		c.emit(Settle{Link: l.id, Writes: ids})
	}
	aborted := len(c.heldIDs)
	for i := range k.items {
		if it := &k.items[i]; it.write != 0 {
			c.heldIDs = append(c.heldIDs, it.write)
		} else {
			c.freeItem(it)
		}
	}
	if ids := c.heldIDs[aborted:len(c.heldIDs):len(c.heldIDs)]; len(ids) > 0 {
		c.emit(Abort{Link: l.id, Writes: ids})
	}
	if l != nil {
		c.armLink(l)
	}
}

func (c *Core) freeItem(it *item) {
	if !it.freed {
		it.freed = true
		c.freed(it.src)
	}
}

func (c *Core) freeItems(k *commit) {
	for i := range k.items {
		c.freeItem(&k.items[i])
	}
}

// commitQueue is the commits of a peer that wait for the window, in order.
type commitQueue struct {
	first, last *commit
	n           int
}

func (q *commitQueue) add(k *commit) {
	k.prev, k.next = q.last, nil
	if q.last == nil {
		q.first = k
	} else {
		q.last.next = k
	}
	q.last = k
	q.n++
}

func (q *commitQueue) remove(k *commit) {
	if k.prev == nil {
		q.first = k.next
	} else {
		k.prev.next = k.next
	}
	if k.next == nil {
		q.last = k.prev
	} else {
		k.next.prev = k.prev
	}
	k.prev, k.next = nil, nil
	q.n--
}
