package outbound

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// FuzzSteps steps a core with whatever the bytes say: an engine that calls at
// random, receivers of both dialects that answer anything to anything. The
// invariants hold after each step, a copy does the same, and a call is answered
// at most once.
func FuzzSteps(f *testing.F) {
	for seed := range byte(24) {
		b := make([]byte, 256)
		for i := range b {
			b[i] = byte(i*int(seed+3)) ^ byte(i>>2)*seed
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, data []byte) { fuzzSteps(t, data) })
}

func fuzzSteps(t *testing.T, data []byte) {
	in := &bytesIn{data: data}
	cfg := testConfig()
	cfg.Staging, cfg.MaxStage, cfg.Window, cfg.MaxWaiting, cfg.MaxPeers, cfg.MaxEndings = 5, 2, 8192, 4, 2, 3
	flags := in.next()
	cfg.Checksum = flags&1 != 0
	cfg.Links = [][]Link{{testLinks["tcp"]}, {testLinks["shm"], testLinks["tcp"]}, {testLinks["nixl"]}}[int(flags>>1)%3]
	cfg.LegacyLink = []string{"nixl", ""}[flags>>3&1]
	cfg.LegacyNoData = flags&32 != 0
	cfg.Dialect = []Dialect{DialectAuto, DialectLMCache}[flags>>4&1]
	c := New(cfg, 0)
	d := fuzzDriver{in: in, answered: map[kv.CallID]int{}}
	now := kv.Instant(0)
	for n := 0; !in.done() && n < 2000; n++ {
		now = now.Add(kv.Duration(in.next()) * kv.Millisecond * []kv.Duration{0, 1, 100}[int(in.next())%3])
		twin := c.Clone()
		ev := d.event()
		acts := c.Step(now, ev)
		d.see(t, acts)
		if err := c.Check(); err != nil {
			t.Fatalf("step %d, %#v: %v", n, ev, err)
		}
		twin.Step(now, ev)
		if !bytes.Equal(c.Encode(nil, now), twin.Encode(nil, now)) {
			t.Fatalf("step %d, %#v: a copy encodes otherwise", n, ev)
		}
	}
}

// bytesIn reads bytes, zeros at the end.
type bytesIn struct {
	data []byte
	pos  int
}

func (b *bytesIn) done() bool { return b.pos >= len(b.data) }

func (b *bytesIn) next() byte {
	if b.done() {
		return 0
	}
	b.pos++
	return b.data[b.pos-1]
}

func (b *bytesIn) of(n int) int { return int(b.next()) % n }

// fuzzDriver knows what names there are, so that most events mean something.
type fuzzDriver struct {
	in       *bytesIn
	call     kv.CallID
	answered map[kv.CallID]int
	conns    []kv.ConnID
	links    []LinkID
	writes   []uint64
	sums     []Sum
	slots    []kv.SlotID
	seqs     []uint64
	engines  [2]kv.ConnID // never used again once lost
	gone     []kv.ConnID
}

// see keeps names from actions.
func (d *fuzzDriver) see(t *testing.T, acts []Action) {
	for _, a := range acts {
		switch a := a.(type) {
		case Dial:
			d.conns = append(d.conns, a.Conn)
		case Connect:
			d.links = append(d.links, a.Link)
		case Write:
			for _, w := range a.Writes {
				d.writes = append(d.writes, w.ID)
			}
		case Sum:
			d.sums = append(d.sums, Sum{Batch: a.Batch, Items: append([]SumItem(nil), a.Items...)})
		case Send:
			switch m := a.Msg.(type) {
			case *msg.Hello:
				d.seqs = append(d.seqs, m.Seq)
			case *msg.Begin:
				d.seqs = append(d.seqs, m.Seq)
			case *msg.Commit:
				d.seqs = append(d.seqs, m.Seq)
			case *msg.Cancel:
				d.seqs = append(d.seqs, m.Seq)
			}
		case Answer:
			if d.answered[a.Call]++; d.answered[a.Call] > 1 {
				t.Fatalf("call %d is answered twice", a.Call)
			}
			d.slots = append(d.slots, a.Slots...)
		case Granted:
			d.slots = append(d.slots, a.Slots...)
		}
	}
}

func last[T any](in *bytesIn, s []T) (v T) {
	if len(s) == 0 {
		return v
	}
	back := in.of(6)
	if back >= len(s) {
		back = len(s) - 1
	}
	return s[len(s)-1-back]
}

func (d *fuzzDriver) event() Event {
	in := d.in
	req := fmt.Sprintf("r%d", in.of(3))
	which := in.of(2)
	if d.engines[which] == 0 {
		d.engines[which] = kv.ConnID(which + 1)
	}
	engine := d.engines[which]
	d.call++
	switch in.of(22) {
	case 0, 1:
		return EngineAttached{Engine: engine, EngineID: "e"}
	case 2, 3:
		return Begin{Engine: engine, Call: d.call, ReqID: req, Total: int64(in.of(5)) - 1 + 1, Peer: Peer{Host: "d", AllocPort: 9000 + in.of(3), InitPort: 8300},
			Deadline: kv.Forever, Stage: int64(in.of(3)), BerthProxy: in.of(2) == 0}
	case 4:
		return Stage{Engine: engine, Call: d.call, ReqID: req, N: int64(in.of(4)), Deadline: kv.Duration(1+in.of(9)) * kv.Second, NonBlocking: in.of(2) == 0}
	case 5:
		return Unstage{Engine: engine, Call: d.call, ReqID: req, Slots: []kv.SlotID{last(in, d.slots)}}
	case 6, 7:
		ev := Submit{Engine: engine, Call: d.call, ReqID: req, HasEnd: in.of(4) == 0, End: int64(in.of(4))}
		for range in.of(3) {
			i := int64(in.of(4))
			ev.Chunks = append(ev.Chunks, Chunk{Index: i, Key: fmt.Sprint("k", i), Slot: last(in, d.slots), Tokens: int64(16 - in.of(2))})
		}
		return ev
	case 8:
		return Cancel{Engine: engine, Call: d.call, ReqID: req, Reason: []fault.Code{"", fault.Deadline}[in.of(2)]}
	case 9:
		return Hangup{Call: kv.CallID(in.of(256))}
	case 10:
		d.engines[which] += 2
		d.gone = append(d.gone, engine)
		return EngineLost{Engine: engine, Last: in.of(2) == 0}
	case 11:
		return EngineFenced{Engine: last(in, d.gone)}
	case 12, 13:
		return Connected{Conn: last(in, d.conns)}
	case 14:
		return Disconnected{Conn: last(in, d.conns), Text: "gone"}
	case 15:
		return LinkUp{Link: last(in, d.links)}
	case 16:
		return d.data()
	case 17:
		return Tick{}
	case 18:
		if len(d.sums) > 0 {
			s := d.sums[0]
			d.sums = d.sums[1:]
			return Summed{Batch: s.Batch, Sums: make([]uint32, len(s.Items))}
		}
		return Malformed{Conn: last(in, d.conns), Text: "garbage"}
	}
	return Received{Conn: last(in, d.conns), Msg: d.message()}
}

func (d *fuzzDriver) data() Event {
	l := last(d.in, d.links)
	switch d.in.of(3) {
	case 0:
		return LinkDown{Link: l, Text: "down"}
	case 1:
		return Lost{Link: l, Writes: []uint64{last(d.in, d.writes)}, Text: "lost"}
	}
	return Sent{Link: l, Writes: []uint64{last(d.in, d.writes), last(d.in, d.writes)}}
}

func (d *fuzzDriver) message() msg.Message {
	in := d.in
	re, begin := last(in, d.seqs), uint64(in.of(6))
	switch in.of(9) {
	case 0, 1:
		links := []msg.LinkOffer{{Name: "tcp"}, {Name: "shm"}, {Name: "nixl"}}
		return &msg.HelloReply{Re: re, Version: 1, Incarnation: kv.Incarnation{byte(in.of(2))}, Resumed: in.of(2) == 0, Capacity: 6, LeaseMS: 3000, Links: links[:in.of(4)]}
	case 2:
		m := &msg.Granted{Re: re, Begin: begin, Generation: kv.Generation(in.of(3))}
		for i := range in.of(5) {
			m.Slots = append(m.Slots, kv.SlotID(i+in.of(3)))
		}
		return m
	case 3:
		return &msg.CommitReply{Re: re, Begin: begin, Complete: in.of(2) == 0}
	case 4:
		return &msg.Ended{Seq: uint64(in.of(4)), Re: re * uint64(in.of(2)), Begin: begin, Ending: []msg.Ending{msg.EndReady, msg.EndFailed, msg.EndCancelled}[in.of(3)], Reason: fault.Deadline}
	case 5:
		return &msg.Error{Re: re, Code: fault.Codes[in.of(len(fault.Codes))], RetryMS: int64(in.of(4))}
	case 6:
		return &msg.HeartbeatReply{Re: re}
	case 7:
		m := &msg.AllocResponse{}
		for range in.of(3) {
			m.RemoteIndexes = append(m.RemoteIndexes, int64(in.of(7))-1)
		}
		if in.of(4) == 0 {
			m.AlreadySent = []int64{int64(in.of(3)) - 1}
		}
		return m
	}
	return &msg.ProxyNotif{}
}

// TestStepsAtRandom is what FuzzSteps does, for a fixed number of inputs.
func TestStepsAtRandom(t *testing.T) {
	state := uint64(1)
	for range histories / 10 {
		data := make([]byte, 512)
		for i := range data {
			state = state*6364136223846793005 + 1442695040888963407
			data[i] = byte(state >> 56)
		}
		fuzzSteps(t, data)
		if t.Failed() {
			return
		}
	}
}
