package nixllink

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
)

const defaultDialTimeout = 5 * time.Second

// A dead host is noticed after about half a minute.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3}

// past is a deadline that interrupts what waits on a connection.
var past = time.Unix(1, 0)

// SenderConfig is what a sender needs.
type SenderConfig struct {
	Library *Library
	// Agent names the NIXL agent: unique for each incarnation.
	Agent    string
	Backends []string  // NIXL's plug-ins to write with
	Pool     link.Pool // the staging pool
	// Module is the Python module that LMCache receivers find in our page list;
	// "": that of the library.
	Module string
	// DialInit connects to the init port of an LMCache receiver; nil: there are
	// none.
	DialInit func(ctx context.Context, addr string) (InitPort, error)
	// DialTimeout bounds one attempt to connect, its handshake included; 0: 5 s.
	DialTimeout time.Duration
}

// InitPort is a connection to an LMCache receiver's init port. Its methods are
// the two round trips of the handshake.
type InitPort interface {
	// Init tells our agent's metadata and returns the name by which the receiver
	// knows it, and the receiver's own.
	Init(ctx context.Context, metadata []byte) (self, theirs []byte, err error)
	// Register tells our page list and returns the receiver's.
	Register(ctx context.Context, self []byte, localID string, pages []byte) ([]byte, error)
	// Done is closed when the connection has ended.
	Done() <-chan struct{}
	Close() error
}

// Sender implements link.Sender.
type Sender struct {
	cfg      SenderConfig
	owner    *owner
	metadata []byte

	mu     sync.Mutex
	closed bool
	conns  map[*conn]struct{}
}

var caps = link.Caps{Mode: link.OneSided}

// NewSender registers the staging pool.
func NewSender(cfg SenderConfig) (*Sender, error) {
	if cfg.DialTimeout == 0 {
		cfg.DialTimeout = defaultDialTimeout
	}
	if cfg.Module == "" {
		cfg.Module = cfg.Library.lib.flavour()
	}
	o, metadata, err := startAgent(cfg.Library, cfg.Agent, cfg.Backends, cfg.Pool)
	if err != nil {
		return nil, err
	}
	return &Sender{cfg: cfg, owner: o, metadata: metadata, conns: make(map[*conn]struct{})}, nil
}

// startAgent starts an agent's owner and returns its metadata.
func startAgent(l *Library, name string, backends []string, pool link.Pool) (*owner, []byte, error) {
	o, err := startOwner(l.lib, name, backends, pool.Bytes[:int64(pool.Slots())*pool.SlotBytes])
	if err != nil {
		return nil, nil, err
	}
	var metadata []byte
	if !o.call(func() { metadata, err = o.agent.metadata() }) {
		err = errUnresponsive
	}
	if err != nil {
		return nil, nil, errors.Join(err, o.close())
	}
	return o, metadata, nil
}

// Caps implements link.Sender.
func (s *Sender) Caps() link.Caps { return caps }

// Connect implements link.Sender. A peer without an incarnation is an LMCache
// receiver, Addr its init port.
func (s *Sender) Connect(ctx context.Context, p link.Peer, ev link.SenderEvents) (link.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.DialTimeout)
	defer cancel()
	c := &conn{s: s, peer: p, ev: ev, writes: map[link.WriteID]*write{}}
	c.idle.L = &c.mu
	handshake := c.greet
	if p.Incarnation == (kv.Incarnation{}) {
		handshake = c.greetLMCache
	}
	if err := handshake(ctx); err != nil {
		return nil, fmt.Errorf("nixl link to %s: %w", p.Addr, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		c.hangUp()
		s.owner.give(func() { s.owner.unload(c.remote) })
		return nil, fmt.Errorf("nixl link to %s: %w", p.Addr, net.ErrClosed)
	}
	s.conns[c] = struct{}{}
	c.tasks.Add(1)
	go c.watch()
	return c, nil
}

// Close implements link.Sender.
func (s *Sender) Close() error {
	s.mu.Lock()
	closed := s.closed
	s.closed = true
	conns := s.conns
	s.conns = nil
	s.mu.Unlock()
	if closed {
		return nil
	}
	for c := range conns {
		c.Close()
	}
	return s.owner.close()
}

// greet says hello to a Berth receiver; the connection stays as the sign of its
// life.
func (c *conn) greet(ctx context.Context) error {
	d := net.Dialer{KeepAliveConfig: keepAlive}
	nc, err := d.DialContext(ctx, "tcp", c.peer.Addr)
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { nc.SetDeadline(past) })
	err = c.hello(nc)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		nc.Close()
		return err
	}
	c.hangUp = func() { nc.Close() }
	c.wait = func() error {
		var b [1]byte
		if _, err := nc.Read(b[:]); err != nil {
			return err
		}
		return errors.New("unexpected data from the receiver")
	}
	return nil
}

func (c *conn) hello(nc net.Conn) error {
	slotBytes := c.s.cfg.Pool.SlotBytes
	if _, err := nc.Write(hello{c.peer.Incarnation, c.peer.Self, c.peer.Secret, uint64(slotBytes)}.append(nil)); err != nil {
		return err
	}
	a, err := readAnswer(nc)
	switch {
	case err != nil:
		return err
	case a.status == statusOtherReceiver:
		return fmt.Errorf("receiver %s is wanted, %s is there", c.peer.Incarnation, a.receiver)
	case a.status != statusOK:
		return fmt.Errorf("hello refused: %v", a.status)
	case a.slots == 0 || a.slots > kv.MaxSlots:
		return fmt.Errorf("the receiver has %d slots, 1 to %d are possible", a.slots, kv.MaxSlots)
	}
	c.pages = &pageList{memory: dram}
	for i := range uint64(a.slots) {
		c.pages.pages = append(c.pages.pages, page{a.addr + i*uint64(slotBytes), uint64(slotBytes), 0})
	}
	if err := c.pages.checkMapping(slotBytes); err != nil {
		return err
	}
	return c.load(a.metadata)
}

func (c *conn) load(metadata []byte) error {
	type loaded struct {
		name string
		err  error
	}
	got := make(chan loaded, 1)
	if !c.s.owner.call(func() {
		name, err := c.s.owner.load(metadata)
		got <- loaded{name, err}
	}) {
		return errUnresponsive
	}
	l := <-got
	c.remote = l.name
	return l.err
}

// greetLMCache makes the handshake on an LMCache receiver's init port. Nothing
// but its four messages ever goes there: one foreign message stops that port
// until the receiver restarts. The connection stays, silent: its end says that
// the receiver is gone.
func (c *conn) greetLMCache(ctx context.Context) error {
	if c.s.cfg.DialInit == nil {
		return errors.New("a receiver without an incarnation, and no way to an init port")
	}
	port, err := c.s.cfg.DialInit(ctx, c.peer.Addr)
	if err != nil {
		return err
	}
	if err := c.exchange(ctx, port); err != nil {
		port.Close()
		return err
	}
	c.hangUp = func() { port.Close() }
	c.wait = func() error { <-port.Done(); return io.EOF }
	return nil
}

func (c *conn) exchange(ctx context.Context, port InitPort) error {
	cfg := c.s.cfg
	self, metadata, err := port.Init(ctx, c.s.metadata)
	if err != nil {
		return err
	}
	if err := c.load(metadata); err != nil {
		return err
	}
	b, err := port.Register(ctx, self, cfg.Agent, appendPages(nil, pagesOf(cfg.Module, cfg.Pool)))
	if err == nil {
		if c.pages, err = parsePages(b); err == nil {
			err = c.pages.checkMapping(cfg.Pool.SlotBytes)
		}
	}
	if err != nil {
		c.s.owner.give(func() { c.s.owner.unload(c.remote) })
	}
	return err
}

// pagesOf lists the slots of a pool.
func pagesOf(module string, p link.Pool) *pageList {
	l := &pageList{module: module, memory: dram, pages: make([]page, 0, p.Slots())}
	base := address(p.Bytes)
	for i := range uint64(p.Slots()) {
		l.pages = append(l.pages, page{uint64(base) + i*uint64(p.SlotBytes), uint64(p.SlotBytes), 0})
	}
	return l
}
