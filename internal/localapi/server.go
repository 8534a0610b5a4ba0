package localapi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
)

// Config is what a Server needs.
type Config struct {
	Path    string // of the socket
	Handler Handler
	// NextConn numbers connections; nil: from 1. It may be shared with other
	// endpoints of the process and is called from one goroutine.
	NextConn func() kv.ConnID
	// HelloTimeout bounds the time until a connection's first frame; 0: 10 s.
	HelloTimeout time.Duration
	Log          *slog.Logger // of connections that end badly; nil: none
}

// Server is the agent's end of the local API. It keeps no state of engines: it
// turns frames into calls of its Handler, and the calls of its owner into
// frames.
//
// Goroutines: one accepts; each connection has a reader, which owns it and
// calls the Handler, and a writer (Pipe); each process that was sent pools has
// a watcher.
//
// Lock: mu, above Pipe.mu. The Handler is never called under it.
type Server struct {
	// Constant.
	cfg      Config
	listener *net.UnixListener
	lock     *os.File
	lines    *rate.Limiter // of the log
	procs    *processes
	closing  chan struct{}
	readers  sync.WaitGroup // and the accepting goroutine
	close    sync.Once

	mu       sync.Mutex
	conns    map[kv.ConnID]*conn
	calls    map[kv.CallID]callOf
	nextCall kv.CallID
	closed   bool
}

// conn is one connection. The maps are guarded by Server.mu.
type conn struct {
	id    kv.ConnID
	pipe  *Pipe
	cred  Cred
	calls map[uint64]kv.CallID // unanswered, by the engine's id; nil: it is gone
	spoke bool                 // its first frame is there
	proc  *process             // nil: unknown

	inside *Inside // in place of pipe, for an engine of this process
}

// callOf is an unanswered call.
type callOf struct {
	conn *conn
	id   uint64 // the engine's
}

// Listen starts a server. The error names the path; that a live process has it
// is one.
func Listen(cfg Config) (*Server, error) {
	l, lock, err := listen(cfg.Path)
	if err != nil {
		return nil, err
	}
	if cfg.NextConn == nil {
		last := kv.ConnID(0)
		cfg.NextConn = func() kv.ConnID { last++; return last }
	}
	if cfg.HelloTimeout == 0 {
		cfg.HelloTimeout = 10 * time.Second
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	s := &Server{
		cfg: cfg, listener: l, lock: lock, lines: rate.NewLimiter(2, 20),
		procs:   newProcesses(cfg.Handler.ProcessGone),
		closing: make(chan struct{}),
		conns:   map[kv.ConnID]*conn{},
		calls:   map[kv.CallID]callOf{},
	}
	s.readers.Go(s.accept)
	return s, nil
}

// Path returns where the socket is.
func (s *Server) Path() string { return s.cfg.Path }

// warn logs, a few lines a second at most: engines may come and go at will.
func (s *Server) warn(text string, attrs ...slog.Attr) {
	if s.lines.Allow() {
		s.cfg.Log.LogAttrs(context.Background(), slog.LevelWarn, text, attrs...)
	}
}

// accept takes connections until the listener is closed.
func (s *Server) accept() {
	pause := time.NewTimer(0)
	defer pause.Stop()
	<-pause.C
	for {
		c, err := s.listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // out of descriptors: some may come free
			s.warn("local API: accept failed", slog.Any("why", err))
			pause.Reset(time.Second)
			select {
			case <-pause.C:
			case <-s.closing:
				return
			}
			continue
		}
		s.admit(c)
	}
}

// admit starts a connection. At the limit the oldest goes for it that has said
// nothing; where all have, it is closed itself.
func (s *Server) admit(uc *net.UnixConn) {
	c := &conn{id: s.cfg.NextConn(), calls: map[uint64]kv.CallID{}}
	var pidfd *os.File
	if c.cred, pidfd = peer(uc); pidfd != nil {
		c.proc = s.procs.connected(c.cred.PID, pidfd)
		c.cred.Process = c.proc.number
	}
	s.mu.Lock()
	if len(s.conns) >= MaxConns {
		s.makeRoom()
	}
	full := s.closed || len(s.conns) >= MaxConns
	if !full {
		c.pipe = NewPipe(uc)
		s.conns[c.id] = c
		s.readers.Go(func() { s.serve(c) })
	}
	s.mu.Unlock()
	if full {
		uc.Close()
		if c.proc != nil {
			s.procs.disconnected(c.proc)
		}
	}
}

// makeRoom ends the oldest connection that has said nothing, if there is one. It
// needs mu.
func (s *Server) makeRoom() {
	var oldest *conn
	for _, c := range s.conns {
		if !c.spoke && (oldest == nil || c.id < oldest.id) {
			oldest = c
		}
	}
	if oldest != nil {
		s.forget(oldest) // it has no calls
		oldest.pipe.Cut(fmt.Errorf("it said nothing, and there were %d connections", MaxConns))
	}
}

// serve is a connection's life.
func (s *Server) serve(c *conn) {
	h := s.cfg.Handler
	h.Connected(c.id, c.cred)
	c.pipe.Expect(s.cfg.HelloTimeout)
	why := c.pipe.Wait(s.read(c))

	s.mu.Lock()
	lost, _ := s.forget(c)
	s.mu.Unlock()

	if c.proc != nil {
		s.procs.disconnected(c.proc)
	}
	for _, call := range lost {
		h.Hangup(call)
	}
	if why != nil {
		s.warn("local API: connection lost", slog.Int("pid", c.cred.PID), slog.Any("why", why))
	}
	h.Disconnected(c.id)
}

// forget takes a connection out, and returns its unanswered calls; ok is false
// when it is out already. It needs mu.
func (s *Server) forget(c *conn) (lost []kv.CallID, ok bool) {
	if s.conns[c.id] != c {
		return nil, false
	}
	delete(s.conns, c.id)
	for _, call := range c.calls {
		lost = append(lost, call)
		delete(s.calls, call)
	}
	c.calls = nil
	return lost, true
}

// read handles frames until the connection ends, and says why it did.
func (s *Server) read(c *conn) error {
	for first := true; ; first = false {
		b, _, err := c.pipe.Read(nil)
		if err != nil {
			if first && isTimeout(err) {
				return fmt.Errorf("no frame within %s", s.cfg.HelloTimeout)
			}
			return err
		}
		if first {
			c.pipe.Expect(0)
			s.mu.Lock()
			c.spoke = true
			s.mu.Unlock()
		}
		if err := s.request(c, b); err != nil {
			return err
		}
	}
}

// request handles one frame. An error ends the connection.
func (s *Server) request(c *conn, b []byte) error {
	id, hasID, req, err := DecodeRequest(b)
	if !hasID {
		return fmt.Errorf("a request without id: %w", err)
	}
	return s.call(c, id, req, err)
}

// call hands a request to the handler, unless refusal, if not nil, or a limit
// is its answer.
func (s *Server) call(c *conn, id uint64, req Request, refusal error) error {
	call, err := s.register(c, id, refusal)
	if err != nil || call == 0 {
		return err
	}
	if h, ok := req.(*Hangup); ok {
		s.mu.Lock()
		given := c.calls[h.Call]
		s.mu.Unlock()
		if given != 0 && h.Call != id {
			s.cfg.Handler.Hangup(given)
		}
		s.Answer(call, &Done{})
		return nil
	}
	s.cfg.Handler.Request(c.id, call, req)
	return nil
}

// register numbers a call. 0 means that it was refused with an answer: for
// refusal, or because too many are unanswered.
func (s *Server) register(c *conn, id uint64, refusal error) (kv.CallID, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.calls == nil {
		return 0, fault.New(fault.PeerLost, "the connection is closed")
	}
	if _, twice := c.calls[id]; twice {
		return 0, fmt.Errorf("id %d of an unanswered call came again", id)
	}
	if refusal == nil && len(c.calls) >= MaxCalls {
		refusal = fault.New(fault.Busy, "%d unanswered calls, at most %d", len(c.calls), MaxCalls)
	}
	if refusal != nil {
		var f *fault.Error
		if !errors.As(refusal, &f) {
			f = fault.New(fault.Internal, "%s", refusal)
		}
		c.fail(id, f)
		return 0, nil
	}
	s.nextCall++
	c.calls[id] = s.nextCall
	s.calls[s.nextCall] = callOf{c, id}
	return s.nextCall, nil
}

// take ends a call; nil if it was answered or its connection is gone.
func (s *Server) take(call kv.CallID) (*conn, uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	of, ok := s.calls[call]
	if !ok {
		return nil, 0
	}
	delete(s.calls, call)
	delete(of.conn.calls, of.id)
	return of.conn, of.id
}

// Answer answers a call. Of a call that is answered or whose connection is
// gone, it does nothing, like Fail and SendPools. An answer over a limit
// becomes an error.
func (s *Server) Answer(call kv.CallID, ans Answer) {
	if c, id := s.take(call); c != nil {
		c.answer(id, ans)
	}
}

// Fail answers a call with an error.
func (s *Server) Fail(call kv.CallID, err *fault.Error) {
	if c, id := s.take(call); c != nil {
		c.fail(id, err)
	}
}

// SendPools answers a hello, with the pools' memfds in the order of ans.Pools.
// They must stay open until the server is closed. From now on the process is
// watched.
func (s *Server) SendPools(call kv.CallID, ans *HelloAnswer, fds []int) {
	c, id := s.take(call)
	if c == nil {
		return
	}
	if len(fds) > 0 && c.proc != nil && !s.procs.watch(c.proc) {
		c.fail(id, fault.New(fault.Busy, "%d processes have the pools, at most %d", maxProcesses, maxProcesses))
		return
	}
	c.answer(id, ans, fds...)
}

// send queues a frame; an engine that lets the queue fill up is cut off.
func (c *conn) send(body func([]byte) ([]byte, error), fds ...int) error {
	err := c.pipe.Send(body, fds...)
	if fault.CodeOf(err) == fault.Busy {
		c.pipe.Cut(ErrNotReading)
	}
	return err
}

func (c *conn) answer(id uint64, ans Answer, fds ...int) {
	if c.inside != nil {
		c.inside.peer.Reply(id, ownedAnswer(ans), nil, fds)
		return
	}
	err := c.send(func(b []byte) ([]byte, error) { return AppendAnswer(b, id, ans) }, fds...)
	switch fault.CodeOf(err) {
	case fault.TooLarge, fault.Internal: // this answer cannot be written
		c.fail(id, fault.New(fault.CodeOf(err), "the answer: %s", err))
	}
}

func (c *conn) fail(id uint64, err *fault.Error) {
	if c.inside != nil {
		c.inside.peer.Reply(id, nil, err, nil)
		return
	}
	c.send(func(b []byte) ([]byte, error) { return AppendError(b, id, err) })
}

// Emit tells an event on a connection; nothing happens when that is gone.
func (s *Server) Emit(id kv.ConnID, ev Event) {
	switch c := s.conn(id); {
	case c == nil:
	case c.inside != nil:
		c.inside.peer.Event(ownedEvent(ev))
	default:
		c.send(func(b []byte) ([]byte, error) { return AppendEvent(b, ev) })
	}
}

// CloseConn closes a connection after what was sent on it. Disconnected
// follows.
func (s *Server) CloseConn(id kv.ConnID) {
	switch c := s.conn(id); {
	case c == nil:
	case c.inside != nil:
		// Off the caller's goroutine, which may be the one that takes Disconnected.
		s.readers.Go(func() { s.drop(c.inside, nil, true) })
	default:
		c.pipe.Flush()
	}
}

func (s *Server) conn(id kv.ConnID) *conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.conns[id]
}

// closeGrace is how long Close waits for engines to read what was sent.
const closeGrace = time.Second

// cut closes every connection, whatever waits to be read.
func (s *Server) cut() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.conns {
		if c.inside == nil {
			c.pipe.Cut(nil)
		}
	}
}

// Close closes everything and waits; the Handler is not called after it. It
// must not be called from the Handler. The second call is harmless.
//
// The order: no new connections, then those there are, each after what was
// sent on it, then the watched processes (which a connection may still add),
// and last the lock, since the next server may start as soon as it is free.
func (s *Server) Close() error {
	var err error
	s.close.Do(func() {
		s.mu.Lock()
		s.closed = true
		var insides []*Inside
		for _, c := range s.conns {
			if c.inside != nil {
				insides = append(insides, c.inside)
			} else {
				c.pipe.Flush()
			}
		}
		s.mu.Unlock()
		for _, i := range insides {
			s.drop(i, errors.New("the agent is closed"), false)
		}
		close(s.closing)
		os.Remove(s.cfg.Path)
		err = s.listener.Close()
		impatient := time.AfterFunc(closeGrace, s.cut)
		s.readers.Wait()
		impatient.Stop()
		s.procs.close()
		s.lock.Close()
	})
	return err
}
