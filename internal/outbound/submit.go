package outbound

import (
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// submit takes a batch over, whole or not at all.
func (c *Core) submit(now kv.Instant, ev Submit) {
	r := c.reqs[ev.ReqID]
	if err := c.checkSubmit(now, r, ev); err != nil {
		c.answer(ev.Call, err)
		return
	}
	c.takeBatch(r, ev)
	c.answer(ev.Call, nil)
	c.touch(r)
}

// checkSubmit verifies a batch whole before any of it counts.
func (c *Core) checkSubmit(now kv.Instant, r *request, ev Submit) *fault.Error {
	switch {
	case c.engines[ev.Engine] == nil:
		return notAttached()
	case r == nil:
		return c.goneError(now, ev.ReqID, fault.NotGranted)
	case r.state != granted:
		return r.notNow(fault.NotGranted)
	case ev.HasEnd && (ev.End < 0 || ev.End > r.total):
		return fault.New(fault.BadRequest, "end is %d; total_chunks is %d", ev.End, r.total)
	case ev.HasEnd && r.hasEnd && ev.End != r.end:
		return fault.New(fault.BadRequest, "end is %d; it was %d", ev.End, r.end)
	}
	if err := c.checkStaged(ev.Engine, r.id, len(ev.Chunks), func(i int) kv.SlotID { return ev.Chunks[i].Slot }); err != nil {
		return err
	}
	end := r.total
	if r.hasEnd {
		end = r.end
	}
	if ev.HasEnd {
		end = ev.End
		if i := r.highest(); i >= end {
			return fault.New(fault.BadRequest, "end is %d; chunk %d was submitted", end, i)
		}
	}
	at := func(i int) kv.SlotID { return kv.SlotID(ev.Chunks[i].Index) }
	for i, k := range ev.Chunks {
		err := c.checkChunk(r, k, end)
		if err == nil && !c.mark(kv.SlotID(k.Index)) {
			err = fault.New(fault.BadRequest, "chunk %d is in the batch twice", k.Index)
		}
		if err != nil {
			c.unmark(i, at)
			return err
		}
	}
	c.unmark(len(ev.Chunks), at)
	return nil
}

func (c *Core) checkChunk(r *request, k Chunk, end int64) *fault.Error {
	switch {
	case k.Index < 0 || k.Index >= r.total:
		return fault.New(fault.Overflow, "chunk %d of %q; total_chunks is %d", k.Index, r.id, r.total)
	case k.Index >= end:
		return fault.New(fault.BadRequest, "chunk %d of %q; end is %d", k.Index, r.id, end)
	case k.Key == "" || len(k.Key) > kv.MaxKey:
		return fault.New(fault.BadRequest, "the key of chunk %d has %d bytes; the limit is %d", k.Index, len(k.Key), kv.MaxKey)
	case k.Tokens < 1 || k.Tokens > c.cfg.Facts.ChunkTokens:
		return fault.New(fault.BadRequest, "chunk %d has %d tokens; a chunk has %d", k.Index, k.Tokens, c.cfg.Facts.ChunkTokens)
	}
	if r.legacy.on && r.sameKey(k) {
		return fault.New(fault.BadRequest, "chunk %d has the key of another chunk, %q", k.Index, k.Key)
	}
	if was := &r.chunks[k.Index]; was.state != absent && (was.key != k.Key || was.tokens != k.Tokens) {
		return fault.New(fault.BadRequest, "chunk %d is %q with %d tokens; it was %q with %d", k.Index, k.Key, k.Tokens, was.key, was.tokens)
	}
	return nil
}

// sameKey reports whether another chunk has this one's key. To an LMCache
// receiver that would be the same chunk, counted twice.
func (r *request) sameKey(k Chunk) bool {
	for i := range r.chunks {
		if was := &r.chunks[i]; was.state != absent && int64(i) != k.Index && was.key == k.Key {
			return true
		}
	}
	return false
}

// highest is the highest index submitted, -1 if none.
func (r *request) highest() int64 {
	for i := int64(len(r.chunks)) - 1; i >= 0; i-- {
		if r.chunks[i].state != absent {
			return i
		}
	}
	return -1
}

// takeBatch makes commits of what is new in a batch, and lets repeats wait for
// the write that is under way.
func (c *Core) takeBatch(r *request, ev Submit) {
	var k *commit
	limit := max(c.cfg.Window/4, 1)
	for i := range ev.Chunks {
		in := &ev.Chunks[i]
		c.engines[c.pool.slots[in.Slot].engine].staged--
		gen := c.pool.submitted(in.Slot)
		was := &r.chunks[in.Index]
		switch was.state {
		case done:
			c.freed(in.Slot)
			continue
		case waiting, moving:
			r.repeats = append(r.repeats, repeat{index: in.Index, slot: in.Slot})
			continue
		}
		r.submitted++
		if r.legacy.on {
			*was = chunk{key: in.Key, tokens: in.Tokens, slot: in.Slot, state: waiting}
			continue
		}
		*was = chunk{key: in.Key, tokens: in.Tokens, state: moving}
		bytes := in.Tokens * c.perToken
		if k == nil || k.bytes+bytes > limit || len(k.items) == kv.MaxKeys || k.encoded+encodedChunk(in.Key) > kv.MaxCommitBytes {
			k = c.newCommit(r)
		}
		k.add(in, gen, bytes)
	}
	// The commit that makes the request whole says how many chunks it has.
	if ev.HasEnd {
		r.hasEnd, r.end = true, ev.End
	}
	if !r.hasEnd && r.submitted == r.total {
		r.hasEnd, r.end = true, r.total
	}
	if r.hasEnd && !r.endSaid && !r.legacy.on {
		r.endSaid = true
		if k == nil {
			k = c.newCommit(r)
		}
		k.msg.HasEnd, k.msg.End = true, r.end
	}
	for _, k := range r.commits {
		if k.phase == fresh {
			c.sumOrQueue(k)
		}
	}
}

// encodedChunk is at least what a chunk takes in an encoded Commit.
func encodedChunk(key string) int64 { return int64(len(key)) + 128 }

// encodedCommit is at least what the rest of a Commit takes.
const encodedCommit = 1024

func (k *commit) add(in *Chunk, gen kv.Generation, bytes int64) {
	k.msg.Chunks = append(k.msg.Chunks, msg.Chunk{Index: in.Index, Key: in.Key, Tokens: in.Tokens})
	k.items = append(k.items, item{src: in.Slot, srcGen: gen, bytes: bytes})
	k.bytes += bytes
	k.encoded += encodedChunk(in.Key)
}
