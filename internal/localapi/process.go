package localapi

import (
	"errors"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// maxProcesses is the most processes that are watched: those that were sent
// pools and live.
const maxProcesses = 1024

// peer returns who connected, and a descriptor of that process, nil where the
// kernel gives none or the process is gone already.
func peer(conn *net.UnixConn) (Cred, *os.File) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return Cred{}, nil
	}
	var cred *unix.Ucred
	pidfd := -1
	raw.Control(func(fd uintptr) {
		if cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err != nil || cred.Pid <= 0 {
			return
		}
		// The socket's own is of the process that connected, even if its number
		// has been used again. Only a kernel that has none is asked by number, and
		// then the connection must still be held: by that process, or its child.
		pidfd, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PEERPIDFD)
		if errors.Is(err, unix.ENOPROTOOPT) {
			if pidfd, err = unix.PidfdOpen(int(cred.Pid), 0); err == nil && polls(int(fd), unix.POLLHUP) {
				unix.Close(pidfd)
				err = unix.ESRCH
			}
		}
	})
	switch {
	case cred == nil:
		return Cred{}, nil
	case pidfd < 0 || err != nil:
		return Cred{UID: cred.Uid}, nil
	}
	unix.CloseOnExec(pidfd)
	if err := unix.SetNonblock(pidfd, true); err != nil {
		unix.Close(pidfd)
		return Cred{UID: cred.Uid}, nil
	}
	return Cred{PID: int(cred.Pid), UID: cred.Uid}, os.NewFile(uintptr(pidfd), "pidfd")
}

// polls reports whether poll says one of these of a descriptor.
func polls(fd int, events int16) bool {
	fds := []unix.PollFd{{Fd: int32(fd), Events: events}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n > 0 && fds[0].Revents&events != 0
}

// processes numbers the processes that connect, and watches those that were
// sent pools until they exit. A pid is used again, perhaps before the exit of its
// last process has been noticed; a number is not. Lock: mu, a leaf.
type processes struct {
	gone func(number int)

	mu      sync.Mutex
	last    int
	byPID   map[int]*process // the newest of each pid
	watched map[*process]struct{}
	closed  bool
	wg      sync.WaitGroup
}

// process is known while it is connected or watched.
type process struct {
	number int
	pid    int
	pidfd  *os.File
	conns  int
}

func newProcesses(gone func(int)) *processes {
	return &processes{gone: gone, byPID: map[int]*process{}, watched: map[*process]struct{}{}}
}

// number returns one that no process has.
func (p *processes) number() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.last++
	return p.last
}

// connected takes f, the pidfd of pid, over. One that is known and has not
// exited is the same process.
func (p *processes) connected(pid int, f *os.File) *process {
	p.mu.Lock()
	defer p.mu.Unlock()
	if known := p.byPID[pid]; known != nil && !known.exited() {
		f.Close()
		known.conns++
		return known
	}
	p.last++
	x := &process{number: p.last, pid: pid, pidfd: f, conns: 1}
	p.byPID[pid] = x
	return x
}

// disconnected ends what connected began.
func (p *processes) disconnected(x *process) {
	p.mu.Lock()
	defer p.mu.Unlock()
	x.conns--
	if _, ok := p.watched[x]; x.conns == 0 && !ok {
		p.forgetLocked(x)
	}
}

func (p *processes) forgetLocked(x *process) {
	if p.byPID[x.pid] == x {
		delete(p.byPID, x.pid)
	}
	x.pidfd.Close()
}

// watch watches a process that is connected. It reports false when too many are.
func (p *processes) watch(x *process) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, ok := p.watched[x]; ok || p.closed {
		return true
	}
	if len(p.watched) >= maxProcesses {
		return false
	}
	p.watched[x] = struct{}{}
	p.wg.Go(func() { p.wait(x) })
	return true
}

// wait sleeps in the poller until the process has exited or its pidfd is closed.
func (p *processes) wait(x *process) {
	raw, err := x.pidfd.SyscallConn()
	if err == nil {
		err = raw.Read(func(fd uintptr) bool { return polls(int(fd), unix.POLLIN) })
	}
	p.mu.Lock()
	delete(p.watched, x)
	if x.conns == 0 {
		p.forgetLocked(x)
	}
	closed := p.closed
	p.mu.Unlock()
	if err == nil && !closed {
		p.gone(x.number)
	}
}

// exited reports whether the process has.
func (x *process) exited() bool {
	gone := false
	raw, err := x.pidfd.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) { gone = polls(int(fd), unix.POLLIN) })
	}
	return gone || err != nil
}

// close ends every watch and waits. No process is connected any more.
func (p *processes) close() {
	p.mu.Lock()
	p.closed = true
	for x := range p.watched {
		x.pidfd.Close()
	}
	p.mu.Unlock()
	p.wg.Wait()
}
