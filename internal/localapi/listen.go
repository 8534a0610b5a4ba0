package localapi

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// maxPath is the most bytes of a unix socket's path.
const maxPath = 107

// listen makes the socket at path, mode 0600, and its directory, mode 0700, if
// that is missing. A socket that a dead process left is replaced; if a live one
// has it, that is an error. The returned lock file must be closed after the
// listener: it is what tells live from dead.
func listen(path string) (*net.UnixListener, *os.File, error) {
	if path == "" || len(path) > maxPath {
		return nil, nil, fmt.Errorf("local_socket %q: path of %d bytes, at least 1 and at most %d", path, len(path), maxPath)
	}
	fail := func(err error) (*net.UnixListener, *os.File, error) {
		return nil, nil, fmt.Errorf("local_socket %s: %w", path, err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fail(err)
	}
	lock, err := os.OpenFile(path+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return fail(err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		lock.Close()
		return fail(errors.New("in use by a running agent"))
	}
	l, err := bind(path)
	if err != nil {
		lock.Close()
		return fail(err)
	}
	return l, lock, nil
}

func bind(path string) (*net.UnixListener, error) {
	if st, err := os.Lstat(path); err == nil {
		if st.Mode().Type() != fs.ModeSocket {
			return nil, errors.New("exists and is no socket")
		}
		// Whoever listens there has no lock file: not one of ours. Only a refusal
		// says that nobody does; one who is busy (EAGAIN: his backlog is full) lives.
		switch c, err := net.DialTimeout("unix", path, time.Second); {
		case err == nil:
			c.Close()
			return nil, errors.New("in use by a running process")
		case !errors.Is(err, unix.ECONNREFUSED):
			return nil, fmt.Errorf("in use, as it seems: %w", err)
		}
		if err := os.Remove(path); err != nil {
			return nil, err
		}
	}
	// By hand, since the mode must be right before anybody can connect.
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close() // FileListener makes its own
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		return nil, os.NewSyscallError("bind", err)
	}
	err = unix.Chmod(path, 0o600)
	if err == nil {
		err = unix.Listen(fd, unix.SOMAXCONN)
	}
	var l net.Listener
	if err == nil {
		l, err = net.FileListener(f)
	}
	if err != nil {
		os.Remove(path)
		return nil, err
	}
	return l.(*net.UnixListener), nil
}
