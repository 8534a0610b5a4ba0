package outbound

import (
	"fmt"
	"strings"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
)

// dataLink is one connection of a data link to a receiver. A request's link is
// fixed when its Begin goes out.
type dataLink struct {
	id       LinkID
	p        *peer
	def      *Link
	state    linkState
	commits  int        // under way over it
	unsent   int        // writes that it has neither sent nor lost
	progress kv.Instant // of what is under way
	timer    timer
}

type linkState uint8

const (
	linkMaking linkState = iota
	linkIsUp
	linkClosing // asked to close; it says LinkDown
)

// try is one link that both ends have, in our order of preference, and when it
// may be tried again.
type try struct {
	def     *Link
	addr    string
	at      kv.Instant
	backoff kv.Duration
	err     string
}

const (
	firstLinkBackoff = 1 * kv.Second
	lastLinkBackoff  = 30 * kv.Second
)

// offered notes which links both ends have; it errs when there is none.
func (c *Core) offered(p *peer) *fault.Error {
	p.tries = p.tries[:0]
	offers := p.sess.Receiver().Links
	for i := range c.cfg.Links {
		for _, o := range offers {
			if o.Name == c.cfg.Links[i].Name {
				p.tries = append(p.tries, try{def: &c.cfg.Links[i], addr: o.Addr})
				break
			}
		}
	}
	if len(p.tries) > 0 {
		return nil
	}
	var mine, theirs []string
	for _, l := range c.cfg.Links {
		mine = append(mine, l.Name)
	}
	for _, o := range offers {
		theirs = append(theirs, o.Name)
	}
	return fault.New(fault.Unsupported, "no data link in common: links are [%s] here, [%s] at the receiver", strings.Join(mine, " "), strings.Join(theirs, " "))
}

// connectLink sees to it that what is queued gets a link: the first that may be
// tried.
func (c *Core) connectLink(now kv.Instant, p *peer) {
	if p.queue.n == 0 {
		p.linkless = kv.Never
	}
	if p.link != nil || p.queue.n == 0 || !p.sess.Up() {
		return
	}
	if p.linkless == kv.Never {
		p.linkless = now
	}
	for i := range p.tries {
		if t := &p.tries[i]; t.at <= now {
			p.link = c.makeLink(p, t.def, t.addr, p.sess.Receiver().Incarnation)
			break
		}
	}
	c.armPeer(p)
}

func (c *Core) makeLink(p *peer, def *Link, addr string, to kv.Incarnation) *dataLink {
	c.lastLink++
	l := &dataLink{id: c.lastLink, p: p, def: def}
	l.timer = timer{kind: timeLink, id: uint64(l.id), link: l}
	c.links[l.id] = l
	p.links++
	c.emit(Connect{Link: l.id, Name: def.Name, Addr: addr, Incarnation: to})
	return l
}

// dropLink closes a data link; new begins take another.
func (c *Core) dropLink(l *dataLink) {
	l.p.unlink(l)
	if l.state != linkClosing {
		l.state = linkClosing
		c.emit(Disconnect{Link: l.id})
	}
	c.armLink(l)
}

// unlink sees to it that no begin to come uses a link.
func (p *peer) unlink(l *dataLink) {
	if p.link == l {
		p.link = nil
	}
	if p.legacy.link == l {
		p.legacy.link = nil
	}
}

func (c *Core) linkUp(ev LinkUp) {
	l := c.links[ev.Link]
	if l == nil || l.state != linkMaking {
		return
	}
	l.state = linkIsUp
	l.p.linkless = kv.Never
	for i := range l.p.tries {
		if t := &l.p.tries[i]; t.def == l.def {
			t.backoff, t.err = 0, ""
		}
	}
	c.emit(Note{Kind: NoteLinkUp, Peer: l.p.name, Link: l.def.Name})
	c.touchPeer(l.p)
}

// linkDown: the link is gone, and with it every hand on our slots. Requests
// that are fixed to it fail; later ones take the next link.
func (c *Core) linkDown(now kv.Instant, ev LinkDown) {
	l := c.links[ev.Link]
	if l == nil {
		return
	}
	delete(c.links, l.id)
	p := l.p
	p.links--
	asked := l.state == linkClosing
	l.state = linkClosing
	p.unlink(l)
	for i := range p.tries {
		if t := &p.tries[i]; t.def == l.def && !asked {
			t.backoff = min(max(2*t.backoff, firstLinkBackoff), lastLinkBackoff)
			t.at, t.err = now.Add(t.backoff), ev.Text
		}
	}
	if !asked {
		c.emit(Note{Kind: NoteLinkDown, Peer: p.name, Link: l.def.Name, Text: ev.Text})
	}
	text := fmt.Sprintf("link %s: %s", l.def.Name, ev.Text)
	for r := p.reqs.first; r != nil; {
		next := r.next
		if r.link == l {
			c.lostAll(now, l, r)
			c.fail(now, r, fault.PeerLost, text)
		}
		r = next
	}
	c.arm(&l.timer, kv.Never)
	c.touchPeer(p)
}

// lostAll takes back what a link still had of a request; it has let go.
func (c *Core) lostAll(now kv.Instant, l *dataLink, r *request) {
	for _, k := range r.commits {
		for i := range k.items {
			if k.items[i].write != 0 {
				c.lose(now, l, k, i, "")
			}
		}
	}
}

// armLink watches over the progress of what is under way.
func (c *Core) armLink(l *dataLink) {
	if l.state != linkIsUp || (l.commits == 0 && l.unsent == 0) {
		c.arm(&l.timer, kv.Never)
		return
	}
	c.arm(&l.timer, l.progress.Add(c.cfg.WriteTimeout))
}

// linkDue: nothing was sent or committed over the link for write_timeout. What
// is under way fails; a link that still holds bytes is given up.
func (c *Core) linkDue(now kv.Instant, l *dataLink) {
	text := fmt.Sprintf("no progress on link %s for %v s; %d writes not sent, %d commits not answered",
		l.def.Name, c.cfg.WriteTimeout.Seconds(), l.unsent, l.commits)
	stuck := l.unsent > 0
	for r := l.p.reqs.first; r != nil; {
		next := r.next
		switch {
		case r.link != l:
		case r.underWay():
			c.fail(now, r, fault.Deadline, text)
		case stuck:
			c.fail(now, r, fault.PeerLost, text)
		}
		r = next
	}
	if stuck {
		c.dropLink(l)
	}
	c.armLink(l)
	c.touchPeer(l.p)
}

// underWay reports whether something of it was started and not answered.
func (r *request) underWay() bool {
	for _, k := range r.commits {
		if k.phase == writing || k.phase == asked {
			return true
		}
	}
	return false
}

func (r *request) linkName() string {
	if r.link == nil {
		return ""
	}
	return r.link.def.Name
}
