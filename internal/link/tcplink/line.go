package tcplink

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/berthkv/berth/internal/link"
)

// Back-off between attempts of a line to connect, doubled from the first to
// the last as long as no chunk goes through.
const (
	firstBackoff = 50 * time.Millisecond
	lastBackoff  = 2 * time.Second
)

// filler stands for the rest of a frame whose chunk the receiver has answered
// for already.
var filler [64 << 10]byte

// line is one data connection, made anew when it breaks. One goroutine runs
// it; fields without a note are that goroutine's.
type line struct {
	c       *conn
	nc      net.Conn // nil while not connected; set under conn.mu
	backoff time.Duration
	header  [frameBytes]byte
	iov     [2][]byte
	bufs    net.Buffers

	broken      bool // guarded by conn.mu
	interrupted bool // guarded by conn.mu: Settle has set a deadline
}

// run connects, carries writes until the connection breaks, and again, until
// the link ends.
func (l *line) run() {
	defer l.c.wg.Done()
	for l.nc != nil || l.redial() {
		l.lose(l.carry())
	}
}

// redial connects, and reports whether it did. The line counts as dialing.
// After a failure it tries again as long as another line is connected; when
// none is, and none is trying, the link is down.
func (l *line) redial() bool {
	c := l.c
	for {
		if !l.pause() {
			return false
		}
		nc, err := c.s.dial(c.ctx, c.peer)
		c.mu.Lock()
		c.dialing--
		if err == nil {
			l.nc, l.broken = nc, false
			c.live++
			c.up.Broadcast()
			c.mu.Unlock()
			return true
		}
		gone := c.live == 0 && c.dialing == 0
		for !gone && c.live == 0 && !c.endedLocked() {
			c.up.Wait() // for those that are still trying
		}
		ended := c.endedLocked()
		c.dialing++
		c.mu.Unlock()
		if gone {
			c.goDown(err)
		}
		if gone || ended {
			return false
		}
	}
}

func (c *conn) endedLocked() bool { return c.closed || c.down != nil }

// pause waits for the line's back-off and reports whether the link still runs.
func (l *line) pause() bool {
	t := time.NewTimer(l.backoff)
	defer t.Stop()
	select {
	case <-l.c.ctx.Done():
		return false
	case <-t.C:
	}
	l.backoff = min(max(2*l.backoff, firstBackoff), lastBackoff)
	return true
}

// carry writes what is queued until the connection or the link ends, and
// returns why the connection did. Then no writer has a slot in hand.
func (l *line) carry() error {
	nc := l.nc // l.nc may be another one before the function below has run
	stop := context.AfterFunc(l.c.ctx, func() { nc.Close() })
	defer stop()
	watched := make(chan error, 1)
	go func() { watched <- l.watch() }()
	var err error
	for w := l.next(); w != nil && err == nil; {
		if err = l.write(w); err == nil {
			l.backoff = 0
			w = l.next()
		}
	}
	l.nc.Close()
	if werr := <-watched; err == nil {
		err = werr
	}
	return err
}

// watch notices that the peer closes: the receiver says nothing after its
// answer to the hello.
func (l *line) watch() error {
	var b [1]byte
	n, err := l.nc.Read(b[:])
	if n > 0 {
		err = errors.New("unexpected data from the receiver")
	}
	l.nc.Close() // a write that waits returns
	l.c.mu.Lock()
	l.broken = true
	l.c.work.Broadcast()
	l.c.mu.Unlock()
	return err
}

// next takes the oldest queued write; nil means that the line is to end.
func (l *line) next() *write {
	c := l.c
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		if l.broken || c.endedLocked() {
			return nil
		}
		if len(c.queue) > 0 {
			w := c.queue[0]
			c.queue[0] = nil
			c.queue = c.queue[1:]
			w.state, w.by = writing, l
			return w
		}
		c.work.Wait()
	}
}

// write sends one frame, from the slot. On an error the write is left to lose.
func (l *line) write(w *write) error {
	c := l.c
	frame{w.Dst, w.Generation, uint32(w.Bytes)}.put(&l.header)
	l.iov = [2][]byte{l.header[:], c.s.cfg.Pool.Slot(w.Src)[:w.Bytes]}
	l.bufs = l.iov[:]
	n, err := l.bufs.WriteTo(l.nc)

	c.mu.Lock()
	w.state = sent
	settled, aborted, interrupted := w.settled, w.aborted, l.interrupted
	l.interrupted = false
	if settled {
		c.letGo.Broadcast()
	}
	if err == nil && aborted && !settled {
		delete(c.writes, w.ID)
	}
	c.mu.Unlock()

	if interrupted {
		if e := l.nc.SetWriteDeadline(time.Time{}); e != nil {
			return e
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return l.fill(n, w.Bytes)
		}
	}
	switch {
	case err != nil:
		return err
	case settled:
	case aborted:
		c.ev.Lost([]link.WriteID{w.ID}, errAborted)
	default:
		c.ev.Sent([]link.WriteID{w.ID})
	}
	return nil
}

// interruptLocked makes the writer let go of the slot that it sends from.
func (l *line) interruptLocked() {
	l.interrupted = true
	l.nc.SetWriteDeadline(past)
}

// fill finishes a frame, of which n bytes have gone out, without its slot. One
// that has not begun is left out.
func (l *line) fill(n, length int64) error {
	if n == 0 {
		return nil
	}
	if n < frameBytes {
		if _, err := l.nc.Write(l.header[n:]); err != nil {
			return err
		}
		n = frameBytes
	}
	for rest := frameBytes + length - n; rest > 0; {
		m, err := l.nc.Write(filler[:min(rest, int64(len(filler)))])
		if err != nil {
			return err
		}
		rest -= int64(m)
	}
	return nil
}

// lose reports what went over the connection that broke, and leaves the line
// dialing.
func (l *line) lose(err error) {
	c := l.c
	c.mu.Lock()
	l.nc = nil
	c.live--
	c.dialing++
	if c.endedLocked() {
		c.mu.Unlock() // whoever ended the link reports
		return
	}
	lost := c.takeLocked(func(w *write) bool { return w.by == l && w.state != queued })
	c.work.Broadcast() // this line may have been woken for a write
	c.mu.Unlock()
	if len(lost) > 0 {
		c.ev.Lost(lost, fmt.Errorf("data connection to %s broke: %w", c.peer.Addr, err))
	}
}
