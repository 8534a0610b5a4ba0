package zmtp

import (
	"context"
	"errors"
	"slices"
	"sync"
)

// Push is a PUSH socket with several peers: each message goes to one of them, in turn over those that are connected and have
// room. A message is lost with the connection that it was given to.
type Push struct {
	// constant
	handler Handler
	opts    Options
	room    *gate // opened when any peer has room again, comes or goes

	mu     sync.Mutex // guards all below
	closed bool
	peers  []*Redialer
	live   []pushTarget // those connected now; replaced, never changed in place
	turn   int          // the next message tries live[turn % len(live)] first
	lastID ConnID
}

type pushTarget struct {
	peer *Redialer
	conn ConnID
}

// NewPush makes a Push without peers. handler (or nil) gets the events of all, those of different peers at the same time;
// Event.Conn is unique in the Push.
func NewPush(handler Handler, opts Options) (*Push, error) {
	opts, err := opts.withDefaults()
	if err != nil {
		return nil, err
	}
	if handler == nil {
		handler = func(Event) {}
	}
	return &Push{handler: handler, opts: opts, room: &gate{}}, nil
}

// Connect adds a peer, at most MaxConns, and keeps a connection to it; see RedialPush. An address that is there already is
// left alone. Errors: ErrClosed, ErrTooMany.
func (p *Push) Connect(addr string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.closed:
		return ErrClosed
	case p.find(addr) >= 0:
		return nil
	case len(p.peers) >= p.opts.MaxConns:
		return ErrTooMany
	}
	var peer *Redialer
	peer = newRedialer(typePush, addr, nil, func(e Event) { p.onEvent(peer, e) }, p.opts, p.newID, p.room)
	p.peers = append(p.peers, peer)
	go peer.run()
	return nil
}

// Disconnect removes a peer and closes its connection as Redialer.Close does; it must not be called from the handler.
func (p *Push) Disconnect(addr string) {
	p.mu.Lock()
	i := p.find(addr)
	if i < 0 {
		p.mu.Unlock()
		return
	}
	peer := p.peers[i]
	p.peers = slices.Delete(p.peers, i, i+1)
	p.mu.Unlock()
	_ = peer.Close()
}

// Send gives one message, copied, to the next peer that has room; it never blocks. Errors: ErrWouldBlock (every
// connected peer is at its high-water mark), ErrNoPeer, ErrClosed, *LimitError.
func (p *Push) Send(frames ...[]byte) error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return ErrClosed
	}
	live, first := p.live, p.turn
	p.turn++
	p.mu.Unlock()

	result := ErrNoPeer
	for i := range live {
		t := live[(first+i)%len(live)]
		err := t.peer.Send(t.conn, frames...)
		switch {
		case errors.Is(err, ErrGone):
		case errors.Is(err, ErrWouldBlock):
			result = err
		default:
			return err
		}
	}
	return result
}

// SendWait is Send that waits for a peer with room until ctx ends.
func (p *Push) SendWait(ctx context.Context, frames ...[]byte) error {
	return p.room.retry(ctx, func() error { return p.Send(frames...) })
}

// Close closes all connections at the same time, as Redialer.Close does. A SendWait that waits fails with ErrClosed.
func (p *Push) Close() error {
	p.mu.Lock()
	p.closed = true
	peers := slices.Clone(p.peers)
	p.mu.Unlock()
	p.room.open()
	var wg sync.WaitGroup
	for _, peer := range peers {
		wg.Go(func() { _ = peer.Close() })
	}
	wg.Wait()
	return nil
}

func (p *Push) onEvent(peer *Redialer, e Event) {
	p.mu.Lock()
	switch e.Kind {
	case Connected:
		p.live = append(slices.Clip(p.live), pushTarget{peer, e.Conn})
	case Disconnected:
		p.live = slices.DeleteFunc(slices.Clone(p.live), func(t pushTarget) bool { return t.conn == e.Conn })
	}
	p.mu.Unlock()
	p.room.open()
	p.handler(e)
}

func (p *Push) newID() ConnID {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lastID++
	return p.lastID
}

// find is called with mu held.
func (p *Push) find(addr string) int {
	return slices.IndexFunc(p.peers, func(peer *Redialer) bool { return peer.addr == addr })
}
