package tcplink

import (
	"testing"
	"time"

	"github.com/berthkv/berth/internal/link"
	"github.com/berthkv/berth/internal/link/linktest"
)

// harnessConnections is how many data connections the tests use.
const harnessConnections = 3

func harness() *linktest.Harness {
	return &linktest.Harness{
		Caps: caps,
		NewReceiver: func(tb testing.TB, c linktest.ReceiverConfig, ev link.ReceiverEvents) link.Receiver {
			r, err := NewReceiver(ReceiverConfig{Incarnation: c.Incarnation, Pool: c.Pool, Listen: "127.0.0.1:0",
				Checksum: c.Checksum, LostGrace: 300 * time.Millisecond}, ev)
			if err != nil {
				tb.Fatal(err)
			}
			return r
		},
		NewSender: func(_ testing.TB, c linktest.SenderConfig) link.Sender {
			n := harnessConnections
			if c.Single {
				n = 1
			}
			return NewSender(SenderConfig{Pool: c.Pool, Connections: n, WriteTimeout: time.Minute})
		},
		Between:   linktest.NewRelay,
		Processes: true,
	}
}

func TestMain(m *testing.M) { linktest.Main(m, harness()) }

func TestConformance(t *testing.T) { linktest.Run(t, harness) }
