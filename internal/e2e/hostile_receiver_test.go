package e2e

import (
	"crypto/rand"
	"fmt"
	"math"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berthkv/berth/client"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/wire"
	"github.com/berthkv/berth/internal/zmtp"
)

// evil is a receiver that answers as it likes. answer returns what it says to a
// message, as bytes; nil: nothing.
type evil struct {
	name   string
	answer func(m msg.Message, n int) [][]byte
}

func said(ms ...msg.Message) (out [][]byte) {
	for _, m := range ms {
		b, err := wire.Append(nil, m)
		if err != nil {
			panic(err)
		}
		out = append(out, b)
	}
	return out
}

// welcome is a proper answer to Hello, but for what change makes of it.
func welcome(m msg.Message, change func(*msg.HelloReply)) [][]byte {
	h, ok := m.(*msg.Hello)
	if !ok {
		return nil
	}
	r := &msg.HelloReply{Re: h.Seq, Version: 1, Incarnation: kv.Incarnation{0xf0}, Capacity: 64, LeaseMS: 1500,
		Links: []msg.LinkOffer{{Name: "tcp", Addr: "127.0.0.1:1"}}}
	if change != nil {
		change(r)
	}
	return said(r)
}

var evils = []evil{
	{"never answers", func(msg.Message, int) [][]byte { return nil }},
	{"answers everything with garbage", func(m msg.Message, n int) [][]byte {
		b := make([]byte, 1+n*37%5000)
		rand.Read(b)
		return [][]byte{b}
	}},
	{"offers links that lead nowhere", func(m msg.Message, n int) [][]byte {
		return welcome(m, func(r *msg.HelloReply) {
			r.Links = []msg.LinkOffer{{Name: "shm", Addr: "/nowhere"}, {Name: "tcp", Addr: "not an address"}, {Name: "wormhole"}}
		})
	}},
	{"has a lease of no time, and another incarnation each time", func(m msg.Message, n int) [][]byte {
		return welcome(m, func(r *msg.HelloReply) { r.LeaseMS, r.Incarnation = int64(n%3), kv.Incarnation{byte(n), byte(n >> 8)} })
	}},
	{"grants what was not asked for, and slots that it cannot have", func(m msg.Message, n int) [][]byte {
		if b, ok := m.(*msg.Begin); ok {
			return said(&msg.Granted{Re: b.Seq + 1000, Begin: b.Begin, Generation: 1}, &msg.Granted{Re: b.Seq, Begin: b.Begin + 7, Generation: 0, Slots: make([]kv.SlotID, 3)},
				&msg.Granted{Re: b.Seq, Begin: b.Begin, Generation: 5, Slots: []kv.SlotID{math.MaxUint32, 0, 0, 1 << 30}})
		}
		return welcome(m, nil)
	}},
	{"speaks of requests that are nobody's, without end", func(m msg.Message, n int) [][]byte {
		out := welcome(m, nil)
		for i := range uint64(200) {
			out = append(out, said(&msg.Ended{Seq: i + 1, Begin: i + 1, Ending: msg.EndFailed, Reason: "no such code", Text: "x"}, &msg.CommitReply{Re: i + 1, Begin: i + 1, Complete: true},
				&msg.Error{Re: i*3 + 1, Code: "hello_required"}, &msg.HeartbeatReply{Re: i + 1})...)
		}
		return out
	}},
	{"speaks LMCache's dialect, and grants too much", func(m msg.Message, n int) [][]byte {
		return said(&msg.AllocResponse{RemoteIndexes: []int64{0, 1, 2, 3, 4, 1 << 40, -7}, AlreadySent: []int64{-1, 99}})
	}},
}

// TestHostileReceiver: a prefill engine's requests to receivers that lie end, and
// cost nothing of those to honest ones; the sender is as before afterwards.
func TestHostileReceiver(t *testing.T) {
	// A busy machine must not be taken for a lost peer.
	good := startAgent(t, receiving(t, 64).with(settings{"log_level": "error", "lease_sec": "6"}))
	c := startAgentProcess(t, sending(64).with(settings{"log_level": "error", "lease_sec": "6", "links": "tcp", "dial_timeout_sec": "2"}))
	v := &victim{child: c, t: t}
	sender, receiver := c.engine(t, "prefill"), good.engine(t)
	for i := range 5 {
		if err := transfer(t.Context(), sender, receiver, fmt.Sprint("warm-", i), good.port()); err != nil {
			t.Fatal(err)
		}
	}
	for _, e := range evils {
		t.Run(e.name, func(t *testing.T) {
			v.t = t
			v.settled(usage{})
			before := v.usage()
			var r *zmtp.Router
			ready := make(chan struct{})
			var n atomic.Int64
			r, err := zmtp.ListenRouter(ctxFor(t), "127.0.0.1:0", func(ev zmtp.Event) {
				<-ready
				if ev.Kind != zmtp.Message {
					return
				}
				m, err := wire.Decode(ev.Frames[len(ev.Frames)-1])
				if err != nil {
					t.Errorf("the agent says %x: %v", ev.Frames, err)
					return
				}
				for _, b := range e.answer(m, int(n.Add(1))) {
					r.Send(ev.Conn, nil, b) // the agent may have closed it
				}
			}, zmtp.Options{Allow: func(netip.Addr) bool { return true }})
			if err != nil {
				t.Fatal(err)
			}
			close(ready)
			port := int(r.Addr().Port())
			var lost []*client.Transfer
			for i := range 6 {
				b := client.Begin{Req: fmt.Sprintf("%s-%d", e.name, i), TotalChunks: pairChunks, Host: "127.0.0.1", AllocPort: port, BerthProxy: true, Deadline: 3 * time.Second}
				tr, err := sender.Begin(ctxFor(t), b)
				if err != nil {
					t.Fatal(err)
				}
				lost = append(lost, tr)
			}
			for i, began := 0, time.Now(); i < 12 || time.Since(began) < attackTime; i++ {
				if err := transfer(t.Context(), sender, receiver, fmt.Sprintf("beside-%s-%d", e.name, i), good.port()); err != nil {
					t.Fatal(err)
				}
			}
			peak := v.usage().memory
			for _, tr := range lost {
				if e := ended(t, tr); e.Err() == nil {
					t.Errorf("%s is ready, and no chunk of it was sent", tr.Req())
				}
			}
			if err := r.Close(); err != nil {
				t.Fatal(err)
			}
			if bound := before.memory + shadow*(2*(8*fullConn+mailbox)+64<<20); peak > bound {
				t.Errorf("%d MiB of memory, at most %d may be", peak>>20, bound>>20)
			}
			v.settled(before)
		})
	}
	good.until(t, "free", allFree)
}
