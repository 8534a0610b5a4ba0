// Package linktest is the conformance suite of the data plane: every link
// passes it. What a link can do is asked through its Caps; what a test needs
// from outside the link (something between its ends that can stall and cut, a
// second process) is in the Harness, and cases that need what is not there do
// not exist for that link.
package linktest

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/berthkv/berth/internal/arena"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
)

// ReceiverConfig is what a case gives a receiver.
type ReceiverConfig struct {
	Incarnation kv.Incarnation
	Pool        link.Pool
	Checksum    bool
}

// SenderConfig is what a case gives a sender.
type SenderConfig struct {
	Pool        link.Pool
	Staging     *arena.Pool // the same memory, for its read-only descriptor
	Generations *arena.Generations
	Single      bool // one data connection, where the link could have several
}

// Harness makes the two halves of one link.
type Harness struct {
	Caps        link.Caps
	NewReceiver func(testing.TB, ReceiverConfig, link.ReceiverEvents) link.Receiver
	NewSender   func(testing.TB, SenderConfig) link.Sender
	// Pump moves a link that has no goroutines of its own one step and reports
	// whether there was one to do. Nil for the others.
	Pump func() bool
	// Between, if set, makes what stands between the two ends.
	Between func(testing.TB) Between
	// Processes: the two ends may be in different processes. The test binary's
	// TestMain must then be Main.
	Processes bool
	// Wrapped: another goroutine passes writes on to the link, so that its
	// panics are not the caller's.
	Wrapped bool
}

// Between stands between a sender and a receiver.
type Between interface {
	// Route returns the address by which a sender reaches addr through it.
	Route(addr string) string
	// Stall lets n more bytes of each frame-carrying connection pass to the
	// receiver, and then nothing until Resume.
	Stall(n int64)
	Resume()
	// Cut breaks every data connection; new ones may be made.
	Cut()
	// Shut is Cut, and no new connection gets through.
	Shut()
}

// Run runs the suite. newHarness is called once for each case.
func Run(t *testing.T, newHarness func() *Harness) {
	warmUp(t)
	for _, c := range cases {
		h := newHarness()
		if !c.applies(h) {
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			fds := openFDs(t)
			ok := t.Run("case", func(t *testing.T) { c.run(newRig(t, h, c.opts)) })
			if !ok {
				return // what is left over then says nothing
			}
			goleak.VerifyNone(t, goleak.IgnoreCurrent())
			if now := openFDs(t); now != fds {
				t.Errorf("%d descriptors are open after the case, %d were before", now, fds)
			}
		})
	}
}

type testCase struct {
	name  string
	needs []need
	opts  options
	run   func(*rig)
}

// need is what a case asks of a harness.
type need func(*Harness) bool

func (c testCase) applies(h *Harness) bool {
	for _, n := range c.needs {
		if !n(h) {
			return false
		}
	}
	return true
}

func writes(h *Harness) bool         { return h.Caps.Mode != link.Pull }
func pulls(h *Harness) bool          { return h.Caps.Mode == link.Pull }
func streams(h *Harness) bool        { return h.Caps.Mode == link.Stream }
func reportsLanding(h *Harness) bool { return h.Caps.Mode != link.OneSided }
func exact(h *Harness) bool          { return h.Caps.ExactFence }
func between(h *Harness) bool        { return h.Between != nil }
func bare(h *Harness) bool           { return !h.Wrapped }
func processes(h *Harness) bool      { return h.Processes }

// openFDs counts the process's descriptors.
func openFDs(t testing.TB) int {
	t.Helper()
	e, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(e)
}
