package shmlink

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berthkv/berth/internal/link"
)

// dialTimeout bounds one attempt to connect, its hello included.
const dialTimeout = 5 * time.Second

// past is a deadline that interrupts what waits on a connection.
var past = time.Unix(1, 0)

// SenderConfig is what a sender needs.
type SenderConfig struct {
	Slots     int // of the staging pool
	SlotBytes int64
	// Staging and Generations are descriptors of the staging pool and of its
	// generation words, opened for reading only. They stay the caller's.
	Staging     int
	Generations int
}

// Sender implements link.Sender. It moves nothing: the receivers do.
type Sender struct {
	cfg SenderConfig

	mu     sync.Mutex
	closed bool
	conns  map[*conn]struct{}
}

// NewSender returns a sender without connections.
func NewSender(cfg SenderConfig) *Sender {
	return &Sender{cfg: cfg, conns: make(map[*conn]struct{})}
}

// Caps implements link.Sender.
func (s *Sender) Caps() link.Caps { return caps }

// Connect implements link.Sender.
func (s *Sender) Connect(ctx context.Context, p link.Peer, ev link.SenderEvents) (link.Conn, error) {
	nc, err := s.dial(ctx, p)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		nc.Close()
		return nil, fmt.Errorf("shm link to %s: %w", p.Addr, net.ErrClosed)
	}
	c := &conn{s: s, peer: p, ev: ev, nc: nc, done: make(chan struct{})}
	s.conns[c] = struct{}{}
	go c.watch()
	return c, nil
}

// Close implements link.Sender.
func (s *Sender) Close() error {
	s.mu.Lock()
	s.closed = true
	conns := s.conns
	s.conns = nil
	s.mu.Unlock()
	for c := range conns {
		c.Close()
	}
	return nil
}

func (s *Sender) dial(ctx context.Context, p link.Peer) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	var d net.Dialer
	nc, err := d.DialContext(ctx, "unix", p.Addr)
	if err != nil {
		return nil, fmt.Errorf("shm link: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { nc.SetDeadline(past) }) // the context ends the handshake too
	err = s.handshake(nc.(*net.UnixConn), p)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		nc.Close()
		return nil, fmt.Errorf("shm link to %s: %w", p.Addr, err)
	}
	return nc, nil
}

func (s *Sender) handshake(nc *net.UnixConn, p link.Peer) error {
	h := hello{p.Incarnation, p.Self, p.Secret, uint32(s.cfg.Slots), uint64(s.cfg.SlotBytes)}.append(nil)
	n, _, err := nc.WriteMsgUnix(h, unix.UnixRights(s.cfg.Staging, s.cfg.Generations), nil)
	if err == nil && n < len(h) { // the descriptors went with the first byte
		_, err = nc.Write(h[n:])
	}
	if err != nil {
		return err
	}
	var b [answerBytes]byte
	if _, err := io.ReadFull(nc, b[:]); err != nil {
		return fmt.Errorf("no answer to the hello: %w", err)
	}
	a, ok := parseAnswer(&b)
	switch {
	case !ok:
		return errors.New("the answer to the hello is of another protocol")
	case a.status == statusOtherReceiver:
		return fmt.Errorf("receiver %s is wanted, %s is there", p.Incarnation, a.receiver)
	case a.status == statusLayout:
		return fmt.Errorf("hello of %d slots of %d bytes refused: %v", s.cfg.Slots, s.cfg.SlotBytes, a.status)
	case a.status != statusOK:
		return fmt.Errorf("hello refused: %v", a.status)
	}
	return nil
}

// conn implements link.Conn.
type conn struct {
	s     *Sender
	peer  link.Peer
	ev    link.SenderEvents
	nc    net.Conn
	close sync.Once
	done  chan struct{} // closed when watch has ended

	mu     sync.Mutex
	closed bool
}

// watch waits for the end of the connection: the receiver says nothing.
func (c *conn) watch() {
	defer close(c.done)
	var b [1]byte
	_, err := c.nc.Read(b[:])
	if err == nil {
		err = errors.New("unexpected data from the receiver")
	}
	c.mu.Lock()
	closed := c.closed
	c.mu.Unlock()
	if !closed {
		c.ev.Down(fmt.Errorf("shm link to %s is down: %w", c.peer.Addr, err))
	}
}

// Write implements link.Conn: the receiver pulls.
func (c *conn) Write([]link.Write) { panic("shmlink: Write on a link of mode Pull") }

// Abort implements link.Conn: there are no writes.
func (c *conn) Abort([]link.WriteID) {}

// Settle implements link.Conn: there are no writes.
func (c *conn) Settle([]link.WriteID) {}

// Close implements link.Conn.
func (c *conn) Close() error {
	c.close.Do(func() {
		c.mu.Lock()
		c.closed = true
		c.mu.Unlock()
		c.nc.Close()
		<-c.done
		c.s.mu.Lock()
		delete(c.s.conns, c)
		c.s.mu.Unlock()
	})
	return nil
}
