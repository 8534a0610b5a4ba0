package outbound

import (
	"cmp"
	"fmt"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// begin accepts a request, or refuses it at once.
func (c *Core) begin(now kv.Instant, ev Begin) {
	e := c.engines[ev.Engine]
	if e == nil {
		c.answer(ev.Call, notAttached())
		return
	}
	if err := c.checkBegin(ev); err != nil {
		c.answer(ev.Call, err)
		if ev.BerthProxy && !c.cfg.SkipNotify && ev.ReqID != "" && len(ev.ReqID) <= kv.MaxReqID && c.reqs[ev.ReqID] == nil {
			c.emit(Notify{Msg: &msg.EndingNotice{ReqID: ev.ReqID, Rank: c.cfg.Rank, Ending: msg.EndFailed, Reason: err.Code, Text: err.Text}})
		}
		return
	}
	if r := c.reqs[ev.ReqID]; r != nil {
		c.beginAgain(r, ev)
		return
	}
	if k := c.endings.get(now, ev.ReqID); k != nil {
		if k.peer == (Peer{}) || (k.peer == ev.Peer && k.total == ev.Total) {
			c.answer(ev.Call, nil)
			c.emit(Ended{Engine: ev.Engine, Ending: k.Ending})
			return
		}
		c.endings.forget(ev.ReqID) // the name is used for another prompt
	}
	p, err := c.admitBegin(ev)
	if err != nil {
		c.answer(ev.Call, err)
		return
	}

	r := c.newRequest()
	r.id, r.peer, r.engine, r.engineID = ev.ReqID, p, ev.Engine, e.id
	r.total, r.wanted, r.berthProxy, r.tokensKey = ev.Total, int(ev.Stage), ev.BerthProxy, cmp.Or(ev.TokensKey, c.tokensKey)
	r.started = now
	r.deadline = now.Add(ev.Deadline)
	if ev.Deadline == kv.Forever {
		r.deadline = now.Add(c.cfg.RequestTimeout)
	}
	c.reqs[r.id] = r
	p.reqs.add(r)
	p.queue.add(r)
	c.arm(&r.timer, r.deadline)
	c.answer(ev.Call, nil)
	c.emit(Note{Kind: NoteBegun, Peer: p.name, ReqID: r.id, Count: r.total})
	c.settleWant(now, p)
	c.touch(r)
}

// checkBegin verifies what a begin says by itself.
func (c *Core) checkBegin(ev Begin) *fault.Error {
	switch {
	case ev.ReqID == "":
		return fault.New(fault.BadRequest, "req_id is empty")
	case len(ev.ReqID) > kv.MaxReqID:
		return fault.New(fault.TooLarge, "req_id has %d bytes; the limit is %d", len(ev.ReqID), kv.MaxReqID)
	case ev.Total < 0:
		return fault.New(fault.BadRequest, "total_chunks is %d", ev.Total)
	case ev.Total > kv.MaxSlots:
		return fault.New(fault.TooLarge, "total_chunks is %d; the limit is %d", ev.Total, kv.MaxSlots)
	case ev.Peer.Host == "":
		return fault.New(fault.BadRequest, "receiver host is empty")
	case ev.Peer.AllocPort < 1 || ev.Peer.AllocPort > 65535:
		return fault.New(fault.BadRequest, "alloc_port is %d", ev.Peer.AllocPort)
	case ev.Peer.InitPort < 0 || ev.Peer.InitPort > 65535:
		return fault.New(fault.BadRequest, "init_port is %d", ev.Peer.InitPort)
	case ev.Deadline <= 0:
		return fault.New(fault.BadRequest, "deadline is %d ns", int64(ev.Deadline))
	case ev.Stage < 0:
		return fault.New(fault.BadRequest, "stage is %d", ev.Stage)
	case ev.Stage > int64(c.cfg.MaxStage):
		return fault.New(fault.TooLarge, "stage is %d; max_stage is %d", ev.Stage, c.cfg.MaxStage)
	case len(ev.TokensKey) > kv.MaxKey:
		return fault.New(fault.TooLarge, "tokens_key has %d bytes; the limit is %d", len(ev.TokensKey), kv.MaxKey)
	case c.cfg.ReceiverAllow != nil && !c.cfg.ReceiverAllow(ev.Peer.Host):
		return fault.New(fault.NotOwner, "receiver host %q is not in receiver_allow", ev.Peer.Host)
	}
	return nil
}

// beginAgain answers a repeat of a live begin as it answered the first.
func (c *Core) beginAgain(r *request, ev Begin) {
	if r.total != ev.Total || r.peer.addr != ev.Peer {
		c.answer(ev.Call, fault.New(fault.BadRequest, "%q is begun with total_chunks %d at %s; now %d at %s",
			r.id, r.total, r.peer.name, ev.Total, ev.Peer.name()))
		return
	}
	if id := c.engines[ev.Engine].id; id != r.engineID {
		c.answer(ev.Call, fault.New(fault.NotOwner, "%q was begun by engine %q, not %q", r.id, r.engineID, id))
		return
	}
	r.engine = ev.Engine
	c.answer(ev.Call, nil)
	if r.state == granted {
		c.emit(Granted{Engine: ev.Engine, ReqID: r.id})
	}
}

// admitBegin finds room for one more request and its receiver.
func (c *Core) admitBegin(ev Begin) (*peer, *fault.Error) {
	switch {
	case c.draining:
		return nil, &fault.Error{Code: fault.Busy, Text: "draining: nothing new is begun"}
	case c.live >= c.cfg.MaxWaiting:
		return nil, &fault.Error{Code: fault.Busy, Text: fmt.Sprintf("%d requests are live; max_waiting is %d", c.live, c.cfg.MaxWaiting), Retry: busyRetry}
	}
	return c.findPeer(ev.Peer)
}

// sendBegins sends what is queued, oldest first, each under the next number.
// Its link is fixed now.
func (c *Core) sendBegins(now kv.Instant, p *peer) {
	if p.queue.n == 0 || !p.sess.Up() || p.link == nil || p.link.state != linkIsUp {
		return
	}
	for r := p.queue.first; r != nil; {
		next := r.qnext
		if r.retryAt == kv.Never || r.retryAt <= now {
			p.queue.remove(r)
			r.become(begun)
			r.retryAt = kv.Never
			r.link = p.link
			p.lastBegin++
			r.begin = p.lastBegin
			p.byBegin[r.begin] = r
			r.beginMsg = msg.Begin{Begin: r.begin, ReqID: r.id, Link: r.link.def.Name, TotalChunks: r.total,
				DeadlineMS: r.left(now).Millis(), TokensKey: r.tokensKey}
			c.request(p, &r.beginMsg, call{kind: callBegin, req: r})
			c.arm(&r.timer, r.deadline)
		}
		r = next
	}
}

// left is the time until the deadline.
func (r *request) left(now kv.Instant) kv.Duration {
	if r.deadline == kv.Never {
		return kv.Forever
	}
	return max(r.deadline.Sub(now), 1)
}

// begunReply takes the answer to Begin.
func (c *Core) begunReply(now kv.Instant, r *request, m msg.Message) {
	switch m := m.(type) {
	case *msg.Granted:
		c.grantedReply(now, r, m)
	case *msg.Error:
		if m.Code == fault.Busy {
			c.busyReply(now, r, m)
			return
		}
		if r.live() {
			c.end(now, r, endingOf(m.Code, m.Text))
		}
	default:
		c.violation(r.peer, r.id, fmt.Sprintf("%T answers Begin", m))
		c.fail(now, r, fault.Internal, fmt.Sprintf("the receiver answered Begin with %T", m))
	}
}

// busyReply tries again with a new number, while there is time. Busy is no
// ending: who gives up says so.
func (c *Core) busyReply(now kv.Instant, r *request, m *msg.Error) {
	if r.state != begun {
		return // cancelled meanwhile: the answer to that is the ending
	}
	wait := kv.FromMillis(m.RetryMS)
	if m.RetryMS < 1 {
		wait = busyRetry
	}
	delete(r.peer.byBegin, r.begin)
	r.begin, r.link = 0, nil
	r.become(queued)
	if now.Add(wait) >= r.deadline {
		c.endAlone(now, r, endingOf(fault.Busy, "no room before the deadline: "+m.Text))
		return
	}
	r.retryAt = now.Add(wait)
	r.peer.queue.add(r)
	c.arm(&r.timer, r.retryAt)
}

func (c *Core) grantedReply(now kv.Instant, r *request, m *msg.Granted) {
	if r.state == ending && r.total == 0 {
		c.complete(now, r) // it was ready before our cancel came
		return
	}
	if r.state != begun {
		return // ended or ending meanwhile: its slots are not touched
	}
	if text := c.checkGranted(r, m); text != "" {
		c.violation(r.peer, r.id, text)
		c.fail(now, r, fault.Internal, "the receiver broke the protocol: "+text)
		return
	}
	r.gen = m.Generation
	r.slots = append(r.slots[:0], m.Slots...)
	c.admitted(now, r)
	if r.total == 0 {
		c.complete(now, r)
	}
}

// admitted makes a request granted and tells its engine, with the staging
// slots that the begin asked for if nobody is before it.
func (c *Core) admitted(now kv.Instant, r *request) {
	r.become(granted)
	r.chunks = grow(r.chunks, int(r.total))
	c.emit(Note{Kind: NoteGranted, Peer: r.peer.name, ReqID: r.id, Count: r.total, Wait: now.Sub(r.started), Link: r.linkName()})
	if to, ok := c.conn(r); ok {
		g := Granted{Engine: to, ReqID: r.id}
		if n := r.wanted; n > 0 && len(c.waits) == 0 && c.staged(r.engineID) == 0 && c.mayTake(r.peer, n) {
			g.Slots = c.handOut(to, r, n)
		}
		c.emit(g)
	}
}

// grow returns n zero elements, in s's memory if that is enough.
func grow[T any](s []T, n int) []T {
	if cap(s) < n {
		return make([]T, n)
	}
	s = s[:n]
	clear(s)
	return s
}

// checkGranted returns what is wrong with a grant, "" if nothing.
func (c *Core) checkGranted(r *request, m *msg.Granted) string {
	if m.Begin != r.begin {
		return fmt.Sprintf("Granted names begin %d; the answer is to %d", m.Begin, r.begin)
	}
	if int64(len(m.Slots)) != r.total {
		return fmt.Sprintf("%d slots were granted for %d chunks", len(m.Slots), r.total)
	}
	if m.Generation == 0 {
		return "the generation is 0"
	}
	capacity := r.peer.sess.Receiver().Capacity
	at := func(i int) kv.SlotID { return m.Slots[i] }
	for i, s := range m.Slots {
		if int64(s) >= capacity || s >= kv.MaxSlots {
			c.unmark(i, at)
			return fmt.Sprintf("slot %d was granted; the capacity is %d", s, capacity)
		}
		if !c.mark(s) {
			c.unmark(i, at)
			return fmt.Sprintf("slot %d was granted twice", s)
		}
	}
	c.unmark(len(m.Slots), at)
	return ""
}
