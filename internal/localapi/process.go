package localapi

import (
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// maxProcesses is the most processes that are watched: those that were sent
// pools and live.
const maxProcesses = 1024

// peer returns who connected, and a descriptor of that process, nil where the
// kernel gives none: then the PID is 0, for unknown.
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
		// has been used again.
		if pidfd, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PEERPIDFD); err != nil {
			pidfd, err = unix.PidfdOpen(int(cred.Pid), 0)
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

// processes watches processes until they exit. Lock: mu, a leaf.
type processes struct {
	gone func(pid int)

	mu      sync.Mutex
	watched map[int]*os.File // pidfd by pid
	closed  bool
	wg      sync.WaitGroup
}

// watch takes f, the pidfd of pid, over. It reports false, and f is still the
// caller's, when too many are watched.
func (p *processes) watch(pid int, f *os.File) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.watched[pid] != nil || p.closed {
		f.Close()
		return true
	}
	if len(p.watched) >= maxProcesses {
		return false
	}
	p.watched[pid] = f
	p.wg.Go(func() { p.wait(pid, f) })
	return true
}

// wait sleeps in the poller until the process has exited or f is closed.
func (p *processes) wait(pid int, f *os.File) {
	raw, err := f.SyscallConn()
	if err == nil {
		err = raw.Read(func(fd uintptr) bool { return readable(int(fd)) })
	}
	p.mu.Lock()
	delete(p.watched, pid)
	closed := p.closed
	p.mu.Unlock()
	f.Close()
	if err == nil && !closed {
		p.gone(pid)
	}
}

// readable reports whether the process of that pidfd has exited.
func readable(pidfd int) bool {
	fds := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n > 0
}

// close ends every watch and waits.
func (p *processes) close() {
	p.mu.Lock()
	p.closed = true
	for _, f := range p.watched {
		f.Close()
	}
	p.mu.Unlock()
	p.wg.Wait()
}
