package node

import (
	"context"
	"fmt"
	"hash/crc32"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/outbound"
	"github.com/berthkv/berth/internal/wire"
)

// Pusher takes messages for the proxy; it never blocks and errs when it cannot
// take one.
type Pusher interface {
	Push(payload []byte) error
}

// Generations holds a word for each staging slot.
type Generations interface {
	Store(slot kv.SlotID, gen kv.Generation)
}

// linkConn is a data link from the loop's view: being made (conn nil) or up.
// It leaves Node.links when it is down or asked to be closed.
type linkConn struct {
	conn    link.Conn
	cancel  context.CancelFunc
	closing bool // asked for while it was being made
}

type linked struct {
	id   outbound.LinkID
	conn link.Conn
	err  error
}

type linkEnded struct {
	id  outbound.LinkID
	err error
}

// connect starts a data link.
func (n *Node) connect(a outbound.Connect) {
	ctx, cancel := context.WithTimeout(n.ctx, n.cfg.DialTimeout)
	n.links[a.Link] = &linkConn{cancel: cancel}
	n.outside(func() {
		defer cancel()
		known := make(chan struct{})
		defer close(known)
		peer := link.Peer{Incarnation: a.Incarnation, Addr: a.Addr, Self: n.cfg.Incarnation, Secret: n.cfg.Secret}
		conn, err := n.deps.Senders[a.Name].Connect(ctx, peer, link.SenderEvents{
			Sent: func(ids []link.WriteID) {
				<-known
				n.mail.post(outbound.Sent{Link: a.Link, Writes: plain(ids)})
			},
			Lost: func(ids []link.WriteID, err error) {
				<-known
				n.mail.post(outbound.Lost{Link: a.Link, Writes: plain(ids), Text: fmt.Sprint(err)})
			},
			Down: func(err error) {
				<-known
				n.mail.post(linkEnded{a.Link, err})
			},
		})
		if !n.mail.post(linked{a.Link, conn, err}) && conn != nil {
			n.release(conn, nil)
		}
	})
}

func (n *Node) onLinked(now kv.Instant, l linked) {
	c := n.links[l.id]
	switch {
	case l.err != nil:
		delete(n.links, l.id)
		n.stepOutbound(now, outbound.LinkDown{Link: l.id, Text: l.err.Error()})
	case c.closing:
		delete(n.links, l.id)
		n.release(l.conn, outbound.LinkDown{Link: l.id, Text: "closed"})
	default:
		c.conn = l.conn
		n.stepOutbound(now, outbound.LinkUp{Link: l.id})
	}
}

func (n *Node) onLinkEnded(now kv.Instant, l linkEnded) {
	c := n.links[l.id]
	if c == nil || c.conn == nil {
		return // being closed; that says LinkDown
	}
	delete(n.links, l.id)
	n.release(c.conn, nil)
	n.stepOutbound(now, outbound.LinkDown{Link: l.id, Text: fmt.Sprint(l.err)})
}

func (n *Node) disconnect(id outbound.LinkID) {
	c := n.links[id]
	if c == nil {
		return
	}
	if c.conn == nil {
		c.closing = true
		c.cancel()
		return // onLinked goes on
	}
	delete(n.links, id)
	n.release(c.conn, outbound.LinkDown{Link: id, Text: "closed"})
}

// release closes a link off the loop, since Close waits for the link's writers,
// and then says so.
func (n *Node) release(conn link.Conn, then any) {
	n.outside(func() {
		conn.Close()
		if then != nil {
			n.mail.post(then)
		}
	})
}

func plain(ids []link.WriteID) []uint64 {
	out := make([]uint64, len(ids))
	for i, id := range ids {
		out[i] = uint64(id)
	}
	return out
}

// stepOutbound steps the sender's core and carries out its actions.
func (n *Node) stepOutbound(now kv.Instant, ev outbound.Event) {
	for _, a := range n.outbound.Step(now, ev) {
		n.execOutbound(a)
	}
}

func (n *Node) execOutbound(a outbound.Action) {
	switch a := a.(type) {
	case outbound.Dial:
		n.controls.dial(a.Conn, a.Peer.Host, a.Peer.AllocPort)
	case outbound.Close:
		n.controls.close(a.Conn)
	case outbound.Send:
		n.controls.send(a.Conn, a.Msg)
	case outbound.Connect:
		n.connect(a)
	case outbound.Disconnect:
		n.disconnect(a.Link)
	case outbound.Write:
		if c := n.links[a.Link]; c != nil && c.conn != nil {
			ws := make([]link.Write, len(a.Writes))
			for i, w := range a.Writes {
				ws[i] = link.Write{ID: link.WriteID(w.ID), Src: w.Src, Dst: w.Dst, Generation: w.Generation, Bytes: w.Bytes}
			}
			c.conn.Write(ws)
		}
	case outbound.Abort:
		if c := n.links[a.Link]; c != nil && c.conn != nil {
			c.conn.Abort(writeIDs(a.Writes))
		}
	case outbound.Settle:
		if c := n.links[a.Link]; c != nil && c.conn != nil {
			c.conn.Settle(writeIDs(a.Writes))
		}
	case outbound.Sum:
		n.sum(a)
	case outbound.Raise:
		for _, s := range a.Slots {
			n.deps.Generations.Store(s.Slot, s.Generation)
		}
	case outbound.Notify:
		n.notify(a.Msg)
	case outbound.Wake:
		n.wake[wakeOutbound] = a.At
	case outbound.Answer:
		n.answerOutbound(a)
	case outbound.Granted:
		n.emitGranted(a)
	case outbound.Ended:
		n.emitEnded(a)
	case outbound.Note:
		n.noteOutbound(a)
	}
}

func writeIDs(ids []uint64) []link.WriteID {
	out := make([]link.WriteID, len(ids))
	for i, id := range ids {
		out[i] = link.WriteID(id)
	}
	return out
}

func (n *Node) notify(m msg.Message) {
	if n.deps.Notify == nil {
		return
	}
	b, err := wire.Append(n.encoded[:0], m)
	if err == nil {
		n.encoded = b
		err = n.deps.Notify.Push(b)
	}
	if err != nil {
		n.stats.notifyFailed()
		n.log.Warn("proxy not told", "err", err)
	}
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// sum computes checksums off the loop; the slots are the core's until Summed.
func (n *Node) sum(a outbound.Sum) {
	items := append([]outbound.SumItem(nil), a.Items...)
	n.outside(func() {
		sums := make([]uint32, len(items))
		for i, it := range items {
			sums[i] = crc32.Checksum(n.deps.Staging.Slot(it.Slot)[:it.Bytes], castagnoli)
		}
		n.mail.post(outbound.Summed{Batch: a.Batch, Sums: sums})
	})
}
