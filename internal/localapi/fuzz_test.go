package localapi

import (
	"encoding/binary"
	"io"
	"net"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// FuzzPipe is a stream that comes over the socket in any pieces, at either end:
// the frames that a simple second reader finds, then the error that ends it.
func FuzzPipe(f *testing.F) {
	frame := func(body string) []byte {
		return append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...)
	}
	f.Add(append(frame("one"), frame("another")...), byte(1), false)
	f.Add(frame("cut short")[:7], byte(3), true)
	f.Add([]byte{0, 0, 0, 0}, byte(0), false)
	f.Add([]byte{255, 255, 255, 255, 1, 2, 3}, byte(2), true)
	f.Add(binary.BigEndian.AppendUint32(nil, MaxFrame), byte(2), false)
	f.Add([]byte{}, byte(2), true)
	f.Fuzz(func(t *testing.T, stream []byte, piece byte, withRights bool) {
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		var ends [2]*net.UnixConn
		for i, fd := range fds {
			file := os.NewFile(uintptr(fd), "pair")
			c, err := net.FileConn(file)
			file.Close()
			if err != nil {
				t.Fatal(err)
			}
			ends[i] = c.(*net.UnixConn)
		}
		go func() {
			defer ends[0].Close()
			for rest := stream; len(rest) > 0; {
				n := min(int(piece)+1, len(rest))
				if _, err := ends[0].Write(rest[:n]); err != nil {
					return
				}
				rest = rest[n:]
			}
		}()
		p := NewPipe(ends[1])
		defer func() {
			p.Cut(nil)
			p.Wait(nil)
		}()
		var oob []byte
		if withRights { // as the client reads the answer to its hello
			oob = make([]byte, unix.CmsgSpace(8))
		}
		for rest := stream; ; {
			got, _, err := p.Read(oob)
			oob = nil
			n := 0
			if len(rest) >= 4 {
				n = int(binary.BigEndian.Uint32(rest))
			}
			whole := len(rest) >= 4 && n >= 1 && n <= MaxFrame && len(rest) >= 4+n
			if (err == nil) != whole {
				t.Fatalf("%x: %x, %v; a whole frame: %v", rest, got, err, whole)
			}
			if err != nil {
				if (err == io.EOF) != (len(rest) == 0) {
					t.Fatalf("%d bytes are left: %v", len(rest), err)
				}
				return
			}
			if string(got) != string(rest[4:4+n]) {
				t.Fatalf("%x, should be %x", got, rest[4:4+n])
			}
			rest = rest[4+n:]
		}
	})
}
