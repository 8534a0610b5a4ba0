package localapi

import (
	"slices"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
)

// Peer is an engine in the agent's own process. Its methods are called by the
// agent's goroutines, Lost last; they must neither block nor call Inside.Send.
type Peer interface {
	// Reply answers the call id, with ans or err. fds are the pools' of a
	// HelloAnswer: they are open during the call.
	Reply(id uint64, ans Answer, err error, fds []int)
	Event(ev Event)
	Lost(why error)
}

// Inside is the connection of an engine in the agent's own process: the same
// calls, answers, limits and rules as over the socket, with no bytes, no system
// call and no goroutine between.
type Inside struct {
	s    *Server
	c    *conn
	peer Peer
}

// Inside connects an engine of this process.
func (s *Server) Inside(p Peer) (*Inside, error) {
	s.mu.Lock()
	if len(s.conns) >= MaxConns {
		s.makeRoom()
	}
	if s.closed || len(s.conns) >= MaxConns {
		defer s.mu.Unlock()
		if s.closed {
			return nil, fault.New(fault.PeerLost, "the agent is closed")
		}
		return nil, fault.New(fault.Busy, "%d connections, at most %d", len(s.conns), MaxConns)
	}
	// What a connection inside was given is out of reach when its owner says so
	// (Unmapped), not when a process exits: to the agent it is a process.
	c := &conn{id: s.cfg.NextConn(), cred: Cred{Process: s.procs.number()}, calls: map[uint64]kv.CallID{}, spoke: true}
	c.inside = &Inside{s, c, p}
	s.conns[c.id] = c
	s.mu.Unlock()
	s.cfg.Handler.Connected(c.id, c.cred)
	return c.inside, nil
}

// Send makes a call; it may wait while the agent is busy. The request's slices
// are copied, since the caller may give up and use them again.
func (i *Inside) Send(id uint64, req Request) error {
	i.s.mu.Lock()
	gone := i.c.calls == nil
	i.s.mu.Unlock()
	if gone {
		return fault.New(fault.PeerLost, "the connection is closed")
	}
	return i.s.call(i.c, id, owned(req), nil)
}

// Close ends the connection; Lost is called before it returns. The second call
// is harmless.
func (i *Inside) Close() { i.s.drop(i, nil, true) }

// Unmapped says that nobody can touch the pools any more that came with Hello.
// After Close.
func (i *Inside) Unmapped() {
	i.s.mu.Lock()
	closed := i.s.closed
	i.s.mu.Unlock()
	if !closed {
		i.s.cfg.Handler.ProcessGone(i.c.cred.Process)
	}
}

// drop ends a connection inside; tell says whether the handler still listens.
func (s *Server) drop(i *Inside, why error, tell bool) {
	s.mu.Lock()
	lost, ok := s.forget(i.c)
	tell = tell && !s.closed
	s.mu.Unlock()
	if !ok {
		return
	}
	if tell {
		for _, call := range lost {
			s.cfg.Handler.Hangup(call)
		}
		s.cfg.Handler.Disconnected(i.c.id)
	}
	i.peer.Lost(why)
}

// owned returns req with slices that are nobody else's.
func owned(req Request) Request {
	switch m := req.(type) {
	case *Unstage:
		c := *m
		c.Slots = slices.Clone(m.Slots)
		return &c
	case *Submit:
		c := *m
		c.Chunks = slices.Clone(m.Chunks)
		return &c
	case *Find:
		c := *m
		c.Keys = slices.Clone(m.Keys)
		return &c
	case *Release:
		c := *m
		c.Chunks = slices.Clone(m.Chunks)
		return &c
	}
	return req
}

// ownedAnswer and ownedEvent do the same for what a core lends.
func ownedAnswer(ans Answer) Answer {
	switch m := ans.(type) {
	case *Slots:
		return &Slots{Slots: slices.Clone(m.Slots)}
	case *Claimed:
		c := *m
		c.Chunks, c.Shape = slices.Clone(m.Chunks), slices.Clone(m.Shape)
		return &c
	}
	return ans
}

func ownedEvent(ev Event) Event {
	if m, ok := ev.(*Granted); ok {
		return &Granted{Req: m.Req, Slots: slices.Clone(m.Slots)}
	}
	return ev
}
