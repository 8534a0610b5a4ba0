package shmlink

import (
	"fmt"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/berthkv/berth/internal/link"
	"github.com/berthkv/berth/internal/link/linktest"
)

var paths atomic.Int64

// newPath returns a path that no other test has, of a length that fits.
func newPath() string { return fmt.Sprintf("@berth-shmlink-test-%d-%d", unix.Getpid(), paths.Add(1)) }

// harnessCopiers is how many copying threads the tests use.
const harnessCopiers = 2

func harness() *linktest.Harness {
	return &linktest.Harness{
		Caps: caps,
		NewReceiver: func(tb testing.TB, c linktest.ReceiverConfig, ev link.ReceiverEvents) link.Receiver {
			r, err := NewReceiver(ReceiverConfig{Incarnation: c.Incarnation, Pool: c.Pool, Path: newPath(), Checksum: c.Checksum, Copiers: harnessCopiers}, ev)
			if err != nil {
				tb.Fatal(err)
			}
			return r
		},
		NewSender: func(tb testing.TB, c linktest.SenderConfig) link.Sender {
			staging, err := c.Staging.ReadOnlyFD()
			if err != nil {
				tb.Fatal(err)
			}
			words, err := c.Generations.ReadOnlyFD()
			if err != nil {
				tb.Fatal(err)
			}
			tb.Cleanup(func() {
				unix.Close(staging)
				unix.Close(words)
			})
			return NewSender(SenderConfig{Slots: c.Staging.Slots(), SlotBytes: c.Staging.SlotBytes(), Staging: staging, Generations: words})
		},
		Processes: true,
	}
}

func TestMain(m *testing.M) { linktest.Main(m, harness()) }

func TestConformance(t *testing.T) { linktest.Run(t, harness) }
