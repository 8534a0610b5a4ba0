package zmtp

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"
)

const (
	// handshakeGrace: at MaxHandshakes a connection of this age makes room for a new one.
	handshakeGrace = time.Second
	// idleGrace: at MaxConns a connection that has been silent for so long makes room for a new one.
	idleGrace = time.Second
	// rememberedIdentities bounds what Event.Again knows.
	rememberedIdentities = 8192
	// acceptPauseMin and acceptPauseMax bound the pause after a failed accept (no descriptor left, for example).
	acceptPauseMin = 5 * time.Millisecond
	acceptPauseMax = time.Second
)

// Stats counts what a listening socket has seen.
type Stats struct {
	Conns        int    // connected now
	Handshakes   int    // in handshake now
	Accepted     uint64 // TCP connections accepted
	Connected    uint64 // handshakes completed
	NotAllowed   uint64 // refused by Options.Allow
	Refused      uint64 // refused for MaxConns, a taken identity, or a failed handshake
	MadeRoom     uint64 // closed for MaxConns, RecvTotal or SendTotal
	AcceptErrors uint64 // failed accepts, each followed by a pause
}

// Listener is what all listening sockets share.
//
// Accept goroutine: accept → Allow → MaxConns → MaxHandshakes → one goroutine a connection: handshake, serve.
type Listener struct {
	// constant
	typ     socketType
	opts    Options
	ln      net.Listener
	handler Handler
	log     *limitedLog
	ctx     context.Context // ends when Close begins
	cancel  context.CancelFunc
	slots   chan struct{} // one token for each connection in handshake
	recv    *budget
	toSend  *budget

	wg     sync.WaitGroup // accept goroutine and connections
	closed chan struct{}  // Close is done
	once   sync.Once

	mu     sync.RWMutex // guards all below
	conns  map[ConnID]*conn
	names  map[string]*conn // ROUTER: the connection of each identity; a subset of conns
	half   *list.List       // of *halfOpen, oldest first
	seen   identitySet
	lastID ConnID
	stats  Stats
}

// halfOpen is a TCP connection in handshake.
type halfOpen struct {
	tcp   *net.TCPConn
	since time.Time
}

func listen(ctx context.Context, typ socketType, addr string, handler Handler, opts Options) (*Listener, error) {
	opts, err := opts.withDefaults()
	if err != nil {
		return nil, err
	}
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("zmtp: %w", err)
	}
	return newListener(typ, ln, handler, opts), nil
}

func newListener(typ socketType, ln net.Listener, handler Handler, opts Options) *Listener {
	l := &Listener{
		typ: typ, opts: opts, ln: ln, handler: handler, log: newLimitedLog(opts.Log),
		slots: make(chan struct{}, opts.MaxHandshakes), closed: make(chan struct{}),
		conns: make(map[ConnID]*conn), names: make(map[string]*conn),
		half: list.New(), seen: newIdentitySet(rememberedIdentities), recv: newBudget(opts.RecvTotal), toSend: newBudget(opts.SendTotal),
	}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	l.wg.Go(l.accept)
	return l
}

// Addr is the address that the socket listens on.
func (l *Listener) Addr() netip.AddrPort {
	a, _ := l.ln.Addr().(*net.TCPAddr)
	return a.AddrPort()
}

// Stats returns the counters.
func (l *Listener) Stats() Stats {
	l.mu.RLock()
	defer l.mu.RUnlock()
	s := l.stats
	s.Conns, s.Handshakes = len(l.conns), l.half.Len()
	return s
}

// CloseConn closes a connection after what is queued for it has been sent and the peer has hung up, at the latest after
// Linger. It does not wait; Disconnected follows. Messages that come meanwhile are dropped. An unknown connection is ignored.
func (l *Listener) CloseConn(id ConnID) {
	if c := l.conn(id); c != nil {
		c.close()
	}
}

// Close stops the socket: no more connections, then each one as CloseConn does. It returns after the last handler has
// returned, at the latest Linger plus the time of a handler that is running. A second call waits for the first.
func (l *Listener) Close() error {
	l.once.Do(func() {
		// 1. Nothing new: handshakes end by the context, admit refuses.
		l.cancel()
		_ = l.ln.Close()
		// 2. Connections flush and end, all at the same time.
		l.mu.RLock()
		conns := make([]*conn, 0, len(l.conns))
		for _, c := range l.conns {
			conns = append(conns, c)
		}
		l.mu.RUnlock()
		for _, c := range conns {
			c.close()
		}
		// 3. Then nobody is left who could call the handler.
		l.wg.Wait()
		close(l.closed)
	})
	<-l.closed
	return nil
}

func (l *Listener) conn(id ConnID) *conn {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.conns[id]
}

func (l *Listener) send(id ConnID, frames [][]byte) error {
	c := l.conn(id)
	if c == nil {
		return ErrGone
	}
	return c.out.send(frames)
}

func (l *Listener) sendWait(ctx context.Context, id ConnID, frames [][]byte) error {
	c := l.conn(id)
	if c == nil {
		return ErrGone
	}
	return c.out.sendWait(ctx, frames)
}

func (l *Listener) count(n *uint64) {
	l.mu.Lock()
	*n++
	l.mu.Unlock()
}

// accept takes connections until Close. A failure (EMFILE, an aborted connection) costs a pause, not the socket.
func (l *Listener) accept() {
	pause := acceptPauseMin
	for {
		nc, err := l.ln.Accept()
		if l.ctx.Err() != nil {
			if err == nil {
				_ = nc.Close()
			}
			return
		}
		if err != nil {
			l.count(&l.stats.AcceptErrors)
			if errors.Is(err, syscall.EMFILE) && l.giveDescriptor() { // not ENFILE: what we gave, others would take
				pause = acceptPauseMin
			}
			l.log.warn("accept failed", "err", err, "pause", pause)
			if !sleep(l.ctx, pause) {
				return
			}
			pause = min(2*pause, acceptPauseMax)
			continue
		}
		pause = acceptPauseMin
		l.take(nc.(*net.TCPConn))
	}
}

// giveDescriptor closes a connection for want of descriptors, as if there were MaxConns: the oldest that is still in
// handshake, if that has had its time, else the one that has been silent the longest. It is false if there is none.
func (l *Listener) giveDescriptor() bool {
	l.mu.RLock()
	oldest := l.half.Front()
	slow := oldest != nil && time.Since(oldest.Value.(*halfOpen).since) >= handshakeGrace
	l.mu.RUnlock()
	if slow {
		_ = oldest.Value.(*halfOpen).tcp.Close()
		return true
	}
	idle := l.idlest()
	if idle == nil {
		return false
	}
	idle.fail(ErrIdle)
	select {
	case <-idle.done:
	case <-l.ctx.Done():
	}
	return true
}

// take decides about an accepted connection and starts its handshake.
func (l *Listener) take(tcp *net.TCPConn) {
	l.count(&l.stats.Accepted)
	remote := tcp.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap().WithZone("")
	if l.opts.Allow != nil && !l.opts.Allow(remote) {
		l.count(&l.stats.NotAllowed)
		l.log.warn("peer is not allowed", "remote", remote)
		_ = tcp.Close()
		return
	}
	if !l.handshakeSlot() {
		_ = tcp.Close()
		return
	}
	l.mu.Lock()
	l.lastID++
	id := l.lastID
	place := l.half.PushBack(&halfOpen{tcp, time.Now()})
	l.mu.Unlock()
	l.wg.Go(func() {
		c, err := l.handshake(id, tcp)
		l.mu.Lock()
		l.half.Remove(place)
		l.mu.Unlock()
		<-l.slots
		if err != nil {
			l.refuse(tcp, c, err)
			return
		}
		c.serve()
	})
}

// handshakeSlot takes a token, if need be from the oldest handshake once that has had its time. It is false after Close.
func (l *Listener) handshakeSlot() bool {
	for {
		select {
		case l.slots <- struct{}{}:
			return true
		default:
		}
		age := time.Duration(0)
		l.mu.RLock()
		oldest := l.half.Front()
		if oldest != nil {
			age = time.Since(oldest.Value.(*halfOpen).since)
		}
		l.mu.RUnlock()
		if oldest != nil && age >= handshakeGrace {
			_ = oldest.Value.(*halfOpen).tcp.Close() // its handshake fails and gives the token back
		}
		timer := time.NewTimer(max(handshakeGrace-age, acceptPauseMin))
		select {
		case l.slots <- struct{}{}:
			timer.Stop()
			return true
		case <-timer.C:
		case <-l.ctx.Done():
			timer.Stop()
			return false
		}
	}
}

func (l *Listener) refuse(tcp *net.TCPConn, c *conn, err error) {
	_ = tcp.Close()
	if c != nil {
		l.unregister(c)
		c.abandon(err)
	}
	l.count(&l.stats.Refused)
	if !errors.Is(err, context.Canceled) {
		l.log.warn("connection refused", "remote", tcp.RemoteAddr(), "err", err)
	}
}

// handshake makes and registers a connection.
func (l *Listener) handshake(id ConnID, tcp *net.TCPConn) (*conn, error) {
	var c *conn
	c, err := newConn(id, l.typ, tcp, func(e Event) {
		l.handler(e)
		if e.Kind == Disconnected {
			l.unregister(c) // now its identity is free
			if errors.Is(e.Err, ErrIdle) || errors.Is(e.Err, ErrCrowded) {
				l.count(&l.stats.MadeRoom)
				l.log.warn("connection closed to make room", "remote", e.Remote, "err", e.Err)
			}
		}
	}, &gate{}, &l.opts, l.recv, l.toSend)
	if err != nil {
		return nil, err
	}
	c.beat.yields = true
	c.beat.nextPing += max(c.beat.interval, 0) / 2 // the other end's first one comes before
	if l.typ == typeRouter {
		return c, c.handshake(l.ctx, l.opts.Identity, func(ctx context.Context, identity []byte) error {
			return l.admit(ctx, c, identity)
		})
	}
	if err := c.handshake(l.ctx, nil, nil); err != nil {
		return c, err
	}
	return c, l.admit(l.ctx, c, nil)
}

// admit registers a connection under its identity, or under a generated one. If a live connection has the identity, that one
// has TakeoverTimeout to answer a PING: then the newcomer is refused. Else it ends, Disconnected first, and the newcomer wins.
func (l *Listener) admit(ctx context.Context, c *conn, identity []byte) error {
	c.identity = string(identity)
	if c.identity == "" {
		c.identity = generatedIdentity(c.id)
	}
	old, err := l.register(c)
	if errors.Is(err, ErrTooMany) {
		if idle := l.idlest(); idle != nil {
			idle.fail(ErrIdle)
			select {
			case <-idle.done: // its Disconnected comes before our Connected
			case <-ctx.Done():
				return context.Cause(ctx)
			}
			old, err = l.register(c)
		}
	}
	if old == nil {
		return err
	}
	alive := old.probe(ctx, l.opts.TakeoverTimeout)
	if !alive && ctx.Err() == nil {
		old.fail(ErrReplaced)
		select {
		case <-old.done:
		case <-ctx.Done():
		}
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if !alive {
		old, err = l.register(c)
	}
	if old != nil { // alive, or another newcomer was faster
		err = fmt.Errorf("%w: %q", ErrIdentityTaken, c.identity)
	}
	return err
}

// register enters c, or returns the connection that has its identity.
func (l *Listener) register(c *conn) (old *conn, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ctx.Err() != nil {
		return nil, ErrClosed
	}
	if len(l.conns) >= l.opts.MaxConns && l.names[c.identity] == nil {
		return nil, ErrTooMany
	}
	if l.typ == typeRouter {
		if old := l.names[c.identity]; old != nil {
			return old, nil
		}
		l.names[c.identity] = c
	}
	l.conns[c.id] = c
	c.again = l.seen.add(c.identity)
	l.stats.Connected++
	return nil, nil
}

// idlest returns the connection that has been silent the longest, if that is long enough to close it.
func (l *Listener) idlest() (idlest *conn) {
	if l.opts.KeepIdle {
		return nil
	}
	l.mu.RLock()
	defer l.mu.RUnlock()
	since := time.Now().Add(-idleGrace)
	for _, c := range l.conns {
		if last := c.start.Add(time.Duration(c.message.Load())); last.Before(since) {
			idlest, since = c, last
		}
	}
	return idlest
}

// unregister takes c out, if it is in.
func (l *Listener) unregister(c *conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.conns, c.id)
	if l.names[c.identity] == c {
		delete(l.names, c.identity)
	}
}
