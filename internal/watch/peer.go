package watch

import (
	"container/heap"
	"container/list"
	"fmt"
	"iter"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/session"
)

// peer is one receiver.
type peer struct {
	id   uint32
	addr Peer
	sess session.Session[call]
	// Ranks of every watch that is kept, oldest first: those of which it is not
	// proved yet that the receiver has them, a message's way or so, and the
	// others, of which there may be many: nothing that happens often walks them.
	fresh, settled list.List
	proof          uint64 // the heartbeat whose answer is awaited, 0: none
	lease          kv.Duration
	down           string     // why it is known not to answer, "" when it does: new watches there fail at once
	at             kv.Instant // its session's next time
	pos            int        // in Core.alarms
	// cancels are names to be cancelled once the session is open.
	cancels []*msg.Cancel
}

// maxCancels bounds the cancels that wait for one receiver's session.
const maxCancels = 1024

// call is what the answer to a request belongs to; rank is nil where nobody
// waits for it.
type call struct{ rank *rank }

func (a Peer) String() string { return fmt.Sprintf("%s:%d", a.Host, a.AllocPort) }

// ranks are all of a peer's. The one at hand may be moved or removed.
func (p *peer) ranks() iter.Seq[*rank] {
	return func(yield func(*rank) bool) {
		for _, l := range []*list.List{&p.settled, &p.fresh} {
			for r := range each(l) {
				if !yield(r) {
					return
				}
			}
		}
	}
}

func each(l *list.List) iter.Seq[*rank] {
	return func(yield func(*rank) bool) {
		for e := l.Front(); e != nil; {
			r := e.Value.(*rank)
			if e = e.Next(); !yield(r) {
				return
			}
		}
	}
}

func (p *peer) watched() int { return p.fresh.Len() + p.settled.Len() }

// findPeer returns a receiver, known or new; nil at the limit.
func (c *Core) findPeer(addr Peer) *peer {
	if p := c.peers[addr]; p != nil {
		return p
	}
	if len(c.peers) >= c.cfg.MaxPeers && !c.evictPeer() {
		return nil
	}
	c.lastPeer++
	p := &peer{id: c.lastPeer, addr: addr}
	p.sess = session.New[call](session.Config{ID: p.id, Role: msg.RoleProxy, Node: c.cfg.Node, Incarnation: c.cfg.Incarnation, Secret: c.cfg.Secret,
		Connect: c.cfg.ConnectTimeout, Idle: c.cfg.Idle}, c.floor)
	c.peers[addr], c.byID[p.id] = p, p
	p.at = p.sess.Next()
	heap.Push(&c.alarms, p)
	return p
}

// evictPeer forgets the oldest receiver without a watch.
func (c *Core) evictPeer() bool {
	for _, p := range c.sortedPeers() {
		if p.watched() == 0 {
			p.sess.Quit()
			c.flush(p)
			c.floor = max(c.floor, p.sess.LastSeq())
			delete(c.peers, p.addr)
			delete(c.byID, p.id)
			heap.Remove(&c.alarms, p.pos)
			c.findLease(p)
			return true
		}
	}
	return false
}

func (c *Core) flush(p *peer) {
	for _, a := range p.sess.Actions() {
		switch a.Do {
		case session.Dial:
			c.emit(Dial{Conn: a.Conn, Peer: p.addr})
		case session.Close:
			c.emit(Close{Conn: a.Conn})
		case session.Send:
			c.emit(Send{Conn: a.Conn, Msg: a.Msg})
		}
	}
	c.arm(p)
}

func (p *peer) when() kv.Instant    { return p.at }
func (p *peer) before(o *peer) bool { return p.at < o.at || p.at == o.at && p.id < o.id }
func (p *peer) index() *int         { return &p.pos }

// settleWant keeps a session while something is watched there, and tries to get
// one back with a receiver that is down.
func (c *Core) settleWant(now kv.Instant, p *peer) {
	p.sess.Want(now, p.watched()+len(p.cancels) > 0 || p.down != "")
	c.flush(p)
}

// pump sends what waits for the session, and a heartbeat after it: its answer
// says that the watches before it are there.
func (c *Core) pump(now kv.Instant, p *peer) {
	if !p.sess.Up() {
		return
	}
	unproved := false
	for r := range each(&p.fresh) {
		if r.state == rankQueued {
			r.state = rankAsked
			p.sess.Request(&msg.Watch{ReqID: r.w.reqID, DeadlineMS: max(r.w.deadline.Sub(now), 1).Millis()}, call{r})
		}
		unproved = unproved || (r.state == rankAsked && r.proof == 0)
	}
	for _, m := range p.cancels {
		p.sess.Request(m, call{})
	}
	p.cancels = nil
	if unproved && p.proof == 0 {
		p.proof = p.sess.Prove(now)
		for r := range each(&p.fresh) { // none is queued any more
			if r.proof == 0 {
				r.proof = p.proof
			}
		}
	}
	c.flush(p)
	c.settleWant(now, p)
}

// proved: what was sent before that heartbeat has arrived.
func (c *Core) proved(p *peer, seq uint64) {
	if p.proof == 0 || seq < p.proof {
		return
	}
	p.proof = 0
	for r := range each(&p.fresh) {
		if r.proof == 0 {
			continue
		}
		r.moveTo(&p.settled)
		if r.state == rankAsked {
			r.state = rankWatching
			c.advance(r.w)
		}
	}
}

// unprove forgets the proof that was under way: its answer cannot come.
func (p *peer) unprove() {
	p.proof = 0
	for r := range each(&p.fresh) {
		r.proof = 0
	}
}

func (c *Core) connected(now kv.Instant, ev Connected) {
	if p := c.byID[session.Owner(ev.Conn)]; p != nil {
		p.sess.Connected(now, ev.Conn)
		c.flush(p)
	}
}

func (c *Core) disconnected(now kv.Instant, ev Disconnected) {
	if p := c.byID[session.Owner(ev.Conn)]; p != nil {
		n := p.sess.Disconnected(now, ev.Conn, ev.Text)
		c.flush(p)
		c.notice(now, p, n)
	}
}

func (c *Core) malformed(now kv.Instant, ev Malformed) {
	if p := c.byID[session.Owner(ev.Conn)]; p != nil {
		n := p.sess.Malformed(now, ev.Conn, ev.Text)
		c.flush(p)
		c.notice(now, p, n)
	}
}

func (c *Core) received(now kv.Instant, ev Received) {
	if p := c.byID[session.Owner(ev.Conn)]; p != nil {
		n := p.sess.Received(now, ev.Conn, ev.Msg)
		c.flush(p)
		c.notice(now, p, n)
	}
}

// notice acts on what a session has to say.
func (c *Core) notice(now kv.Instant, p *peer, n session.Notice[call]) {
	switch n.Kind {
	case session.Reply:
		if r := n.Ref.rank; r != nil {
			c.reply(r, n.Msg)
		}
		c.flush(p)
		return
	case session.Proved:
		p.down = ""
		c.proved(p, n.Seq)
	case session.Closed:
		p.unprove()
	case session.Resumed:
		p.down = ""
		p.unprove()
	case session.Up: // what an earlier session watched is gone with it
		p.down = ""
		p.unprove()
		c.lose(p, false, fault.PeerLost, "the receiver opened another session")
	case session.Lost:
		p.down = n.Text
		p.unprove()
		p.cancels = nil
		c.lose(p, true, n.Code, n.Text)
	case session.Refused:
		p.down = ""
		p.unprove()
		p.cancels = nil
		c.lose(p, true, n.Code, n.Text)
	case session.Legacy:
		p.down = ""
		p.unprove()
		p.cancels = nil
		for r := range p.ranks() {
			if r.state == rankQueued {
				r.state = rankLegacy
				r.moveTo(&p.settled)
				c.advance(r.w)
			}
		}
		c.lose(p, false, fault.PeerLost, n.Text)
	}
	c.findLease(p)
	c.settleWant(now, p)
	c.pump(now, p)
}

// lose ends what was watched in a session that is over, and with queued also
// what waits for one. A rank that was ready may be so no more: what its
// receiver kept for us, and nobody has claimed, is cancelled with our lease.
func (c *Core) lose(p *peer, queued bool, code fault.Code, text string) {
	for r := range p.ranks() {
		if r.w.told || r.state == rankLegacy || (r.state == rankQueued && !queued) {
			continue
		}
		c.result(r.w, Result{Ending: msg.EndFailed, Reason: code, Text: fmt.Sprintf("%s: %s", p.addr, text), Rank: r.n})
	}
}

// findLease finds the shortest lease, if that of one session has changed.
func (c *Core) findLease(changed *peer) {
	if changed.lease == changed.sess.Lease() {
		return
	}
	changed.lease = changed.sess.Lease()
	c.lease = 0
	for _, p := range c.byID {
		if p.lease > 0 && (c.lease == 0 || p.lease < c.lease) {
			c.lease = p.lease
		}
	}
}
