package nixllink

import (
	"fmt"
	"os"
	"sync/atomic"
	"testing"

	"github.com/berthkv/berth/internal/link"
	"github.com/berthkv/berth/internal/link/linktest"
)

var agents atomic.Int64

// agentName returns a name that no other agent has.
func newAgentName() string { return fmt.Sprintf("test-%d-%d", os.Getpid(), agents.Add(1)) }

func harness() *linktest.Harness {
	library := newLibrary()
	return &linktest.Harness{
		Caps: caps,
		NewReceiver: func(tb testing.TB, c linktest.ReceiverConfig, ev link.ReceiverEvents) link.Receiver {
			r, err := NewReceiver(ReceiverConfig{Library: library(tb), Agent: newAgentName(), Backends: []string{"UCX"}, Incarnation: c.Incarnation, Pool: c.Pool,
				Listen: "127.0.0.1:0", Advertise: "127.0.0.1"}, ev)
			if err != nil {
				tb.Fatal(err)
			}
			return r
		},
		NewSender: func(tb testing.TB, c linktest.SenderConfig) link.Sender {
			s, err := NewSender(SenderConfig{Library: library(tb), Agent: newAgentName(), Backends: []string{"UCX"}, Pool: c.Pool})
			if err != nil {
				tb.Fatal(err)
			}
			return s
		},
		Processes: processes,
	}
}

func TestConformance(t *testing.T) { linktest.Run(t, harness) }
