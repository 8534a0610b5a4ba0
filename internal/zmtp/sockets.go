package zmtp

import (
	"context"
	"net/netip"
)

// Router is a listening ROUTER socket; its peers are DEALER, REQ and ROUTER sockets.
type Router struct{ *Listener }

// ListenRouter listens on addr ("host:port", port 0: any free one). ctx bounds the call only; Close ends the socket.
func ListenRouter(ctx context.Context, addr string, handler Handler, opts Options) (*Router, error) {
	l, err := listen(ctx, typeRouter, addr, handler, opts)
	if err != nil {
		return nil, err
	}
	return &Router{l}, nil
}

// Send queues one message for a connection, copying it; it never blocks. On nil the message goes out in order unless the
// connection is lost. Errors: ErrWouldBlock, ErrGone, *LimitError.
func (r *Router) Send(id ConnID, frames ...[]byte) error { return r.send(id, frames) }

// SendWait is Send that waits for room until ctx ends or the connection is gone.
func (r *Router) SendWait(ctx context.Context, id ConnID, frames ...[]byte) error {
	return r.sendWait(ctx, id, frames)
}

// Pull is a listening PULL socket; its peers are PUSH sockets. Each is read by a goroutine of its own, so that none waits for
// another.
type Pull struct{ *Listener }

// ListenPull is ListenRouter for a PULL socket.
func ListenPull(ctx context.Context, addr string, handler Handler, opts Options) (*Pull, error) {
	l, err := listen(ctx, typePull, addr, handler, opts)
	if err != nil {
		return nil, err
	}
	return &Pull{l}, nil
}

// Request is one message to a Rep, without its envelope.
type Request struct {
	Conn   ConnID
	Remote netip.AddrPort
	Frames [][]byte // may be none; they belong to the Responder
}

// Responder makes the answer to a request. Calls for one connection come one after the other, for different ones at the same
// time. ctx ends when the socket closes. No frames are sent as one empty frame: a REQ peer without an answer would be
// stuck.
type Responder func(ctx context.Context, req Request) [][]byte

// Rep is a listening REP socket: each message, whatever is in it, gets one answer, in order. Its peers are REQ and DEALER sockets.
type Rep struct{ *Listener }

// ListenRep is ListenRouter for a REP socket.
func ListenRep(ctx context.Context, addr string, respond Responder, opts Options) (*Rep, error) {
	r := &Rep{}
	ready := make(chan struct{})
	l, err := listen(ctx, typeRep, addr, func(e Event) {
		<-ready
		if e.Kind == Message {
			r.answer(e, respond)
		}
	}, opts)
	if err != nil {
		return nil, err
	}
	r.Listener = l
	close(ready)
	return r, nil
}

// answer sends the response with the envelope of the request: all up to the first empty frame. A message without an empty
// frame has no envelope, and neither has its answer.
func (r *Rep) answer(e Event, respond Responder) {
	var envelope [][]byte
	body := e.Frames
	for i, f := range e.Frames {
		if len(f) == 0 {
			envelope, body = e.Frames[:i+1:i+1], e.Frames[i+1:]
			break
		}
	}
	reply := respond(r.ctx, Request{Conn: e.Conn, Remote: e.Remote, Frames: body})
	if len(reply) == 0 {
		reply = [][]byte{{}}
	}
	// A peer that sends without reading waits here for its own answers, until WriteTimeout ends it.
	if err := r.sendWait(r.ctx, e.Conn, append(envelope, reply...)); err != nil {
		r.log.warn("answer not sent", "remote", e.Remote, "err", err)
		r.CloseConn(e.Conn)
	}
}
