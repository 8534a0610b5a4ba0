package nixllink

import (
	"fmt"
	"net"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/berthkv/berth/internal/link"
)

const (
	// maxPosted is how many writes of a link the library has at a time: enough to
	// keep it busy, and few to wait for when the rest is given up.
	maxPosted = 16
	// closeGrace is how long Close waits for writes that the library has.
	closeGrace = time.Second
)

// conn implements link.Conn.
type conn struct {
	s      *Sender
	peer   link.Peer
	ev     link.SenderEvents
	remote string    // the receiver's agent
	pages  *pageList // its slots
	hangUp func()    // ends the connection that shows that it lives
	wait   func() error
	tasks  sync.WaitGroup // watch, goDown
	once   sync.Once

	mu     sync.Mutex
	idle   sync.Cond // a posted write has ended
	writes map[link.WriteID]*write
	queue  []*write
	posted int
	down   error
	closed bool
}

type state uint8

const (
	queued state = iota
	posted
	sent
)

type write struct {
	link.Write
	state   state
	aborted bool
	settled bool
}

// address returns where b is. Pools are mapped, they do not move.
func address(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// Write implements link.Conn.
func (c *conn) Write(ws []link.Write) {
	pool := c.s.cfg.Pool
	c.mu.Lock()
	switch {
	case c.closed:
		c.mu.Unlock()
		panic("nixllink: Write after Close")
	case c.down != nil:
		err := c.down
		c.mu.Unlock()
		ids := make([]link.WriteID, len(ws))
		for i, w := range ws {
			ids[i] = w.ID
		}
		c.ev.Lost(ids, err)
		return
	}
	defer c.mu.Unlock()
	if n := len(c.writes) + len(ws); n > pool.Slots() {
		panic(fmt.Sprintf("nixllink: %d unsettled writes from a staging pool of %d slots", n, pool.Slots()))
	}
	for _, w := range ws {
		if _, taken := c.writes[w.ID]; taken || int64(w.Src) >= int64(pool.Slots()) || w.Bytes < 1 || w.Bytes > pool.SlotBytes {
			panic(fmt.Sprintf("nixllink: write %d of %d bytes from slot %d is out of range or taken", w.ID, w.Bytes, w.Src))
		}
		x := &write{Write: w}
		c.writes[w.ID] = x
		c.queue = append(c.queue, x)
	}
	c.s.owner.give(c.pump)
}

// pump posts what is queued. Only the owner calls it.
func (c *conn) pump() {
	for {
		c.mu.Lock()
		if c.down != nil || c.closed || c.posted == maxPosted || len(c.queue) == 0 {
			c.mu.Unlock()
			return
		}
		w := c.queue[0]
		c.queue[0] = nil
		c.queue = c.queue[1:]
		w.state = posted
		c.posted++
		c.mu.Unlock()
		if err := c.post(w); err != nil {
			c.finish(w, err)
		}
	}
}

func (c *conn) post(w *write) error {
	if int64(w.Dst) >= int64(len(c.pages.pages)) {
		return fmt.Errorf("slot %d was granted, the receiver has %d pages", w.Dst, len(c.pages.pages))
	}
	to := c.pages.pages[w.Dst]
	o := c.s.owner
	req, err := o.agent.post(c.remote, remoteMemory{c.pages.memory, to.device, to.addr}, address(c.s.cfg.Pool.Slot(w.Src)), w.Bytes)
	if err != nil {
		return err
	}
	o.posted = append(o.posted, &transfer{req: req, conn: c, done: func(err error) {
		c.finish(w, err)
		c.pump()
	}})
	return nil
}

// finish takes a write back from the library. Its endpoint is of no use after
// an error: the link goes down, and the caller makes another.
func (c *conn) finish(w *write, err error) {
	c.mu.Lock()
	c.posted--
	w.state = sent
	settled, lost := w.settled, err != nil || w.aborted
	if settled || lost {
		delete(c.writes, w.ID)
	}
	broken := err != nil && c.down == nil && !c.closed
	if broken {
		c.tasks.Add(1)
	}
	c.idle.Broadcast()
	c.mu.Unlock()
	switch {
	case settled:
	case lost && err == nil:
		c.ev.Lost([]link.WriteID{w.ID}, errAborted)
	case lost:
		c.ev.Lost([]link.WriteID{w.ID}, err)
	default:
		c.ev.Sent([]link.WriteID{w.ID})
	}
	if broken {
		go func() {
			defer c.tasks.Done()
			c.goDown(err)
		}()
	}
}

var errAborted = fmt.Errorf("aborted")

// Abort implements link.Conn.
func (c *conn) Abort(ids []link.WriteID) {
	var lost []link.WriteID
	c.mu.Lock()
	for _, id := range ids {
		switch w := c.writes[id]; {
		case w == nil:
		case w.state == posted:
			w.aborted = true
		default:
			c.forgetLocked(w)
			lost = append(lost, id)
		}
	}
	c.mu.Unlock()
	if len(lost) > 0 {
		c.ev.Lost(lost, errAborted)
	}
}

// Settle implements link.Conn. What the library still has is waited for: it
// reads the staging slot.
func (c *conn) Settle(ids []link.WriteID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, id := range ids {
		if w := c.writes[id]; w != nil {
			w.settled = true
			for w.state == posted {
				c.idle.Wait()
			}
			c.forgetLocked(w)
		}
	}
}

func (c *conn) forgetLocked(w *write) {
	delete(c.writes, w.ID)
	if w.state == queued {
		c.queue = slices.DeleteFunc(c.queue, func(x *write) bool { return x == w })
	}
}

// watch waits for the end of the connection that shows that the receiver lives.
func (c *conn) watch() {
	defer c.tasks.Done()
	c.goDown(fmt.Errorf("the receiver is gone: %w", c.wait()))
}

// goDown ends the link, once, unless it is closed.
func (c *conn) goDown(err error) {
	err = fmt.Errorf("nixl link to %s is down: %w", c.peer.Addr, err)
	c.mu.Lock()
	if c.down != nil || c.closed {
		c.mu.Unlock()
		return
	}
	c.down = err
	c.mu.Unlock()
	c.hangUp()
	c.takeBack(err)
	c.ev.Down(err)
}

// takeBack disconnects from the receiver and loses every write that is not
// settled.
func (c *conn) takeBack(err error) {
	o := c.s.owner
	o.call(func() { o.drop(c, err) })
	c.mu.Lock()
	var ids []link.WriteID
	for id, w := range c.writes {
		if !w.settled {
			ids = append(ids, id)
		}
		w.state = sent // also one that the library does not give back
	}
	clear(c.writes)
	c.queue = nil
	c.idle.Broadcast()
	c.mu.Unlock()
	if slices.Sort(ids); len(ids) > 0 {
		c.ev.Lost(ids, err)
	}
}

// Close implements link.Conn.
func (c *conn) Close() error {
	c.once.Do(func() {
		c.mu.Lock()
		c.closed = true
		down := c.down != nil
		over := false
		t := time.AfterFunc(closeGrace, func() {
			c.mu.Lock()
			over = true
			c.idle.Broadcast()
			c.mu.Unlock()
		})
		for !down && c.posted > 0 && !over {
			c.idle.Wait()
		}
		c.mu.Unlock()
		t.Stop()
		c.hangUp()
		c.tasks.Wait()
		if !down {
			c.takeBack(net.ErrClosed)
		}
		c.s.mu.Lock()
		delete(c.s.conns, c)
		c.s.mu.Unlock()
	})
	return nil
}
