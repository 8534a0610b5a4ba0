package lobby

import (
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// open returns a lobby that reads one byte as the hello, answers it, and then
// echoes nothing until the peer closes.
func open(t *testing.T, cfg Config) (addr string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var b *Lobby
	ready := make(chan struct{})
	cfg.Serve = func(nc net.Conn) {
		<-ready
		var one [1]byte
		if _, err := io.ReadFull(nc, one[:]); err != nil {
			return
		}
		if b.Admit(nc) == nil {
			nc.Write(one[:])
			io.Copy(io.Discard, nc)
		}
	}
	b = Open(l, cfg)
	close(ready)
	t.Cleanup(func() {
		b.Shut()
		b.Shut()
		b.Wait()
	})
	return l.Addr().String()
}

func dial(t *testing.T, addr string) net.Conn {
	t.Helper()
	nc, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nc.Close() })
	nc.SetDeadline(time.Now().Add(20 * time.Second))
	return nc
}

func served(nc net.Conn) bool {
	nc.Write([]byte{7})
	var one [1]byte
	n, _ := io.ReadFull(nc, one[:])
	return n == 1
}

func ended(nc net.Conn) bool {
	_, err := nc.Read(make([]byte, 1))
	return err != nil && !errors.Is(err, os.ErrDeadlineExceeded)
}

// Half-open connections by the thousand: who speaks is served, the oldest of
// the silent ones go, and at most the limit is left.
func TestSilentConnectionsDelayNobody(t *testing.T) {
	addr := open(t, Config{MaxWaiting: 3})
	admitted := dial(t, addr)
	if !served(admitted) {
		t.Fatal("not served")
	}
	var silent []net.Conn
	for i := range 1000 {
		silent = append(silent, dial(t, addr))
		if i%100 == 0 && !served(dial(t, addr)) {
			t.Fatalf("not served beside %d silent connections", i)
		}
		if i >= 3 && !ended(silent[i-3]) { // one past the limit
			t.Fatalf("silent connection %d was kept beside %d later ones", i-3, 3)
		}
	}
	for _, nc := range silent[997:] { // at the limit
		if !served(nc) {
			t.Error("a connection within the limit was closed")
		}
	}
	if admitted.SetReadDeadline(time.Now()); ended(admitted) {
		t.Error("an admitted connection was closed")
	}
}

func TestHelloTimeout(t *testing.T) {
	addr := open(t, Config{HelloTimeout: time.Millisecond})
	if !ended(dial(t, addr)) {
		t.Error("a silent connection outlived its time")
	}
}

func TestPermit(t *testing.T) {
	addr := open(t, Config{Permit: func(net.Conn) bool { return false }})
	if served(dial(t, addr)) {
		t.Error("served without permission")
	}
}
