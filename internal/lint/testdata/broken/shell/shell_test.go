package shell

import (
	"context"
	"net"
	"testing"
	clock "time"

	_ "example.org/broken/cmd"
	_ "example.org/broken/tcp"
)

func TestSleep(t *testing.T) {
	t.Skip("not today")
	clock.Sleep(1)
	reader.Skip() // of something else
	// A test may do these.
	net.Dial("tcp", "a:1")
	wait(context.Background())
	go wait(nil)
}
