package intake

import (
	"fmt"
	"slices"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// watch is a proxy's interest in a name: from its Watch until the name has
// neither a live request nor an open question. When the proxy's session ends,
// what it watched and nobody has claimed is cancelled.
type watch struct {
	peer    *peer
	name    *name
	asks    []ask
	vouched bool // Ready came before a legacy request was complete
	timer   timer

	byPeer, byName links[watch]
}

// ask is a Watch or a Ready that is not answered yet. It belongs to (incarnation,
// seq): asked again, it is answered where it was asked last.
type ask struct {
	seq   uint64
	conn  kv.ConnID
	until kv.Instant
}

// maxWatches is how many names all proxies may watch.
func (c *Core) maxWatches() int { return c.cfg.MaxWaiting + c.cfg.Capacity }

// noWatch says why a proxy may not watch another name, nil if it may. R11, and a
// share for each, as of max_waiting (reserve.Ledger.Request): one proxy keeps no
// other from watching.
func (c *Core) noWatch(p *peer) *fault.Error {
	left := c.maxWatches() - c.watches
	switch {
	case left < 1:
		return busy("%d names are watched, at most %d may be", c.watches, c.maxWatches())
	case p.watches.n >= 3*left:
		return busy("%d names are watched by this proxy, at most three times the %d places left of %d may be", p.watches.n, left, c.maxWatches())
	}
	return nil
}

// maxAsks bounds what one proxy may ask about one name at a time.
const maxAsks = 16

func (w *watch) ring(c *Core) {
	w.asks = slices.DeleteFunc(w.asks, func(a ask) bool {
		if a.until > c.now {
			return false
		}
		c.refuse(a.conn, a.seq, fault.New(fault.Deadline, "%q has not ended in time", w.name.id))
		return true
	})
	c.armWatch(w)
	c.dropIdle(w)
}

func (c *Core) armWatch(w *watch) {
	at := kv.Never
	for _, a := range w.asks {
		at = min(at, a.until)
	}
	c.timers.set(&w.timer, at)
}

// watchName answers with the first ready of that name, or how it ended when one
// has and none is live.
func (c *Core) watchName(cn *conn, p *peer, m *msg.Watch) {
	if m.ReqID == "" || len(m.ReqID) > kv.MaxReqID || m.DeadlineMS < 0 {
		c.refuse(cn.id, m.Seq, fault.New(fault.BadRequest, "req_id has %d bytes; 1 to %d are allowed; deadline_ms is %d",
			len(m.ReqID), kv.MaxReqID, m.DeadlineMS))
		return
	}
	d := kv.FromMillis(m.DeadlineMS)
	if d == kv.Forever {
		d = c.cfg.RequestTimeout
	}
	n := c.nameOf(m.ReqID)
	if v, ok := n.outcome(); ok && n.watchOf(p) == nil && c.noWatch(p) != nil { // a repeat, maybe: R9
		c.send(cn.id, &msg.Ended{Re: m.Seq, ReqID: n.id, Ending: v.ending, Reason: v.reason, Text: v.text})
		return
	}
	if c.ask(cn, p, n, m.Seq, d) == nil {
		c.dropName(n)
		return
	}
	for r := range n.requests.all {
		if r.legacy != nil {
			r.legacy.watched = true
			if r.state == admitted {
				c.unoffer(r) // its Ready commits it, no find
			}
		}
	}
	c.tellName(n)
}

// vouch commits a legacy request: the proxy that watches it has heard from all
// ranks that their bytes are there. What comes before the request is complete
// is kept.
func (c *Core) vouch(cn *conn, p *peer, m *msg.Ready) {
	n := c.names[m.ReqID]
	var w *watch
	if n != nil {
		if v, ok := n.outcome(); ok {
			c.send(cn.id, &msg.Ended{Re: m.Seq, ReqID: n.id, Ending: v.ending, Reason: v.reason, Text: v.text})
			return
		}
		w = n.watchOf(p)
	}
	if w == nil {
		c.refuse(cn.id, m.Seq, fault.New(fault.NotOwner, "%q is not watched by this proxy", m.ReqID))
		return
	}
	if c.ask(cn, p, n, m.Seq, c.cfg.RequestTimeout) != nil {
		w.vouched = true
		c.commitVouched(n)
	}
}

// commitVouched commits a complete legacy request for which a Ready has come.
func (c *Core) commitVouched(n *name) {
	for w := range n.watches.all {
		if !w.vouched {
			continue
		}
		for r := range n.requests.all {
			if r.state == admitted && r.legacy != nil && r.legacy.complete {
				w.vouched = false
				c.commitLegacy(r)
				return
			}
		}
		return
	}
}

// ask notes a question about a name, or that it was asked again. It returns nil
// when the question was refused.
func (c *Core) ask(cn *conn, p *peer, n *name, seq uint64, d kv.Duration) *watch {
	w := n.watchOf(p)
	if w != nil {
		for i := range w.asks {
			if w.asks[i].seq == seq {
				w.asks[i].conn = cn.id
				return w
			}
		}
	}
	if w == nil {
		if err := c.noWatch(p); err != nil {
			c.refuse(cn.id, seq, err)
			return nil
		}
	}
	if w != nil && len(w.asks) >= maxAsks {
		c.refuse(cn.id, seq, busy("%d questions about one name are open, at most %d may be", len(w.asks), maxAsks))
		return nil
	}
	if w == nil {
		w = &watch{peer: p, name: n}
		w.timer = timer{order: c.number(), alarm: w}
		p.watches.push(w)
		n.watches.push(w)
		c.watches++
	}
	w.asks = append(w.asks, ask{seq: seq, conn: cn.id, until: c.now.Add(d)})
	c.armWatch(w)
	return w
}

func (n *name) watchOf(p *peer) *watch {
	for w := range n.watches.all {
		if w.peer == p {
			return w
		}
	}
	return nil
}

// answerWatch answers what is asked about a name.
func (c *Core) answerWatch(w *watch, v verdict) {
	for _, a := range w.asks {
		c.send(a.conn, &msg.Ended{Re: a.seq, ReqID: w.name.id, Ending: v.ending, Reason: v.reason, Text: v.text})
	}
	w.asks = w.asks[:0]
	c.armWatch(w)
}

// dropIdle forgets a watch that nothing can come of.
func (c *Core) dropIdle(w *watch) {
	if len(w.asks) == 0 && w.name.requests.n == 0 {
		c.dropWatch(w)
	}
}

func (c *Core) dropWatch(w *watch) {
	c.timers.set(&w.timer, kv.Never)
	w.peer.watches.remove(w)
	w.name.watches.remove(w)
	c.watches--
	c.dropName(w.name)
}

// endWatches cancels what a proxy watched and nobody has claimed: nobody else
// will.
func (c *Core) endWatches(p *peer) {
	v := verdict{msg.EndCancelled, fault.Cancelled, fmt.Sprintf("proxy %s, which watched it, is lost", p.label)}
	for w := range p.watches.all {
		n := w.name
		for r := range n.requests.all {
			switch r.state {
			case waiting, admitted:
				c.end(r, v, byReceiver)
			case ready:
				c.giveBack(r)
			}
		}
		c.markName(n.id, v, p.label)
	}
	for w := range p.watches.all {
		c.dropWatch(w) // of what is claimed
	}
}
