package chaos

import (
	"container/heap"
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// namespaces is a network namespace for each node. A node's one interface is a
// TUN device whose packets this process carries to the other nodes', so that it
// can delay, lose and cut as it likes, in each direction by itself, and the
// kernels' TCP at both ends has to cope. Nothing of it outlives this process.
type namespaces struct {
	wire *wire
	used byte

	mu    sync.Mutex
	ports map[netip.Addr]*port
}

const (
	tunMTU    = 9000
	portQueue = 8192 // packets on their way to a node; more are dropped, as a router does
	tunName   = "chaos0"
)

func (n *namespaces) String() string {
	return "a network namespace for each node, joined by a user-space switch of packets"
}

func (n *namespaces) perSender() bool { return true }

func (n *namespaces) place(name string) (*place, error) {
	n.used++
	ip := netip.AddrFrom4([4]byte{10, 88, 0, n.used})
	var tun *os.File
	p, err := newPlace(name, func() (err error) {
		tun, err = enterNamespace(ip)
		return err
	})
	if err != nil {
		return nil, err
	}
	p.ip, p.bind, p.loop = ip, ip.String(), "127.0.0.1"
	pt := newPort(tun)
	n.mu.Lock()
	n.ports[ip] = pt
	n.mu.Unlock()
	var wg sync.WaitGroup
	wg.Go(func() { n.read(pt) })
	wg.Go(pt.write)
	p.end = func() {
		n.mu.Lock()
		delete(n.ports, ip)
		n.mu.Unlock()
		pt.close()
		wg.Wait()
	}
	return p, nil
}

// enterNamespace moves the calling thread into a new network namespace with a
// TUN device at ip.
func enterNamespace(ip netip.Addr) (*os.File, error) {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return nil, os.NewSyscallError("unshare(CLONE_NEWNET)", err)
	}
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: "/dev/net/tun", Err: err}
	}
	tun, err := func() (*os.File, error) {
		ifr, err := unix.NewIfreq(tunName)
		if err != nil {
			return nil, err
		}
		ifr.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr); err != nil {
			return nil, os.NewSyscallError("TUNSETIFF", err)
		}
		s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return nil, os.NewSyscallError("socket", err)
		}
		defer unix.Close(s)
		a := ip.As4()
		for _, step := range []struct {
			what string
			call uint
			dev  string
			set  func(*unix.Ifreq)
		}{
			{"SIOCSIFFLAGS lo", unix.SIOCSIFFLAGS, "lo", func(r *unix.Ifreq) { r.SetUint16(unix.IFF_UP | unix.IFF_RUNNING) }},
			{"SIOCSIFADDR", unix.SIOCSIFADDR, tunName, func(r *unix.Ifreq) { r.SetInet4Addr(a[:]) }},
			{"SIOCSIFNETMASK", unix.SIOCSIFNETMASK, tunName, func(r *unix.Ifreq) { r.SetInet4Addr([]byte{255, 255, 255, 0}) }},
			{"SIOCSIFMTU", unix.SIOCSIFMTU, tunName, func(r *unix.Ifreq) { r.SetUint32(tunMTU) }},
			{"SIOCSIFFLAGS", unix.SIOCSIFFLAGS, tunName, func(r *unix.Ifreq) { r.SetUint16(unix.IFF_UP | unix.IFF_RUNNING) }},
		} {
			r, err := unix.NewIfreq(step.dev)
			if err != nil {
				return nil, err
			}
			step.set(r)
			if err := unix.IoctlIfreq(s, step.call, r); err != nil {
				return nil, os.NewSyscallError(step.what, err)
			}
		}
		return os.NewFile(uintptr(fd), "tun of "+ip.String()), nil
	}()
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("a network interface: %w", err)
	}
	return tun, nil
}

// read carries what one node sends.
func (n *namespaces) read(from *port) {
	buf := make([]byte, tunMTU+64)
	for {
		k, err := from.tun.Read(buf)
		if err != nil {
			return // closed
		}
		src, dst, what, ok := parse(buf[:k])
		if !ok {
			continue
		}
		n.mu.Lock()
		to := n.ports[dst]
		n.mu.Unlock()
		if to == nil {
			continue
		}
		cut, lost, delay, _ := n.wire.verdict(src, dst, what)
		if !cut && !lost {
			to.send(append([]byte(nil), buf[:k]...), delay)
		}
	}
}

// parse reads an IPv4 packet's ends and, for TCP, what it carries.
func parse(b []byte) (src, dst netip.Addr, what traffic, ok bool) {
	if len(b) < 20 || b[0]>>4 != 4 {
		return src, dst, what, false // IPv6 says hello to its neighbours
	}
	src, dst = netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20]))
	head := int(b[0]&15) * 4
	if b[9] == unix.IPPROTO_TCP && len(b) >= head+4 {
		if what, ok = trafficOf(binary.BigEndian.Uint16(b[head:])); !ok {
			what, _ = trafficOf(binary.BigEndian.Uint16(b[head+2:]))
		}
	}
	return src, dst, what, true
}

// port is a node's end of the switch: the packets on their way to it, by the
// time at which they are there.
type port struct {
	tun *os.File

	mu     sync.Mutex
	queue  packets
	last   int
	wake   chan struct{} // holds 1
	closed bool
}

func newPort(tun *os.File) *port { return &port{tun: tun, wake: make(chan struct{}, 1)} }

type packet struct {
	due   time.Time
	order int
	b     []byte
}

type packets []packet

func (p packets) Len() int      { return len(p) }
func (p packets) Swap(i, j int) { p[i], p[j] = p[j], p[i] }
func (p packets) Less(i, j int) bool {
	if p[i].due.Equal(p[j].due) {
		return p[i].order < p[j].order
	}
	return p[i].due.Before(p[j].due)
}
func (p *packets) Push(x any) { *p = append(*p, x.(packet)) }
func (p *packets) Pop() any {
	last := (*p)[len(*p)-1]
	*p = (*p)[:len(*p)-1]
	return last
}

func (p *port) send(b []byte, delay time.Duration) {
	p.mu.Lock()
	if len(p.queue) < portQueue {
		p.last++
		heap.Push(&p.queue, packet{time.Now().Add(delay), p.last, b})
	}
	p.mu.Unlock()
	p.kick()
}

func (p *port) kick() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// write hands packets over when they are due.
func (p *port) write() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		p.mu.Lock()
		if p.closed {
			p.mu.Unlock()
			return
		}
		wait := time.Hour
		var next []byte
		if len(p.queue) > 0 {
			if wait = time.Until(p.queue[0].due); wait <= 0 {
				next = heap.Pop(&p.queue).(packet).b
			}
		}
		p.mu.Unlock()
		if next != nil {
			p.tun.Write(next) // what the kernel does not take is lost, as on a wire
			continue
		}
		timer.Reset(wait)
		select {
		case <-p.wake:
		case <-timer.C:
		}
	}
}

func (p *port) close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.kick()
	p.tun.Close()
}
