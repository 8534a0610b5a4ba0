package outbound

import (
	"fmt"
	"slices"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/session"
)

// legacyPeer is the connections to an LMCache receiver: a bounded pool of which
// each request owns one for its life, and one for cancels.
type legacyPeer struct {
	running int // requests that are begun there and not forgotten
	link    *dataLink
	conns   int // of the pool, those being made too
	dialing int
	idle    []*legacyConn
	dialAt  kv.Instant // not before
	backoff kv.Duration
	since   kv.Instant // no connection since, and one is needed; Never: none is
	err     string

	cancel  *legacyConn
	cancels []legacyCancel // the first is out if the connection is busy
}

type legacyCancel struct {
	req   *request
	keys  []string // that the receiver holds for it
	doubt string   // or this: cancelMessage
	tries int
}

// legacyConn is one connection to an LMCache receiver.
type legacyConn struct {
	id   kv.ConnID
	p    *peer
	open bool
	req  *request // whose it is
	out  bool     // the cancel connection: its message is not answered
}

func (c *Core) newLegacyConn(p *peer) *legacyConn {
	c.lastConn++
	lc := &legacyConn{id: c.lastConn, p: p}
	c.legacy[lc.id] = lc
	c.emit(Dial{Conn: lc.id, Peer: p.addr})
	return lc
}

// dialLegacy makes connections for what is queued, up to the bound.
func (c *Core) dialLegacy(now kv.Instant, p *peer) {
	l := &p.legacy
	if p.queue.n > 0 && l.conns == l.dialing && l.since == kv.Never {
		l.since = now
	}
	for l.conns < c.cfg.LegacyConns && l.dialing < p.queue.n && l.dialAt <= now {
		c.newLegacyConn(p)
		l.conns++
		l.dialing++
	}
}

func (c *Core) legacyConnected(conn kv.ConnID) {
	lc := c.legacy[conn]
	if lc == nil || lc.open {
		return
	}
	p := lc.p
	lc.open = true
	if lc != p.legacy.cancel {
		p.legacy.dialing--
		p.legacy.backoff, p.legacy.dialAt, p.legacy.since, p.legacy.err = 0, 0, kv.Never, ""
		p.legacy.idle = append(p.legacy.idle, lc)
	}
	c.touchPeer(p)
}

func (c *Core) legacyDisconnected(now kv.Instant, conn kv.ConnID, text string) {
	lc := c.legacy[conn]
	if lc == nil {
		return
	}
	delete(c.legacy, conn)
	p := lc.p
	l := &p.legacy
	c.touchPeer(p)
	if lc == l.cancel {
		c.cancelConnLost(now, p, lc)
		return
	}
	l.conns--
	l.idle = slices.DeleteFunc(l.idle, func(x *legacyConn) bool { return x == lc })
	if !lc.open {
		l.dialing--
		l.err = text
		l.backoff = min(max(2*l.backoff, session.FirstBackoff), session.LastBackoff)
		l.dialAt = now.Add(l.backoff)
	}
	if r := lc.req; r != nil {
		out := r.legacy.out
		if k := r.legacy.commit; k != nil {
			k.owed = false
			r.legacy.doubt = k.msg.Chunks[0].Key
		}
		lc.req, r.legacy.conn, r.legacy.out, r.legacy.commit = nil, nil, false, nil
		if out && (r.state == ending || r.state == told) && !r.legacy.asked {
			c.cancelLegacy(r) // what was said before may have come too early
		}
		c.fail(now, r, fault.PeerLost, "the connection was lost: "+text)
		c.touch(r)
	}
}

// cancelConnLost: what was not answered is said once more over a new
// connection; when there is none to be had, the receiver is gone and nothing is
// left to be cancelled.
func (c *Core) cancelConnLost(now kv.Instant, p *peer, lc *legacyConn) {
	l := &p.legacy
	l.cancel = nil
	n := 0
	switch {
	case !lc.open:
		n = len(l.cancels)
	case !lc.out:
	case l.cancels[0].tries > 1:
		n = 1
	default: // it may have arrived: its keys are not to be taken twice
		if x := &l.cancels[0]; len(x.keys) > 0 && !x.req.legacy.last {
			x.doubt = x.keys[0]
		}
	}
	lost := slices.Clone(l.cancels[:n])
	l.cancels = slices.Delete(l.cancels, 0, n)
	for _, x := range lost {
		c.cancelledLegacy(now, x.req)
	}
}

// pumpCancels sends the next cancel, one at a time.
func (c *Core) pumpCancels(p *peer) {
	l := &p.legacy
	switch {
	case len(l.cancels) == 0:
	case l.cancel == nil:
		l.cancel = c.newLegacyConn(p)
	case l.cancel.open && !l.cancel.out:
		l.cancel.out = true
		l.cancels[0].tries++
		c.emit(Send{Conn: l.cancel.id, Msg: c.cancelMessage(l.cancels[0])})
	}
}

// rolledBack takes the keys out of a request's cancels that are not out yet: the
// receiver holds none of them any more.
func (p *peer) rolledBack(r *request) {
	for i, x := range p.legacy.cancels {
		if x.req == r && (i > 0 || !p.legacy.cancel.busy()) {
			p.legacy.cancels[i].keys = nil
		}
	}
}

// busy reports whether a message is out on the cancel connection.
func (lc *legacyConn) busy() bool { return lc != nil && lc.out }

func (c *Core) legacyReceived(now kv.Instant, conn kv.ConnID, m msg.Message) {
	lc := c.legacy[conn]
	if lc == nil {
		return
	}
	answer, ok := m.(*msg.AllocResponse)
	switch {
	case ok && lc.out:
		lc.out = false
		x := lc.p.legacy.cancels[0]
		lc.p.legacy.cancels = slices.Delete(lc.p.legacy.cancels, 0, 1)
		c.cancelledLegacy(now, x.req)
		c.touchPeer(lc.p)
	case ok && lc.req != nil && lc.req.legacy.out:
		c.allocReply(now, lc.req, answer)
	default:
		c.legacyMalformed(now, conn, fmt.Sprintf("%T answers nothing that was asked", m))
	}
}

// legacyMalformed: nothing on that connection can be told apart any more.
func (c *Core) legacyMalformed(now kv.Instant, conn kv.ConnID, text string) {
	if lc := c.legacy[conn]; lc != nil {
		c.violation(lc.p, "", text)
		c.emit(Close{Conn: conn})
		c.legacyDisconnected(now, conn, text)
	}
}

// legacyDue gives up the connection on which a request's answer does not come:
// a cancel's for longer than that may take, or, of one that has ended, that to
// its AllocRequest for as long as a request may take.
func (c *Core) legacyDue(now kv.Instant, r *request) {
	lc := r.legacy.conn
	if r.legacy.cancels > 0 {
		lc = r.peer.legacy.cancel
	}
	if lc == nil || (r.state != told && r.legacy.cancels == 0) {
		c.arm(&r.timer, c.patience(now)) // its writes are not drained
		return
	}
	c.emit(Close{Conn: lc.id})
	c.legacyDisconnected(now, lc.id, "no answer")
	if r.legacy.owes() {
		c.arm(&r.timer, c.patience(now))
	}
}

// releaseConn gives a request's connection back to the pool.
func (c *Core) releaseConn(r *request) {
	if lc := r.legacy.conn; lc != nil {
		lc.req, r.legacy.conn = nil, nil
		lc.p.legacy.idle = append(lc.p.legacy.idle, lc)
		c.touchPeer(lc.p)
	}
}

// legacyNext is when an LMCache receiver has something due.
func (p *peer) legacyNext(connect kv.Duration) kv.Instant {
	at := kv.Never
	if l := &p.legacy; p.queue.n > 0 && p.dialect == speaksLMCache {
		if l.dialAt > 0 {
			at = l.dialAt
		}
		at = min(at, l.since.Add(connect))
	}
	return at
}

// dialDue gives up on a receiver to which no connection can be made.
func (c *Core) dialDue(now kv.Instant, p *peer) {
	l := &p.legacy
	if now >= l.since.Add(c.cfg.ConnectTimeout) {
		l.since = kv.Never
		c.failQueued(now, p, fault.PeerLost, fmt.Sprintf("no connection within %v s: %s", c.cfg.ConnectTimeout.Seconds(), l.err))
	}
	if l.dialAt <= now {
		l.dialAt = 0
	}
}

// legacyQuit closes every connection to a receiver without a request.
func (c *Core) legacyQuit(p *peer) {
	for _, id := range sortedKeys(c.legacy) {
		if c.legacy[id].p == p {
			c.emit(Close{Conn: id})
			delete(c.legacy, id)
		}
	}
	p.legacy.idle, p.legacy.cancel, p.legacy.conns, p.legacy.dialing = nil, nil, 0, 0
}
