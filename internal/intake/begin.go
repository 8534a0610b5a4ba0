package intake

import (
	"fmt"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/reserve"
)

// begin admits a Berth sender's request, lets it wait, or refuses it. What it
// names may be known: then the answer that it had, or will have, is repeated.
func (c *Core) begin(cn *conn, p *peer, m *msg.Begin) {
	key := reqKey{begin: m.Begin}
	if r := p.live[key]; r != nil {
		c.beginAgain(cn, r, m)
		return
	}
	if e := p.ended[key]; e != nil {
		c.beginEnded(cn, e, m)
		return
	}
	if m.Begin <= p.highest { // 0 is no number
		c.refuse(cn.id, m.Seq, fault.New(fault.Ended, "begin %d has ended; the highest seen is %d", m.Begin, p.highest))
		return
	}
	p.highest = m.Begin
	if err := c.checkBegin(m); err != nil {
		c.turnAway(p, key, m.ReqID, err)
		c.refuse(cn.id, m.Seq, err)
		return
	}
	r := c.newRequest(p, key, m.ReqID, m.TotalChunks)
	r.link = c.linkNamed(m.Link)
	r.beginConn, r.beginSeq = cn.id, m.Seq
	c.allow(r, kv.FromMillis(m.DeadlineMS))
	c.enter(r)
}

// beginAgain answers a repeat of a request that is live.
func (c *Core) beginAgain(cn *conn, r *request, m *msg.Begin) {
	switch {
	case m.ReqID != r.id || m.TotalChunks != r.total || m.Link != c.linkOf(r).Name:
		c.refuse(cn.id, m.Seq, fault.New(fault.BadRequest, "begin %d is %q with %d chunks over %s, not %q with %d over %s",
			m.Begin, r.id, r.total, c.linkOf(r).Name, m.ReqID, m.TotalChunks, m.Link))
	case r.state != waiting:
		c.send(cn.id, r.grantedReply(m.Seq))
	case m.Seq != r.beginSeq:
		c.refuse(cn.id, m.Seq, fault.New(fault.BadRequest, "begin %d waits under seq %d, not %d", m.Begin, r.beginSeq, m.Seq))
	default:
		r.beginConn = cn.id // it keeps its place; the answer goes where it was asked last
	}
}

// beginEnded answers a repeat of a request that has ended.
func (c *Core) beginEnded(cn *conn, e *ending, m *msg.Begin) {
	if e.ending != msg.EndReady {
		c.refuse(cn.id, m.Seq, e.answer())
		return
	}
	if e.total == 0 {
		c.send(cn.id, &msg.Granted{Re: m.Seq, Begin: m.Begin, Generation: e.gen})
		return
	}
	c.refuse(cn.id, m.Seq, fault.New(fault.Ended, "begin %d was ready", m.Begin))
}

func (r *request) grantedReply(seq uint64) *msg.Granted {
	return &msg.Granted{Re: seq, Begin: r.key.begin, Generation: r.gen, Slots: r.slots}
}

// checkBegin says why a new request is refused (R4). Busy is no ending.
func (c *Core) checkBegin(m *msg.Begin) *fault.Error {
	if c.draining {
		return errDraining()
	}
	if c.crowded() {
		return errCrowded(c.cfg.MaxEndings)
	}
	if m.ReqID == "" || len(m.ReqID) > kv.MaxReqID {
		return fault.New(fault.BadRequest, "req_id has %d bytes; 1 to %d are allowed", len(m.ReqID), kv.MaxReqID)
	}
	if c.linkNamed(m.Link) == noLink {
		return fault.New(fault.Unsupported, "link %q is not offered", m.Link)
	}
	if m.TotalChunks < 0 {
		return fault.New(fault.BadRequest, "total_chunks is %d", m.TotalChunks)
	}
	if m.TotalChunks > int64(c.cfg.Capacity) {
		return errTooLarge(m.TotalChunks, c.cfg.Capacity)
	}
	if m.DeadlineMS < 0 {
		return fault.New(fault.BadRequest, "deadline_ms is %d", m.DeadlineMS)
	}
	if m.TokensKey != "" && c.tokensKey != "" && m.TokensKey != c.tokensKey {
		return fault.New(fault.LayoutMismatch, "tokens_key is %q here, %q there", c.tokensKey, m.TokensKey)
	}
	return c.marked(m.ReqID)
}

// marked refuses a name that a proxy has cancelled before it was live.
func (c *Core) marked(id string) *fault.Error {
	n := c.names[id]
	if n == nil || n.marks == 0 {
		return nil
	}
	return fault.New(fault.Cancelled, "%q was cancelled by its proxy", id)
}

func errTooLarge(total int64, capacity int) *fault.Error {
	return fault.New(fault.TooLarge, "total_chunks is %d; the pool has %d slots", total, capacity)
}

func errCrowded(limit int) *fault.Error {
	return busy("%d endings are kept, all younger than %g s", limit, kv.ShortTTL.Seconds())
}

// linkNamed returns the index of an offered link, or noLink.
func (c *Core) linkNamed(name string) int {
	for i, l := range c.cfg.Links {
		if l.Name == name {
			return i
		}
	}
	return noLink
}

// turnAway keeps the ending of a request that was refused at its first message.
// A refusal that may be tried again is kept for repeats alone: it is no ending.
func (c *Core) turnAway(p *peer, key reqKey, id string, err *fault.Error) {
	c.act(Note{Kind: NoteRefused, Owner: p.label, ReqID: id, Reason: err.Code, Text: err.Text})
	v := failedBy(err)
	if err.Code == fault.Cancelled {
		v.ending = msg.EndCancelled
	}
	e := &ending{verdict: v, owner: p, key: key}
	if id != "" && len(id) <= kv.MaxReqID && (err.Code != fault.Busy || p.role == roleLegacy) {
		e.name = c.nameOf(id)
	}
	if !c.crowded() {
		c.keep(e)
	}
	if e.name != nil {
		c.tellName(e.name)
	}
}

// answer is a kept ending, other than ready, as an answer.
func (e *ending) answer() *fault.Error {
	err := e.verdict.err()
	if err.Code == fault.Busy {
		err.Retry = busyRetry
	}
	return err
}

// allow sets how long a request may take: to be ready, and to be admitted.
func (c *Core) allow(r *request, given kv.Duration) {
	if given == kv.Forever {
		given = c.cfg.RequestTimeout
	}
	r.deadline = c.now.Add(given)
	r.admitBy = c.now.Add(c.cfg.AllocationTimeout)
}

// lateVerdict says which time ran out.
func (c *Core) lateVerdict(r *request) verdict {
	if r.state == waiting && r.admitBy < r.deadline {
		return failedBy(fault.New(fault.Deadline, "pd_allocation_timeout_sec %g ran out: %d slots are needed, %d are free",
			c.cfg.AllocationTimeout.Seconds(), r.total, c.ledger.Free()))
	}
	return failedBy(fault.New(fault.Deadline, "it was not ready within %g s: %d of %d chunks are committed",
		r.deadline.Sub(r.arrived).Seconds(), r.committed, r.goal()))
}

// enter asks the ledger for a request's room (R3: all of it or nothing).
func (c *Core) enter(r *request) {
	ok, err := c.ledger.Request(r.serial, reserve.Sender(r.owner.serial), r.total)
	switch {
	case err != nil:
		err.Retry = busyRetry
		c.sendAway(r, err)
	case ok:
		c.admit(r)
	default:
		c.waiting[r.serial] = r
		if r.legacy != nil && !c.firstWaits(r) {
			return
		}
		c.arm(r)
		c.note(r, Note{Kind: NoteWaiting, Count: r.total})
	}
}

// sendAway refuses a request that holds nothing and has waited, or would have
// to, because of busy: no ending, except for a legacy sender, who never tries
// again.
func (c *Core) sendAway(r *request, err *fault.Error) {
	if c.waiting[r.serial] != nil {
		c.unqueue(r)
	}
	c.answerPending(r, err)
	n := r.name
	n.requests.remove(r)
	delete(r.owner.live, r.key)
	r.state, r.name = draining, nil
	c.turnAway(r.owner, r.key, r.id, err)
	c.discard(r)
	c.tellName(n)
}

// admit gives a request the room that the ledger has taken for it: a Berth
// sender all its slots at once, which costs no more than a reservation.
func (c *Core) admit(r *request) {
	delete(c.waiting, r.serial)
	must(c.pool.Reserve(int(r.total)))
	c.generation++
	r.gen, r.state, r.admitAt = c.generation, admitted, c.now
	c.granted[r.gen] = r
	c.note(r, Note{Kind: NoteAdmitted, Count: r.total, Wait: c.now.Sub(r.arrived)})
	if r.legacy != nil {
		c.admitLegacy(r)
		return
	}
	for range r.total {
		c.grant(r)
	}
	if r.total > 0 {
		c.act(Open{Owner: r.owner.incarnation, Link: c.linkOf(r).Name, Generation: r.gen, Slots: r.slots})
	}
	c.send(r.beginConn, r.grantedReply(r.beginSeq))
	r.beginSeq = 0
	if r.total == 0 {
		c.becomeReady(r)
		return
	}
	c.arm(r)
}

// cancel ends a sender's request, or every request of a name for a proxy or a
// tool. It is answered at once with the ending that stands.
func (c *Core) cancel(cn *conn, p *peer, m *msg.Cancel) {
	if (m.Begin != 0) == (m.ReqID != "") || (m.Begin != 0) != (p.role == msg.RoleSender) || len(m.ReqID) > kv.MaxReqID {
		c.refuse(cn.id, m.Seq, fault.New(fault.BadRequest, "a %s cancels by %s", p.role, cancelsBy(p.role)))
		return
	}
	v := asked(m.Reason, m.Text)
	if p.role == msg.RoleSender {
		c.cancelBegin(p, m.Begin, v)
		stands := p.standing(m.Begin)
		c.send(cn.id, &msg.Ended{Re: m.Seq, Begin: m.Begin, Ending: stands.ending, Reason: stands.reason, Text: stands.text})
		return
	}
	stands := c.cancelName(m.ReqID, v)
	if p.role == msg.RoleProxy {
		c.markName(m.ReqID, v, p.label)
	}
	c.send(cn.id, &msg.Ended{Re: m.Seq, ReqID: m.ReqID, Ending: stands.ending, Reason: stands.reason, Text: stands.text})
}

func cancelsBy(r msg.Role) string {
	if r == msg.RoleSender {
		return "begin"
	}
	return fmt.Sprintf("req_id of 1 to %d bytes", kv.MaxReqID)
}

// cancelBegin ends a sender's request in whatever state it is, known or not.
func (c *Core) cancelBegin(p *peer, begin uint64, v verdict) {
	key := reqKey{begin: begin}
	r := p.live[key]
	switch {
	case r != nil && r.unfinished():
		c.end(r, v, bySender)
	case r != nil && r.state == ready && v.reason != fault.Deadline:
		c.giveBack(r) // its engine, or a sibling rank, has no use for it
	case r == nil && begin > p.highest:
		p.highest = begin
		if !c.crowded() {
			c.keep(&ending{verdict: v, owner: p, key: key})
		}
	}
}

// standing is the ending of a begin that has ended.
func (p *peer) standing(begin uint64) verdict {
	key := reqKey{begin: begin}
	if p.live[key] != nil {
		return isReady
	}
	if e := p.ended[key]; e != nil {
		return e.verdict
	}
	return verdict{msg.EndFailed, fault.Ended, "it has ended, and its ending is no longer kept"}
}

// markName makes a name that is not live refuse what comes later under it: the
// ending that it has, or one that is left on it.
func (c *Core) markName(id string, v verdict, by string) {
	n := c.nameOf(id)
	switch {
	case n.requests.n > 0 || n.marks > 0:
	case n.endings.n > 0:
		n.endings.last.mark = true
		n.marks++
	case !c.crowded():
		v.ending, v.reason = msg.EndCancelled, fault.Cancelled
		c.keep(&ending{verdict: v, name: n, mark: true})
		c.act(Note{Kind: NoteEnded, Owner: by, ReqID: id, Ending: v.ending, Reason: v.reason, Text: "cancelled before it began"})
	}
	c.tellName(n)
}
