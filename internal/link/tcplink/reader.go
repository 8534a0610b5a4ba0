package tcplink

import (
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"os"
	"sync/atomic"
	"time"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
	"github.com/berthkv/berth/internal/link/gate"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// past is a deadline that interrupts what waits on a connection.
var past = time.Unix(1, 0)

// reader reads the frames of one data connection.
type reader struct {
	r           *Receiver
	nc          net.Conn
	owner       kv.Incarnation
	interrupted atomic.Bool // a deadline has been set by Interrupt
	scratch     []byte      // what is thrown away goes here; made when needed
}

// Interrupt implements gate.Filler: a read that waits returns.
func (c *reader) Interrupt() {
	c.interrupted.Store(true)
	c.nc.SetReadDeadline(past)
}

// frames reads frames until the connection ends or breaks the protocol.
func (c *reader) frames() error {
	var b [frameBytes]byte
	for {
		if _, err := io.ReadFull(c.nc, b[:]); err != nil {
			return err
		}
		f := parseFrame(&b)
		if int64(f.slot) >= int64(c.r.gate.Slots()) {
			return fmt.Errorf("a frame for slot %d of %d", f.slot, c.r.gate.Slots())
		}
		if int64(f.length) > c.r.cfg.Pool.SlotBytes {
			return fmt.Errorf("a frame of %d bytes for a slot of %d", f.length, c.r.cfg.Pool.SlotBytes)
		}
		if err := c.frame(f); err != nil {
			return err
		}
	}
}

// frame reads the bytes of one frame, into its slot or away.
func (c *reader) frame(f frame) error {
	for {
		switch c.r.gate.Enter(c.owner, f.gen, f.slot, c) {
		case gate.Entered:
			return c.fill(f)
		case gate.Busy:
			// The chunk comes anew, over this connection; the other one is
			// likely dead. Who came last fills the slot, from byte 0.
			if err := c.takeOver(f.slot); err != nil {
				return err
			}
		default:
			c.r.ev.Late(f.slot, f.gen)
			return c.discard(int64(f.length))
		}
	}
}

// takeOver interrupts the reader that fills a slot and waits until it is out.
func (c *reader) takeOver(s kv.SlotID) error {
	left := c.r.gate.Interrupt(s)
	if left == nil {
		return nil
	}
	t := time.NewTimer(letGo)
	defer t.Stop()
	select {
	case <-left:
		return nil
	case <-c.r.stop:
		return net.ErrClosed
	case <-t.C:
		return fmt.Errorf("slot %d: its reader did not let go within %v", s, letGo)
	}
}

// fill reads a frame's bytes into its slot, which it has entered. If it is
// interrupted there it leaves and discards the rest.
func (c *reader) fill(f frame) error {
	dst := c.r.cfg.Pool.Slot(f.slot)[:f.length]
	n, err := io.ReadFull(c.nc, dst)
	full := n == len(dst)
	l := link.Landing{Slot: f.slot, Generation: f.gen, Bytes: int64(n)}
	if full && c.r.cfg.Checksum {
		l.Sum, l.HasSum = crc32.Checksum(dst, castagnoli), true
	}
	switch c.r.gate.Leave(f.slot, full) {
	case gate.Full:
		c.r.ev.Landed([]link.Landing{l})
	case gate.Fenced:
		c.r.ev.Fenced(f.gen, []kv.SlotID{f.slot})
	case gate.Empty: // another reader wants it, or this connection broke
	}
	// Out of the slot: no interrupt comes any more.
	if c.interrupted.Swap(false) {
		if e := c.nc.SetReadDeadline(time.Time{}); e != nil {
			return e
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			err = nil
		}
	}
	if err != nil {
		return err
	}
	return c.discard(int64(len(dst) - n))
}

// discard reads n bytes and throws them away.
func (c *reader) discard(n int64) error {
	if c.scratch == nil && n > 0 {
		c.scratch = make([]byte, 64<<10)
	}
	for n > 0 {
		m, err := io.ReadFull(c.nc, c.scratch[:min(n, int64(len(c.scratch)))])
		if err != nil {
			return err
		}
		n -= int64(m)
	}
	return nil
}
