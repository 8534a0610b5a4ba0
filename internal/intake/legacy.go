package intake

import (
	"fmt"
	"strings"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// legacy is what a request of an LMCache sender has besides: it is granted
// batch by batch inside its reservation, and nobody commits its chunks.
type legacy struct {
	batches  []batch           // that came before it was admitted
	index    map[string]uint32 // which chunk a key is, by first appearance
	reserved int64             // slots not granted yet
	counted  int64             // slots counted as incomplete
	graceAt  kv.Instant        // surplus_grace_sec after a last-flagged batch
	first    bool              // its first batch waits: its sender says nothing more
	single   bool              // anonymous: all of it is in one message
	complete bool              // no further chunk is granted
	watched  bool              // a Berth proxy watches it, or did
	unsaid   int               // fresh replies that stand in line
}

// batch is an AllocRequest that waits with its request.
type batch struct {
	m     *msg.AllocRequest
	reply *reply
}

// reply is the place of an answer in the line of a connection: one for each
// message, in order.
type reply struct {
	conn  *conn
	m     *msg.AllocResponse // nil: not known yet
	grant kv.Generation      // whose slots it names, 0: nobody's
	fresh bool               // it names slots that no reply has named before
}

// maxReplies bounds that line; LMCache's sender has one.
const maxReplies = 1024

// line takes a place in the line. A peer that has too many is cut off.
func (c *Core) line(cn *conn) *reply {
	if len(cn.replies) >= maxReplies { // R11
		c.act(Note{Kind: NoteViolation, Owner: cn.identity, Reason: fault.Busy,
			Text: fmt.Sprintf("%d messages are unanswered on one connection, at most %d may be", len(cn.replies), maxReplies)})
		c.act(Close{Conn: cn.id})
		cn.superseded = true
		return nil
	}
	r := &reply{conn: cn}
	cn.replies = append(cn.replies, r)
	return r
}

// answerBatch fills a place, and sends what is next in the line.
func (c *Core) answerBatch(r *reply, m *msg.AllocResponse) {
	r.m = m
	cn := r.conn
	for len(cn.replies) > 0 && cn.replies[0].m != nil {
		first := cn.replies[0]
		cn.replies[0] = nil
		cn.replies = cn.replies[1:]
		if c.conns[cn.id] == cn {
			c.send(cn.id, c.current(first))
			c.said(first)
		}
	}
}

// said notes that a sender knows the slots of a batch: before that it cannot
// have written them.
func (c *Core) said(r *reply) {
	if q := c.granted[r.grant]; q != nil && r.fresh {
		q.legacy.unsaid--
		c.offerLegacy(q)
	}
}

// current is a reply as it is true when it leaves the line: the slots of a
// request that is ready meanwhile, or has ended, are not to be written any more.
func (c *Core) current(r *reply) *msg.AllocResponse {
	if r.grant == 0 {
		return r.m
	}
	q := c.granted[r.grant]
	switch {
	case q == nil || !q.live():
		return refusal(len(r.m.RemoteIndexes))
	case q.unfinished():
		return r.m
	}
	return alreadySent(len(r.m.RemoteIndexes))
}

// refusal refuses a message of that many keys.
func refusal(keys int) *msg.AllocResponse {
	m := &msg.AllocResponse{RemoteIndexes: make([]int64, max(keys, 1))}
	for i := range m.RemoteIndexes {
		m.RemoteIndexes[i] = -1
	}
	return m
}

func (c *Core) refuseLegacy(cn *conn, keys int) {
	if r := c.line(cn); r != nil {
		c.answerBatch(r, refusal(keys))
	}
}

// legacyOwner returns the owner that a connection's identity names.
func (c *Core) legacyOwner(cn *conn) *peer {
	if cn.owner != nil {
		return cn.owner
	}
	id := cn.identity
	if id == "" {
		id = fmt.Sprintf("#%d", cn.id)
	}
	p := c.identities[id]
	if p == nil {
		p = c.newPeer(roleLegacy, id)
		p.identity = id
		c.identities[id] = p
	}
	c.attach(cn, p)
	return p
}

// allocRequest is a batch: of a new request, or of one that is known.
func (c *Core) allocRequest(cn *conn, m *msg.AllocRequest) {
	p := c.legacyOwner(cn)
	rep := c.line(cn)
	if rep == nil {
		return
	}
	key := reqKey{name: m.ReqID}
	if m.ReqID != "" {
		if r := p.live[key]; r != nil {
			c.nextBatch(r, m, rep)
			return
		}
		if e := p.ended[key]; e != nil {
			if e.ending != msg.EndReady { // a late batch
				c.answerBatch(rep, refusal(len(m.Keys)))
				return
			}
			e.owner = nil // an id that was ready is free again
			delete(p.ended, key)
		}
	}
	total := m.TotalChunks
	if m.ReqID == "" {
		total = int64(len(m.Keys))
	}
	if err := c.checkFirst(p, m, total); err != nil {
		if m.ReqID == "" {
			c.act(Note{Kind: NoteRefused, Owner: p.label, Reason: err.Code, Text: err.Text})
		} else {
			c.turnAway(p, key, m.ReqID, err)
		}
		c.answerBatch(rep, refusal(len(m.Keys)))
		return
	}
	id := m.ReqID
	if id == "" {
		p.anonymous++
		id = fmt.Sprintf("anon:%s:%d", p.identity, p.anonymous)
		key = reqKey{begin: p.anonymous}
	}
	r := c.newRequest(p, key, id, total)
	r.legacy = &legacy{index: map[string]uint32{}, graceAt: kv.Never, single: m.ReqID == "", watched: r.name.watches.n > 0}
	c.park(r, m, rep)
	c.allow(r, kv.Forever)
	c.enter(r)
}

// checkFirst says why a first batch is refused (R4).
func (c *Core) checkFirst(p *peer, m *msg.AllocRequest, total int64) *fault.Error {
	switch {
	case c.cfg.LegacyData && !c.handshakes.has(p.identity):
		return fault.New(fault.HelloRequired,
			"%s has made no data handshake with this receiver since it started: restart that prefiller", p.identity)
	case c.draining:
		return errDraining()
	case c.crowded():
		return errCrowded(c.cfg.MaxEndings)
	case len(m.ReqID) > kv.MaxReqID:
		return errReqID(m.ReqID)
	case m.ReqID != "" && total < 1:
		return fault.New(fault.BadRequest, "total_chunks is %d", total)
	case total > int64(c.cfg.Capacity):
		return errTooLarge(total, c.cfg.Capacity)
	}
	if err := c.checkBatch(nil, m); err != nil {
		return err
	}
	if err := c.checkParked(m); err != nil {
		return err
	}
	if n := distinct(nil, m.Keys); n > total {
		return errOverflow(n, total)
	}
	return c.marked(m.ReqID)
}

func errOverflow(n, total int64) *fault.Error {
	return fault.New(fault.Overflow, "%d distinct chunks are named; total_chunks is %d", n, total)
}

// firstWaits notes that a first batch waits: its sender is in lock-step, it says
// nothing more until this is answered, not even what would complete its other
// requests. So when it cannot fit before those are complete it is refused: that
// wait could never end. It reports whether the request still waits.
func (c *Core) firstWaits(r *request) bool {
	r.legacy.first = true
	c.lockSteps(r.owner, 1, 0)
	reach := int64(c.cfg.Capacity) - c.lasting - c.lockStep
	if r.total <= reach {
		return true
	}
	c.sendAway(r, fault.New(fault.TooLarge,
		"%d chunks: %d slots are free, and at most %d come free while this and other senders wait in lock-step for an answer",
		r.total, c.ledger.Free(), reach))
	return false
}

// firstAnswered ends that.
func (c *Core) firstAnswered(r *request) {
	if r.legacy.first {
		r.legacy.first = false
		c.lockSteps(r.owner, -1, 0)
	}
}

// lockSteps changes a legacy owner's unanswered first batches and the slots of
// its incomplete requests, and with them F: the sum of the latter over all who
// have any of the former.
func (c *Core) lockSteps(p *peer, unanswered int, incomplete int64) {
	if p.unanswered > 0 {
		c.lockStep -= p.incomplete
	}
	p.unanswered += unanswered
	p.incomplete += incomplete
	if p.unanswered > 0 {
		c.lockStep += p.incomplete
	}
}

// admitLegacy grants the batches of a request that was admitted.
func (c *Core) admitLegacy(r *request) {
	l := r.legacy
	c.firstAnswered(r)
	l.reserved, l.counted = r.total, r.total
	c.lockSteps(r.owner, 0, r.total)
	c.arm(r)
	for _, b := range c.unpark(r) {
		if r.state == draining { // an earlier one has failed it
			c.answerBatch(b.reply, refusal(len(b.m.Keys)))
			continue
		}
		c.grantBatch(r, b.m, b.reply)
	}
}

// complete ends the granting: what was reserved beyond goes back. A Ready that
// came earlier counts now.
func (c *Core) complete(r *request) {
	r.legacy.complete = true
	r.end = int64(len(r.slots))
	c.unreserve(r)
	if r.end == 0 {
		c.becomeReady(r)
		return
	}
	r.goneAt = c.now.Add(c.cfg.UnclaimedTTL)
	c.arm(r)
	c.offerLegacy(r)
	c.commitVouched(r.name)
}

// vouchable: find's caller may vouch for a legacy request.
func (r *request) vouchable() bool {
	return r.state == admitted && r.legacy.complete && !r.legacy.watched && r.legacy.unsaid == 0
}

func (c *Core) offerLegacy(r *request) {
	if r.vouchable() {
		c.offer(r)
	}
}

// unreserve gives back what is reserved for a legacy request and not granted.
func (c *Core) unreserve(r *request) {
	l := r.legacy
	must(c.pool.Unreserve(int(l.reserved)))
	c.lockSteps(r.owner, 0, -l.counted)
	l.reserved, l.counted = 0, 0
}

// commitLegacy commits a complete request: somebody has vouched for its bytes.
func (c *Core) commitLegacy(r *request) {
	for i := range r.end {
		must(c.pool.Land(r.slots[i], r.gen))
		c.commitChunk(r, i)
	}
	c.becomeReady(r)
}

// cancelNotif ends a request in whatever state it is, known or not, at once,
// even when the answer must stand in line. The keys do not matter: they may be
// another request's too.
func (c *Core) cancelNotif(cn *conn, m *msg.CancelNotif) {
	p := c.legacyOwner(cn)
	rep := c.line(cn)
	if rep == nil {
		return
	}
	key := reqKey{name: m.ReqID}
	r := p.live[key]
	v := verdict{msg.EndCancelled, fault.Cancelled, "its sender has cancelled it"}
	switch {
	case m.ReqID == "" || len(m.ReqID) > kv.MaxReqID:
	case r != nil && r.unfinished():
		c.end(r, v, bySender)
	case r != nil && r.state == ready:
		c.giveBack(r)
	case r == nil && p.ended[key] == nil && !c.crowded():
		n := c.nameOf(m.ReqID)
		c.keep(&ending{verdict: v, owner: p, key: key, name: n})
		c.tellName(n)
	}
	c.answerBatch(rep, &msg.AllocResponse{})
}

// handshakes remembers which LMCache senders made their data handshake with
// this incarnation. They never repeat it.
type handshakes struct {
	at   map[string]uint64 // local id → order
	last uint64
}

func (h *handshakes) add(localID string, limit int) {
	if h.at[localID] != 0 {
		return
	}
	if len(h.at) >= limit { // R11: the oldest goes
		var oldest string
		for id, at := range h.at {
			if oldest == "" || at < h.at[oldest] {
				oldest = id
			}
		}
		delete(h.at, oldest)
	}
	h.last++
	h.at[localID] = h.last
}

// has looks up the sender of an identity "<local_id>-to-<receiver>".
func (h *handshakes) has(identity string) bool {
	if i := strings.LastIndex(identity, "-to-"); i >= 0 {
		identity = identity[:i]
	}
	return h.at[identity] != 0
}
