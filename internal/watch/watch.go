package watch

import (
	"container/heap"
	"container/list"
	"fmt"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// watched is one Watch, kept until Cancel or Release.
type watched struct {
	call     kv.CallID
	n        uint64 // in order of arrival
	reqID    string
	deadline kv.Instant
	pos      int // in Core.due, until it is told
	ranks    []*rank
	accepted bool // said
	told     bool // the result was said
	bad      bool // and was bad: the name was cancelled at its receivers
	words    []kv.ConnID
	asked    bool // Ready was sent
}

func (w *watched) when() kv.Instant { return w.deadline }
func (w *watched) before(o *watched) bool {
	return w.deadline < o.deadline || w.deadline == o.deadline && w.n < o.n
}
func (w *watched) index() *int { return &w.pos }

// rankState is how far the watch at one receiver is.
//
//	queued ──► asked ──► watching ──► ready
//	   └► legacy (its word is the senders')
//
// A bad ending of one rank is the result of the watch and leaves the rank as
// it is.
type rankState uint8

const (
	rankQueued   rankState = iota // waits for the session
	rankAsked                     // Watch is out
	rankWatching                  // it has arrived
	rankReady                     // the receiver said so
	rankLegacy                    // an LMCache receiver: it cannot say
)

type rank struct {
	w     *watched
	n     int
	p     *peer
	state rankState
	proof uint64 // fresh: the heartbeat sent after the Watch, 0: none yet
	list  *list.List
	at    *list.Element // in list, p's fresh or settled
}

// moveTo puts a rank at the end of one of its receiver's lists; nil: of none.
func (r *rank) moveTo(l *list.List) {
	if r.list != nil {
		r.list.Remove(r.at)
	}
	if r.list, r.at = l, nil; l != nil {
		r.at = l.PushBack(r)
	}
}

// watch begins a watch at every rank's receiver.
func (c *Core) watch(now kv.Instant, ev Watch) {
	if c.watches[ev.Call] != nil {
		return // a repeat
	}
	w := &watched{call: ev.Call, reqID: ev.ReqID}
	if err := c.checkWatch(ev); err != nil {
		c.emit(Result{Call: ev.Call, Ending: msg.EndFailed, Reason: err.Code, Text: err.Text})
		return
	}
	if ev.Deadline == kv.Forever || ev.Deadline == 0 {
		ev.Deadline = c.cfg.Deadline
	}
	w.deadline = now.Add(ev.Deadline)
	c.lastWatch++
	w.n = c.lastWatch
	heap.Push(&c.due, w)
	c.watches[w.call], c.byName[w.reqID] = w, w
	for i, addr := range ev.Peers {
		p := c.findPeer(addr)
		if p == nil {
			c.result(w, Result{Ending: msg.EndFailed, Reason: fault.Busy, Rank: i,
				Text: fmt.Sprintf("%d receivers are known; the limit is %d", len(c.peers), c.cfg.MaxPeers)})
			return
		}
		if p.down != "" {
			c.result(w, Result{Ending: msg.EndFailed, Reason: fault.PeerLost, Rank: i, Text: fmt.Sprintf("%s does not answer: %s", p.addr, p.down)})
			return
		}
		r := &rank{w: w, n: i, p: p}
		w.ranks = append(w.ranks, r)
		r.moveTo(&p.fresh)
		if p.sess.Foreign() {
			r.state = rankLegacy
			r.moveTo(&p.settled)
		}
		c.settleWant(now, p)
	}
	for _, r := range w.ranks {
		c.pump(now, r.p)
	}
	c.early.replay(w.reqID, func(e *earlyWord) { c.takeEarly(w, e) })
	c.advance(w)
}

func (c *Core) checkWatch(ev Watch) *fault.Error {
	switch {
	case ev.ReqID == "":
		return fault.New(fault.BadRequest, "req_id is empty")
	case len(ev.ReqID) > kv.MaxReqID:
		return fault.New(fault.TooLarge, "req_id has %d bytes; the limit is %d", len(ev.ReqID), kv.MaxReqID)
	case len(ev.Peers) == 0 || len(ev.Peers) > maxRanks:
		return fault.New(fault.BadRequest, "%d receivers; a watch has 1 to %d", len(ev.Peers), maxRanks)
	case c.byName[ev.ReqID] != nil:
		return fault.New(fault.BadRequest, "%q is watched already", ev.ReqID)
	case len(c.watches) >= c.cfg.MaxWatches:
		return fault.New(fault.Busy, "%d watches; the limit is %d", len(c.watches), c.cfg.MaxWatches)
	}
	return nil
}

// reply takes a receiver's word on a rank: the answer to Watch, or to Ready.
func (c *Core) reply(r *rank, m msg.Message) {
	if r.w.told {
		return
	}
	switch m := m.(type) {
	case *msg.Ended:
		if m.Ending == msg.EndReady {
			r.state = rankReady
			c.advance(r.w)
			return
		}
		c.result(r.w, Result{Ending: m.Ending, Reason: m.Reason, Text: m.Text, Rank: r.n})
	case *msg.Error:
		c.result(r.w, Result{Ending: msg.EndFailed, Reason: m.Code, Text: m.Text, Rank: r.n})
	default:
		c.result(r.w, Result{Ending: msg.EndFailed, Reason: fault.Internal, Text: fmt.Sprintf("the receiver answered Watch with %T", m), Rank: r.n})
	}
}

// advance says Accepted, asks legacy requests to be committed, and says the
// result, as soon as each may be said.
func (c *Core) advance(w *watched) {
	if w.told {
		return
	}
	there, ready := true, true
	for _, r := range w.ranks {
		there = there && r.state >= rankWatching
		ready = ready && (r.state == rankReady || (r.state == rankLegacy && w.spoken()))
	}
	if there && !w.accepted {
		w.accepted = true
		c.emit(Accepted{Call: w.call})
	}
	if w.spoken() && !w.asked && there {
		w.asked = true
		for _, r := range w.ranks {
			if r.state == rankWatching && r.p.sess.Opened() {
				r.p.sess.Request(&msg.Ready{ReqID: w.reqID}, call{})
				c.flush(r.p)
			}
		}
	}
	if ready {
		c.result(w, Result{Ending: msg.EndReady})
	}
}

// result fixes the result. A bad one ends the name at the other receivers.
func (c *Core) result(w *watched, res Result) {
	if w.told {
		return
	}
	c.tell(w)
	res.Call = w.call
	c.emit(res)
	if w.bad = res.Ending != msg.EndReady; w.bad {
		c.cancelRanks(w, fault.Cancelled, fmt.Sprintf("rank %d ended: %s %s", res.Rank, res.Reason, res.Text))
	}
}

// tell notes that nothing more is said of a watch.
func (c *Core) tell(w *watched) {
	if !w.told {
		w.told = true
		heap.Remove(&c.due, w.pos)
	}
}

// expire ends a watch at its deadline.
func (c *Core) expire(w *watched) {
	slow := 0
	for _, r := range w.ranks {
		if r.state != rankReady && r.state != rankLegacy {
			slow = r.n
			break
		}
	}
	c.result(w, Result{Ending: msg.EndFailed, Reason: fault.Deadline, Text: "not ready before the deadline of its watch", Rank: slow})
}

// cancel ends a name at all its receivers, also after it was ready, and the
// watch.
func (c *Core) cancel(now kv.Instant, ev Cancel) {
	w := c.watches[ev.Call]
	if w == nil {
		return
	}
	if ev.Reason == fault.Deadline && !w.accepted && !w.told {
		w.blame()
	}
	c.tell(w)
	if ev.Reason == "" {
		ev.Reason = fault.Cancelled
	}
	if !w.bad {
		c.cancelRanks(w, ev.Reason, ev.Text)
	}
	c.forget(now, w)
}

// blame notes which receivers did not take a watch in the caller's time: one
// that waited is enough, the next ones need not until such a receiver answers.
func (w *watched) blame() {
	for _, r := range w.ranks {
		if r.state < rankWatching && r.p.down == "" {
			r.p.down = "it did not take a watch in time"
		}
	}
}

// cancelRanks tells every receiver that may know the name. A deadline is told
// as a cancel: for a deadline's sake alone a receiver would keep what is ready.
func (c *Core) cancelRanks(w *watched, code fault.Code, text string) {
	if code == fault.Deadline {
		code, text = fault.Cancelled, "deadline: "+text
	}
	for _, r := range w.ranks {
		m := &msg.Cancel{ReqID: w.reqID, Reason: code, Text: text}
		switch {
		case r.state == rankLegacy || (r.state == rankQueued && !w.accepted):
		case r.p.sess.Opened():
			r.p.sess.Request(m, call{})
			c.flush(r.p)
		case len(r.p.cancels) < maxCancels:
			r.p.cancels = append(r.p.cancels, m)
		}
	}
}

// forget drops a watch that is cancelled or released.
func (c *Core) forget(now kv.Instant, w *watched) {
	c.tell(w)
	delete(c.watches, w.call)
	delete(c.byName, w.reqID)
	for _, r := range w.ranks {
		r.moveTo(nil)
		c.settleWant(now, r.p)
	}
}
