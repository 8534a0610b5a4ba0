package intake

import (
	"slices"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/slot"
)

// commit is a Commit that is not answered yet. It is parked at the first of its
// chunks that is not committed, and moves on when that one is.
type commit struct {
	seq    uint64
	conn   kv.ConnID // where it was asked last
	chunks []uint32
	at     int
	next   *commit // parked at the same chunk
}

// commit names chunks whose bytes were, or are being, moved. It is checked whole
// before any of it counts.
func (c *Core) commit(cn *conn, p *peer, m *msg.Commit) {
	key := reqKey{begin: m.Begin}
	r := p.live[key]
	if r == nil {
		c.commitEnded(cn, p, m)
		return
	}
	if r.state == ready || r.state == claimed {
		c.send(cn.id, &msg.CommitReply{Re: m.Seq, Begin: m.Begin, Complete: true})
		return
	}
	for _, w := range r.commits {
		if w.seq == m.Seq { // sent again: the answer goes where it was asked last
			w.conn = cn.id
			return
		}
	}
	if err := c.checkCommit(r, m); err != nil {
		c.violation(r, err)
		c.refuse(cn.id, m.Seq, err)
		return
	}
	w := c.newCommit(m.Seq, cn.id)
	r.commits = append(r.commits, w)
	if m.HasEnd && r.end < 0 {
		r.end = m.End
		c.surplus(r)
	}
	c.name(r, w, m)
	if r.committed == r.goal() {
		c.becomeReady(r)
		return
	}
	c.advance(r, w)
}

// commitEnded answers a Commit of a request that is not live.
func (c *Core) commitEnded(cn *conn, p *peer, m *msg.Commit) {
	e := p.ended[reqKey{begin: m.Begin}]
	switch {
	case e == nil && (m.Begin == 0 || m.Begin > p.highest):
		err := fault.New(fault.BadRequest, "begin %d never came; the highest seen is %d", m.Begin, p.highest)
		c.act(Note{Kind: NoteViolation, Owner: p.label, Reason: err.Code, Text: err.Text})
		c.refuse(cn.id, m.Seq, err)
	case e == nil:
		c.refuse(cn.id, m.Seq, fault.New(fault.Ended, "begin %d has ended; the highest seen is %d", m.Begin, p.highest))
	case e.ending == msg.EndReady:
		c.send(cn.id, &msg.CommitReply{Re: m.Seq, Begin: m.Begin, Complete: true})
	default:
		c.refuse(cn.id, m.Seq, e.answer())
	}
}

// violation fails a request because its owner broke the protocol.
func (c *Core) violation(r *request, err *fault.Error) {
	kind := NoteViolation
	if err.Code == fault.Internal {
		kind = NoteChecksum
	}
	c.note(r, Note{Kind: kind, Reason: err.Code, Text: err.Text})
	c.end(r, failedBy(err), byReceiver)
}

// checkCommit says why a Commit is a violation.
func (c *Core) checkCommit(r *request, m *msg.Commit) *fault.Error {
	if r.state != admitted {
		return fault.New(fault.BadRequest, "a Commit for begin %d, which is not granted yet", m.Begin)
	}
	if len(r.commits) > int(r.total) { // R11: each conforming one brings a chunk or the end
		return fault.New(fault.BadRequest, "%d Commits of begin %d are unanswered; its %d chunks need at most %d",
			len(r.commits), m.Begin, r.total, r.total+1)
	}
	end := r.end
	if m.HasEnd {
		switch {
		case m.End < 0 || m.End > r.total:
			return fault.New(fault.BadRequest, "end is %d; total_chunks is %d", m.End, r.total)
		case end >= 0 && end != m.End:
			return fault.New(fault.BadRequest, "end is %d; it was %d before", m.End, end)
		case m.End <= r.top:
			return fault.New(fault.BadRequest, "end is %d; chunk %d was named before", m.End, r.top)
		}
		end = m.End
	}
	if len(m.Chunks) == 0 {
		if !m.HasEnd {
			return fault.New(fault.BadRequest, "a Commit with neither chunks nor end")
		}
		return nil
	}
	full, err := c.checkLayout(r, m)
	if err != nil {
		return err
	}
	for i := range m.Chunks {
		if err := c.checkChunk(r, m, &m.Chunks[i], end, full); err != nil {
			return err
		}
	}
	return nil
}

// checkLayout checks what holds for all chunks and returns the bytes of a full
// one.
func (c *Core) checkLayout(r *request, m *msg.Commit) (full int64, _ *fault.Error) {
	if len(m.Chunks) > kv.MaxKeys {
		return 0, fault.New(fault.BadRequest, "%d chunks in one Commit, at most %d", len(m.Chunks), kv.MaxKeys)
	}
	if r.full != 0 {
		if m.Fmt != r.format || m.DType != r.dtype || !slices.Equal(m.Shape, r.shape) {
			return 0, fault.New(fault.BadRequest, "fmt %d, dtype %s, shape %v; they were %d, %s, %v before",
				m.Fmt, m.DType, m.Shape, r.format, r.dtype, r.shape)
		}
		return r.full, nil
	}
	f := &c.cfg.Facts
	if f.Format != 0 && (m.Fmt != f.Format || m.DType != f.DType) {
		return 0, fault.New(fault.LayoutMismatch, "fmt %d and dtype %s here, %d and %s there", f.Format, f.DType, m.Fmt, m.DType)
	}
	dim, ok := m.Fmt.TokenDim()
	if !ok || dim >= len(m.Shape) {
		return 0, fault.New(fault.BadRequest, "fmt %d with %d dimensions", m.Fmt, len(m.Shape))
	}
	if f.ChunkTokens != 0 && m.Shape[dim] != f.ChunkTokens {
		return 0, fault.New(fault.LayoutMismatch, "chunk_tokens is %d here; the shape has %d", f.ChunkTokens, m.Shape[dim])
	}
	full, err := kv.ChunkBytes(m.Fmt, m.DType, m.Shape, m.Shape[dim])
	if err != nil {
		return 0, fault.New(fault.BadRequest, "%v", err)
	}
	if full > f.SlotBytes {
		return 0, errSlot(full, f.SlotBytes)
	}
	return full, nil
}

func errSlot(bytes, slot int64) *fault.Error {
	return fault.New(fault.TooLarge, "a chunk has %d bytes; a slot has %d", bytes, slot)
}

// checkChunk checks one chunk against what is known of it.
func (c *Core) checkChunk(r *request, m *msg.Commit, k *msg.Chunk, end, full int64) *fault.Error {
	link := c.linkOf(r)
	switch {
	case k.Index < 0:
		return fault.New(fault.BadRequest, "chunk %d", k.Index)
	case k.Index >= r.total:
		return fault.New(fault.Overflow, "chunk %d; total_chunks is %d", k.Index, r.total)
	case end >= 0 && k.Index >= end:
		return fault.New(fault.BadRequest, "chunk %d; end is %d", k.Index, end)
	case len(k.Key) > kv.MaxKey:
		return fault.New(fault.BadRequest, "the key of chunk %d has %d bytes, at most %d", k.Index, len(k.Key), kv.MaxKey)
	case link.Pull && k.Src == nil:
		return fault.New(fault.BadRequest, "chunk %d has no src; link %s needs one", k.Index, link.Name)
	case !link.Pull && k.Src != nil:
		return fault.New(fault.BadRequest, "chunk %d has a src; link %s has none", k.Index, link.Name)
	}
	bytes, err := chunkBytes(m, k.Tokens, full)
	if err != nil {
		return fault.New(fault.BadRequest, "chunk %d: %v", k.Index, err)
	}
	ch := &r.chunks[k.Index]
	if ch.named {
		if ch.key != k.Key || ch.tokens != k.Tokens {
			return fault.New(fault.BadRequest, "chunk %d is named again as %q with %d tokens; it was %q with %d",
				k.Index, k.Key, k.Tokens, ch.key, ch.tokens)
		}
		return nil
	}
	if c.pool.Slot(r.slots[k.Index]).Landed {
		return landedWrong(k.Index, bytes, k.HasChecksum, k.Checksum, ch.bytes, ch.hasSum, ch.sum)
	}
	return nil
}

// chunkBytes avoids the product of the shape for a full chunk.
func chunkBytes(m *msg.Commit, tokens, full int64) (int64, error) {
	if dim, _ := m.Fmt.TokenDim(); tokens == m.Shape[dim] {
		return full, nil
	}
	return kv.ChunkBytes(m.Fmt, m.DType, m.Shape, tokens)
}

// landedWrong compares what a Commit says of a chunk with what has landed.
func landedWrong(index, bytes int64, hasSum bool, sum uint32, landed int64, landedHasSum bool, landedSum uint32) *fault.Error {
	if bytes != landed {
		return fault.New(fault.BadRequest, "chunk %d has %d bytes; %d have landed", index, bytes, landed)
	}
	if hasSum && landedHasSum && sum != landedSum {
		return fault.New(fault.Internal, "chunk %d has checksum %08x; what has landed has %08x", index, sum, landedSum)
	}
	return nil
}

// name notes the chunks of a checked Commit; those that have landed are
// committed, the others are pulled or waited for.
func (c *Core) name(r *request, w *commit, m *msg.Commit) {
	if r.full == 0 && len(m.Chunks) > 0 {
		dim, _ := m.Fmt.TokenDim()
		r.format, r.dtype, r.shape = m.Fmt, m.DType, append(r.shape, m.Shape...)
		r.full, _ = kv.ChunkBytes(m.Fmt, m.DType, m.Shape, m.Shape[dim])
	}
	link := c.linkOf(r)
	var pull []PullItem
	for i := range m.Chunks {
		k := &m.Chunks[i]
		w.chunks = append(w.chunks, uint32(k.Index))
		ch, s := &r.chunks[k.Index], r.slots[k.Index]
		if ch.named {
			continue
		}
		ch.bytes, _ = chunkBytes(m, k.Tokens, r.full)
		ch.key, ch.tokens, ch.named = k.Key, k.Tokens, true
		ch.sum, ch.hasSum = k.Checksum, k.HasChecksum
		r.top = max(r.top, k.Index)
		switch {
		case c.pool.Slot(s).Landed:
			c.commitChunk(r, k.Index)
		case link.OneSided: // the write was done before the Commit was sent
			must(c.pool.Land(s, r.gen))
			c.commitChunk(r, k.Index)
		case link.Pull:
			pull = append(pull, PullItem{Slot: s, Src: k.Src.Slot, SrcGen: k.Src.Generation, Bytes: ch.bytes})
		}
	}
	if pull != nil {
		c.act(Pull{Owner: r.owner.incarnation, Link: link.Name, Generation: r.gen, Items: pull})
	}
}

// commitChunk makes a chunk readable: it has landed and was named (R7).
func (c *Core) commitChunk(r *request, index int64) {
	must(c.pool.Commit(r.slots[index], r.gen))
	r.committed++
	r.bytes += r.chunks[index].bytes
}

// advance answers a Commit all of whose chunks are committed, or parks it.
func (c *Core) advance(r *request, w *commit) {
	for ; w.at < len(w.chunks); w.at++ {
		i := w.chunks[w.at]
		if c.pool.Slot(r.slots[i]).State == slot.Granted {
			w.next, r.chunks[i].parked = r.chunks[i].parked, w
			return
		}
	}
	c.send(w.conn, &msg.CommitReply{Re: w.seq, Begin: r.key.begin})
	r.commits = slices.DeleteFunc(r.commits, func(x *commit) bool { return x == w })
	c.freeCommit(w)
}

// landed: the bytes of a chunk are in its slot. A late one is ignored.
func (c *Core) landed(e Landed) {
	r := c.granted[e.Generation]
	if r == nil || r.state != admitted || c.pool.Land(e.Slot, e.Generation) != nil {
		return
	}
	index := int64(c.pool.Slot(e.Slot).Chunk)
	ch := &r.chunks[index]
	if !ch.named {
		ch.bytes, ch.sum, ch.hasSum = e.Bytes, e.Sum, e.HasSum
		return
	}
	if err := landedWrong(index, ch.bytes, ch.hasSum, ch.sum, e.Bytes, e.HasSum, e.Sum); err != nil {
		c.violation(r, err)
		return
	}
	c.commitChunk(r, index)
	if r.committed == r.goal() {
		c.becomeReady(r)
		return
	}
	w := ch.parked
	ch.parked = nil
	for w != nil {
		next := w.next
		w.next = nil
		w.at++
		c.advance(r, w)
		w = next
	}
}

// failed: the bytes under way into a slot will not arrive. That their source was
// handed out again is no ending: their owner has given the request up, and its
// Cancel, or the end of its session, is on its way and says why.
func (c *Core) failed(e Failed) {
	r := c.granted[e.Generation]
	if r == nil || r.state != admitted {
		return
	}
	if s := c.pool.Slot(e.Slot); s.Generation != e.Generation || s.State != slot.Granted || s.Landed {
		return
	}
	switch e.Err.Code {
	case fault.StaleGeneration:
	case fault.PeerLost:
		c.end(r, failedBy(e.Err), byReceiver)
	default:
		c.violation(r, e.Err)
	}
}

// becomeReady ends a request as ready: every chunk is committed.
func (c *Core) becomeReady(r *request) {
	if r.end < 0 {
		r.end = r.total
	}
	for _, w := range r.commits {
		c.send(w.conn, &msg.CommitReply{Re: w.seq, Begin: r.key.begin, Complete: true})
	}
	c.dropCommits(r)
	c.note(r, Note{Kind: NoteEnded, Ending: msg.EndReady, Count: r.committed, Bytes: r.bytes, Wait: c.now.Sub(r.arrived),
		Transfer: c.now.Sub(r.admitAt)})
	if r.end == 0 { // nothing to claim
		c.retireEmpty(r)
		return
	}
	c.written(r)
	r.state = ready
	r.name.readies++
	r.goneAt = c.now.Add(c.cfg.UnclaimedTTL)
	c.arm(r)
	c.offer(r)
	c.tellName(r.name)
}

// retireEmpty ends a request without chunks: ready at once, released at once.
func (c *Core) retireEmpty(r *request) {
	r.state = ready
	r.name.readies++
	c.retire(r, isReady)
}

// ---- records of Commits, used again ----

func (c *Core) newCommit(seq uint64, id kv.ConnID) *commit {
	w := c.spareCommits.take()
	*w = commit{seq: seq, conn: id, chunks: w.chunks[:0]}
	return w
}

func (c *Core) freeCommit(w *commit) {
	if cap(w.chunks) <= maxSpareChunks {
		c.spareCommits.give(w)
	}
}

func (c *Core) dropCommits(r *request) {
	for _, w := range r.commits {
		c.freeCommit(w)
	}
	clear(r.commits)
	r.commits = r.commits[:0]
	for i := range r.chunks {
		r.chunks[i].parked = nil
	}
}
