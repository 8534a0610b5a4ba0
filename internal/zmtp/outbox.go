package zmtp

import (
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

const (
	// burst: a Send that comes sooner than this after the last write leaves its bytes to the writer goroutine, which then
	// finds those of the next Sends too. A single request or answer goes out at once.
	burst = 5 * time.Microsecond
	// keepBuffer is the largest buffer kept for reuse; one that a big message has grown is given back.
	keepBuffer = 64 << 10
	// writePiece is what one write deadline is for.
	writePiece = 256 << 10
	// maxControl bounds the control frames that wait. A peer that reaches it floods us with PINGs and reads no answer; it
	// gets no more answers until it reads.
	maxControl = 64
)

// outbox is the sending side of a connection: bytes that wait for TCP, under a high-water mark.
//
// At any time at most one goroutine writes to the socket, and active is true while it does: a Send whose write cannot block,
// or else the writer. It takes control or msgs whole, so that frames of two messages never mix; rest is what is left of
// what it took. All else only appends.
type outbox struct {
	// constant
	tcp      *net.TCPConn
	raw      syscall.RawConn
	opts     *Options
	onError  func(error) // the connection cannot be written to any more; called without mu
	room     *gate       // opened when there may be room again
	tryWrite func(fd uintptr) bool

	waiting share // szMsgs; taken before mu, since it may cost another connection its outbox

	writers sync.WaitGroup // writer goroutines; Add under mu and only while state != outDead

	// owned by who made active true
	rest   []byte // still to be written
	tryN   int
	tryErr error

	mu      sync.Mutex
	state   outState
	active  bool
	control []byte // whole commands; they overtake msgs
	msgs    []byte // whole messages
	spare   []byte // a buffer to swap with
	last    time.Time

	nControl        int // commands in control
	nMsgs, szMsgs   int // messages not yet given to TCP and their encoded bytes: in msgs, and in what was taken
	nTaken, szTaken int // the part of these that was taken
}

type outState uint8

// open → flushing (close has begun: no more sends, what is queued goes out, then the write side is shut) → dead.
const (
	outOpen outState = iota
	outFlushing
	outDead
)

// newOutbox makes an outbox that holds back everything until release.
func newOutbox(tcp *net.TCPConn, opts *Options, room *gate, onError func(error)) (*outbox, error) {
	raw, err := tcp.SyscallConn()
	if err != nil {
		return nil, err
	}
	o := &outbox{tcp: tcp, raw: raw, opts: opts, onError: onError, room: room, active: true}
	o.tryWrite = func(fd uintptr) bool {
		for {
			o.tryN, o.tryErr = syscall.Write(int(fd), o.rest)
			if !errors.Is(o.tryErr, syscall.EINTR) {
				return true
			}
		}
	}
	return o, nil
}

// release starts sending: the handshake is through.
func (o *outbox) release() {
	o.mu.Lock()
	o.active = false
	o.pump(false)
}

// send queues one message, or writes it at once where that cannot block.
func (o *outbox) send(frames [][]byte) error {
	size := encodedSize(frames)
	if err := o.checkLimits(frames, size); err != nil {
		return err
	}
	if !o.waiting.take(int64(size), nil) {
		return ErrWouldBlock
	}
	o.mu.Lock()
	if err := o.roomFor(size); err != nil {
		o.mu.Unlock()
		o.waiting.give(int64(size))
		return err
	}
	o.enqueue(frames, size)
	return nil
}

// sendWait is send that waits for room.
func (o *outbox) sendWait(ctx context.Context, frames [][]byte) error {
	return o.room.retry(ctx, func() error { return o.send(frames) })
}

func (o *outbox) checkLimits(frames [][]byte, size int) error {
	if len(frames) == 0 {
		return protocolErrorf("message without a frame")
	}
	if len(frames) > o.opts.MaxFrames {
		return &LimitError{Option: "MaxFrames", Got: int64(len(frames)), Max: int64(o.opts.MaxFrames)}
	}
	if int64(size) <= min(o.opts.MaxFrame, o.opts.MaxMessage) {
		return nil
	}
	var sum int64
	for _, f := range frames {
		n := int64(len(f))
		if n > o.opts.MaxFrame {
			return &LimitError{Option: "MaxFrame", Got: n, Max: o.opts.MaxFrame}
		}
		sum += n
	}
	if sum > o.opts.MaxMessage {
		return &LimitError{Option: "MaxMessage", Got: sum, Max: o.opts.MaxMessage}
	}
	return nil
}

// roomFor is called with mu held.
func (o *outbox) roomFor(size int) error {
	if o.state != outOpen {
		return ErrGone
	}
	if o.nMsgs > 0 && (o.nMsgs >= o.opts.SendQueue || o.szMsgs+size > o.opts.SendQueueBytes) {
		return ErrWouldBlock
	}
	return nil
}

// enqueue is called with mu held and releases it.
func (o *outbox) enqueue(frames [][]byte, size int) {
	o.msgs = appendMessage(o.msgs, frames)
	o.nMsgs++
	o.szMsgs += size
	o.pump(true)
}

// sendControl queues a command made by appendTo, ahead of messages and outside their high-water mark.
func (o *outbox) sendControl(appendTo func([]byte) []byte) {
	o.mu.Lock()
	if o.state != outOpen || o.nControl >= maxControl {
		o.mu.Unlock()
		return
	}
	o.control = appendTo(o.control)
	o.nControl++
	o.pump(true)
}

// pump is called with mu held and releases it. It sees to it that somebody writes what is queued; with mayWrite the caller
// does so itself if that does not block.
func (o *outbox) pump(mayWrite bool) {
	if o.active || o.state == outDead || !o.takeLocked() {
		o.shutIfFlushed()
		o.mu.Unlock()
		return
	}
	o.active = true
	if !mayWrite || time.Since(o.last) < burst {
		o.startWriter()
		o.mu.Unlock()
		return
	}
	o.mu.Unlock()

	err := o.writeSome()
	o.mu.Lock()
	o.last = time.Now()
	if err == nil && (len(o.rest) > 0 || o.nextLocked()) {
		o.startWriter()
		o.mu.Unlock()
		return
	}
	o.active = false
	o.shutIfFlushed()
	o.mu.Unlock()
	if err != nil {
		o.onError(err)
	}
}

// startWriter is called with mu held and active true.
func (o *outbox) startWriter() {
	if o.state == outDead {
		o.active = false // the connection is over: there is nobody to write to
		return
	}
	o.writers.Add(1)
	go o.write()
}

// write is the writer goroutine: it ends when nothing is left.
func (o *outbox) write() {
	defer o.writers.Done()
	for {
		err := o.writeRest()
		o.mu.Lock()
		if err == nil && o.nextLocked() {
			o.mu.Unlock()
			continue
		}
		o.last = time.Now()
		o.active = false
		o.shutIfFlushed()
		o.mu.Unlock()
		if err != nil {
			o.onError(err)
		}
		return
	}
}

// writeSome writes what TCP takes of rest without blocking.
func (o *outbox) writeSome() error {
	if err := o.raw.Write(o.tryWrite); err != nil {
		return err
	}
	if o.tryErr != nil && !errors.Is(o.tryErr, syscall.EAGAIN) {
		return o.tryErr
	}
	o.rest = o.rest[max(o.tryN, 0):]
	return nil
}

// writeRest writes all of rest; the peer has WriteTimeout for each piece in which it must take at least one byte.
func (o *outbox) writeRest() error {
	if err := o.writeSome(); err != nil || len(o.rest) == 0 {
		return err
	}
	for len(o.rest) > 0 {
		if err := o.tcp.SetWriteDeadline(time.Now().Add(o.opts.WriteTimeout)); err != nil {
			return err
		}
		n, err := o.tcp.Write(o.rest[:min(len(o.rest), writePiece)])
		o.rest = o.rest[n:]
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded) && n == 0:
			return ErrStalled
		case err != nil && !errors.Is(err, os.ErrDeadlineExceeded):
			return err
		}
	}
	return o.tcp.SetWriteDeadline(time.Time{}) // an expired one would fail the next writeSome
}

// takeLocked makes rest the control frames if there are any, else the messages. It reports whether there is something.
func (o *outbox) takeLocked() bool {
	switch {
	case len(o.control) > 0:
		o.rest, o.control, o.nControl = o.control, nil, 0
	case len(o.msgs) > 0:
		o.rest, o.msgs, o.spare = o.msgs, o.spare[:0], o.msgs
		o.nTaken, o.szTaken = o.nMsgs, o.szMsgs
	default:
		return false
	}
	return true
}

// nextLocked is called when all of rest has been given to TCP: it makes room for new messages and takes what is next.
func (o *outbox) nextLocked() bool {
	o.nMsgs -= o.nTaken
	o.szMsgs -= o.szTaken
	o.waiting.give(int64(o.szTaken))
	o.nTaken, o.szTaken = 0, 0
	if cap(o.spare) > keepBuffer {
		o.spare = nil
	}
	o.room.open()
	return o.state != outDead && o.takeLocked()
}

// flush refuses further sends and shuts the write side once everything is out. It does not wait.
func (o *outbox) flush() {
	o.mu.Lock()
	if o.state == outOpen {
		o.state = outFlushing
		o.room.open()
		o.shutIfFlushed()
	}
	o.mu.Unlock()
}

// shutIfFlushed is called with mu held. Shutting a socket down does not block.
func (o *outbox) shutIfFlushed() {
	if o.state == outFlushing && !o.active && len(o.msgs) == 0 {
		_ = o.tcp.CloseWrite() // fails only on a connection that is gone, which its reader reports
	}
}

// kill refuses sends and lets the writer end. The socket must be closed too, so that a blocked write returns.
func (o *outbox) kill() {
	o.mu.Lock()
	o.state = outDead
	o.msgs, o.control, o.nControl = nil, nil, 0
	o.waiting.give(int64(o.szMsgs))
	o.nMsgs, o.szMsgs, o.nTaken, o.szTaken = 0, 0, 0, 0
	o.room.open()
	o.mu.Unlock()
}
