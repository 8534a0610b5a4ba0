package outbound

import (
	"fmt"
	"sort"
	"strings"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/session"
)

// peer is one receiver: its session, its data link, and what goes there.
type peer struct {
	id      uint32
	addr    Peer
	name    string
	sess    session.Session[call]
	dialect dialect
	timer   timer
	usedAt  kv.Instant
	touched bool

	reqs      reqList // all that are not forgotten
	queue     reqQueue
	byBegin   map[uint64]*request
	lastBegin uint64

	tries    []try
	link     *dataLink  // for begins to come
	links    int        // data links that have not said LinkDown
	linkless kv.Instant // begins wait for a link since

	window     commitQueue
	unanswered int64 // bytes of commits under way
	lost       int   // chunks to be written again
	held       int   // staging slots staged or writing for it

	legacy legacyPeer
}

// dialect is what a receiver is known to speak.
type dialect uint8

const (
	unknown dialect = iota
	speaksBerth
	speaksLMCache
)

// call is what the answer to one of our requests belongs to.
type call struct {
	kind   callKind
	req    *request
	commit *commit
}

type callKind uint8

const (
	callBegin callKind = iota
	callCommit
	callCancel
	callFree // a cancel after ready: nobody waits for its answer
)

func (a Peer) name() string {
	host := a.Host
	if strings.Contains(host, ":") && !strings.HasPrefix(host, "[") {
		host = "[" + host + "]"
	}
	return fmt.Sprintf("%s:%d", host, a.AllocPort)
}

// findPeer returns a receiver, known or new; Busy at the limit.
func (c *Core) findPeer(addr Peer) (*peer, *fault.Error) {
	if p := c.peers[addr]; p != nil {
		return p, nil
	}
	if len(c.peers) >= c.cfg.MaxPeers && !c.evictPeer() {
		return nil, &fault.Error{Code: fault.Busy, Text: fmt.Sprintf("%d receivers are known; the limit is %d", len(c.peers), c.cfg.MaxPeers), Retry: busyRetry}
	}
	c.lastPeer++
	p := &peer{id: c.lastPeer, addr: addr, name: addr.name(), byBegin: map[uint64]*request{}, lastBegin: c.floor, linkless: kv.Never}
	p.legacy.since = kv.Never
	p.timer = timer{kind: timePeer, id: uint64(p.id), peer: p}
	p.sess = session.New[call](session.Config{ID: p.id, Role: msg.RoleSender, Node: c.cfg.Node, Incarnation: c.cfg.Incarnation,
		Secret: c.cfg.Secret, Facts: &c.cfg.Facts, Connect: c.cfg.ConnectTimeout, Idle: c.cfg.RequestTimeout}, c.floor)
	if c.cfg.Dialect == DialectLMCache {
		p.dialect = speaksLMCache
	}
	c.peers[addr] = p
	c.byID[p.id] = p
	return p, nil
}

// evictPeer forgets the receiver that was without a use for longest. One that
// still has a data link is told to close it, and can go the next time.
func (c *Core) evictPeer() bool {
	var old *peer
	for _, p := range c.sortedPeers() {
		if p.reqs.n == 0 && p.held == 0 && (old == nil || p.usedAt < old.usedAt) {
			old = p
		}
	}
	if old == nil {
		return false
	}
	old.sess.Quit()
	c.flush(old)
	c.legacyQuit(old)
	if old.links > 0 {
		for _, l := range []*dataLink{old.link, old.legacy.link} {
			if l != nil {
				c.dropLink(l)
			}
		}
		return false
	}
	c.floor = max(c.floor, old.lastBegin, old.sess.LastSeq())
	c.arm(&old.timer, kv.Never)
	delete(c.peers, old.addr)
	delete(c.byID, old.id)
	return true
}

// sortedPeers returns the receivers in the order in which they were met.
func (c *Core) sortedPeers() []*peer {
	ps := make([]*peer, 0, len(c.byID))
	for _, p := range c.byID {
		ps = append(ps, p)
	}
	sort.Slice(ps, func(i, j int) bool { return ps[i].id < ps[j].id })
	return ps
}

// settleWant keeps a session while there are requests.
func (c *Core) settleWant(now kv.Instant, p *peer) {
	p.usedAt = now
	if c.cfg.Dialect == DialectLMCache {
		return
	}
	p.sess.Want(now, p.reqs.n > 0)
	c.flush(p)
}

// request makes a request of the session's.
func (c *Core) request(p *peer, m msg.Message, of call) {
	if of.req != nil {
		of.req.calls++
	}
	p.sess.Request(m, of)
	c.flush(p)
}

// flush hands the session's actions on, and minds its time.
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
	c.armPeer(p)
}

func (c *Core) armPeer(p *peer) {
	c.arm(&p.timer, min(p.next(c.cfg.ConnectTimeout), p.legacyNext(c.cfg.ConnectTimeout)))
}

// next is when a receiver has something due: its session, a link to try again,
// or the end of the wait for one.
func (p *peer) next(patience kv.Duration) kv.Instant {
	at := p.sess.Next()
	if p.link == nil && p.legacy.link == nil && p.queue.n > 0 && (p.sess.Up() || p.dialect == speaksLMCache) {
		for i := range p.tries {
			at = min(at, p.tries[i].at)
		}
	}
	if p.linkless != kv.Never {
		at = min(at, p.linkless.Add(patience))
	}
	return at
}

func (c *Core) peerDue(now kv.Instant, p *peer) {
	for p.sess.Next() <= now {
		n := p.sess.Tick(now)
		c.flush(p)
		c.notice(now, p, n)
	}
	if p.linkless != kv.Never && now >= p.linkless.Add(c.cfg.ConnectTimeout) {
		p.linkless = kv.Never
		var errs []string
		for _, t := range p.tries {
			errs = append(errs, t.def.Name+": "+t.err)
		}
		c.failQueued(now, p, fault.PeerLost, "no data link: "+strings.Join(errs, "; "))
	}
	c.dialDue(now, p)
	if p.reqs.n == 0 && p.sess.Idle() {
		c.legacyQuit(p)
	}
	c.touchPeer(p)
}

// pump does for a receiver whatever may be done now.
func (c *Core) pump(now kv.Instant, p *peer) {
	c.pumpLegacy(now, p)
	if !p.sess.Opened() && p.link != nil {
		c.dropLink(p.link) // the session rests
	}
	c.connectLink(now, p)
	c.sendBegins(now, p)
	c.rewrite(now, p)
	c.startCommits(now, p)
	c.armPeer(p)
}

func (c *Core) connected(now kv.Instant, ev Connected) {
	if p := c.byID[session.Owner(ev.Conn)]; p != nil {
		p.sess.Connected(now, ev.Conn)
		c.flush(p)
		return
	}
	c.legacyConnected(ev.Conn)
}

func (c *Core) disconnected(now kv.Instant, ev Disconnected) {
	if p := c.byID[session.Owner(ev.Conn)]; p != nil {
		n := p.sess.Disconnected(now, ev.Conn, ev.Text)
		c.flush(p)
		c.notice(now, p, n)
		return
	}
	c.legacyDisconnected(now, ev.Conn, ev.Text)
}

func (c *Core) malformed(now kv.Instant, ev Malformed) {
	if p := c.byID[session.Owner(ev.Conn)]; p != nil {
		c.violation(p, "", ev.Text)
		n := p.sess.Malformed(now, ev.Conn, ev.Text)
		c.flush(p)
		c.notice(now, p, n)
		return
	}
	c.legacyMalformed(now, ev.Conn, ev.Text)
}

func (c *Core) received(now kv.Instant, ev Received) {
	if p := c.byID[session.Owner(ev.Conn)]; p != nil {
		n := p.sess.Received(now, ev.Conn, ev.Msg)
		c.flush(p)
		c.notice(now, p, n)
		c.armPeer(p)
		return
	}
	c.legacyReceived(now, ev.Conn, ev.Msg)
}

// notice acts on what a session has to say.
func (c *Core) notice(now kv.Instant, p *peer, n session.Notice[call]) {
	switch n.Kind {
	case session.None:
		return
	case session.Closed:
		if p.dialect == speaksLMCache {
			p.dialect = unknown // the next connection asks again
		}
	case session.Reply:
		c.reply(now, n.Ref, n.Msg)
	case session.Asked:
		c.endedAsk(now, p, n.Msg.(*msg.Ended))
		c.flush(p)
	case session.Violation:
		c.violation(p, "", n.Text)
	case session.Up:
		c.endSession(now, p, "the receiver opened another session")
		p.dialect = speaksBerth
		c.emit(Note{Kind: NoteSession, Peer: p.name, Text: "opened"})
		if err := c.offered(p); err != nil {
			c.failQueued(now, p, err.Code, err.Text)
		}
	case session.Resumed:
		c.emit(Note{Kind: NoteSession, Peer: p.name, Text: "resumed"})
	case session.Lost:
		c.emit(Note{Kind: NotePeerLost, Peer: p.name, Text: n.Text})
		c.endSession(now, p, n.Text)
		c.failQueued(now, p, n.Code, n.Text)
	case session.Refused:
		c.emit(Note{Kind: NoteSession, Peer: p.name, Reason: n.Code, Text: "refused: " + n.Text})
		c.endSession(now, p, n.Text)
		c.failQueued(now, p, n.Code, n.Text)
	case session.Legacy:
		c.endSession(now, p, n.Text)
		c.metLegacy(now, p)
	}
	if n.Kind != session.Reply && n.Kind != session.Asked {
		c.findLease()
	}
	c.touchPeer(p)
}

func (c *Core) reply(now kv.Instant, of call, m msg.Message) {
	r := of.req
	if r == nil {
		return // of a cancel after ready
	}
	r.calls--
	switch of.kind {
	case callBegin:
		c.begunReply(now, r, m)
	case callCommit:
		c.commitReply(now, of.commit, m)
	case callCancel:
		c.cancelReply(now, r, m)
	}
	c.touch(r)
}

// endSession ends what was begun in a session that is over. Nothing is owed to
// it any more, and its data link goes too.
func (c *Core) endSession(now kv.Instant, p *peer, text string) {
	for r := p.reqs.first; r != nil; {
		next := r.next
		if r.state != queued && !r.legacy.on {
			r.calls, r.drain = 0, 0
			for _, k := range r.commits {
				k.owed = false
			}
			e := endingOf(fault.PeerLost, text)
			switch {
			case r.state == begun || (r.state == ending && r.gen == 0): // it may never have heard of it
				c.endAlone(now, r, e)
			case r.live():
				c.end(now, r, e)
			}
			c.touch(r)
		}
		r = next
	}
	if p.link != nil {
		c.dropLink(p.link)
	}
	p.tries, p.linkless = p.tries[:0], kv.Never
	c.armPeer(p)
}

// failQueued ends what no receiver has heard of.
func (c *Core) failQueued(now kv.Instant, p *peer, code fault.Code, text string) {
	for r := p.queue.first; r != nil; {
		next := r.qnext
		c.endAlone(now, r, endingOf(code, text))
		r = next
	}
}

// findLease finds the shortest lease that is held.
func (c *Core) findLease() {
	c.lease = 0
	for _, p := range c.byID {
		if l := p.sess.Lease(); l > 0 && (c.lease == 0 || l < c.lease) {
			c.lease = l
		}
	}
}
