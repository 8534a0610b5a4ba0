package client

import (
	"testing"

	"golang.org/x/sys/unix"
)

// FuzzRights is any control message that could come with the agent's answer.
func FuzzRights(f *testing.F) {
	f.Add(unix.UnixRights(3, 4))
	f.Add(unix.UnixRights())
	f.Add(append(unix.UnixRights(1), unix.UnixRights(2, 3, 4)...))
	f.Add([]byte("\x12\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x01\x00\x00\x00\x07\x00"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if fds, _ := descriptors(b); len(fds) > len(b)/4 {
			t.Errorf("%d descriptors from %d bytes", len(fds), len(b))
		}
	})
}
