package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"runtime"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/berthkv/berth/internal/arena"
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
	"github.com/berthkv/berth/internal/link/shmlink"
	"github.com/berthkv/berth/internal/link/tcplink"
)

const (
	writeInflight  = 16        // chunks under way
	writeMemory    = 256 << 20 // of a pool: far more than any cache holds, as with real ones
	tcpConnections = 2         // as agents have by default
)

// copier moves n chunks of one pool into another, both of so many slots.
type copier interface {
	move(n int) error
	Close() error
}

// memory is that of two pools, in slots of any size that divides it.
type memory struct {
	dir           string
	staging, recv *arena.Pool
}

// pools are the two as slots of a size.
func (m *memory) pools(size int64) (staging, recv link.Pool) {
	return link.Pool{Bytes: m.staging.Bytes(), SlotBytes: size, FD: m.staging.FD()}, link.Pool{Bytes: m.recv.Bytes(), SlotBytes: size, FD: m.recv.FD()}
}

func newMemory(dir string, bytes int64) (*memory, error) {
	m := &memory{dir: dir}
	for _, p := range []**arena.Pool{&m.staging, &m.recv} {
		var err error
		if *p, err = arena.New(arena.Config{Name: "benchmark pool", Slots: 1, SlotBytes: bytes, Writable: p == &m.staging}); err != nil {
			return nil, errors.Join(err, m.Close())
		}
		clear((*p).Bytes())
	}
	return m, nil
}

func (m *memory) Close() error {
	var errs []error
	for _, p := range []*arena.Pool{m.staging, m.recv} {
		if p != nil {
			errs = append(errs, p.Close())
		}
	}
	return errors.Join(errs...)
}

// writes measures each link beside the best that the machine can do with the same
// memory and as many threads or connections.
func (t Transfer) writes(r *run) error {
	largest := t.Sizes[0]
	for _, size := range t.Sizes {
		largest = max(largest, size)
	}
	bytes := max(min(writeMemory, t.Volume), writeInflight*largest)
	f, err := newMemory(r.dir, (bytes+largest-1)/largest*largest)
	if err != nil {
		return err
	}
	defer f.Close()
	for _, link := range []string{"shm", "tcp"} {
		for _, size := range t.Sizes {
			if err := t.write(r, f, link, size); err != nil {
				return fmt.Errorf("%s, chunks of %d bytes: %w", link, size, err)
			}
		}
	}
	return nil
}

func (t Transfer) write(r *run, f *memory, name string, size int64) error {
	best, what := "raw sockets", fmt.Sprintf("tcp write, %d connections", tcpConnections)
	if name == "shm" {
		best, what = "memcpy", fmt.Sprintf("shm write, %d threads", copiers())
	}
	ours, err := f.link(name, size)
	if err != nil {
		return err
	}
	defer ours.Close()
	theirs, err := f.raw(name, size)
	if err != nil {
		return err
	}
	defer theirs.Close()
	n := int(max(t.Volume/size, 1))
	turn := func(c copier) func() (sample, error) {
		return func() (sample, error) {
			cpu, start := cpuTime(), time.Now()
			err := c.move(n)
			gb := float64(int64(n)*size) / 1e9
			return sample{figures: []float64{gb / time.Since(start).Seconds(), (cpuTime() - cpu).Seconds() / gb}}, err
		}
	}
	_, err = r.compare(fmt.Sprintf("%s, %d KiB", what, size>>10), "generations and fences on, checksums off",
		[]metric{{"rate", "GB/s"}, {"CPU", "s/GB"}}, side{"berth", nil, turn(ours)}, side{best, nil, turn(theirs)})
	return err
}

func copiers() int { return min(runtime.NumCPU(), 4) }

// cpuTime is what this process has spent.
func cpuTime() time.Duration {
	var u unix.Rusage
	unix.Getrusage(unix.RUSAGE_SELF, &u) // cannot fail with these arguments
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// linkCopier moves chunks over a link, writeInflight of them under way.
type linkCopier struct {
	recv   link.Receiver
	send   link.Sender
	conn   link.Conn
	bytes  int64
	free   []kv.SlotID
	gen    kv.Generation
	landed chan []link.Landing
	fenced chan kv.SlotID
	failed chan error
	undo   []func() error
}

var benchPeer = link.Peer{Incarnation: kv.Incarnation{1}, Self: kv.Incarnation{2}, Secret: kv.Secret{3}}

func (m *memory) link(name string, size int64) (c *linkCopier, err error) {
	staging, recv := m.pools(size)
	c = &linkCopier{bytes: size, landed: make(chan []link.Landing, writeInflight), fenced: make(chan kv.SlotID, writeInflight), failed: make(chan error, 1)}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Close())
		}
	}()
	for i := range recv.Slots() {
		c.free = append(c.free, kv.SlotID(i))
	}
	if err := c.receiver(name, filepath.Join(m.dir, "write.shm"), recv); err != nil {
		return c, err
	}
	c.recv.Allow(benchPeer.Self, benchPeer.Secret)
	if err := c.sender(name, m.staging, staging); err != nil {
		return c, err
	}
	peer := benchPeer
	peer.Addr = c.recv.Offer()
	ctx, cancel := context.WithTimeout(context.Background(), answerTimeout)
	defer cancel()
	c.conn, err = c.send.Connect(ctx, peer, link.SenderEvents{Sent: func([]link.WriteID) {}, Down: c.fail, Lost: func(_ []link.WriteID, err error) { c.fail(err) }})
	return c, err
}

func (c *linkCopier) receiver(name, path string, pool link.Pool) (err error) {
	ev := link.ReceiverEvents{
		Landed: func(l []link.Landing) { c.landed <- l },
		Failed: func(_ kv.SlotID, _ kv.Generation, err *fault.Error) { c.fail(err) },
		Fenced: func(_ kv.Generation, slots []kv.SlotID) {
			for _, s := range slots {
				c.fenced <- s
			}
		},
		Lost: func(_ kv.Incarnation, err error) { c.fail(err) },
		Late: func(s kv.SlotID, g kv.Generation) {
			c.fail(fmt.Errorf("slot %d got a late chunk of generation %d", s, g))
		},
	}
	if name == "shm" {
		c.recv, err = shmlink.NewReceiver(shmlink.ReceiverConfig{Incarnation: benchPeer.Incarnation, Pool: pool, Path: path, Copiers: copiers()}, ev)
	} else {
		c.recv, err = tcplink.NewReceiver(tcplink.ReceiverConfig{Incarnation: benchPeer.Incarnation, Pool: pool, Listen: "127.0.0.1:0"}, ev)
	}
	return err
}

func (c *linkCopier) sender(name string, memory *arena.Pool, pool link.Pool) error {
	if name == "tcp" {
		c.send = tcplink.NewSender(tcplink.SenderConfig{Pool: pool, Connections: tcpConnections})
		return nil
	}
	gens, err := arena.NewGenerations(pool.Slots())
	if err != nil {
		return err
	}
	c.undo = append(c.undo, gens.Close)
	s := shmlink.SenderConfig{Slots: pool.Slots(), SlotBytes: pool.SlotBytes}
	for _, d := range []struct {
		open func() (int, error)
		fd   *int
	}{{memory.ReadOnlyFD, &s.Staging}, {gens.ReadOnlyFD, &s.Generations}} {
		fd, err := d.open()
		if err != nil {
			return err
		}
		c.undo = append(c.undo, func() error { return unix.Close(fd) })
		*d.fd = fd
	}
	c.send = shmlink.NewSender(s)
	return nil
}

// fail keeps the first failure. Closing is none that anybody reads.
func (c *linkCopier) fail(err error) {
	select {
	case c.failed <- err:
	default:
	}
}

func (c *linkCopier) start() {
	s := c.free[0]
	c.free = c.free[1:]
	c.gen++
	c.recv.Open(benchPeer.Self, c.gen, []kv.SlotID{s})
	if c.send.Caps().Mode == link.Pull {
		c.recv.Pull(benchPeer.Self, c.gen, []link.PullItem{{Slot: s, Src: s, Bytes: c.bytes}})
	} else {
		c.conn.Write([]link.Write{{ID: link.WriteID(s), Src: s, Dst: s, Generation: c.gen, Bytes: c.bytes}})
	}
}

func (c *linkCopier) move(n int) error {
	started := min(n, writeInflight)
	for range started {
		c.start()
	}
	patience := time.NewTimer(turnTimeout)
	defer patience.Stop()
	for done := 0; done < n; {
		select {
		case landed := <-c.landed:
			for _, l := range landed {
				done++
				c.conn.Settle([]link.WriteID{link.WriteID(l.Slot)})
				c.recv.Revoke(l.Generation, []kv.SlotID{l.Slot})
				c.free = append(c.free, <-c.fenced) // soon: nobody fills it any more
				if started < n {
					started++
					c.start()
				}
			}
		case err := <-c.failed:
			return err
		case <-patience.C:
			return fmt.Errorf("%d of %d chunks came within %v", done, n, turnTimeout)
		}
	}
	return nil
}

func (c *linkCopier) Close() error {
	var errs []error
	if c.conn != nil {
		errs = append(errs, c.conn.Close())
	}
	if c.send != nil {
		errs = append(errs, c.send.Close())
	}
	if c.recv != nil {
		errs = append(errs, c.recv.Close())
	}
	for _, f := range c.undo {
		errs = append(errs, f())
	}
	return errors.Join(errs...)
}

// raw is the best without a link: memcpy with as many threads, or a plain loop
// over as many connections, one write a chunk, read in whole into its slot.
func (m *memory) raw(name string, size int64) (copier, error) {
	staging, recv := m.pools(size)
	if name == "shm" {
		return memcpy{staging, recv}, nil
	}
	s := &sockets{staging: staging, recv: recv}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer l.Close()
	for range tcpConnections {
		out, err := net.DialTimeout("tcp", l.Addr().String(), answerTimeout)
		if err != nil {
			return nil, errors.Join(err, s.Close())
		}
		s.conns = append(s.conns, out)
		in, err := l.Accept()
		if err != nil {
			return nil, errors.Join(err, s.Close())
		}
		s.conns = append(s.conns, in)
	}
	return s, nil
}

type memcpy struct{ staging, recv link.Pool }

func (m memcpy) move(n int) error {
	var g errgroup.Group
	threads, slots := copiers(), m.recv.Slots()
	for c := range threads {
		g.Go(func() error {
			for i := c; i < n; i += threads {
				s := kv.SlotID(i % slots)
				copy(m.recv.Slot(s), m.staging.Slot(s))
			}
			return nil
		})
	}
	return g.Wait()
}

func (memcpy) Close() error { return nil }

type sockets struct {
	staging, recv link.Pool
	conns         []net.Conn // out and in by turns
}

func (s *sockets) move(n int) error {
	var g errgroup.Group
	slots, pairs := s.recv.Slots(), len(s.conns)/2
	for c := range pairs {
		out, in := s.conns[2*c], s.conns[2*c+1]
		out.SetDeadline(time.Now().Add(turnTimeout))
		in.SetDeadline(time.Now().Add(turnTimeout))
		g.Go(func() error {
			for i := c; i < n; i += pairs {
				if _, err := out.Write(s.staging.Slot(kv.SlotID(i % slots))); err != nil {
					return err
				}
			}
			return nil
		})
		g.Go(func() error {
			for i := c; i < n; i += pairs {
				if _, err := io.ReadFull(in, s.recv.Slot(kv.SlotID(i%slots))); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return g.Wait()
}

func (s *sockets) Close() error {
	var errs []error
	for _, c := range s.conns {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}
