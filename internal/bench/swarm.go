package bench

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/wire"
)

// swarm is the load generator of the control benchmark: connections that ask a
// receiver in LMCache's dialect, all served by the goroutine that calls pairs.
//
// It shares two cores with what it measures, so it does as little as a client
// can: no goroutine a connection, a poll for as many answers as have come, and
// messages that were encoded before, in which only the numbers change. Every
// answer is decoded and checked.
type swarm struct {
	name  string
	poll  int // epoll
	conns []*asker
	pair  int // number of the next: names are never used twice
	event []unix.EpollEvent
}

// asker is one connection. It asks for room for a pair, gives it back, and is
// free for the next.
type asker struct {
	file   *os.File // owns fd
	fd     int
	in     []byte // has come; not a whole message yet
	alloc  stencil
	cancel stencil

	i      int  // of the pair
	giving bool // waits for the cancel's answer, not the request's
}

// answerTimeout bounds one answer of a receiver.
const answerTimeout = 30 * time.Second

// dialSwarm connects. It sends no heartbeats: a stopped peer would miss them.
func dialSwarm(ctx context.Context, name, addr string, n, keys int) (_ *swarm, err error) {
	s := &swarm{name: name, event: make([]unix.EpollEvent, n)}
	if s.poll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	for i := range n {
		a, err := dialAsker(ctx, addr, fmt.Sprintf("bench-to-%s#%d", addr, i))
		if err == nil {
			s.conns = append(s.conns, a)
			a.alloc, a.cancel, err = stencils(keys)
		}
		if err == nil {
			err = unix.EpollCtl(s.poll, unix.EPOLL_CTL_ADD, a.fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(i)})
		}
		if err != nil {
			s.close()
			return nil, fmt.Errorf("%s at %s: %w", name, addr, err)
		}
	}
	return s, nil
}

func (s *swarm) close() {
	for _, a := range s.conns {
		a.file.Close()
	}
	unix.Close(s.poll)
}

// dialAsker connects a DEALER of ZMTP 3.0, which is never asked for a sign of
// life.
func dialAsker(ctx context.Context, addr, identity string) (*asker, error) {
	var d net.Dialer
	nc, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	defer nc.Close() // what is kept is a duplicate
	stop := context.AfterFunc(ctx, func() { nc.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	var greeting [64]byte
	copy(greeting[:], "\xff\x00\x00\x00\x00\x00\x00\x00\x00\x7f\x03\x00NULL")
	ready := []byte("\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity")
	ready = append(binary.BigEndian.AppendUint32(ready, uint32(len(identity))), identity...)
	if _, err := nc.Write(append(append(greeting[:], 4, byte(len(ready))), ready...)); err != nil {
		return nil, err
	}
	// The peer's greeting and its READY, a short command.
	if _, err := io.ReadFull(nc, greeting[:]); err != nil {
		return nil, err
	}
	var head [2]byte
	if _, err := io.ReadFull(nc, head[:]); err != nil {
		return nil, err
	}
	theirs := make([]byte, head[1])
	if _, err := io.ReadFull(nc, theirs); err != nil {
		return nil, err
	}
	if head[0] != 4 || !bytes.HasPrefix(theirs, []byte("\x05READY")) {
		return nil, fmt.Errorf("no READY but %q", theirs)
	}
	f, err := nc.(*net.TCPConn).File()
	if err != nil {
		return nil, err
	}
	a := &asker{file: f, fd: int(f.Fd())} // File made it blocking, and for both
	return a, unix.SetNonblock(a.fd, true)
}

// pairs makes count pairs over so many of the connections.
func (s *swarm) pairs(ctx context.Context, clients, keys, count int, arrivals []time.Duration) (timing, error) {
	t := timing{begun: make([]time.Time, count), latency: make([]time.Duration, count)}
	free := append([]*asker(nil), s.conns[:clients]...)
	first := s.pair
	s.pair += count
	start := time.Now()
	for next, done := 0, 0; done < count; {
		now := time.Now()
		for ; next < count && len(free) > 0; next++ {
			t.begun[next] = now
			if arrivals != nil {
				if t.begun[next] = start.Add(arrivals[next]); t.begun[next].After(now) {
					break
				}
			}
			a := free[len(free)-1]
			free = free[:len(free)-1]
			a.i = next
			if err := a.send(a.alloc, first+next); err != nil {
				return t, fmt.Errorf("%s: %w", s.name, err)
			}
		}
		until := now.Add(answerTimeout)
		if arrivals != nil && next < count && len(free) > 0 {
			until = t.begun[next]
		}
		ready, err := s.wait(ctx, until)
		if err != nil {
			return t, err
		}
		if len(ready) == 0 && len(free) < clients && until.Sub(now) >= answerTimeout {
			return t, fmt.Errorf("%s: no answer within %v", s.name, answerTimeout)
		}
		for _, e := range ready {
			a := s.conns[e.Fd]
			got, err := a.answer()
			switch {
			case err != nil:
				return t, fmt.Errorf("%s: %w", s.name, err)
			case got == nil: // not whole yet
			case a.giving:
				a.giving = false
				free = append(free, a)
				done++
			default:
				t.latency[a.i] = time.Since(t.begun[a.i])
				if err := granted(got, keys); err != nil {
					return t, fmt.Errorf("%s %w", s.name, err)
				}
				a.giving = true
				if err := a.send(a.cancel, first+a.i); err != nil {
					return t, fmt.Errorf("%s: %w", s.name, err)
				}
			}
		}
	}
	t.elapsed = time.Since(start)
	return t, nil
}

// wait returns the connections with something to read, or none when the time has
// come. It looks at ctx now and then.
func (s *swarm) wait(ctx context.Context, until time.Time) ([]unix.EpollEvent, error) {
	for {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		left := time.Until(until)
		patience := max(0, min(int(left/time.Millisecond), 50))
		if patience == 0 && left > 0 { // epoll's unit is too coarse
			ts := unix.NsecToTimespec(int64(left))
			if _, err := unix.Ppoll([]unix.PollFd{{Fd: int32(s.poll), Events: unix.POLLIN}}, &ts, nil); err != nil && !errors.Is(err, unix.EINTR) {
				return nil, err
			}
		}
		n, err := unix.EpollWait(s.poll, s.event, patience)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return nil, err
		case n > 0 || left <= 0:
			return s.event[:n], nil
		}
	}
}

// send sends the message of a pair. One is under way at a time, so that there is
// always room for it.
func (a *asker) send(m stencil, pair int) error {
	m.number(pair)
	n, err := unix.Write(a.fd, m.b)
	if err == nil && n < len(m.b) {
		err = io.ErrShortWrite
	}
	return err
}

// answer reads what has come and returns the message once it is whole.
func (a *asker) answer() (*msg.AllocResponse, error) {
	have := len(a.in)
	if cap(a.in)-have < 2048 {
		a.in = append(make([]byte, 0, 2*cap(a.in)+4096), a.in...)
	}
	n, err := unix.Read(a.fd, a.in[have:cap(a.in)])
	switch {
	case errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR):
		return nil, nil
	case err != nil:
		return nil, err
	case n == 0:
		return nil, io.ErrUnexpectedEOF
	}
	a.in = a.in[:have+n]
	for b := a.in; len(b) >= 2; {
		flags, size, head := b[0], uint64(b[1]), 2
		if flags&2 != 0 {
			if len(b) < 9 {
				return nil, nil
			}
			size, head = binary.BigEndian.Uint64(b[1:]), 9
		}
		if uint64(len(b)-head) < size {
			return nil, nil
		}
		body := b[head : head+int(size)]
		if b = b[head+int(size):]; flags&1 != 0 {
			continue
		}
		if len(b) > 0 {
			return nil, fmt.Errorf("%d bytes that nobody asked for", len(b))
		}
		m, err := wire.Decode(body)
		if err != nil {
			return nil, err
		}
		got, ok := m.(*msg.AllocResponse)
		if !ok {
			return nil, fmt.Errorf("%T is no answer", m)
		}
		a.in = a.in[:0]
		return got, nil
	}
	return nil, nil
}

// granted errs unless every key has its slot.
func granted(a *msg.AllocResponse, keys int) error {
	if len(a.RemoteIndexes) != keys {
		return fmt.Errorf("answers a request of %d keys with %v", keys, a.RemoteIndexes)
	}
	for _, slot := range a.RemoteIndexes {
		if slot < 0 {
			return fmt.Errorf("refuses a request of %d keys", keys)
		}
	}
	return nil
}

// stencil is an encoded message in which the numbers of a pair's names are
// written anew.
type stencil struct {
	b  []byte
	at []int // of the digits: the request's, then each key's
}

// digits of a number, in hex.
const digits = 16

func appendDigits(b []byte, n uint64) []byte { return fmt.Appendf(b, "%0*x", digits, n) }

// number makes it the message of that pair.
func (s stencil) number(pair int) {
	for j, at := range s.at {
		n := uint64(pair)<<12 | uint64(j)
		for k := digits - 1; k >= 0; k-- {
			s.b[at+k] = "0123456789abcdef"[n&15]
			n >>= 4
		}
	}
}

// stencils makes the two messages of a pair.
func stencils(keys int) (alloc, cancel stencil, err error) {
	const sample = 0xa5a5a5a5 // a pair whose digits are nowhere else in them
	names := make([]string, keys)
	for j := range names {
		names[j] = fmt.Sprintf("m@1@0@%s@bfloat16", appendDigits(nil, sample<<12|uint64(j+1)))
	}
	req := "b" + string(appendDigits(nil, sample<<12))
	cut := func(m msg.Message) (s stencil, err error) {
		payload, err := wire.Append(nil, m)
		if err != nil {
			return s, err
		}
		s.b = []byte{1, 0, 2} // the empty frame, and the payload's, a long one
		s.b = append(binary.BigEndian.AppendUint64(s.b, uint64(len(payload))), payload...)
		for j := range keys + 1 {
			s.at = append(s.at, bytes.Index(s.b, appendDigits(nil, sample<<12|uint64(j))))
		}
		return s, nil
	}
	alloc, err = cut(&msg.AllocRequest{Keys: names, Fmt: kv.Format2LTD, Shape: controlShape, DType: "bfloat16",
		LastChunkToks: chunkTokens, ReqID: req, TotalChunks: int64(keys)})
	if err == nil {
		cancel, err = cut(&msg.CancelNotif{ReqID: req, Keys: names})
	}
	return alloc, cancel, err
}
