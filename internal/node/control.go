package node

import (
	"context"
	"log/slog"
	"time"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/wire"
)

// Dialer makes control connections to receivers.
type Dialer interface {
	// Dial connects and completes the handshake, or errs. The callbacks come in
	// order from the connection's goroutine, Closed last and once; neither comes
	// when Dial errs.
	Dial(ctx context.Context, host string, port int, n uint64, ev DialEvents) (ControlConn, error)
}

// DialEvents are the callbacks of one dialled connection.
type DialEvents struct {
	Message func(payload []byte)
	Closed  func(err error)
}

// ControlConn is a dialled control connection. Send copies the payload and
// never blocks; Close flushes within a bound and does not wait.
type ControlConn interface {
	Send(payload []byte) error
	Close()
}

// controls are the control connections that a core has asked for, numbered by
// it. Both shells with a dialling side have one; it is owned by their loop.
type controls struct {
	ctx     context.Context
	outside func(work func())
	mail    *mailbox
	dialer  Dialer
	timeout time.Duration // of a dial
	log     *slog.Logger
	stats   *Stats
	conns   map[kv.ConnID]*controlConn
	encoded []byte // scratch
}

// controlConn is being dialled (conn nil) or open. It leaves controls.conns
// with its controlClosed, once.
type controlConn struct {
	conn    ControlConn
	cancel  context.CancelFunc // of the dial
	closing bool
}

// What controls put into the mailbox; the loop hands the first and last back
// (opened, closed) and steps its core.
type (
	controlDialled struct {
		id   kv.ConnID
		conn ControlConn
		err  error
	}
	controlMessage struct {
		id  kv.ConnID
		msg msg.Message
		err error // could not be decoded
	}
	controlClosed struct {
		id  kv.ConnID
		err error
	}
)

// dial starts a connection. Its events wait until the loop knows it.
func (c *controls) dial(id kv.ConnID, host string, port int) {
	ctx, cancel := context.WithTimeout(c.ctx, c.timeout)
	c.conns[id] = &controlConn{cancel: cancel}
	c.outside(func() {
		defer cancel()
		known := make(chan struct{})
		defer close(known)
		conn, err := c.dialer.Dial(ctx, host, port, uint64(id), DialEvents{
			Message: func(p []byte) {
				<-known
				c.stats.received(len(p))
				m, err := wire.Decode(p)
				c.mail.putFrom(id, len(p), controlMessage{id, m, err})
			},
			Closed: func(err error) {
				<-known
				c.mail.post(controlClosed{id, err})
			},
		})
		if !c.mail.post(controlDialled{id, conn, err}) && conn != nil {
			conn.Close()
		}
	})
}

// opened takes in the outcome of a dial and reports whether the connection is
// usable; when it is not, closed is called for it now or later.
func (c *controls) opened(d controlDialled, closed func(controlClosed)) bool {
	if d.err != nil {
		closed(controlClosed{d.id, d.err})
		return false
	}
	cc := c.conns[d.id]
	cc.conn = d.conn
	if cc.closing {
		d.conn.Close()
		return false
	}
	return true
}

// forget drops a connection that has reported its end.
func (c *controls) forget(id kv.ConnID) { delete(c.conns, id) }

// close asks for the end of a connection; controlClosed comes later.
func (c *controls) close(id kv.ConnID) {
	if cc := c.conns[id]; cc != nil {
		cc.closing = true
		cc.cancel()
		if cc.conn != nil {
			cc.conn.Close()
		}
	}
}

// send encodes and sends. A connection that cannot take a message is closed,
// and the core says it again over the next one.
func (c *controls) send(id kv.ConnID, m msg.Message) {
	cc := c.conns[id]
	if cc == nil || cc.conn == nil {
		return
	}
	b, err := wire.Append(c.encoded[:0], m)
	if err == nil {
		c.encoded = b
		err = cc.conn.Send(b)
	}
	if err != nil {
		c.log.Error("control message not sent", "err", err)
		cc.conn.Close()
		return
	}
	c.stats.sent(len(b))
}

// closeAll asks for the end of every connection.
func (c *controls) closeAll() {
	for id := range c.conns {
		c.close(id)
	}
}
