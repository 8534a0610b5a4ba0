package outbound

import (
	"fmt"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// endingOf is the ending that a code stands for.
func endingOf(code fault.Code, text string) Ending {
	if code == fault.Cancelled {
		return Ending{Ending: msg.EndCancelled, Reason: code, Text: text}
	}
	return Ending{Ending: msg.EndFailed, Reason: code, Text: text}
}

// cancel is the engine's, or an operator's. It is valid in every state and for
// unknown names.
func (c *Core) cancel(now kv.Instant, ev Cancel) {
	if ev.Reason == "" {
		ev.Reason = fault.Cancelled
	}
	r := c.reqs[ev.ReqID]
	if r == nil {
		c.cancelGone(now, ev)
		return
	}
	if len(r.callers) >= maxCancelCalls {
		c.answer(ev.Call, fault.New(fault.Busy, "%d calls wait for the end of %q; the limit is %d", len(r.callers), r.id, maxCancelCalls))
		return
	}
	r.callers = append(r.callers, ev.Call)
	c.callers[ev.Call] = r
	r.unwanted = r.unwanted || ((!r.live() || r.state == ending) && ev.Reason != fault.Deadline)
	c.fail(now, r, ev.Reason, ev.Text)
	c.touch(r)
}

// cancelGone answers a cancel of what has ended, or was never begun: that is
// kept, so that a begin which it overtook is answered with it.
func (c *Core) cancelGone(now kv.Instant, ev Cancel) {
	k := c.endings.get(now, ev.ReqID)
	if k == nil {
		e := endingOf(ev.Reason, ev.Text)
		e.ReqID = ev.ReqID
		if ev.ReqID != "" && len(ev.ReqID) <= kv.MaxReqID {
			c.endings.put(now, kept{Ending: e})
		}
		c.emit(Answer{Call: ev.Call, Ending: &e})
		return
	}
	e := k.Ending
	c.emit(Answer{Call: ev.Call, Ending: &e})
	if ev.Reason != fault.Deadline {
		c.freeReady(k, ev.Reason, ev.Text)
	}
}

// freeReady tells a receiver that what is ready is not wanted: that changes no
// ending, but what nobody has claimed gives its room back.
func (c *Core) freeReady(k *kept, reason fault.Code, text string) {
	if p := c.peers[k.peer]; p != nil && k.Ending.Ending == msg.EndReady && k.begin != 0 && p.sess.Opened() {
		c.request(p, &msg.Cancel{Begin: k.begin, Reason: reason, Text: text}, call{kind: callFree})
		k.begin = 0
	}
}

// fail is a cause of ours to end a request. The receiver decides: it is asked
// to end it, and its answer is the ending. What it never heard of ends here.
func (c *Core) fail(now kv.Instant, r *request, code fault.Code, text string) {
	switch r.state {
	case queued:
		c.endAlone(now, r, endingOf(code, text))
	case begun, granted:
		r.become(ending)
		c.stopWrites(r)
		c.arm(&r.timer, c.patience(now))
		r.cancelMsg = msg.Cancel{Begin: r.begin, Reason: code, Text: text}
		if r.legacy.on {
			c.failLegacy(r)
		} else {
			c.request(r.peer, &r.cancelMsg, call{kind: callCancel, req: r})
		}
		c.dropWaits(func(w *stageWait) bool { return w.req == r }, fault.New(code, "%q is ending: %s", r.id, text))
		c.touch(r)
	}
}

// cancelReply takes the answer to our Cancel.
func (c *Core) cancelReply(now kv.Instant, r *request, m msg.Message) {
	if r.state != ending {
		return
	}
	switch m := m.(type) {
	case *msg.Ended:
		c.end(now, r, Ending{Ending: m.Ending, Reason: m.Reason, Text: m.Text})
	case *msg.Error: // it keeps no ending of it: ours stands
		c.end(now, r, endingOf(r.cancelMsg.Reason, r.cancelMsg.Text))
	default:
		c.violation(r.peer, r.id, fmt.Sprintf("%T answers Cancel", m))
		c.end(now, r, endingOf(r.cancelMsg.Reason, r.cancelMsg.Text))
	}
}

// endedAsk takes the receiver's word that a request has ended. It is answered
// when none of its writes is in flight; at once when it is forgotten.
func (c *Core) endedAsk(now kv.Instant, p *peer, m *msg.Ended) {
	r := p.byBegin[m.Begin]
	if r == nil || r.state == told {
		p.sess.Answer(&msg.Drained{Re: m.Seq, Begin: m.Begin})
		return
	}
	r.drain = m.Seq
	if r.live() {
		c.end(now, r, Ending{Ending: m.Ending, Reason: m.Reason, Text: m.Text})
		return
	}
	c.touch(r)
}

// complete: every chunk is committed. The proxy is told here and nowhere else.
func (c *Core) complete(now kv.Instant, r *request) {
	if r.ready {
		return
	}
	r.ready = true
	if r.live() {
		c.end(now, r, Ending{Ending: msg.EndReady})
	}
	if r.ending.Ending == msg.EndReady {
		c.notifyReady(r)
	}
	c.touch(r)
}

// notifyReady tells an LMCache proxy. Berth's learns it from Berth's receiver.
func (c *Core) notifyReady(r *request) {
	if c.cfg.SkipNotify || (r.berthProxy && !r.legacy.on) {
		return
	}
	r.notif.ReqID = r.id
	c.emit(Notify{Msg: &r.notif})
}

// endAlone ends a request of which no receiver can know, and says so to a
// proxy that would wait for the receiver's word.
func (c *Core) endAlone(now kv.Instant, r *request, e Ending) {
	c.end(now, r, e)
	c.notifyEnding(r)
}

// notifyEnding tells a Berth proxy of a bad ending that no receiver tells.
func (c *Core) notifyEnding(r *request) {
	if e := &r.ending; r.berthProxy && !c.cfg.SkipNotify {
		c.emit(Notify{Msg: &msg.EndingNotice{ReqID: r.id, Rank: c.cfg.Rank, Ending: e.Ending, Reason: e.Reason, Text: e.Text}})
	}
}

// end fixes the ending. The first one counts.
func (c *Core) end(now kv.Instant, r *request, e Ending) {
	if !r.live() {
		return
	}
	r.peer.queue.remove(r)
	c.arm(&r.timer, c.patience(now))
	e.ReqID = r.id
	if e.Ending == msg.EndReady {
		e.Reason, e.Text = "", ""
	}
	r.become(ended)
	r.ending = e
	if r.legacy.on && e.Ending != msg.EndReady {
		c.notifyEnding(r) // LMCache's receivers tell no proxy anything
	}
	if r.ready {
		for _, k := range r.commits {
			if k.phase == writing || k.phase == asked {
				c.settle(k)
			}
		}
	}
	c.stopWrites(r)
	c.dropWaits(func(w *stageWait) bool { return w.req == r }, endedError(&r.ending))
	c.touch(r)
}

// stopWrites gives up whatever of a request is not over.
func (c *Core) stopWrites(r *request) {
	for _, k := range r.commits {
		c.giveUp(k)
	}
	c.freeRepeats(r)
	for i := range r.chunks {
		if k := &r.chunks[i]; r.legacy.on && k.state == waiting {
			k.state = moving
			c.freed(k.slot)
		}
	}
}

// tidy tells a request's ending once none of its writes is in flight, and
// forgets it once nothing is owed to it.
func (c *Core) tidy(now kv.Instant, r *request) {
	c.reap(r)
	if r.state == ended && r.busy == 0 && !r.awaitsComplete() {
		c.tell(now, r)
	}
	if r.state == told && r.calls == 0 && !r.legacy.owes() {
		c.dropRequest(now, r)
	}
}

// awaitsComplete: the Commit's own answer, which tells the proxy, is on its way.
func (r *request) awaitsComplete() bool {
	return r.ending.Ending == msg.EndReady && !r.ready && !r.overdue && r.owed()
}

func (c *Core) tell(now kv.Instant, r *request) {
	r.become(told)
	if r.drain != 0 {
		r.drained = msg.Drained{Re: r.drain, Begin: r.begin}
		r.peer.sess.Answer(&r.drained)
		c.flush(r.peer)
	}
	for _, call := range r.callers {
		delete(c.callers, call)
		e := r.ending
		c.emit(Answer{Call: call, Ending: &e})
	}
	r.callers = r.callers[:0]
	if to, ok := c.conn(r); ok {
		c.emit(Ended{Engine: to, Ending: r.ending})
	}
	c.emit(Note{Kind: NoteEnded, Peer: r.peer.name, ReqID: r.id, Ending: r.ending.Ending, Reason: r.ending.Reason, Text: r.ending.Text,
		Count: r.committed, Bytes: r.bytes, Link: r.linkName(), Wait: now.Sub(r.started)})
	k := kept{Ending: r.ending, peer: r.peer.addr, total: r.total, begin: r.begin}
	if r.unwanted {
		c.freeReady(&k, fault.Cancelled, "cancelled while it ended")
	}
	c.endings.put(now, k)
	delete(c.reqs, r.id)
	c.arm(&r.timer, kv.Never)
	if r.legacy.owes() {
		c.arm(&r.timer, now.Add(c.cfg.RequestTimeout))
	}
}

// owed reports whether a Commit is without an answer.
func (r *request) owed() bool {
	for _, k := range r.commits {
		if k.owed {
			return true
		}
	}
	return false
}

// requestDue: a request's deadline, or the time to begin it again.
func (c *Core) requestDue(now kv.Instant, r *request) {
	switch {
	case !r.live() || r.state == ending:
		c.answerDue(now, r)
	case now >= r.deadline:
		c.fail(now, r, fault.Deadline, fmt.Sprintf("not ready within %v s", r.deadline.Sub(r.started).Seconds()))
	default:
		c.arm(&r.timer, r.deadline)
		r.retryAt = kv.Never
	}
	c.touch(r)
}

// answerDue: an answer that is given at once did not come. What the receiver has
// decided is not known then, it may be ready: the verdict is peer_lost.
func (c *Core) answerDue(now kv.Instant, r *request) {
	switch {
	case r.legacy.on:
		c.legacyDue(now, r)
	case r.state == ending:
		c.end(now, r, endingOf(fault.PeerLost, c.unanswered(now, r, "Cancel")))
	case r.awaitsComplete():
		c.unanswered(now, r, "Commit")
		r.overdue = true
	}
}

// unanswered says that a message was not answered within our patience. That is
// the receiver's fault only if it has answered what was asked later; else the
// connection was silent, or our clock has jumped.
func (c *Core) unanswered(now kv.Instant, r *request, what string) string {
	if !r.peer.sess.Proved(now.Add(-c.cfg.ConnectTimeout)) {
		return what + " was not answered, nor what was asked later"
	}
	text := what + " was not answered"
	c.violation(r.peer, r.id, text)
	return text
}

// patience is how long an answer is awaited that is given at once.
func (c *Core) patience(now kv.Instant) kv.Instant { return now.Add(c.cfg.ConnectTimeout) }

func (c *Core) violation(p *peer, reqID, text string) {
	c.emit(Note{Kind: NoteViolation, Peer: p.name, ReqID: reqID, Text: text})
}
