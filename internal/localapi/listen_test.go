package localapi

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestBusySocketIsAlive: a socket whose backlog is full is somebody's.
func TestBusySocketIsAlive(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	for full := false; !full; {
		c, err := net.Dial("unix", path)
		if full = err != nil; !full {
			defer c.Close()
		}
	}
	s, err := Listen(Config{Path: path, Handler: make(recorder, 1)})
	if err == nil {
		s.Close()
		t.Fatal("the socket of a live process was taken over")
	}
	if !strings.Contains(err.Error(), "in use") || !strings.Contains(err.Error(), path) {
		t.Errorf("error %v", err)
	}
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("the live socket is gone: %v", err)
	}
}
