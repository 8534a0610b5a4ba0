package localapi

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berthkv/berth/internal/fault"
)

// WriteTimeout bounds a write that makes no progress.
const WriteTimeout = 10 * time.Second

// ErrNotReading is why a pipe was closed whose other end does not read.
var ErrNotReading = errors.New("the other end does not read")

// Pipe carries frames over a unix stream socket, in both directions and at
// both ends. Sending never blocks: frames wait, up to MaxBacklog bytes, for
// the pipe's one writing goroutine. Only one goroutine may read.
//
// Lock: mu, a leaf; nothing is written under it.
type Pipe struct {
	conn    *net.UnixConn
	r       *bufio.Reader // of conn: most frames cost one read, not two
	header  [4]byte
	in      []byte        // the last frame read
	wake    chan struct{} // holds a token when there is something to do
	stopped chan struct{} // the writer is done

	mu    sync.Mutex
	out   []byte // frames that wait
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
	go p.write()
	return p
}

// Send queues one frame, which body appends. It errs if body does, when the
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
	p.signal()
	return nil
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
	var spare []byte
	for range p.wake {
		for {
			p.mu.Lock()
			if p.state == pipeClosed {
				p.mu.Unlock()
				return
			}
			b, fds, state := p.out, p.fds, p.state
			p.out, p.fds = spare[:0], nil
			p.mu.Unlock()
			if len(b) == 0 {
				spare = b
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
			if spare = b; cap(spare) > keepBuffer {
				spare = nil
			}
		}
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
