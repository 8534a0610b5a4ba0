package intake

import (
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// nextBatch is a batch of a request that is live.
func (c *Core) nextBatch(r *request, m *msg.AllocRequest, rep *reply) {
	if m.TotalChunks != 0 && m.TotalChunks != r.total { // the first is unharmed
		c.note(r, Note{Kind: NoteViolation, Reason: fault.BadRequest, Text: "another request under an id that is live"})
		c.answerBatch(rep, refusal(len(m.Keys)))
		return
	}
	if !r.unfinished() {
		c.answerBatch(rep, r.already(m.Keys))
		return
	}
	if err := c.checkBatch(r, m); err != nil {
		c.violation(r, err)
		c.answerBatch(rep, refusal(len(m.Keys)))
		return
	}
	if r.state == waiting { // the first messages race: it is charged once
		if err := c.checkParked(m); err != nil {
			c.sendAway(r, err)
			c.answerBatch(rep, refusal(len(m.Keys)))
			return
		}
		c.park(r, m, rep)
		return
	}
	c.grantBatch(r, m, rep)
}

// maxParked bounds the keys of the batches that wait. LMCache's senders have one
// message each under way, a hundred bytes for a chunk.
const maxParked = 64 << 20

// keyBytes is what a batch keeps in memory: its keys, and a few words for each.
func keyBytes(m *msg.AllocRequest) (n int64) {
	for _, k := range m.Keys {
		n += int64(len(k)) + 64
	}
	return n
}

// checkParked says why a batch may not wait (R11).
func (c *Core) checkParked(m *msg.AllocRequest) *fault.Error {
	if n := c.parked + keyBytes(m); n > maxParked {
		return busy("%d bytes of keys would wait for room, at most %d may", n, maxParked)
	}
	return nil
}

// park keeps a batch until its request is admitted or ends.
func (c *Core) park(r *request, m *msg.AllocRequest, rep *reply) {
	r.legacy.batches = append(r.legacy.batches, batch{m, rep})
	c.parked += keyBytes(m)
}

// unpark takes them out.
func (c *Core) unpark(r *request) []batch {
	batches := r.legacy.batches
	r.legacy.batches = nil
	for _, b := range batches {
		c.parked -= keyBytes(b.m)
	}
	return batches
}

// already answers a batch of a request that is ready: what it holds was sent;
// anything else is refused without touching it.
func (r *request) already(keys []string) *msg.AllocResponse {
	for _, k := range keys {
		if _, ok := r.legacy.index[k]; !ok {
			return refusal(len(keys))
		}
	}
	return alreadySent(len(keys))
}

func alreadySent(keys int) *msg.AllocResponse {
	a := &msg.AllocResponse{RemoteIndexes: []int64{}}
	for i := range keys {
		a.AlreadySent = append(a.AlreadySent, int64(i))
	}
	return a
}

// checkBatch says why a batch is bad. r is nil for a first one.
func (c *Core) checkBatch(r *request, m *msg.AllocRequest) *fault.Error {
	if len(m.Keys) > kv.MaxKeys {
		return fault.New(fault.BadRequest, "%d keys in one message, at most %d", len(m.Keys), kv.MaxKeys)
	}
	for i, k := range m.Keys {
		if len(k) > kv.MaxKey {
			return fault.New(fault.BadRequest, "key %d has %d bytes, at most %d", i, len(k), kv.MaxKey)
		}
	}
	if len(m.Keys) == 0 {
		return nil
	}
	f := &c.cfg.Facts
	if f.Format != 0 && (m.Fmt != f.Format || m.DType != f.DType) {
		return fault.New(fault.LayoutMismatch, "fmt %d and dtype %s here, %d and %s there", f.Format, f.DType, m.Fmt, m.DType)
	}
	full, last, err := batchBytes(m)
	if err != nil {
		return fault.New(fault.BadRequest, "%v", err)
	}
	dim, _ := m.Fmt.TokenDim()
	switch {
	case full > f.SlotBytes || last > f.SlotBytes:
		return errSlot(full, f.SlotBytes)
	case f.ChunkTokens != 0 && len(m.Keys) > 1 && m.Shape[dim] != f.ChunkTokens:
		return fault.New(fault.LayoutMismatch, "chunk_tokens is %d here; the shape has %d", f.ChunkTokens, m.Shape[dim])
	case r != nil && r.full != 0 && !r.sameLayout(m, dim):
		return fault.New(fault.BadRequest, "fmt %d, dtype %s, shape %v; they were %d, %s, %v before",
			m.Fmt, m.DType, m.Shape, r.format, r.dtype, r.shape)
	}
	return nil
}

// batchBytes returns the bytes of a batch's chunks and of its last one.
func batchBytes(m *msg.AllocRequest) (full, last int64, err error) {
	dim, ok := m.Fmt.TokenDim()
	tokens := int64(1)
	if ok && dim < len(m.Shape) {
		tokens = m.Shape[dim]
	}
	if full, err = kv.ChunkBytes(m.Fmt, m.DType, m.Shape, tokens); err != nil {
		return 0, 0, err
	}
	last, err = kv.ChunkBytes(m.Fmt, m.DType, m.Shape, m.LastChunkToks)
	return full, last, err
}

// sameLayout compares a batch with those before; a batch of one partial chunk
// has the partial shape.
func (r *request) sameLayout(m *msg.AllocRequest, dim int) bool {
	if m.Fmt != r.format || m.DType != r.dtype || len(m.Shape) != len(r.shape) {
		return false
	}
	for i := range m.Shape {
		if i != dim && m.Shape[i] != r.shape[i] {
			return false
		}
	}
	return true
}

// distinct counts the different keys of a batch that a request does not hold.
func distinct(held map[string]uint32, keys []string) int64 {
	seen := make(map[string]struct{}, len(keys))
	for _, k := range keys {
		if _, ok := held[k]; !ok {
			seen[k] = struct{}{}
		}
	}
	return int64(len(seen))
}

// grantBatch grants a batch's keys in the order in which they first appear, and
// answers it. R2: inside the reservation that never waits. More distinct keys
// than were declared roll the request back.
func (c *Core) grantBatch(r *request, m *msg.AllocRequest, rep *reply) {
	l := r.legacy
	n := distinct(l.index, m.Keys)
	if n > l.reserved {
		if !l.complete || r.end == r.total {
			c.violation(r, errOverflow(int64(len(r.slots))+n, r.total))
		} // else the surplus went back: a late batch, which does not touch it
		c.answerBatch(rep, refusal(len(m.Keys)))
		return
	}
	answer := &msg.AllocResponse{RemoteIndexes: make([]int64, len(m.Keys))}
	if len(m.Keys) > 0 {
		c.grantKeys(r, m, answer.RemoteIndexes)
		rep.grant, rep.fresh = r.gen, n > 0
		if rep.fresh {
			l.unsaid++
		}
	}
	c.answerBatch(rep, answer)
	switch {
	case l.complete:
	case l.reserved == 0 || l.single || m.IsLastBatch && len(m.Keys) == 0:
		c.complete(r)
	case m.IsLastBatch && l.graceAt == kv.Never: // the flag is not reliable
		l.graceAt = c.now.Add(c.cfg.SurplusGrace)
		c.arm(r)
	}
}

// grantKeys fills in the slot of each key.
func (c *Core) grantKeys(r *request, m *msg.AllocRequest, indexes []int64) {
	l := r.legacy
	full, last, _ := batchBytes(m)
	dim, _ := m.Fmt.TokenDim()
	if full > r.full { // a batch of one partial chunk has the partial shape
		r.format, r.dtype, r.full = m.Fmt, m.DType, full
		r.shape = append(r.shape[:0], m.Shape...)
	}
	for i, k := range m.Keys {
		at, ok := l.index[k]
		if !ok {
			at = uint32(len(r.slots))
			l.index[k] = at
			l.reserved--
			c.grant(r)
			r.chunks[at] = chunk{key: k, bytes: full, tokens: m.Shape[dim], named: true}
			if i == len(m.Keys)-1 {
				r.chunks[at].bytes, r.chunks[at].tokens = last, m.LastChunkToks
			}
		}
		indexes[i] = int64(r.slots[at])
	}
}
