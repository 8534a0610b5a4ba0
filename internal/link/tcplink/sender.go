package tcplink

import (
	"context"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berthkv/berth/internal/link"
)

// Defaults of the sending side.
const (
	DefaultConnections  = 4
	DefaultWriteTimeout = 10 * time.Second
	DefaultDialTimeout  = 5 * time.Second
)

// A dead host is noticed on an idle connection after about half a minute.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3}

// SenderConfig is what a sender needs. Zero fields after Pool get the default.
type SenderConfig struct {
	Pool        link.Pool // the staging pool
	Connections int       // data connections to each receiver
	// WriteTimeout is how long the peer's kernel may acknowledge nothing of
	// what was sent before the connection counts as broken.
	WriteTimeout time.Duration
	// DialTimeout bounds one attempt to connect, its hello included.
	DialTimeout time.Duration
}

// Sender implements link.Sender.
type Sender struct {
	cfg SenderConfig

	mu     sync.Mutex
	closed bool
	conns  map[*conn]struct{}
}

// NewSender returns a sender without connections.
func NewSender(cfg SenderConfig) *Sender {
	if cfg.Connections == 0 {
		cfg.Connections = DefaultConnections
	}
	if cfg.WriteTimeout == 0 {
		cfg.WriteTimeout = DefaultWriteTimeout
	}
	if cfg.DialTimeout == 0 {
		cfg.DialTimeout = DefaultDialTimeout
	}
	return &Sender{cfg: cfg, conns: make(map[*conn]struct{})}
}

// Caps implements link.Sender.
func (s *Sender) Caps() link.Caps { return caps }

// Connect implements link.Sender. It returns when the first data connection is
// through; the others follow.
func (s *Sender) Connect(ctx context.Context, p link.Peer, ev link.SenderEvents) (link.Conn, error) {
	nc, err := s.dial(ctx, p)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		nc.Close()
		return nil, fmt.Errorf("tcp link to %s: %w", p.Addr, net.ErrClosed)
	}
	c := newConn(s, p, ev, nc)
	s.conns[c] = struct{}{}
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

func (s *Sender) forget(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
}

// dial makes one data connection and says hello on it.
func (s *Sender) dial(ctx context.Context, p link.Peer) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.DialTimeout)
	defer cancel()
	d := net.Dialer{KeepAliveConfig: keepAlive}
	nc, err := d.DialContext(ctx, "tcp", p.Addr)
	if err != nil {
		return nil, fmt.Errorf("tcp link: %w", err)
	}
	// The context ends the handshake too.
	stop := context.AfterFunc(ctx, func() { nc.SetDeadline(past) })
	err = s.handshake(nc.(*net.TCPConn), p)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		nc.Close()
		return nil, fmt.Errorf("tcp link to %s: %w", p.Addr, err)
	}
	return nc, nil
}

func (s *Sender) handshake(nc *net.TCPConn, p link.Peer) error {
	if err := setUserTimeout(nc, s.cfg.WriteTimeout); err != nil {
		return err
	}
	if _, err := nc.Write(hello{p.Incarnation, p.Self, p.Secret}.append(nil)); err != nil {
		return err
	}
	var b [answerBytes]byte
	if _, err := io.ReadFull(nc, b[:]); err != nil {
		return fmt.Errorf("no answer to the hello: %w", err)
	}
	a, ok := parseAnswer(&b)
	switch {
	case !ok:
		return fmt.Errorf("the answer to the hello is of another protocol")
	case a.status == statusOtherReceiver:
		return fmt.Errorf("receiver %s is wanted, %s is there", p.Incarnation, a.receiver)
	case a.status != statusOK:
		return fmt.Errorf("hello refused: %v", a.status)
	}
	return nil
}

// setUserTimeout lets the kernel break a connection whose peer acknowledges
// nothing for d, also when its window is shut: a stopped process.
func setUserTimeout(nc *net.TCPConn, d time.Duration) error {
	raw, err := nc.SyscallConn()
	if err != nil {
		return err
	}
	var e error
	if err := raw.Control(func(fd uintptr) {
		e = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(d.Milliseconds()))
	}); err != nil {
		return err
	}
	return e
}
