package localapi

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berthkv/berth/internal/fault"
)

// WriteTimeout bounds a write that makes no progress.
const WriteTimeout = 10 * time.Second

// ErrNotReading is why a pipe was closed whose other end does not read.
var ErrNotReading = errors.New("the other end does not read")

// Pipe carries frames over a unix stream socket, in both directions and at
// both ends. Sending never blocks: the sender writes what the socket takes at
// once; the rest waits, up to MaxBacklog bytes, for the pipe's one writing
// goroutine. Only one goroutine may read.
//
// Lock: mu, a leaf; nothing is written under it.
type Pipe struct {
	conn    *net.UnixConn
	raw     syscall.RawConn
	r       *bufio.Reader // of conn: most frames cost one read, not two
	header  [4]byte
	in      []byte        // the last frame read
	wake    chan struct{} // holds a token when there is something to do
	stopped chan struct{} // the writer is done

	// try writes what is in tryB, without waiting; owned by who made busy true.
	try    func(fd uintptr) bool
	tryB   []byte
	tryN   int
	tryErr error

	mu    sync.Mutex
	busy  bool   // a Send writes, and signals the writer if anything is left to do
	rest  []byte // what it has left; goes before out
	out   []byte // frames that wait
	spare []byte // a buffer to swap with out
	fds   []attachment
	state pipeState
	why   error // first reason to stop, but for an orderly close
}

// attachment is descriptors that go with the byte at an offset of out.
type attachment struct {
	at  int
	fds []int
}

type pipeState uint8

const (
	pipeOpen     pipeState = iota
	pipeFlushing           // what waits is written, then the socket is closed
	pipeClosed             // what waits is dropped
)

// NewPipe takes conn over.
func NewPipe(conn *net.UnixConn) *Pipe {
	p := &Pipe{conn: conn, r: bufio.NewReader(conn), wake: make(chan struct{}, 1), stopped: make(chan struct{})}
	p.raw, _ = conn.SyscallConn() // fails only without a connection, which the reader reports
	p.try = func(fd uintptr) bool {
		for {
			p.tryN, p.tryErr = syscall.Write(int(fd), p.tryB)
			if !errors.Is(p.tryErr, syscall.EINTR) {
				return true
			}
		}
	}
	go p.write()
	return p
}

// Send writes or queues one frame, which body appends. It errs if body does, when the
// frame is too large, with fault.PeerLost when the pipe is closed, and with
// fault.Busy when more than MaxBacklog would wait. The fds must stay open as
// long as the pipe; the peer gets its own.
func (p *Pipe) Send(body func([]byte) ([]byte, error), fds ...int) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.state != pipeOpen {
		return fault.New(fault.PeerLost, "the connection is closed")
	}
	out, err := appendFrame(p.out, body)
	if err != nil {
		return err
	}
	if len(out) > MaxBacklog {
		return fault.New(fault.Busy, "%d bytes wait to be read, at most %d", len(out), MaxBacklog)
	}
	if len(fds) > 0 {
		p.fds = append(p.fds, attachment{len(p.out), fds})
	}
	p.out = out
	p.pump()
	return nil
}

// pump writes what waits, as far as that does not block, and leaves the rest to
// the writer. It needs mu, and gives it up while it writes.
func (p *Pipe) pump() {
	switch {
	case p.busy: // who writes looks again
		return
	case p.rest != nil || len(p.fds) > 0: // the writer has begun, or must: it passes descriptors
		p.signal()
		return
	}
	p.busy = true
	p.tryB, p.out, p.spare = p.out, p.spare[:0], nil
	p.tryN, p.tryErr = 0, nil
	p.mu.Unlock()
	err := p.raw.Write(p.try)
	p.mu.Lock()
	p.busy = false
	b, n := p.tryB, max(p.tryN, 0)
	p.tryB = nil
	if err == nil && !errors.Is(p.tryErr, syscall.EAGAIN) {
		err = p.tryErr
	}
	switch {
	case err != nil:
		p.stop(err)
		return
	case n < len(b):
		p.rest = b[n:]
	case cap(b) <= keepBuffer:
		p.spare = b
	}
	if p.rest != nil || len(p.out) > 0 || p.state != pipeOpen {
		p.signal()
	}
}

// Flush closes the pipe after what waits has been written. It does not wait.
func (p *Pipe) Flush() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.state == pipeOpen {
		p.state = pipeFlushing
		p.conn.SetReadDeadline(time.Unix(1, 0)) // the reader is done too
		p.signal()
	}
}

// Cut closes the pipe, whatever waits, and does not wait; the reader's call
// returns. why is what Wait shall return.
func (p *Pipe) Cut(why error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stop(why)
}

// Wait waits for a flush to end, at most WriteTimeout for each of its writes,
// and closes the pipe. For the reader, after Read has failed: it returns the
// reason, nil if the other end closed or this one did.
func (p *Pipe) Wait(err error) error {
	p.mu.Lock()
	if p.state == pipeOpen {
		if errors.Is(err, io.EOF) {
			err = nil
		}
		p.stop(err)
	}
	p.mu.Unlock()
	<-p.stopped
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.why
}

// stop needs mu.
func (p *Pipe) stop(why error) {
	if p.state == pipeClosed {
		return
	}
	p.state = pipeClosed
	if p.why == nil {
		p.why = why
	}
	p.conn.SetDeadline(time.Unix(1, 0)) // interrupts the reader and a write
	p.signal()
}

func (p *Pipe) signal() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// write is the writing goroutine. It alone closes the socket.
func (p *Pipe) write() {
	defer close(p.stopped)
	defer p.conn.Close()
	for range p.wake {
		for {
			b, fds, state := p.take()
			if state == pipeClosed {
				return
			}
			if len(b) == 0 {
				if state == pipeFlushing {
					return
				}
				break
			}
			if err := p.writeAll(b, fds); err != nil {
				if errors.Is(err, unix.EAGAIN) || isTimeout(err) {
					err = ErrNotReading
				}
				p.mu.Lock()
				p.stop(err)
				p.mu.Unlock()
				return
			}
			p.written()
		}
	}
}

// take returns what the writer has to write: nothing while a Send writes, which
// signals afterwards, and then nothing to flush either. What it returns stays in
// rest, so that no Send writes meanwhile.
func (p *Pipe) take() ([]byte, []attachment, pipeState) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.busy && p.state != pipeClosed {
		return nil, nil, pipeOpen
	}
	if p.rest != nil {
		return p.rest, nil, p.state // descriptors are only with what is in out
	}
	b, fds := p.out, p.fds
	if len(b) > 0 {
		p.rest, p.out, p.spare, p.fds = b, p.spare[:0], nil, nil
	}
	return b, fds, p.state
}

// written is called when all of rest has been.
func (p *Pipe) written() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if cap(p.rest) <= keepBuffer {
		p.spare = p.rest
	}
	p.rest = nil
	if p.state != pipeClosed {
		p.conn.SetWriteDeadline(time.Time{}) // an expired one would fail a later Send
	}
}

// keepBuffer is the most memory that an idle pipe keeps for each direction.
const keepBuffer = 1 << 20

// writeStep is written under one deadline, so that progress renews it.
const writeStep = 256 << 10

func (p *Pipe) writeAll(b []byte, fds []attachment) error {
	done := 0
	for done < len(b) {
		end := min(done+writeStep, len(b))
		var oob []byte
		if len(fds) > 0 {
			if at := fds[0].at; at == done {
				oob = unix.UnixRights(fds[0].fds...)
				fds = fds[1:]
			}
			if len(fds) > 0 {
				end = min(end, fds[0].at)
			}
		}
		if !p.renew() {
			return nil // closed meanwhile; write sees it
		}
		if oob == nil {
			n, err := p.conn.Write(b[done:end])
			if done += n; err != nil {
				return err
			}
			continue
		}
		n, _, err := p.conn.WriteMsgUnix(b[done:end], oob, nil)
		if done += n; err != nil {
			return err
		}
	}
	return nil
}

// renew sets the next write's deadline, unless the pipe was closed.
func (p *Pipe) renew() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.state == pipeClosed {
		return false
	}
	p.conn.SetWriteDeadline(time.Now().Add(WriteTimeout))
	return true
}

func isTimeout(err error) bool {
	var t interface{ Timeout() bool }
	return errors.As(err, &t) && t.Timeout()
}

// Read reads one frame, which is valid until the next Read. With oob it also
// stores there the control messages that come with the frame's first byte, and
// returns their length; only before the first Read without, which may read ahead.
// io.EOF is an end between frames.
func (p *Pipe) Read(oob []byte) (frame []byte, oobn int, err error) {
	got := 0
	if len(oob) > 0 {
		var flags int
		got, oobn, flags, _, err = p.conn.ReadMsgUnix(p.header[:], oob)
		if errors.Is(err, io.EOF) { // which net wraps here, and nowhere else
			err = io.EOF
		}
		if err != nil {
			return nil, 0, err
		}
		if flags&unix.MSG_CTRUNC != 0 {
			return nil, oobn, fmt.Errorf("more descriptors than the %d bytes for them hold", len(oob))
		}
	}
	if err := p.fill(p.header[got:], got > 0); err != nil {
		return nil, oobn, err
	}
	n := int(binary.BigEndian.Uint32(p.header[:]))
	if n == 0 || n > MaxFrame {
		return nil, oobn, fmt.Errorf("frame of %d bytes, at least 1 and at most %d", n, MaxFrame)
	}
	if cap(p.in) > keepBuffer {
		p.in = nil
	}
	// The buffer grows with what comes, not with what was announced.
	p.in = p.in[:0]
	for len(p.in) < n {
		have := len(p.in)
		end := min(n, max(cap(p.in), 2*have, 64<<10))
		if cap(p.in) < end {
			p.in = append(make([]byte, 0, end), p.in...)
		}
		p.in = p.in[:end]
		if err := p.fill(p.in[have:], true); err != nil {
			return nil, oobn, err
		}
	}
	return p.in, oobn, nil
}

// fill reads all of b; within says that a frame has begun before it.
func (p *Pipe) fill(b []byte, within bool) error {
	_, err := io.ReadFull(p.r, b)
	if within && err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return err
}

// Expect bounds the time until the next bytes come; 0 is no bound.
func (p *Pipe) Expect(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.state != pipeOpen {
		return
	}
	if d == 0 {
		p.conn.SetReadDeadline(time.Time{})
		return
	}
	p.conn.SetReadDeadline(time.Now().Add(d))
}
