// Package faultlink makes a link worse: it wraps the halves of any link and
// slows down, delays, loses or falsifies what goes through, by a plan. For
// tests, for the demo's chaos, and for benchmarks that need a slow network.
package faultlink

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"time"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
)

// Plan is what goes wrong. The zero Plan changes nothing. Its functions are
// called from several goroutines, one call at a time for each connection of a
// sender and for each receiver.
type Plan struct {
	// BytesPerSecond is the most that a connection of a sender passes on, or
	// that a receiver of mode Pull copies; 0 is unlimited.
	BytesPerSecond int64
	// Delay holds each chunk back before it is passed on.
	Delay time.Duration
	// Connect, if set, may refuse a connection.
	Connect func(link.Peer) error
	// Lose, if set, says which chunks are not passed on: a write is reported as
	// Lost, a pull as Failed. A pull has no ID.
	Lose func(link.Write) bool
	// Flip, if set, says in which landed chunks a bit changes, and at which byte.
	Flip func(link.Landing) (at int64, ok bool)
}

var errPlan = errors.New("lost by the fault plan")

// Sender wraps the sending half. Writes are passed on in order.
func Sender(s link.Sender, p Plan) link.Sender { return &sender{s, p} }

type sender struct {
	link.Sender
	plan Plan
}

func (s *sender) Connect(ctx context.Context, p link.Peer, ev link.SenderEvents) (link.Conn, error) {
	if s.plan.Connect != nil {
		if err := s.plan.Connect(p); err != nil {
			return nil, fmt.Errorf("refused by the fault plan: %w", err)
		}
	}
	c := &conn{plan: s.plan, ev: ev}
	inner := ev
	inner.Down = func(err error) {
		c.lose(c.held.remove(all, nil), err)
		ev.Down(err)
	}
	c.held = newHold(s.plan, c.pass)
	var err error
	if c.Conn, err = s.Sender.Connect(ctx, p, inner); err != nil {
		c.held.close()
		return nil, err
	}
	return c, nil
}

type conn struct {
	link.Conn
	plan Plan
	ev   link.SenderEvents
	held *hold[link.Write]
}

func all(link.Write) bool { return true }

func (c *conn) Write(ws []link.Write) {
	for _, w := range ws {
		c.held.add(w, w.Bytes)
	}
}

func (c *conn) pass(w link.Write) {
	if c.plan.Lose != nil && c.plan.Lose(w) {
		c.ev.Lost([]link.WriteID{w.ID}, errPlan)
		return
	}
	c.Conn.Write([]link.Write{w})
}

func (c *conn) lose(ws []link.Write, err error) {
	if len(ws) == 0 {
		return
	}
	ids := make([]link.WriteID, len(ws))
	for i, w := range ws {
		ids[i] = w.ID
	}
	c.ev.Lost(ids, err)
}

func oneOf(ids []link.WriteID) func(link.Write) bool {
	return func(w link.Write) bool {
		for _, id := range ids {
			if id == w.ID {
				return true
			}
		}
		return false
	}
}

func (c *conn) Abort(ids []link.WriteID) {
	held := c.held.remove(oneOf(ids), func() { c.Conn.Abort(ids) })
	c.Conn.Abort(ids)
	c.lose(held, errPlan)
}

func (c *conn) Settle(ids []link.WriteID) {
	c.held.remove(oneOf(ids), func() { c.Conn.Settle(ids) })
	c.Conn.Settle(ids)
}

func (c *conn) Close() error {
	held := c.held.close()
	err := c.Conn.Close()
	c.lose(held, errPlan)
	return err
}

// Receiver wraps the receiving half that build makes with the events it is
// given. Bits are flipped in pool, where the receiver puts the chunks.
func Receiver(p Plan, pool link.Pool, ev link.ReceiverEvents, build func(link.ReceiverEvents) (link.Receiver, error)) (link.Receiver, error) {
	r := &receiver{plan: p, ev: ev}
	inner := ev
	if p.Flip != nil {
		inner.Landed = func(ls []link.Landing) {
			for i := range ls {
				flip(p, pool, &ls[i])
			}
			ev.Landed(ls)
		}
	}
	var err error
	if r.Receiver, err = build(inner); err != nil {
		return nil, err
	}
	r.held = newHold(p, r.pass)
	return r, nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// flip changes a chunk as the network would have: before it was summed.
func flip(p Plan, pool link.Pool, l *link.Landing) {
	at, ok := p.Flip(*l)
	if !ok {
		return
	}
	b := pool.Slot(l.Slot)[:l.Bytes]
	b[at] ^= 1
	if l.HasSum {
		l.Sum = crc32.Checksum(b, castagnoli)
	}
}

type receiver struct {
	link.Receiver
	plan Plan
	ev   link.ReceiverEvents
	held *hold[pull]
}

type pull struct {
	owner kv.Incarnation
	gen   kv.Generation
	item  link.PullItem
}

func (r *receiver) Pull(owner kv.Incarnation, gen kv.Generation, items []link.PullItem) {
	for _, it := range items {
		r.held.add(pull{owner, gen, it}, it.Bytes)
	}
}

func (r *receiver) pass(p pull) {
	if r.plan.Lose != nil && r.plan.Lose(link.Write{Src: p.item.Src, Dst: p.item.Slot, Generation: p.gen, Bytes: p.item.Bytes}) {
		r.ev.Failed(p.item.Slot, p.gen, fault.New(fault.BadRequest, "%v", errPlan))
		return
	}
	r.Receiver.Pull(p.owner, p.gen, []link.PullItem{p.item})
}

func (r *receiver) Revoke(gen kv.Generation, slots []kv.SlotID) {
	r.held.remove(func(p pull) bool {
		for _, s := range slots {
			if s == p.item.Slot && gen == p.gen {
				return true
			}
		}
		return false
	}, nil)
	r.Receiver.Revoke(gen, slots)
}

func (r *receiver) Close() error {
	r.held.close()
	return r.Receiver.Close()
}
