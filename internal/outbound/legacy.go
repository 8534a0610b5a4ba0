package outbound

import (
	"fmt"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// An LMCache receiver answers each message when it is done, in any order, with
// nothing to tell the answers apart. So a request owns one connection for its
// life and has one message out on it:
//
//	admission       AllocRequest, no keys, total_chunks ──► granted
//	allocation      AllocRequest, the next chunks in order ──► their slots; write
//	the last flag   AllocRequest, no keys, meanwhile ──► ready, once all is written
//
// A cancel goes over another connection, once no write is in flight, since that
// receiver frees at once. One of a request whose AllocRequest is out is said
// again with the keys of its answer: the receiver grants them all the same. One
// of a request whose connection was lost before that answer names no keys: see
// cancelMessage.
type legacyRequest struct {
	on      bool
	conn    *legacyConn
	out     bool     // an AllocRequest is not answered
	commit  *commit  // whose chunks it names; nil: admission, or the flag alone
	next    int64    // the first chunk that was not asked for
	last    bool     // the last flag is out
	lastOK  bool     // and answered
	keys    []string // granted, or called already sent, and not cancelled
	doubt   string   // a key of an AllocRequest whose connection was lost; "": none
	cancels int      // queued or not answered
	asked   bool     // to be cancelled once its writes are over
}

// owes reports whether the receiver still owes an answer.
func (l *legacyRequest) owes() bool { return l.on && (l.out || l.cancels > 0) }

// metLegacy: the receiver speaks LMCache's dialect.
func (c *Core) metLegacy(now kv.Instant, p *peer) {
	if c.cfg.Dialect == DialectBerth {
		c.failQueued(now, p, fault.Unsupported, "the receiver speaks LMCache's dialect; peer_dialect is berth")
		return
	}
	p.dialect = speaksLMCache
	c.emit(Note{Kind: NoteSession, Peer: p.name, Text: "lmcache"})
}

// pumpLegacy starts what may start at an LMCache receiver and goes on with
// what runs.
func (c *Core) pumpLegacy(now kv.Instant, p *peer) {
	if p.dialect == speaksLMCache {
		c.startLegacy(now, p)
	}
	for r := p.reqs.first; r != nil && p.legacy.running > 0; {
		next := r.next
		if r.legacy.on {
			c.advanceLegacy(now, r)
		}
		r = next
	}
	c.pumpCancels(p)
	c.armPeer(p)
}

// startLegacy gives queued requests a connection each, oldest first.
func (c *Core) startLegacy(now kv.Instant, p *peer) {
	if p.queue.n == 0 {
		p.linkless = kv.Never
		return
	}
	if c.cfg.LegacyLink == "" && !c.cfg.LegacyNoData {
		c.failQueued(now, p, fault.Unsupported, "the receiver speaks LMCache's dialect, and there is no data link to those (links has no nixl)")
		return
	}
	for r := p.queue.first; r != nil; {
		next := r.qnext
		switch {
		case r.total == 0: // nothing to move, and that receiver refuses such a request
			c.runLegacy(r)
			c.admitted(now, r)
			c.complete(now, r)
		case c.cfg.LegacyLink != "" && p.addr.InitPort == 0:
			c.endAlone(now, r, endingOf(fault.BadRequest, "an LMCache receiver needs its init port"))
		}
		r = next
	}
	if p.queue.n == 0 || !c.legacyLinkUp(now, p) {
		return
	}
	for p.queue.n > 0 && len(p.legacy.idle) > 0 {
		n := len(p.legacy.idle) - 1
		lc := p.legacy.idle[n]
		p.legacy.idle = p.legacy.idle[:n]
		r := p.queue.first
		c.runLegacy(r)
		r.legacy.conn, r.link = lc, p.legacy.link
		lc.req = r
		c.alloc(r, nil, false)
	}
	c.dialLegacy(now, p)
}

func (c *Core) runLegacy(r *request) {
	r.peer.queue.remove(r)
	r.peer.legacy.running++
	r.legacy.on = true
	r.become(begun)
}

// legacyLinkUp sees to the data link; true when requests may start.
func (c *Core) legacyLinkUp(now kv.Instant, p *peer) bool {
	switch l := p.legacy.link; {
	case c.cfg.LegacyNoData:
		return true
	case l != nil:
		return l.state == linkIsUp
	}
	if p.linkless == kv.Never {
		p.linkless = now
	}
	if len(p.tries) != 1 || p.tries[0].def != c.legacyDef {
		p.tries = append(p.tries[:0], try{def: c.legacyDef})
	}
	if p.tries[0].at <= now {
		init := p.addr
		init.AllocPort = init.InitPort
		p.legacy.link = c.makeLink(p, c.legacyDef, init.name(), kv.Incarnation{})
	}
	return false
}

// alloc sends an AllocRequest: for the chunks of a commit, or for none.
func (c *Core) alloc(r *request, k *commit, last bool) {
	full := c.cfg.Facts.ChunkTokens
	m := &msg.AllocRequest{Keys: []string{}, Fmt: c.cfg.Facts.Format, Shape: c.cfg.Shape, DType: c.cfg.Facts.DType, LastChunkToks: full,
		ReqID: r.id, IsLastBatch: last, TotalChunks: r.total}
	if k != nil {
		m.Keys = k.keys()
		if t := k.msg.Chunks[len(k.msg.Chunks)-1].Tokens; t != full {
			m.LastChunkToks = t
			if len(m.Keys) == 1 { // one partial chunk has the partial shape itself
				m.Shape = append([]int64(nil), c.cfg.Shape...)
				dim, _ := c.cfg.Facts.Format.TokenDim()
				m.Shape[dim] = t
			}
		}
	}
	r.legacy.out, r.legacy.commit, r.legacy.last = true, k, last
	if k != nil {
		k.owed = true
	}
	c.emit(Send{Conn: r.legacy.conn.id, Msg: m})
}

// advanceLegacy asks for the next chunks, for the end, or to be cancelled, when
// it is time for that.
func (c *Core) advanceLegacy(now kv.Instant, r *request) {
	switch {
	case r.state == granted && !r.legacy.out:
		if k := c.nextRun(now, r); k != nil {
			c.alloc(r, k, false) // the flag would end what the receiver knows of the request
		} else if r.hasEnd && r.legacy.next == r.end && !r.legacy.last {
			c.alloc(r, nil, true)
		} else if r.legacy.lastOK && r.committed == r.end {
			c.complete(now, r)
		}
	case r.state == ending && r.busy == 0 && r.legacy.asked:
		r.legacy.asked = false
		c.cancelLegacy(r)
	}
}

// nextRun makes a commit of the next chunks in order that were submitted; nil
// when the next one was not. Only the last chunk of a run may be partial.
func (c *Core) nextRun(now kv.Instant, r *request) *commit {
	var k *commit
	for r.legacy.next < int64(len(r.chunks)) {
		in := &r.chunks[r.legacy.next]
		if in.state != waiting {
			break
		}
		bytes := in.tokens * c.perToken
		if k == nil {
			if p := r.peer; p.unanswered > 0 && p.unanswered+bytes > c.cfg.Window {
				return nil
			}
			k = c.newCommit(r)
		} else if len(k.items) == kv.MaxKeys || k.bytes+bytes > max(c.cfg.Window/4, 1) || k.encoded+encodedChunk(in.key) > kv.MaxCommitBytes {
			break
		}
		in.state = moving
		k.add(&Chunk{Index: r.legacy.next, Key: in.key, Slot: in.slot, Tokens: in.tokens}, 0, bytes)
		r.legacy.next++
		if in.tokens != c.cfg.Facts.ChunkTokens {
			break
		}
	}
	if k != nil {
		k.phase = asked
		c.underWay(now, k)
	}
	return k
}

// allocReply takes the answer to a request's AllocRequest.
func (c *Core) allocReply(now kv.Instant, r *request, m *msg.AllocResponse) {
	k := r.legacy.commit
	r.legacy.out, r.legacy.commit = false, nil
	keys := 0
	if k != nil {
		k.owed = false
		keys = len(k.msg.Chunks)
	}
	refused, text := checkAlloc(m, keys)
	switch {
	case r.state == begun || r.state == granted:
		switch {
		case text != "":
			if refused {
				r.legacy.keys = nil // it has rolled back by itself
			} else {
				c.violation(r.peer, r.id, text)
				r.legacy.keys = append(r.legacy.keys, k.keys()...) // it may hold these too
			}
			c.fail(now, r, fault.Internal, text)
		case r.state == begun:
			c.admitted(now, r)
		default:
			if k != nil {
				c.granted(k, m)
			}
			r.legacy.lastOK = r.legacy.last
			if k != nil {
				c.writeLegacy(now, k)
			}
		}
	case refused:
		r.legacy.keys = nil
		r.peer.rolledBack(r)
	default: // cancelled meanwhile: it granted all the same
		if text == "" && k != nil {
			c.granted(k, m)
		}
		if !r.legacy.asked {
			c.cancelLegacy(r)
		}
	}
	c.touch(r)
}

// checkAlloc returns what is wrong with an answer for n keys, "" if nothing.
func checkAlloc(m *msg.AllocResponse, n int) (refused bool, text string) {
	for _, i := range m.RemoteIndexes {
		if i == -1 {
			return true, "the receiver refused (LMCache's gives no reason)"
		}
	}
	if len(m.RemoteIndexes) != n-len(m.AlreadySent) {
		return false, fmt.Sprintf("%d slots and %d already sent for %d keys", len(m.RemoteIndexes), len(m.AlreadySent), n)
	}
	seen := map[int64]bool{}
	for _, i := range m.AlreadySent {
		if i < 0 || i >= int64(n) || seen[i] {
			return false, fmt.Sprintf("key %d of %d is already sent", i, n)
		}
		seen[i] = true
	}
	clear(seen)
	for _, i := range m.RemoteIndexes {
		if i < 0 || i >= kv.MaxSlots || seen[i] {
			return false, fmt.Sprintf("slot %d was granted, or twice", i)
		}
		seen[i] = true
	}
	return false, ""
}

// granted notes the slots of a commit's chunks. What the receiver has already it
// counts for this request too, so a cancel names it.
func (c *Core) granted(k *commit, m *msg.AllocResponse) {
	r := k.req
	for _, i := range m.AlreadySent {
		k.items[i].there = true
	}
	at := 0
	for i := range k.items {
		if it := &k.items[i]; !it.there {
			it.dst = kv.SlotID(m.RemoteIndexes[at])
			at++
		}
	}
	r.legacy.keys = append(r.legacy.keys, k.keys()...)
}

// keys are the keys of a commit's chunks; none of no commit.
func (k *commit) keys() (out []string) {
	if k == nil {
		return nil
	}
	for _, in := range k.msg.Chunks {
		out = append(out, in.Key)
	}
	return out
}

// writeLegacy writes the chunks that were granted; those that are there, and
// all when no data moves, are done.
func (c *Core) writeLegacy(now kv.Instant, k *commit) {
	r := k.req
	k.phase = writing
	if r.link != nil {
		r.link.progress = now
	}
	for i := range k.items {
		if it := &k.items[i]; it.there || c.cfg.LegacyNoData {
			it.there = true
			c.committed(r, k, i)
			c.freeItem(it)
		}
	}
	c.writeItems(k, false)
	c.legacyWritten(k)
}

// legacyWritten ends a commit whose chunks are all written.
func (c *Core) legacyWritten(k *commit) {
	if k.phase == writing && k.unsent == 0 && k.lost == 0 {
		c.leaveWindow(k)
		k.phase = over
		if k.req.link != nil {
			c.armLink(k.req.link)
		}
		c.freeRepeats(k.req)
		c.touch(k.req)
	}
}

// failLegacy begins the end of a request at an LMCache receiver. A waiting one
// is cancelled at once; otherwise its writes are drained first.
func (c *Core) failLegacy(r *request) {
	r.legacy.asked = true
	c.touch(r)
}

// cancelLegacy queues a cancel with the keys that were granted since the last
// one.
func (c *Core) cancelLegacy(r *request) {
	l, p := &r.legacy, r.peer
	x := legacyCancel{req: r, keys: l.keys, doubt: l.doubt}
	l.keys, l.doubt = nil, ""
	l.cancels++
	p.legacy.cancels = append(p.legacy.cancels, x)
	c.touchPeer(p)
}

// cancelMessage is what says a cancel. Where it is not known whether an
// AllocRequest has arrived, neither is whether its keys are held for this request
// or only for others, whose chunks a CancelNotif would take. But a violation
// makes that receiver roll a request back by what itself knows of it, and do
// nothing where it knows nothing: an AllocRequest without total_chunks.
func (c *Core) cancelMessage(x legacyCancel) msg.Message {
	if x.doubt == "" {
		return &msg.CancelNotif{ReqID: x.req.id, Keys: append([]string{}, x.keys...)}
	}
	return &msg.AllocRequest{Keys: []string{x.doubt}, Fmt: c.cfg.Facts.Format, Shape: c.cfg.Shape, DType: c.cfg.Facts.DType,
		LastChunkToks: c.cfg.Facts.ChunkTokens, ReqID: x.req.id}
}

// cancelledLegacy: a cancel was answered, or can never be.
func (c *Core) cancelledLegacy(now kv.Instant, r *request) {
	r.legacy.cancels--
	if r.state == ending && r.legacy.cancels == 0 {
		c.end(now, r, endingOf(r.cancelMsg.Reason, r.cancelMsg.Text))
	}
	c.touch(r)
}
