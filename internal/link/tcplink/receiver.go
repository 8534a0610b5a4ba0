package tcplink

import (
	"crypto/subtle"
	"fmt"
	"io"
	"math"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
	"github.com/berthkv/berth/internal/link/gate"
	"github.com/berthkv/berth/internal/link/lobby"
)

// Defaults and limits of the receiving side.
const (
	// DefaultMaxConnections is how many data connections an owner may have.
	DefaultMaxConnections = 16
	// DefaultMaxTotal is how many all owners may have together before an owner
	// that has one gets no other.
	DefaultMaxTotal = 4096
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
	Permit         func(netip.Addr) bool
	Checksum       bool // compute Landing.Sum
	MaxConnections int  // of one owner
	// MaxTotal is how many connections all owners together may have beyond the
	// first of each. An owner's first is never refused for want of room, so that
	// many owners with many cannot keep a newcomer out; how many owners there are
	// is the caller's to limit.
	MaxTotal  int
	LostGrace time.Duration
}

// Receiver implements link.Receiver.
type Receiver struct {
	cfg   ReceiverConfig
	ev    link.ReceiverEvents
	gate  *gate.Gate
	offer string
	lobby *lobby.Lobby
	stop  chan struct{}
	wg    sync.WaitGroup // loss watches
	close sync.Once

	mu     sync.Mutex
	closed bool
	owners map[kv.Incarnation]*owner
	total  int // connections of all owners
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
	if cfg.MaxTotal == 0 {
		cfg.MaxTotal = DefaultMaxTotal
	}
	if cfg.LostGrace == 0 {
		cfg.LostGrace = DefaultLostGrace
	}
	if cfg.Pool.SlotBytes > math.MaxUint32 {
		return nil, fmt.Errorf("tcp link: a slot of %d bytes; a frame carries %d at most", cfg.Pool.SlotBytes, uint32(math.MaxUint32))
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
		cfg: cfg, ev: ev, gate: gate.New(cfg.Pool.Slots()), offer: net.JoinHostPort(host, fmt.Sprint(addr.Port)),
		stop: make(chan struct{}), owners: make(map[kv.Incarnation]*owner),
	}
	r.mu.Lock() // until lobby is set
	defer r.mu.Unlock()
	r.lobby = lobby.Open(l, lobby.Config{Permit: r.permit, Serve: r.serve})
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
		r.total -= len(o.conns)
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
		r.lobby.Shut()
		close(r.stop)
		r.mu.Lock()
		r.closed = true // nobody registers from here on
		for _, o := range r.owners {
			for c := range o.conns {
				c.nc.Close() // its reader leaves its slot and ends
			}
		}
		r.mu.Unlock()
		r.lobby.Wait()
		r.wg.Wait()
	})
	return nil
}

// permit asks the configuration about a peer's address.
func (r *Receiver) permit(nc net.Conn) bool {
	return r.cfg.Permit == nil || r.cfg.Permit(nc.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap())
}

// serve handshakes and then reads frames until the connection ends.
func (r *Receiver) serve(nc net.Conn) {
	if nc.(*net.TCPConn).SetKeepAliveConfig(keepAlive) != nil {
		return
	}
	var b [helloBytes]byte
	if _, err := io.ReadFull(nc, b[:]); err != nil {
		return
	}
	h, ok := parseHello(&b)
	if !ok {
		return // not our protocol: an answer would mean nothing to it
	}
	c := &reader{r: r, nc: nc, owner: h.owner}
	st := r.register(h, c)
	_, err := nc.Write(answer{st, r.cfg.Incarnation}.append(nil))
	if st != statusOK {
		return
	}
	if err == nil {
		err = r.lobby.Admit(nc)
	}
	if err == nil {
		err = c.frames()
	}
	nc.Close() // before it is counted as gone
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
	case len(o.conns) >= r.cfg.MaxConnections, len(o.conns) > 0 && r.total >= r.cfg.MaxTotal:
		return statusTooMany
	}
	o.conns[c] = struct{}{}
	r.total++
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
	r.total--
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
	t := time.NewTicker(r.cfg.LostGrace)
	defer t.Stop()
	for {
		r.mu.Lock()
		epoch := o.epoch
		r.mu.Unlock()
		select {
		case <-t.C:
		case <-r.stop:
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
