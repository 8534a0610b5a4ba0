package memlink

import (
	"context"
	"fmt"
	"slices"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
)

// SenderConfig is what a sender needs.
type SenderConfig struct {
	Pool link.Pool // the staging pool
	// Generation returns a staging slot's generation word, for mode Pull.
	Generation func(kv.SlotID) kv.Generation
}

// Sender implements link.Sender.
type Sender struct {
	n      *Network
	cfg    SenderConfig
	closed bool
}

// Sender adds a sender to the network.
func (n *Network) Sender(cfg SenderConfig) *Sender { return &Sender{n: n, cfg: cfg} }

// Caps implements link.Sender.
func (s *Sender) Caps() link.Caps { return s.n.Caps() }

// Connect implements link.Sender. It never waits.
func (s *Sender) Connect(_ context.Context, p link.Peer, ev link.SenderEvents) (link.Conn, error) {
	r := s.n.receivers[p.Addr]
	switch {
	case s.closed:
		return nil, errClosed
	case r == nil:
		return nil, fmt.Errorf("nobody is at %s", p.Addr)
	case s.n.severed[[2]kv.Incarnation{p.Self, p.Incarnation}]:
		return nil, errCut
	case r.cfg.Incarnation != p.Incarnation:
		return nil, fmt.Errorf("receiver %s is wanted, %s is there", p.Incarnation, r.cfg.Incarnation)
	}
	if secret, ok := r.owners[p.Self]; !ok || secret != p.Secret {
		return nil, fmt.Errorf("owner or secret refused")
	}
	c := &conn{n: s.n, s: s, to: r, peer: p, ev: ev, writes: map[link.WriteID]*transfer{}}
	s.n.conns = append(s.n.conns, c)
	return c, nil
}

// Close implements link.Sender.
func (s *Sender) Close() error {
	s.closed = true
	for _, c := range append([]*conn(nil), s.n.conns...) {
		if c.s == s {
			c.Close()
		}
	}
	return nil
}

// conn implements link.Conn.
type conn struct {
	n      *Network
	s      *Sender
	to     *Receiver
	peer   link.Peer
	ev     link.SenderEvents
	writes map[link.WriteID]*transfer // unsettled; nil once sent
	down   error
	closed bool
}

// Write implements link.Conn.
func (c *conn) Write(ws []link.Write) {
	pool := c.s.cfg.Pool
	switch {
	case c.n.mode == link.Pull:
		panic("memlink: Write on a link of mode Pull")
	case c.closed:
		panic("memlink: Write after Close")
	case c.down == nil && len(c.writes)+len(ws) > pool.Slots():
		panic(fmt.Sprintf("memlink: %d unsettled writes from a staging pool of %d slots", len(c.writes)+len(ws), pool.Slots()))
	}
	for _, w := range ws {
		if c.down != nil {
			c.ev.Lost([]link.WriteID{w.ID}, c.down)
			continue
		}
		if _, taken := c.writes[w.ID]; taken || int64(w.Src) >= int64(pool.Slots()) || w.Bytes < 0 || w.Bytes > pool.SlotBytes {
			panic(fmt.Sprintf("memlink: write %d of %d bytes from slot %d is out of range or taken", w.ID, w.Bytes, w.Src))
		}
		t := &transfer{n: c.n, to: c.to, owner: c.peer.Self, dst: w.Dst, gen: w.Generation, bytes: w.Bytes,
			conn: c, id: w.ID, from: pool, src: w.Src}
		c.writes[w.ID] = t
		c.n.queue = append(c.n.queue, t)
	}
}

// Abort implements link.Conn.
func (c *conn) Abort(ids []link.WriteID) {
	for _, id := range ids {
		t, ok := c.writes[id]
		switch {
		case !ok:
		case t != nil && t.begun:
			t.aborted = true
		default:
			c.forget(id)
			c.ev.Lost([]link.WriteID{id}, errAborted)
		}
	}
}

// Settle implements link.Conn.
func (c *conn) Settle(ids []link.WriteID) {
	for _, id := range ids {
		if t := c.writes[id]; t != nil && t.begun {
			t.filler = true
			delete(c.writes, id)
		} else {
			c.forget(id)
		}
	}
}

// forget drops a write of which nothing is in flight any more.
func (c *conn) forget(id link.WriteID) {
	if t := c.writes[id]; t != nil {
		c.n.remove(t)
	}
	delete(c.writes, id)
}

// breakOff loses everything that is unsettled, oldest first.
func (c *conn) breakOff(err error) {
	for _, t := range append([]*transfer(nil), c.n.queue...) {
		if t.conn == c {
			c.n.remove(t)
			t.lose(err)
		}
	}
	ids := make([]link.WriteID, 0, len(c.writes))
	for id := range c.writes { // sent
		ids = append(ids, id)
	}
	clear(c.writes)
	if slices.Sort(ids); len(ids) > 0 {
		c.ev.Lost(ids, err)
	}
}

// end ends the connection, telling the sides that are to be told.
func (c *conn) end(err error, tellSender, tellReceiver bool) {
	if c.down != nil || c.closed {
		return
	}
	c.down = fmt.Errorf("link to %s is down: %w", c.peer.Addr, err)
	c.n.conns = slices.DeleteFunc(c.n.conns, func(o *conn) bool { return o == c })
	c.breakOff(c.down)
	for _, t := range append([]*transfer(nil), c.n.queue...) {
		if t.word != nil && t.owner == c.peer.Self && t.to == c.to { // a pull from memory that is gone
			c.n.remove(t)
			t.lose(c.down)
		}
	}
	if tellSender {
		c.ev.Down(c.down)
	}
	if tellReceiver {
		c.to.ev.Lost(c.peer.Self, c.down)
	}
}

// Close implements link.Conn.
func (c *conn) Close() error {
	c.end(errClosed, false, true)
	c.closed = true
	return nil
}
