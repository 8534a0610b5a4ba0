package tcplink

import (
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
	"github.com/berthkv/berth/internal/link/gate"
)

// Defaults and limits of the receiving side.
const (
	// DefaultMaxConnections is how many data connections an owner may have.
	DefaultMaxConnections = 16
	// DefaultMaxHandshakes is how many connections may be without a hello at a
	// time; one more closes the oldest of them.
	DefaultMaxHandshakes = 64
	// DefaultHandshakeTimeout is how long one may be without.
	DefaultHandshakeTimeout = 5 * time.Second
	// DefaultLostGrace is how long an owner may be without a data connection
	// before it is reported as lost: enough to dial again.
	DefaultLostGrace = 2 * time.Second
	// letGo bounds the wait for an interrupted reader, which needs no more than
	// to be scheduled.
	letGo = 5 * time.Second
)

// ReceiverConfig is what a receiver needs. Zero fields after Pool get the
// default.
type ReceiverConfig struct {
	Incarnation kv.Incarnation // ours
	Pool        link.Pool      // the receive pool
	Listen      string         // host:port; port 0 takes a free one
	Advertise   string         // host that peers shall dial; "" is Listen's
	// Permit says whether an address may connect; nil permits all.
	Permit           func(netip.Addr) bool
	Checksum         bool // compute Landing.Sum
	MaxConnections   int  // of one owner
	MaxHandshakes    int
	HandshakeTimeout time.Duration
	LostGrace        time.Duration
}

// Receiver implements link.Receiver.
type Receiver struct {
	cfg      ReceiverConfig
	ev       link.ReceiverEvents
	gate     *gate.Gate
	listener *net.TCPListener
	offer    string
	stop     chan struct{}
	wg       sync.WaitGroup // accept loop, connections, loss watches
	close    sync.Once

	mu      sync.Mutex
	closed  bool
	owners  map[kv.Incarnation]*owner
	pending []net.Conn // without a hello, oldest first
}

// owner is a sender that may connect. Its fields are guarded by Receiver.mu.
type owner struct {
	id       kv.Incarnation
	secret   kv.Secret
	conns    map[*reader]struct{}
	epoch    uint64 // counts connections made
	watching bool   // a watchLoss goroutine runs
}

// NewReceiver listens and serves. The error of a port that is taken names it.
func NewReceiver(cfg ReceiverConfig, ev link.ReceiverEvents) (*Receiver, error) {
	if cfg.MaxConnections == 0 {
		cfg.MaxConnections = DefaultMaxConnections
	}
	if cfg.MaxHandshakes == 0 {
		cfg.MaxHandshakes = DefaultMaxHandshakes
	}
	if cfg.HandshakeTimeout == 0 {
		cfg.HandshakeTimeout = DefaultHandshakeTimeout
	}
	if cfg.LostGrace == 0 {
		cfg.LostGrace = DefaultLostGrace
	}
	l, err := net.Listen("tcp", cfg.Listen)
	if err != nil {
		return nil, fmt.Errorf("tcp link cannot listen on %q: %w", cfg.Listen, err)
	}
	addr := l.Addr().(*net.TCPAddr)
	host := cfg.Advertise
	if host == "" {
		host = addr.IP.String()
		if addr.IP.IsUnspecified() {
			l.Close()
			return nil, fmt.Errorf("tcp link listens on %q, which peers cannot dial: a host to advertise is needed", cfg.Listen)
		}
	}
	r := &Receiver{
		cfg: cfg, ev: ev, gate: gate.New(cfg.Pool.Slots()), listener: l.(*net.TCPListener),
		offer: net.JoinHostPort(host, fmt.Sprint(addr.Port)), stop: make(chan struct{}), owners: make(map[kv.Incarnation]*owner),
	}
	r.wg.Add(1)
	go r.accept()
	return r, nil
}

// Caps implements link.Receiver.
func (r *Receiver) Caps() link.Caps { return caps }

var caps = link.Caps{Mode: link.Stream, ExactFence: true}

// Offer implements link.Receiver.
func (r *Receiver) Offer() string { return r.offer }

// Allow implements link.Receiver.
func (r *Receiver) Allow(id kv.Incarnation, secret kv.Secret) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if o := r.owners[id]; o != nil {
		o.secret = secret
		return
	}
	r.owners[id] = &owner{id: id, secret: secret, conns: make(map[*reader]struct{})}
}

// Disallow implements link.Receiver.
func (r *Receiver) Disallow(id kv.Incarnation) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if o := r.owners[id]; o != nil {
		delete(r.owners, id)
		for c := range o.conns {
			c.nc.Close()
		}
	}
}

// Open implements link.Receiver.
func (r *Receiver) Open(id kv.Incarnation, gen kv.Generation, slots []kv.SlotID) {
	r.gate.Open(id, gen, slots)
}

// Pull implements link.Receiver: this link has another mode.
func (r *Receiver) Pull(kv.Incarnation, kv.Generation, []link.PullItem) {
	panic("tcplink: Pull on a link of mode Stream")
}

// Revoke implements link.Receiver.
func (r *Receiver) Revoke(gen kv.Generation, slots []kv.SlotID) {
	if fenced := r.gate.Revoke(gen, slots); len(fenced) > 0 {
		r.ev.Fenced(gen, fenced)
	}
}

// Close implements link.Receiver.
func (r *Receiver) Close() error {
	r.close.Do(func() {
		r.mu.Lock()
		r.closed = true // no connection is served from here on
		close(r.stop)
		r.listener.Close()
		for _, nc := range r.pending {
			nc.Close()
		}
		for _, o := range r.owners {
			for c := range o.conns {
				c.nc.Close() // its reader leaves its slot and ends
			}
		}
		r.mu.Unlock()
	})
	r.wg.Wait()
	return nil
}

// accept admits connections until the listener is closed. An error that is
// not the end (out of descriptors) is waited out.
func (r *Receiver) accept() {
	defer r.wg.Done()
	for {
		nc, err := r.listener.AcceptTCP()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			if !r.pause(100 * time.Millisecond) {
				return
			}
			continue
		}
		if r.cfg.Permit != nil && !r.cfg.Permit(nc.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()) {
			nc.Close()
			continue
		}
		if !r.addPending(nc) {
			return
		}
		go r.serve(nc)
	}
}

// pause waits and reports whether the receiver still runs.
func (r *Receiver) pause(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-r.stop:
		return false
	}
}

// addPending counts a connection that has said nothing yet. The oldest goes
// when there are too many: who speaks at once is served, however many do not.
func (r *Receiver) addPending(nc net.Conn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		nc.Close()
		return false
	}
	if len(r.pending) >= r.cfg.MaxHandshakes {
		r.pending[0].Close()
		r.pending = r.pending[1:]
	}
	r.pending = append(r.pending, nc)
	r.wg.Add(1)
	return true
}

func (r *Receiver) dropPending(nc net.Conn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, p := range r.pending {
		if p == nc {
			r.pending = append(r.pending[:i], r.pending[i+1:]...)
			return
		}
	}
}

// serve handshakes and then reads frames until the connection ends.
func (r *Receiver) serve(nc *net.TCPConn) {
	defer r.wg.Done()
	defer nc.Close()
	err := nc.SetKeepAliveConfig(keepAlive)
	if err == nil {
		err = nc.SetDeadline(time.Now().Add(r.cfg.HandshakeTimeout))
	}
	var b [helloBytes]byte
	if err == nil {
		_, err = io.ReadFull(nc, b[:])
	}
	r.dropPending(nc)
	if err != nil {
		return
	}
	h, ok := parseHello(&b)
	if !ok {
		return // not our protocol: an answer would mean nothing to it
	}
	c := &reader{r: r, nc: nc, owner: h.owner}
	st := r.register(h, c)
	_, err = nc.Write(answer{st, r.cfg.Incarnation}.append(nil))
	if st != statusOK {
		return
	}
	if err == nil {
		err = nc.SetDeadline(time.Time{})
	}
	if err == nil {
		err = c.frames()
	}
	nc.Close()
	r.unregister(c, err)
}

// register checks a hello and adds the connection to its owner.
func (r *Receiver) register(h hello, c *reader) status {
	r.mu.Lock()
	defer r.mu.Unlock()
	if h.receiver != r.cfg.Incarnation {
		return statusOtherReceiver
	}
	o := r.owners[h.owner]
	var secret kv.Secret // compared also when there is no owner: equal time
	if o != nil {
		secret = o.secret
	}
	same := subtle.ConstantTimeCompare(secret[:], h.secret[:]) == 1
	switch {
	case o == nil || !same || r.closed:
		return statusRefused
	case len(o.conns) >= r.cfg.MaxConnections:
		return statusTooMany
	}
	o.conns[c] = struct{}{}
	o.epoch++
	return statusOK
}

// unregister removes a connection that ended with err. When it was the last of
// an owner, the owner is lost unless it dials again in time.
func (r *Receiver) unregister(c *reader, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	o := r.owners[c.owner]
	if o == nil {
		return
	}
	if _, ok := o.conns[c]; !ok {
		return // of a time before the owner was disallowed and allowed again
	}
	delete(o.conns, c)
	if len(o.conns) == 0 && !o.watching && !r.closed {
		o.watching = true
		r.wg.Add(1)
		go r.watchLoss(o, err)
	}
}

// watchLoss waits until the owner has a connection again or has had none for
// the whole grace, and then reports it as lost.
func (r *Receiver) watchLoss(o *owner, err error) {
	defer r.wg.Done()
	for {
		r.mu.Lock()
		epoch := o.epoch
		r.mu.Unlock()
		if !r.pause(r.cfg.LostGrace) {
			return
		}
		r.mu.Lock()
		again := len(o.conns) == 0 && o.epoch != epoch // came and went meanwhile
		lost := len(o.conns) == 0 && o.epoch == epoch && r.owners[o.id] == o && !r.closed
		o.watching = again
		r.mu.Unlock()
		if lost {
			r.ev.Lost(o.id, fmt.Errorf("no data connection from %s for %v: %w", o.id.Short(), r.cfg.LostGrace, err))
		}
		if !again {
			return
		}
	}
}
