package proxy

import (
	"context"
	"testing"
	"time"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/openai"
)

// The prefill engine may say that the KV will not come; a receiver's word, where
// it is there, stands against that.
func TestWhoseWord(t *testing.T) {
	failed := Ending{Ending: msg.EndFailed, Reason: fault.TooLarge}
	for _, c := range []struct {
		name     string
		said     openai.First
		receiver *Ending
		want     fault.Code
	}{
		{"nobody says anything", openai.First{}, nil, fault.Deadline},
		{"the engine alone", openai.First{Failed: "peer_lost"}, nil, fault.PeerLost},
		{"a code of a later version", openai.First{Failed: "tired"}, nil, fault.Internal},
		{"the receiver alone", openai.First{}, &failed, fault.TooLarge},
		{"both", openai.First{Failed: "peer_lost"}, &failed, fault.TooLarge},
		{"it is there all the same", openai.First{Failed: "peer_lost"}, &Ending{Ending: msg.EndReady}, ""},
	} {
		tr := &transfer{x: &exchange{p: &Proxy{cfg: Config{Timeouts: Timeouts{Transfer: time.Millisecond}}}, ctx: context.Background()}, settled: make(chan struct{})}
		if c.receiver != nil {
			tr.x.p.cfg.Timeouts.Transfer = time.Hour
			tr.ending = *c.receiver
			close(tr.settled)
		}
		tr.told(&c.said)
		var got fault.Code
		if f := tr.wait(); f != nil {
			got = f.code()
		}
		if got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}
