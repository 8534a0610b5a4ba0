package node

import (
	"runtime"
	"testing"
	"time"

	"github.com/berthkv/berth/internal/kv"
)

// patience bounds every wait of a test; nothing depends on its length.
const patience = 20 * time.Second

// TestMailboxIsFair: a connection that floods the mailbox waits at its own share,
// and another one's word is in the next batch all the same.
func TestMailboxIsFair(t *testing.T) {
	m := newMailbox(10_000)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for m.putFrom(1, 100, "flood") {
		}
	}()
	batch := func() (flood, other int) {
		t.Helper()
		select {
		case <-m.ready:
		case <-time.After(patience):
			t.Fatal("the mailbox is empty")
		}
		for _, ev := range m.take(nil) {
			if ev == "flood" {
				flood++
			} else {
				other++
			}
		}
		return flood, other
	}
	for flooded := 0; flooded < 100; {
		m.putFrom(2, 100, "word")
		flood, other := batch()
		if flood > perConn || other != 1 {
			t.Fatalf("%d of the flood and %d words in one batch", flood, other)
		}
		if flood > 0 {
			flooded++
		}
		runtime.Gosched()
	}
	m.close()
	<-done
}

// TestMailboxBytes: messages wait when together they are too large; one alone
// always fits.
func TestMailboxBytes(t *testing.T) {
	m := newMailbox(10_000)
	m.putFrom(1, 2*maxBytes, "one")
	waits := make(chan bool)
	go func() { waits <- m.putFrom(2, 1, "another") }()
	select {
	case <-waits:
		t.Fatal("there was no room")
	default:
	}
	if n := len(m.take(nil)); n != 1 {
		t.Fatalf("%d messages", n)
	}
	select {
	case <-waits:
	case <-time.After(patience):
		t.Fatal("it still waits")
	}
	for i := range 10_000 - 1 {
		m.putFrom(kv.ConnID(10+i), maxBytes/20_000, "small")
	}
	go func() { waits <- m.putFrom(3, 1, "one too many") }()
	m.close()
	if <-waits {
		t.Error("one more than the limit was taken")
	}
}
