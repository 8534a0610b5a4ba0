package zmtp

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"
)

// Redialer keeps one connection to one address: it dials, reports, and dials again after a pause that doubles, up to
// ReconnectMax, until a connection has lasted that long. Each connection has an identity and a ConnID of its own. Nothing is
// queued between connections: a Send names the connection that it means and is refused with ErrGone after that one's end.
//
// Its events come one at a time: Unreachable for each attempt that fails, else Connected, Messages, Disconnected.
type Redialer struct {
	// constant
	typ      socketType
	addr     string
	identity func(n uint64) []byte
	handler  Handler
	opts     Options
	nextID   func() ConnID
	room     *gate
	ctx      context.Context // ends when Close begins
	cancel   context.CancelFunc
	done     chan struct{}

	mu  sync.Mutex // guards cur
	cur *conn      // nil between connections
}

// RedialDealer keeps a DEALER connected to addr until Close. identity is asked for each attempt, n = 1, 2, ...; nil: none is
// announced. It returns at once; options that are wrong are its only error.
func RedialDealer(addr string, identity func(n uint64) []byte, handler Handler, opts Options) (*Redialer, error) {
	return redial(typeDealer, addr, identity, handler, opts)
}

// RedialPush keeps a PUSH connected to addr until Close; see RedialDealer.
func RedialPush(addr string, handler Handler, opts Options) (*Redialer, error) {
	return redial(typePush, addr, nil, handler, opts)
}

func redial(typ socketType, addr string, identity func(n uint64) []byte, handler Handler, opts Options) (*Redialer, error) {
	opts, err := opts.withDefaults()
	if err != nil {
		return nil, err
	}
	var last ConnID
	r := newRedialer(typ, addr, identity, handler, opts, func() ConnID { last++; return last }, &gate{})
	go r.run()
	return r, nil
}

func newRedialer(typ socketType, addr string, identity func(n uint64) []byte, handler Handler, opts Options, nextID func() ConnID, room *gate) *Redialer {
	if identity == nil {
		identity = func(uint64) []byte { return nil }
	}
	r := &Redialer{
		typ: typ, addr: addr, identity: identity, handler: handler, opts: opts, nextID: nextID, room: room,
		done: make(chan struct{}),
	}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	return r
}

// Addr is the address that it dials.
func (r *Redialer) Addr() string { return r.addr }

// Send queues one message for a connection, copying it; it never blocks. Errors: ErrWouldBlock, ErrGone, *LimitError.
func (r *Redialer) Send(id ConnID, frames ...[]byte) error {
	c := r.current(id)
	if c == nil {
		return ErrGone
	}
	return c.out.send(frames)
}

// SendWait is Send that waits for room until ctx ends or the connection is gone.
func (r *Redialer) SendWait(ctx context.Context, id ConnID, frames ...[]byte) error {
	c := r.current(id)
	if c == nil {
		return ErrGone
	}
	return c.out.sendWait(ctx, frames)
}

// CloseConn ends a connection as Listener.CloseConn does; after a pause the next one is dialled.
func (r *Redialer) CloseConn(id ConnID) {
	if c := r.current(id); c != nil {
		c.close()
	}
}

// Close ends the connection as CloseConn does, or the attempt, and dials no more. It returns after the last handler has returned. It must
// not be called from the handler. A second call waits for the first.
func (r *Redialer) Close() error {
	r.cancel()
	r.mu.Lock()
	c := r.cur
	r.mu.Unlock()
	if c != nil {
		c.close()
	}
	<-r.done
	return nil
}

func (r *Redialer) current(id ConnID) *conn {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.cur == nil || r.cur.id != id {
		return nil
	}
	return r.cur
}

// setCurrent is false after Close.
func (r *Redialer) setCurrent(c *conn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cur = c
	return r.ctx.Err() == nil
}

func (r *Redialer) run() {
	defer close(r.done)
	pause := backoff{min: r.opts.ReconnectMin, max: r.opts.ReconnectMax}
	again := false
	for n := uint64(1); r.ctx.Err() == nil; n++ {
		id, identity := r.nextID(), r.identity(n)
		c, err := r.connect(id, identity)
		if err != nil {
			if r.ctx.Err() != nil {
				return
			}
			r.handler(Event{Kind: Unreachable, Conn: id, Identity: string(identity), Err: err})
		} else {
			c.again, again = again, true
			if !r.setCurrent(c) {
				c.close()
			}
			began := time.Now()
			c.serve()
			r.setCurrent(nil)
			if time.Since(began) >= r.opts.ReconnectMax {
				pause.reset()
			}
		}
		sleep(r.ctx, pause.next(rand.Float64()))
	}
}

func (r *Redialer) connect(id ConnID, identity []byte) (*conn, error) {
	if err := checkIdentity(identity); err != nil {
		return nil, err
	}
	return connect(r.ctx, id, r.typ, r.addr, identity, r.handler, r.room, &r.opts)
}

// backoff is a pause that doubles from min to max; half of it is random.
type backoff struct {
	min, max time.Duration
	cur      time.Duration
}

// next returns the next pause; random is in [0, 1).
func (b *backoff) next(random float64) time.Duration {
	b.cur = min(max(2*b.cur, b.min), b.max)
	half := b.cur / 2
	return b.cur - time.Duration(random*float64(half))
}

func (b *backoff) reset() { b.cur = 0 }
