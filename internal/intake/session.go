package intake

import (
	"fmt"
	"slices"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// conn is a control connection. Its dialect is settled by its first message: a
// Hello makes it a session's, an LMCache message a legacy owner's.
type conn struct {
	id         kv.ConnID
	identity   string
	remote     string
	session    *peer // that said Hello on it; it may be over
	owner      *peer // legacy: the owner of this identity, known to be connected
	superseded bool  // a later Hello of the same incarnation: what comes is dropped unread

	replies []*reply // to LMCache messages, in order; the first is not ready
}

// roleLegacy is the role of a peer that never says Hello: an LMCache sender.
const roleLegacy msg.Role = "legacy"

// peer is who speaks: a session of a sender, proxy or tool, or a legacy owner.
// It outlives its session while requests of it do.
type peer struct {
	serial uint64
	role   msg.Role
	label  string // for notes and status
	over   bool   // the session is over; a legacy owner's never is

	// A session's.
	incarnation kv.Incarnation
	secret      kv.Secret
	conn        kv.ConnID          // over which it speaks now
	hello       uint64             // seq of the Hello on it
	opener      uint64             // seq of the Hello that opened the session
	highest     uint64             // begin seen
	seq         uint64             // of our own requests
	told        map[uint64]*ending // Ended, by our seq, that Drained has not answered
	watches     list[watch]

	// A legacy owner's.
	identity   string
	conns      int
	incomplete int64  // slots of admitted requests that still need messages of it
	unanswered int    // first batches that wait: it can send nothing meanwhile
	anonymous  uint64 // requests without an id

	lease    kv.Instant // until when; Never: a connected legacy owner
	timer    timer
	requests list[request]       // every record
	live     map[reqKey]*request // those not draining
	ended    map[reqKey]*ending  // kept
}

func (p *peer) ring(c *Core) { c.leaseDue(p) }

func (c *Core) newPeer(role msg.Role, label string) *peer {
	p := blankPeer()
	p.serial, p.role, p.label, p.lease = c.number(), role, label, kv.Never
	p.timer = timer{order: p.serial, alarm: p}
	return p
}

func blankPeer() *peer {
	p := &peer{live: map[reqKey]*request{}, ended: map[reqKey]*ending{}}
	p.requests.at = func(r *request) *links[request] { return &r.byOwner }
	p.watches.at = func(w *watch) *links[watch] { return &w.byPeer }
	return p
}

// ---- connections ----

func (c *Core) connected(e Connected) {
	if len(c.conns) >= c.cfg.MaxConns { // R11
		c.act(Note{Kind: NotePeerRefused, Owner: e.Identity, Reason: fault.Busy,
			Text: fmt.Sprintf("%s: %d control connections are open, at most %d may be", e.Remote, len(c.conns), c.cfg.MaxConns)})
		c.act(Close{Conn: e.Conn})
		return
	}
	cn := &conn{id: e.Conn, identity: e.Identity, remote: e.Remote}
	c.conns[e.Conn] = cn
	if p := c.identities[e.Identity]; p != nil && e.Identity != "" {
		c.attach(cn, p)
	}
}

func (c *Core) disconnected(id kv.ConnID) {
	cn := c.conns[id]
	if cn == nil {
		return
	}
	delete(c.conns, id)
	p := cn.owner
	if p == nil {
		return
	}
	if p.conns--; p.conns == 0 {
		if len(p.live) > 0 {
			p.lease = c.now.Add(c.cfg.Lease)
			c.leases++
			c.timers.set(&p.timer, p.lease)
		}
		c.reap(p)
	}
}

// attach notes that a legacy owner has this connection: its lease does not run.
func (c *Core) attach(cn *conn, p *peer) {
	cn.owner = p
	if p.conns++; p.conns == 1 && p.lease != kv.Never {
		p.lease = kv.Never
		c.leases--
		c.timers.set(&p.timer, kv.Never)
	}
}

// received steps one message.
func (c *Core) received(e Received) {
	cn := c.conns[e.Conn]
	if cn == nil || cn.superseded {
		return
	}
	switch m := e.Msg.(type) {
	case *msg.Hello:
		c.hello(cn, m)
	case *msg.AllocRequest:
		if cn.session != nil {
			c.refuseLegacy(cn, len(m.Keys))
			return
		}
		c.allocRequest(cn, m)
	case *msg.CancelNotif:
		if cn.session != nil {
			c.refuseLegacy(cn, 1)
			return
		}
		c.cancelNotif(cn, m)
	case *msg.Begin:
		if p := c.session(cn, m.Seq, msg.RoleSender); p != nil {
			c.begin(cn, p, m)
		}
	case *msg.Commit:
		if p := c.session(cn, m.Seq, msg.RoleSender); p != nil {
			c.commit(cn, p, m)
		}
	case *msg.Cancel:
		if p := c.session(cn, m.Seq, ""); p != nil {
			c.cancel(cn, p, m)
		}
	case *msg.Watch:
		if p := c.session(cn, m.Seq, msg.RoleProxy); p != nil {
			c.watchName(cn, p, m)
		}
	case *msg.Ready:
		if p := c.session(cn, m.Seq, msg.RoleProxy); p != nil {
			c.vouch(cn, p, m)
		}
	case *msg.Heartbeat:
		if p := c.session(cn, m.Seq, ""); p != nil {
			c.send(cn.id, &msg.HeartbeatReply{Re: m.Seq})
		}
	case *msg.Drained:
		if p := cn.session; p != nil && !p.over {
			c.renew(p)
			c.drained(p, m)
		}
	case *msg.ProxyNotif, *msg.EndingNotice:
		c.refuseLegacy(cn, 1) // another port's
	default: // a reply to something never asked
	}
}

// malformed answers what could not be understood, as any message is answered.
func (c *Core) malformed(e Malformed) {
	cn := c.conns[e.Conn]
	switch {
	case cn == nil || cn.superseded:
	case e.Seq == 0:
		c.refuseLegacy(cn, e.Keys)
	case !e.Unknown:
		c.refuse(cn.id, e.Seq, fault.New(fault.BadRequest, "%s", e.Text))
	case cn.session == nil || cn.session.over:
		c.refuse(cn.id, e.Seq, errHello())
	default:
		c.refuse(cn.id, e.Seq, fault.New(fault.UnknownMessage, "%s", e.Text))
	}
}

func errHello() *fault.Error {
	return fault.New(fault.HelloRequired, "there is no session on this connection, or its lease ran out")
}

// session returns the session that speaks on a connection, its lease renewed,
// or answers with an error. Role is the one that may say this, "" any.
func (c *Core) session(cn *conn, seq uint64, role msg.Role) *peer {
	p := cn.session
	if p == nil || p.over {
		c.refuse(cn.id, seq, errHello())
		return nil
	}
	c.renew(p)
	if role != "" && p.role != role {
		c.refuse(cn.id, seq, fault.New(fault.BadRequest, "a %s's message from a %s", role, p.role))
		return nil
	}
	return p
}

// ---- hello ----

func (c *Core) hello(cn *conn, m *msg.Hello) {
	if cn.session != nil {
		c.refuse(cn.id, m.Seq, fault.New(fault.BadRequest, "a second Hello on one connection"))
		return
	}
	if err := c.checkHello(cn, m); err != nil {
		c.act(Note{Kind: NotePeerRefused, Owner: label(m.Node, m.Incarnation), Reason: err.Code, Text: cn.remote + ": " + err.Text})
		c.refuse(cn.id, m.Seq, err)
		return
	}
	old := c.sessions[m.Incarnation]
	resumed := old != nil && m.Resume && m.Session == old.opener
	if old != nil {
		c.supersede(old)
		if !resumed { // the sender's own verdict
			c.endSession(old, verdict{msg.EndFailed, fault.PeerLost, "the peer ended its session"})
		}
	}
	p := old
	if !resumed {
		p = c.newPeer(m.Role, label(m.Node, m.Incarnation))
		p.incarnation, p.secret, p.opener = m.Incarnation, m.Secret, m.Seq
		p.told = map[uint64]*ending{}
		c.sessions[m.Incarnation] = p
		c.leases++
		if p.role == msg.RoleSender {
			c.act(Allow{Owner: p.incarnation, Secret: p.secret})
		}
	}
	cn.session, p.conn, p.hello = p, cn.id, m.Seq
	c.renew(p)
	c.send(cn.id, &msg.HelloReply{Re: m.Seq, Version: msg.Version, Incarnation: c.cfg.Incarnation, Resumed: resumed,
		Capacity: int64(c.cfg.Capacity), LeaseMS: c.cfg.Lease.Millis(), Links: c.offers()})
	text := "began"
	if resumed {
		text = "resumed"
		c.tellAgain(p)
	}
	c.act(Note{Kind: NoteSession, Owner: p.label, Text: text})
}

// checkHello says why a Hello is refused; nothing else comes of a refusal.
func (c *Core) checkHello(cn *conn, m *msg.Hello) *fault.Error {
	if cn.owner != nil || len(cn.replies) > 0 {
		return fault.New(fault.BadRequest, "a Hello on a connection that speaks LMCache's dialect")
	}
	if m.Min > msg.Version || m.Max < msg.Version || m.Min > m.Max {
		return fault.New(fault.Unsupported, "versions %d to %d are spoken here, %d to %d there", msg.Version, msg.Version, m.Min, m.Max)
	}
	if m.Role != msg.RoleSender && m.Role != msg.RoleProxy && m.Role != msg.RoleTool {
		return fault.New(fault.BadRequest, "role %q is not known", m.Role)
	}
	if m.Incarnation.IsZero() {
		return fault.New(fault.BadRequest, "incarnation is missing")
	}
	if m.Role == msg.RoleSender {
		if m.Facts == nil {
			return fault.New(fault.BadRequest, "layout is missing")
		}
		if name, mine, theirs := c.cfg.Facts.Differs(*m.Facts); name != "" {
			return fault.New(fault.LayoutMismatch, "%s is %s here, %s there", name, mine, theirs)
		}
	}
	p := c.sessions[m.Incarnation]
	if p == nil {
		if len(c.sessions) >= c.cfg.MaxConns { // R11
			return busy("%d sessions are open, at most %d may be", len(c.sessions), c.cfg.MaxConns)
		}
		return nil
	}
	if !sameSecret(p.secret, m.Secret) {
		return fault.New(fault.NotOwner, "incarnation %s is live and its secret is another one", m.Incarnation.Short())
	}
	if p.role != m.Role {
		return fault.New(fault.BadRequest, "incarnation %s is a %s, not a %s", m.Incarnation.Short(), p.role, m.Role)
	}
	if m.Seq <= p.hello { // over an older connection: it would end the session that came after it
		return fault.New(fault.BadRequest, "a late Hello: its seq is %d, the session's last Hello had %d", m.Seq, p.hello)
	}
	return nil
}

// sameSecret compares in a time that does not depend on where they differ.
func sameSecret(a, b kv.Secret) bool {
	var d byte
	for i := range a {
		d |= a[i] ^ b[i]
	}
	return d == 0
}

func label(node string, i kv.Incarnation) string {
	if len(node) > kv.MaxNode {
		node = node[:kv.MaxNode]
	}
	return node + "/" + i.Short()
}

func (c *Core) offers() []msg.LinkOffer {
	var o []msg.LinkOffer
	for _, l := range c.cfg.Links {
		o = append(o, msg.LinkOffer{Name: l.Name, Addr: l.Addr})
	}
	return o
}

// supersede drops what still comes on the connection a session had.
func (c *Core) supersede(p *peer) {
	if cn := c.conns[p.conn]; cn != nil && cn.session == p {
		cn.superseded = true
		c.act(Close{Conn: cn.id})
	}
}

// tellAgain repeats, after a reconnect, the endings that were not answered.
func (c *Core) tellAgain(p *peer) {
	var seqs []uint64
	for s := range p.told {
		seqs = append(seqs, s)
	}
	slices.Sort(seqs)
	for _, s := range seqs {
		c.send(p.conn, p.told[s].message(s))
	}
}

// ---- leases ----

// renew counts a lease from now on. The timer is moved only when it rings.
func (c *Core) renew(p *peer) {
	p.lease = c.now.Add(c.cfg.Lease)
	if p.timer.pos == 0 {
		c.timers.set(&p.timer, p.lease)
	}
}

func (c *Core) leaseDue(p *peer) {
	if p.lease > c.now {
		c.timers.set(&p.timer, p.lease)
		return
	}
	text := fmt.Sprintf("nothing was heard for lease_sec %g", c.cfg.Lease.Seconds())
	c.act(Note{Kind: NoteLeaseExpired, Owner: p.label, Reason: fault.PeerLost, Count: int64(len(p.live)), Text: text})
	v := verdict{msg.EndFailed, fault.PeerLost, text}
	if p.role == roleLegacy {
		c.leases--
		p.lease = kv.Never
		c.endAll(p, v)
		c.reap(p)
		return
	}
	c.endSession(p, v)
}

// endSession ends a session and every unfinished request of it; what a proxy
// watched and nobody has claimed is cancelled. Ready requests stay for the
// engine.
func (c *Core) endSession(p *peer, v verdict) {
	p.over = true
	delete(c.sessions, p.incarnation)
	c.leases--
	c.timers.set(&p.timer, kv.Never)
	c.endAll(p, v)
	for _, e := range p.ended {
		e.owner = nil
	}
	clear(p.ended)
	clear(p.told)
	c.endWatches(p)
	if p.role == msg.RoleSender {
		c.act(Disallow{Owner: p.incarnation})
	}
}

func (c *Core) endAll(p *peer, v verdict) {
	for r := range p.requests.all {
		if r.unfinished() {
			c.end(r, v, byReceiver)
		}
	}
}

// peerGone: the process is gone, so nothing of it writes any more and nothing
// of it will come.
func (c *Core) peerGone(i kv.Incarnation) {
	if p := c.sessions[i]; p != nil {
		c.supersede(p)
		c.endSession(p, verdict{msg.EndFailed, fault.PeerLost, "the peer's process is gone"})
	}
	for r := range c.requests.all {
		if r.state == draining && r.owner.incarnation == i && !c.linkOf(r).ExactFence {
			c.writerGone(r)
		}
	}
}

// linkLost fails what was to come over that link.
func (c *Core) linkLost(e LinkLost) {
	p := c.sessions[e.Owner]
	if p == nil {
		return
	}
	for r := range p.requests.all {
		if r.unfinished() && c.linkOf(r).Name == e.Link {
			c.end(r, verdict{msg.EndFailed, fault.PeerLost, "link " + e.Link + " is lost: " + e.Text}, byReceiver)
		}
	}
}

// reap forgets a legacy owner of which nothing is left.
func (c *Core) reap(p *peer) {
	if p.role != roleLegacy || p.conns > 0 || p.requests.n > 0 || len(p.ended) > 0 {
		return
	}
	if p.lease != kv.Never {
		p.lease = kv.Never
		c.leases--
		c.timers.set(&p.timer, kv.Never)
	}
	delete(c.identities, p.identity)
}
