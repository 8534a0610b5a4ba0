package zmtp

import (
	"context"
	"errors"
	"fmt"
	"net"
)

// Conn is one dialled connection; it does not come back when it is lost.
type Conn struct {
	c    *conn
	recv chan [][]byte // nil where a handler takes the messages
}

// DialDealer connects a DEALER socket to a ROUTER, REP or DEALER at addr ("host:port") and returns when the handshake is
// through. ctx and HandshakeTimeout bound the call. With a nil handler, messages are taken with Recv.
func DialDealer(ctx context.Context, addr string, handler Handler, opts Options) (*Conn, error) {
	return dial(ctx, typeDealer, addr, handler, opts)
}

// DialPush connects a PUSH socket to a PULL at addr; see DialDealer. It gets no Message events.
func DialPush(ctx context.Context, addr string, handler Handler, opts Options) (*Conn, error) {
	return dial(ctx, typePush, addr, handler, opts)
}

func dial(ctx context.Context, typ socketType, addr string, handler Handler, opts Options) (*Conn, error) {
	opts, err := opts.withDefaults()
	if err != nil {
		return nil, err
	}
	d := &Conn{}
	if handler == nil {
		d.recv = make(chan [][]byte, opts.RecvQueue)
		handler = d.queue
	}
	d.c, err = connect(ctx, 1, typ, addr, opts.Identity, handler, &gate{}, &opts)
	if err != nil {
		return nil, err
	}
	go d.c.serve()
	return d, nil
}

// connect makes a TCP connection and the handshake; what it returns must be served.
func connect(ctx context.Context, id ConnID, typ socketType, addr string, identity []byte, handler Handler, room *gate, opts *Options) (*conn, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, opts.HandshakeTimeout, ErrHandshake)
	defer cancel()
	var d net.Dialer
	nc, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, dialError(ctx, addr, err)
	}
	tcp := nc.(*net.TCPConn)
	c, err := newConn(id, typ, tcp, handler, room, opts, nil, nil)
	if err != nil {
		_ = tcp.Close()
		return nil, dialError(ctx, addr, err)
	}
	c.identity = string(identity)
	if err := c.handshake(ctx, identity, nil); err != nil {
		c.abandon(err)
		return nil, dialError(ctx, addr, err)
	}
	return c, nil
}

func dialError(ctx context.Context, addr string, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) {
		err = fmt.Errorf("%w (%w)", cause, err)
	}
	return fmt.Errorf("zmtp: dial %s: %w", addr, err)
}

// queue is the handler of a connection without one.
func (d *Conn) queue(e Event) {
	if e.Kind == Message {
		select {
		case d.recv <- e.Frames:
		case <-d.c.stop:
		}
	}
}

// Send queues one message, copying it; it never blocks. Errors: ErrWouldBlock, ErrGone, *LimitError.
func (d *Conn) Send(frames ...[]byte) error { return d.c.out.send(frames) }

// SendWait is Send that waits for room until ctx ends or the connection is gone.
func (d *Conn) SendWait(ctx context.Context, frames ...[]byte) error {
	return d.c.out.sendWait(ctx, frames)
}

// Recv returns the next message, which the caller then owns. After the connection has ended it returns those that had come,
// then the cause. It must not be used where a handler was given.
func (d *Conn) Recv(ctx context.Context) ([][]byte, error) {
	select {
	case m := <-d.recv:
		return m, nil
	default:
	}
	select {
	case m := <-d.recv:
		return m, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-d.c.done:
	}
	select {
	case m := <-d.recv:
		return m, nil
	default:
		return nil, d.c.cause
	}
}

// Done is closed when the connection has ended and its last handler has returned.
func (d *Conn) Done() <-chan struct{} { return d.c.done }

// Err is the cause of the end: nil while Done is open, never nil afterwards.
func (d *Conn) Err() error {
	select {
	case <-d.c.done:
		return d.c.cause
	default:
		return nil
	}
}

// Close sends what is queued, waits for the peer to hang up, at the latest Linger, and for the handler to return. A second
// call waits for the first. It must not be called from the handler.
func (d *Conn) Close() error {
	d.c.close()
	<-d.c.done
	return nil
}

// Req is a connection of a REQ socket: one request, then its answer.
type Req struct {
	conn *Conn
	turn chan struct{} // held by the call that waits for its answer
}

// DialReq connects a REQ socket to a REP or ROUTER at addr; see DialDealer.
func DialReq(ctx context.Context, addr string, opts Options) (*Req, error) {
	d, err := dial(ctx, typeReq, addr, nil, opts)
	if err != nil {
		return nil, err
	}
	return &Req{conn: d, turn: make(chan struct{}, 1)}, nil
}

// Do sends a request and returns the answer, without the empty frame that marks the end of an envelope. Calls wait for each
// other. If ctx ends while the answer is awaited, the connection is closed: a late answer would be taken for that of the
// next request.
func (r *Req) Do(ctx context.Context, frames ...[]byte) ([][]byte, error) {
	select {
	case r.turn <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	defer func() { <-r.turn }()
	if err := r.conn.SendWait(ctx, append([][]byte{nil}, frames...)...); err != nil {
		return nil, err
	}
	reply, err := r.conn.Recv(ctx)
	if err == nil && (len(reply) < 2 || len(reply[0]) != 0) {
		err = protocolErrorf("answer without an empty first frame")
	}
	if err != nil {
		r.conn.c.fail(err)
		return nil, err
	}
	return reply[1:], nil
}

// Done is closed when the connection has ended.
func (r *Req) Done() <-chan struct{} { return r.conn.Done() }

// Close ends the connection; a Do that waits fails.
func (r *Req) Close() error { return r.conn.Close() }
