package tcplink

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"

	"github.com/berthkv/berth/internal/link"
)

var (
	errAborted = errors.New("given up by the caller")
	errClosed  = errors.New("the link was closed")
)

type writeState uint8

const (
	queued  writeState = iota
	writing            // in a writer's hands
	sent               // in the kernel's
)

// write is one unsettled write; its fields are guarded by conn.mu.
type write struct {
	link.Write
	state   writeState
	aborted bool
	settled bool  // while writing
	by      *line // that writes or has sent it
}

// conn implements link.Conn: one receiver, several data connections ("lines"),
// which take writes from one queue.
type conn struct {
	s      *Sender
	peer   link.Peer
	ev     link.SenderEvents
	ctx    context.Context // ends at Close and at Down
	cancel context.CancelFunc
	wg     sync.WaitGroup // lines
	close  sync.Once

	mu      sync.Mutex
	work    sync.Cond // for lines: the queue has grown, a line broke, the link ended
	up      sync.Cond // for lines: another one is connected, the link ended
	letGo   sync.Cond // for Settle: a writer has let go of a write
	closed  bool
	down    error // why, once it is down
	queue   []*write
	writes  map[link.WriteID]*write
	live    int // lines that are connected
	dialing int // lines that are trying to be
}

// newConn starts the lines; the first has its connection already.
func newConn(s *Sender, p link.Peer, ev link.SenderEvents, nc net.Conn) *conn {
	c := &conn{s: s, peer: p, ev: ev, writes: make(map[link.WriteID]*write)}
	c.work.L, c.up.L, c.letGo.L = &c.mu, &c.mu, &c.mu
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.live, c.dialing = 1, s.cfg.Connections-1
	c.wg.Add(s.cfg.Connections)
	go (&line{c: c, nc: nc}).run()
	for range s.cfg.Connections - 1 { // not c.dialing: the first line may have changed it already
		go (&line{c: c}).run()
	}
	return c
}

// Write implements link.Conn.
func (c *conn) Write(ws []link.Write) {
	pool := c.s.cfg.Pool
	c.mu.Lock()
	down := c.down
	if c.closed {
		c.mu.Unlock()
		panic("tcplink: Write after Close")
	}
	if down == nil {
		if n := len(c.writes) + len(ws); n > pool.Slots() {
			c.mu.Unlock()
			panic(fmt.Sprintf("tcplink: %d unsettled writes from a staging pool of %d slots", n, pool.Slots()))
		}
		for _, w := range ws {
			if int64(w.Src) >= int64(pool.Slots()) || w.Bytes < 0 || w.Bytes > pool.SlotBytes || c.writes[w.ID] != nil {
				c.mu.Unlock()
				panic(fmt.Sprintf("tcplink: write %d of %d bytes from slot %d, of a pool of %d slots of %d bytes, is out of range or taken",
					w.ID, w.Bytes, w.Src, pool.Slots(), pool.SlotBytes))
			}
			e := &write{Write: w}
			c.writes[w.ID] = e
			c.queue = append(c.queue, e)
		}
		if len(ws) == 1 {
			c.work.Signal()
		} else {
			c.work.Broadcast()
		}
	}
	c.mu.Unlock()
	if down != nil && len(ws) > 0 {
		ids := make([]link.WriteID, len(ws))
		for i, w := range ws {
			ids[i] = w.ID
		}
		c.ev.Lost(ids, down)
	}
}

// Abort implements link.Conn.
func (c *conn) Abort(ids []link.WriteID) {
	var lost []link.WriteID
	waiting := false // one of them is in the queue
	c.mu.Lock()
	for _, id := range ids {
		switch w := c.writes[id]; {
		case w == nil:
		case w.state == writing:
			w.aborted = true
		default:
			delete(c.writes, id)
			waiting = waiting || w.state == queued
			lost = append(lost, id)
		}
	}
	if waiting {
		c.sweepLocked()
	}
	c.mu.Unlock()
	if len(lost) > 0 {
		c.ev.Lost(lost, errAborted)
	}
}

// Settle implements link.Conn. It waits for a writer that still has one of the
// writes in hand no longer than the writer needs to be interrupted.
func (c *conn) Settle(ids []link.WriteID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	waiting := false // one of them is in the queue
	for _, id := range ids {
		w := c.writes[id]
		if w == nil {
			continue
		}
		waiting = waiting || w.state == queued
		w.settled = true
		for w.state == writing && c.writes[id] == w {
			w.by.interruptLocked()
			c.letGo.Wait()
		}
		if c.writes[id] == w { // not lost meanwhile
			delete(c.writes, id)
		}
	}
	if waiting {
		c.sweepLocked()
	}
}

// sweepLocked takes out of the queue what is no longer in writes.
func (c *conn) sweepLocked() {
	c.queue = slices.DeleteFunc(c.queue, func(w *write) bool { return c.writes[w.ID] != w })
}

// takeLocked forgets the writes that match and returns their ids.
func (c *conn) takeLocked(match func(*write) bool) (ids []link.WriteID) {
	for id, w := range c.writes {
		if match(w) {
			delete(c.writes, id)
			ids = append(ids, id)
		}
	}
	return ids
}

// goDown ends the link: no line is connected and dialling has failed.
func (c *conn) goDown(err error) {
	c.mu.Lock()
	if c.down != nil || c.closed {
		c.mu.Unlock()
		return
	}
	c.down = fmt.Errorf("tcp link to %s is down: %w", c.peer.Addr, err)
	lost := c.takeLocked(func(*write) bool { return true })
	c.queue = nil
	c.work.Broadcast()
	c.up.Broadcast()
	c.mu.Unlock()
	c.cancel()
	if len(lost) > 0 {
		c.ev.Lost(lost, c.down)
	}
	c.ev.Down(c.down)
}

// Close implements link.Conn.
func (c *conn) Close() error {
	c.close.Do(func() {
		c.mu.Lock()
		c.closed = true
		c.work.Broadcast()
		c.up.Broadcast()
		c.mu.Unlock()
		c.cancel()  // ends dialling, and closes the connections
		c.wg.Wait() // no writer has a slot in hand, no callback comes
		c.mu.Lock()
		lost := c.takeLocked(func(*write) bool { return true })
		c.queue = nil
		c.mu.Unlock()
		if len(lost) > 0 {
			c.ev.Lost(lost, errClosed)
		}
		c.s.forget(c)
	})
	return nil
}
