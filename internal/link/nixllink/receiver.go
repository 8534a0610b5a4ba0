package nixllink

import (
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
	"github.com/berthkv/berth/internal/link/gate"
	"github.com/berthkv/berth/internal/link/lobby"
)

// ReceiverConfig is what a receiver needs.
type ReceiverConfig struct {
	Library *Library
	// Agent names the NIXL agent: unique for each incarnation.
	Agent       string
	Backends    []string // NIXL's plug-ins to be written by
	Incarnation kv.Incarnation
	Pool        link.Pool // the receive pool
	// Listen is where Berth senders say hello ("host:port", port 0: any), and
	// Advertise the host that they dial.
	Listen, Advertise string
	Permit            func(netip.Addr) bool // nil: all are permitted
}

// Receiver implements link.Receiver, and answers LMCache senders' handshakes.
type Receiver struct {
	cfg      ReceiverConfig
	ev       link.ReceiverEvents
	gate     *gate.Gate
	owner    *owner
	metadata []byte
	lobby    *lobby.Lobby
	offer    string
	close    sync.Once
	err      error

	mu     sync.Mutex
	closed bool
	owners map[kv.Incarnation]*peer
}

// peer is a Berth sender that may connect.
type peer struct {
	secret kv.Secret
	nc     net.Conn // nil while it is not connected
}

// NewReceiver registers the receive pool, listens and serves.
func NewReceiver(cfg ReceiverConfig, ev link.ReceiverEvents) (*Receiver, error) {
	l, err := net.Listen("tcp", cfg.Listen)
	if err != nil {
		return nil, err
	}
	o, metadata, err := startAgent(cfg.Library, cfg.Agent, cfg.Backends, cfg.Pool)
	if err != nil {
		l.Close()
		return nil, err
	}
	r := &Receiver{cfg: cfg, ev: ev, gate: gate.New(cfg.Pool.Slots()), owner: o, metadata: metadata,
		offer:  net.JoinHostPort(cfg.Advertise, fmt.Sprint(l.Addr().(*net.TCPAddr).Port)),
		owners: make(map[kv.Incarnation]*peer)}
	r.mu.Lock() // until lobby is set
	defer r.mu.Unlock()
	r.lobby = lobby.Open(l, lobby.Config{Permit: r.permit, Serve: r.serve})
	return r, nil
}

// Caps implements link.Receiver.
func (r *Receiver) Caps() link.Caps { return caps }

// Offer implements link.Receiver.
func (r *Receiver) Offer() string { return r.offer }

// Allow implements link.Receiver.
func (r *Receiver) Allow(id kv.Incarnation, secret kv.Secret) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.owners[id]; p != nil {
		p.secret = secret
		return
	}
	r.owners[id] = &peer{secret: secret}
}

// Disallow implements link.Receiver.
func (r *Receiver) Disallow(id kv.Incarnation) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.owners[id]; p != nil {
		delete(r.owners, id)
		if p.nc != nil {
			p.nc.Close()
		}
	}
}

// Open implements link.Receiver.
func (r *Receiver) Open(id kv.Incarnation, gen kv.Generation, slots []kv.SlotID) {
	r.gate.Open(id, gen, slots)
}

// Pull implements link.Receiver: this link has another mode.
func (r *Receiver) Pull(kv.Incarnation, kv.Generation, []link.PullItem) {
	panic("nixllink: Pull on a link of mode OneSided")
}

// Revoke implements link.Receiver. Who still writes is not known here.
func (r *Receiver) Revoke(gen kv.Generation, slots []kv.SlotID) { r.gate.Revoke(gen, slots) }

// Close implements link.Receiver.
func (r *Receiver) Close() error {
	r.close.Do(func() {
		r.lobby.Shut()
		r.mu.Lock()
		r.closed = true
		for _, p := range r.owners {
			if p.nc != nil {
				p.nc.Close()
			}
		}
		r.mu.Unlock()
		r.lobby.Wait()
		r.err = r.owner.close()
	})
	return r.err
}

func (r *Receiver) permit(nc net.Conn) bool {
	return r.cfg.Permit == nil || r.cfg.Permit(nc.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap())
}

// serve answers a hello and then waits for the end of the connection.
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
	p, st := r.register(h, nc)
	a := answer{status: st, receiver: r.cfg.Incarnation}
	if st == statusOK {
		a.slots, a.addr, a.metadata = uint32(r.cfg.Pool.Slots()), uint64(address(r.cfg.Pool.Bytes)), r.metadata
	}
	_, err := nc.Write(a.append(nil))
	if st != statusOK {
		return
	}
	if err == nil {
		err = r.lobby.Admit(nc)
	}
	if err == nil {
		if _, err = nc.Read(b[:1]); err == nil {
			err = errors.New("unexpected data from the sender")
		}
	}
	nc.Close()
	r.mu.Lock()
	lost := p.nc == nc && r.owners[h.owner] == p && !r.closed // else a newer connection has replaced it
	if p.nc == nc {
		p.nc = nil
	}
	r.mu.Unlock()
	if lost {
		r.ev.Lost(h.owner, fmt.Errorf("nixl link from %s: %w", h.owner.Short(), err))
	}
}

// register checks a hello. A newer connection of an owner replaces its older one.
func (r *Receiver) register(h hello, nc net.Conn) (*peer, status) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if h.receiver != r.cfg.Incarnation {
		return nil, statusOtherReceiver
	}
	p := r.owners[h.owner]
	var secret kv.Secret // compared also when there is no owner: equal time
	if p != nil {
		secret = p.secret
	}
	same := subtle.ConstantTimeCompare(secret[:], h.secret[:]) == 1
	switch {
	case p == nil || !same || r.closed:
		return nil, statusRefused
	case h.slotBytes != uint64(r.cfg.Pool.SlotBytes):
		return nil, statusLayout
	}
	if p.nc != nil {
		p.nc.Close()
	}
	p.nc = nc
	return p, statusOK
}

// Init answers the first message of an LMCache sender's handshake: with its own
// agent's name, and our agent's metadata. Its metadata is read for the name
// alone and not handed to the library.
func (r *Receiver) Init(metadata []byte) (agent, ours []byte, err error) {
	name, err := agentName(metadata)
	return []byte(name), r.metadata, err
}

// Register answers the second: with our page list, in the module that the
// sender's bindings have. The sender's own list, often of another memory and
// size, must have our page length.
func (r *Receiver) Register(pages []byte) ([]byte, error) {
	l, err := parsePages(pages)
	if err != nil {
		return nil, err
	}
	if err := l.checkLength(r.cfg.Pool.SlotBytes); err != nil {
		return nil, err
	}
	return appendPages(nil, pagesOf(l.module, r.cfg.Pool)), nil
}
