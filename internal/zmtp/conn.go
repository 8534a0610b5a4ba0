package zmtp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// conn is one connection after TCP: handshake, then serve until it ends.
//
//	handshake → serving → closing (flush, half-close, wait for the peer) → dead
//
// serving → dead directly when the peer goes or breaks a rule.
type conn struct {
	// constant
	id      ConnID
	typ     socketType
	opts    *Options
	tcp     *net.TCPConn
	remote  netip.AddrPort
	start   time.Time
	handler Handler
	out     *outbox
	stop    chan struct{} // closed when closing begins or the connection is dead
	done    chan struct{} // closed after Disconnected was handled

	// set by the handshake, constant afterwards
	identity string
	again    bool
	minor    byte // of the peer's version

	// owned by the goroutine that runs handshake and serve
	in *reader

	receiving share // bytes of the message that is coming in or being handled

	// atomic
	message atomic.Int64 // nanoseconds from start to the last message
	heard   atomic.Int64 // nanoseconds from start to the last byte read
	busy    atomic.Bool  // the handler runs, so nothing is being read
	peerTTL atomic.Int64 // nanoseconds; 0: none
	pinged  atomic.Int64 // nanoseconds from start to the peer's last PING
	closing atomic.Bool

	failOnce  sync.Once
	stopOnce  sync.Once
	closeOnce sync.Once
	cause     error // written in failOnce, read after stop and the reader's end

	beatMu sync.Mutex // guards beat and the timers
	beat   heartbeat
	timer  *time.Timer // next beat; nil before serve and after its end
	linger *time.Timer // bounds closing; nil before

	probeMu sync.Mutex // guards probes
	probes  map[uint64]chan struct{}
	probeN  uint64
}

// newConn makes a connection; recv and send are the budgets of its socket, nil for none.
func newConn(id ConnID, typ socketType, tcp *net.TCPConn, handler Handler, room *gate, opts *Options, recv, send *budget) (*conn, error) {
	c := &conn{
		id: id, typ: typ, opts: opts, tcp: tcp, handler: handler, start: time.Now(),
		stop: make(chan struct{}), done: make(chan struct{}),
	}
	if a, ok := tcp.RemoteAddr().(*net.TCPAddr); ok {
		c.remote = netip.AddrPortFrom(a.AddrPort().Addr().Unmap(), a.AddrPort().Port())
	}
	c.beat = heartbeat{interval: opts.HeartbeatInterval, timeout: opts.HeartbeatTimeout, nextPing: opts.HeartbeatInterval}
	c.in = newReader(heardReader{c}, readLimits{opts.MaxFrame, opts.MaxMessage, opts.MaxFrames})
	crowded := func() { c.fail(ErrCrowded) }
	if recv != nil {
		c.receiving = share{b: recv, evict: crowded}
		c.in.room = func(n int64) bool { return c.receiving.take(n, c.stop) }
	}
	out, err := newOutbox(tcp, opts, room, c.fail)
	c.out = out
	if out != nil && send != nil {
		out.waiting = share{b: send, evict: crowded}
	}
	return c, err
}

// heardReader reads the socket and notes the sign of life.
type heardReader struct{ c *conn }

func (h heardReader) Read(b []byte) (int, error) {
	n, err := h.c.tcp.Read(b)
	if n > 0 {
		h.c.heard.Store(int64(time.Since(h.c.start)))
	}
	return n, err
}

// handshake exchanges greeting and READY within HandshakeTimeout and ctx. With admit, our READY waits until the peer's has
// come and admit has taken it: libzmq keeps its messages until it has our READY, so a refused peer loses none.
func (c *conn) handshake(ctx context.Context, identity []byte, admit func(ctx context.Context, identity []byte) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, c.opts.HandshakeTimeout, ErrHandshake)
	defer cancel()
	release := context.AfterFunc(ctx, func() { _ = c.tcp.SetDeadline(time.Unix(1, 0)) })
	defer release()
	err := c.exchange(ctx, identity, admit)
	if !release() && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

func (c *conn) exchange(ctx context.Context, identity []byte, admit func(context.Context, []byte) error) error {
	if _, err := c.tcp.Write(appendGreeting(nil, len(identity))); err != nil {
		return err
	}
	for _, n := range []int{1, signatureLen, signatureLen + 1, greetingLen} {
		if err := c.in.fill(n); err != nil {
			return err
		}
		minor, err := parseGreeting(c.in.buf[c.in.r : c.in.r+n])
		if err != nil {
			return err
		}
		c.minor = minor
	}
	c.in.r += greetingLen
	ready := appendReady(nil, c.typ, identity)
	if admit == nil {
		if _, err := c.tcp.Write(ready); err != nil {
			return err
		}
	}
	peer, err := c.readReady()
	if err != nil {
		return err
	}
	if admit != nil {
		if err := admit(ctx, peer); err != nil {
			return err
		}
		if _, err := c.tcp.Write(ready); err != nil {
			return err
		}
	}
	return nil
}

// readReady waits for the peer's READY and returns the identity in it.
func (c *conn) readReady() ([]byte, error) {
	message, command, err := c.in.next()
	if err != nil {
		return nil, err
	}
	if message != nil {
		return nil, protocolErrorf("message before READY")
	}
	name, data, err := parseCommand(command)
	if err != nil {
		return nil, err
	}
	switch name {
	case "READY":
	case "ERROR":
		return nil, peerError(data)
	default:
		return nil, protocolErrorf("command %q instead of READY", name)
	}
	peer, identity, err := parseReady(data)
	if err != nil {
		return nil, err
	}
	if !c.typ.fits(peer) {
		return nil, &incompatibleError{ours: c.typ, theirs: peer}
	}
	return identity, nil
}

// abandon ends a connection whose handshake has failed.
func (c *conn) abandon(err error) {
	c.fail(err)
	c.receiving.drop()
	close(c.done)
}

// serve runs the connection until it ends; the handshake is through.
func (c *conn) serve() {
	c.out.release()
	c.startBeat()
	c.deliver(Event{Kind: Connected, Again: c.again})
	err := c.read()
	c.receiving.drop()
	if c.closing.Load() {
		err = ErrClosed
	}
	c.fail(err)
	c.out.writers.Wait()
	c.stopTimers()
	c.deliver(Event{Kind: Disconnected, Err: c.cause})
	close(c.done)
}

func (c *conn) deliver(e Event) {
	e.Conn, e.Identity, e.Remote = c.id, c.identity, c.remote
	c.busy.Store(true)
	c.handler(e)
	c.heard.Store(int64(time.Since(c.start))) // while the handler ran the peer could not be heard
	c.busy.Store(false)
}

// read delivers messages until the stream ends.
func (c *conn) read() error {
	for {
		message, command, err := c.in.next()
		switch {
		case err != nil:
			return err
		case message == nil:
			if err := c.command(command); err != nil {
				return err
			}
		case !c.typ.receives():
			return protocolErrorf("a %s socket gets no messages", c.typ)
		default:
			c.message.Store(int64(time.Since(c.start)))
			large := c.receiving.held > 0 // only this goroutine changes it
			if large {
				c.receiving.pin(true)
			}
			if !c.closing.Load() {
				c.deliver(Event{Kind: Message, Frames: message})
			}
			if large {
				c.receiving.drop()
				c.receiving.pin(false)
			}
		}
	}
}

func (c *conn) command(body []byte) error {
	name, data, err := parseCommand(body)
	if err != nil {
		return err
	}
	switch name {
	case "PING":
		ttl, context, err := parsePing(data)
		if err != nil {
			return err
		}
		c.pinged.Store(int64(time.Since(c.start)))
		if d := int64(ttl) * int64(100*time.Millisecond); c.peerTTL.Swap(d) != d {
			c.beatNow()
		}
		c.out.sendControl(func(b []byte) []byte { return appendCommand(b, "PONG", context) })
	case "PONG":
		c.probed(data)
	case "ERROR":
		return peerError(data)
	}
	return nil // as libzmq does with commands that it does not know
}

// peerError is what the peer's ERROR command says.
func peerError(data []byte) error {
	if len(data) == 0 || len(data) < 1+int(data[0]) {
		return protocolErrorf("malformed ERROR")
	}
	return protocolErrorf("the peer says %q", data[1:1+int(data[0])])
}

// close stops sends, lets what is queued go out, and ends the connection when the peer has hung up, at the latest after
// Linger. It does not wait.
func (c *conn) close() {
	c.closeOnce.Do(func() {
		c.closing.Store(true)
		c.stopOnce.Do(func() { close(c.stop) })
		c.beatMu.Lock()
		c.linger = time.AfterFunc(c.opts.Linger, func() { c.fail(ErrClosed) })
		c.beatMu.Unlock()
		c.out.flush()
	})
}

// fail ends the connection at once; the first cause counts.
func (c *conn) fail(err error) {
	c.failOnce.Do(func() {
		if errors.Is(err, os.ErrClosed) || errors.Is(err, net.ErrClosed) {
			err = ErrClosed
		}
		c.cause = err
		c.out.kill()
		_ = c.tcp.Close() // there is nobody to tell
		c.stopOnce.Do(func() { close(c.stop) })
	})
}

// startBeat begins heartbeats. A peer of ZMTP 3.0 is not asked: PING came with 3.1.
func (c *conn) startBeat() {
	c.beatMu.Lock()
	defer c.beatMu.Unlock()
	if c.minor == 0 {
		c.beat.interval = -1
	}
	c.timer = time.AfterFunc(max(c.beat.interval, 0), c.onBeat)
}

func (c *conn) onBeat() {
	c.beatMu.Lock()
	if c.timer == nil {
		c.beatMu.Unlock()
		return
	}
	now, heard := time.Since(c.start), time.Duration(c.heard.Load())
	if c.busy.Load() {
		heard = now
	}
	ping, dead, wait := c.beat.tick(now, heard, time.Duration(c.pinged.Load()), time.Duration(c.peerTTL.Load()))
	if !dead && wait > 0 {
		c.timer.Reset(wait)
	}
	c.beatMu.Unlock()
	if dead {
		c.fail(ErrHeartbeat)
	}
	if ping {
		c.ping(nil)
	}
}

// beatNow looks at the heartbeat again at once, because the peer's TTL has changed.
func (c *conn) beatNow() {
	c.beatMu.Lock()
	defer c.beatMu.Unlock()
	if c.timer != nil {
		c.timer.Reset(0)
	}
}

func (c *conn) stopTimers() {
	c.beatMu.Lock()
	defer c.beatMu.Unlock()
	c.timer.Stop()
	c.timer = nil
	if c.linger != nil {
		c.linger.Stop()
	}
}

func (c *conn) ping(context []byte) {
	ttl := uint16((c.opts.HeartbeatInterval + c.opts.HeartbeatTimeout + 100*time.Millisecond - 1) / (100 * time.Millisecond))
	c.out.sendControl(func(b []byte) []byte { return appendPing(b, ttl, context) })
}

// probe asks the peer for a sign of life: a PONG with a context of its own. It reports whether one came within the timeout.
// While our own handler runs no answer can be read; then the peer is taken to be alive.
func (c *conn) probe(ctx context.Context, timeout time.Duration) bool {
	answer := make(chan struct{})
	c.probeMu.Lock()
	if c.probes == nil {
		c.probes = make(map[uint64]chan struct{})
	}
	c.probeN++
	n := c.probeN
	c.probes[n] = answer
	c.probeMu.Unlock()
	defer func() {
		c.probeMu.Lock()
		delete(c.probes, n)
		c.probeMu.Unlock()
	}()
	c.ping(binary.BigEndian.AppendUint64(nil, n))
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	select {
	case <-answer:
		return true
	case <-c.stop:
		return false
	case <-ctx.Done():
		return c.busy.Load()
	}
}

func (c *conn) probed(context []byte) {
	if len(context) != 8 {
		return // the answer to a heartbeat
	}
	c.probeMu.Lock()
	defer c.probeMu.Unlock()
	n := binary.BigEndian.Uint64(context)
	if answer := c.probes[n]; answer != nil {
		close(answer)
		delete(c.probes, n)
	}
}

// incompatibleError is ErrIncompatible with both types.
type incompatibleError struct{ ours, theirs socketType }

func (e *incompatibleError) Error() string {
	return ErrIncompatible.Error() + ": ours is " + string(e.ours) + ", the peer's " + string(bytes.ToValidUTF8([]byte(e.theirs), nil))
}

func (e *incompatibleError) Is(target error) bool { return target == ErrIncompatible }
