package outbound

import (
	"slices"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// fakeReceiver is a simple receiver: first come, first served.
type fakeReceiver struct {
	w       *world
	n       int
	life    int
	conn    *fakeConn
	session bool
	free    []kv.SlotID
	gen     kv.Generation
	seq     uint64
	reqs    []*fakeRequest
	byGen   map[kv.Generation]*fakeRequest
	highest uint64
	answers map[uint64]msg.Message
	pending map[uint64]bool
	was     map[string]bool // ids that were ready
	legacy  *legacyReceiver
}

type fakeRequest struct {
	id        string
	begin     uint64
	beginSeq  uint64
	total     int64
	state     string // waiting, granted, ready, ended
	ending    msg.Ended
	slots     []kv.SlotID
	gen       kv.Generation
	landed    map[int64]bool
	named     map[int64]bool
	end       int64
	commits   []*msg.Commit // without an answer
	askedEnd  uint64        // seq of our Ended
	drained   bool
	exact     bool
	freed     bool
	pull, one bool
}

func newReceiver(w *world, n int) *fakeReceiver {
	f := &fakeReceiver{w: w, n: n, was: map[string]bool{}, byGen: map[kv.Generation]*fakeRequest{}, gen: kv.Generation(1000 * (n + 1))}
	f.restart()
	return f
}

// restart makes it a new incarnation that knows nothing.
func (f *fakeReceiver) restart() {
	f.life++
	f.session, f.conn, f.reqs, f.highest = false, nil, nil, 0
	f.legacy = newLegacyReceiver()
	f.answers, f.pending = map[uint64]msg.Message{}, map[uint64]bool{}
	f.free = nil
	for i := range kv.SlotID(6) {
		f.free = append(f.free, i)
	}
	for _, k := range f.w.sortedConns() {
		if k.peer == f.n {
			k.gone = true
		}
	}
	for _, l := range f.w.sortedLinks() {
		if l.peer == f.n && l.up && !l.closed {
			f.w.linkDown(l)
		}
	}
}

func (f *fakeReceiver) send(m msg.Message) {
	if f.conn != nil && f.conn.up && !f.conn.gone {
		f.conn.toS = append(f.conn.toS, m)
	}
}

func (f *fakeReceiver) answer(seq uint64, m msg.Message) {
	delete(f.pending, seq)
	f.answers[seq] = m
	f.send(m)
}

func (f *fakeReceiver) receive(k *fakeConn, m msg.Message) {
	if f.w.legacy {
		f.receiveLegacy(k, m)
		return
	}
	if h, ok := m.(*msg.Hello); ok {
		f.hello(k, h)
		return
	}
	if f.conn != k {
		return
	}
	switch m := m.(type) {
	case *msg.Heartbeat:
		f.send(&msg.HeartbeatReply{Re: m.Seq})
	case *msg.Begin:
		if f.known(m.Seq) {
			return
		}
		if m.Begin <= f.highest {
			f.answer(m.Seq, &msg.Error{Re: m.Seq, Code: fault.Ended})
			return
		}
		f.highest = m.Begin
		r := &fakeRequest{id: m.ReqID, begin: m.Begin, beginSeq: m.Seq, total: m.TotalChunks, state: "waiting", end: -1,
			landed: map[int64]bool{}, named: map[int64]bool{}, pull: m.Link == "shm", one: m.Link == "nixl", exact: m.Link != "nixl"}
		if f.w.rnd.Intn(12) == 0 && !f.w.quiet {
			r.state = "ended"
			r.ending = msg.Ended{Ending: msg.EndFailed, Reason: fault.TooLarge}
			f.answer(m.Seq, &msg.Error{Re: m.Seq, Code: []fault.Code{fault.TooLarge, fault.Busy}[f.w.rnd.Intn(2)], RetryMS: 50})
			return
		}
		f.reqs = append(f.reqs, r)
		f.admit()
	case *msg.Commit:
		if !f.known(m.Seq) {
			f.commit(m)
		}
	case *msg.Cancel:
		if f.known(m.Seq) {
			return
		}
		f.highest = max(f.highest, m.Begin)
		r := f.find(m.Begin)
		if r == nil {
			f.answer(m.Seq, &msg.Ended{Re: m.Seq, Begin: m.Begin, Ending: msg.EndFailed, Reason: fault.Ended})
			return
		}
		e := msg.Ended{Ending: msg.EndFailed, Reason: m.Reason}
		if m.Reason == fault.Cancelled {
			e.Ending = msg.EndCancelled
		}
		f.end(r, e, r.exact)
		k := r.ending
		k.Seq, k.Re, k.Begin = 0, m.Seq, m.Begin
		f.answer(m.Seq, &k)
	case *msg.Drained:
		for _, r := range f.reqs {
			if r.askedEnd == m.Re {
				r.drained = true
				f.release(r)
			}
		}
	}
}

// known repeats an answer; it reports whether the request is not new.
func (f *fakeReceiver) known(seq uint64) bool {
	if m := f.answers[seq]; m != nil {
		f.send(m)
		return true
	}
	if f.pending[seq] {
		return true
	}
	f.pending[seq] = true
	return false
}

func (f *fakeReceiver) hello(k *fakeConn, h *msg.Hello) {
	resumed := h.Resume && f.session
	if !resumed {
		for _, r := range f.reqs {
			if r.state == "waiting" || r.state == "granted" {
				r.state = "ended"
				f.release(r)
			}
		}
		f.pending, f.answers = map[uint64]bool{}, map[uint64]msg.Message{}
	}
	f.session, f.conn = true, k
	var offers []msg.LinkOffer
	for _, n := range []string{"tcp", "shm", "nixl"} {
		offers = append(offers, msg.LinkOffer{Name: n})
	}
	f.send(&msg.HelloReply{Re: h.Seq, Version: 1, Incarnation: kv.Incarnation{byte(f.n), byte(f.life)}, Resumed: resumed, Capacity: 6, LeaseMS: 15000, Links: offers})
	if resumed {
		for _, r := range f.reqs {
			if r.askedEnd != 0 && !r.drained {
				e := r.ending
				e.Seq, e.Begin = r.askedEnd, r.begin
				f.send(&e)
			}
		}
	}
	f.admit()
}

func (f *fakeReceiver) find(begin uint64) *fakeRequest {
	for _, r := range f.reqs {
		if r.begin == begin {
			return r
		}
	}
	return nil
}

func (f *fakeReceiver) admit() {
	for _, r := range f.reqs {
		if r.state != "waiting" {
			continue
		}
		if int(r.total) > len(f.free) {
			return
		}
		f.gen++
		r.state, r.gen = "granted", f.gen
		f.byGen[r.gen] = r
		r.slots = slices.Clone(f.free[:r.total])
		f.free = f.free[r.total:]
		f.answer(r.beginSeq, &msg.Granted{Re: r.beginSeq, Begin: r.begin, Generation: r.gen, Slots: slices.Clone(r.slots)})
		if r.total == 0 {
			f.ready(r)
		}
	}
}

func (f *fakeReceiver) ready(r *fakeRequest) {
	r.state, r.ending = "ready", msg.Ended{Ending: msg.EndReady}
	f.was[r.id] = true
	f.release(r) // claimed and released at once
}

// release gives the slots back.
func (f *fakeReceiver) release(r *fakeRequest) {
	if !r.freed {
		r.freed = true
		f.free = append(f.free, r.slots...)
		f.admit()
	}
}

func (f *fakeReceiver) landed(gen kv.Generation, dst kv.SlotID) {
	if f.w.legacy {
		f.landedLegacy(dst)
		return
	}
	r := f.byGen[gen]
	if r == nil || r.state != "granted" {
		return
	}
	if i := slices.Index(r.slots, dst); i >= 0 {
		r.landed[int64(i)] = true
		f.reply(r)
	}
}

func (f *fakeReceiver) commit(m *msg.Commit) {
	r := f.find(m.Begin)
	if r == nil || (r.state != "granted" && r.state != "ready") {
		f.answer(m.Seq, &msg.Error{Re: m.Seq, Code: fault.Ended})
		return
	}
	if m.HasEnd {
		if r.end >= 0 && r.end != m.End {
			f.w.failf("%s: end is said as %d and %d", r.id, r.end, m.End)
		}
		r.end = m.End
	}
	for _, k := range m.Chunks {
		if k.Index >= r.total || (r.end >= 0 && k.Index >= r.end) {
			f.w.failf("%s: chunk %d of %d, end %d", r.id, k.Index, r.total, r.end)
		}
		r.named[k.Index] = true
		if r.pull {
			if k.Src == nil || f.w.gens[k.Src.Slot] != k.Src.Generation {
				f.end(r, msg.Ended{Ending: msg.EndFailed, Reason: fault.StaleGeneration}, false)
				break
			}
			r.landed[k.Index] = true
		}
		if r.one && !r.landed[k.Index] {
			f.w.failf("%s: chunk %d is committed before it was written", r.id, k.Index)
		}
	}
	if r.state == "ended" {
		f.answer(m.Seq, &msg.Error{Re: m.Seq, Code: r.ending.Reason})
		return
	}
	r.commits = append(r.commits, m)
	f.reply(r)
}

// reply answers the Commits whose chunks have landed.
func (f *fakeReceiver) reply(r *fakeRequest) {
	for i := 0; i < len(r.commits); {
		m := r.commits[i]
		whole := true
		for _, k := range m.Chunks {
			whole = whole && r.landed[k.Index]
		}
		if !whole {
			i++
			continue
		}
		r.commits = slices.Delete(r.commits, i, i+1)
		complete := r.end >= 0
		for k := int64(0); k < r.end; k++ {
			complete = complete && r.landed[k] && r.named[k]
		}
		f.answer(m.Seq, &msg.CommitReply{Re: m.Seq, Begin: r.begin, Complete: complete || r.state == "ready"})
		if complete && r.state == "granted" {
			f.ready(r)
		}
	}
}

// end ends a request; what is unanswered of it gets Error, and unless it is
// silent an Ended follows.
func (f *fakeReceiver) end(r *fakeRequest, e msg.Ended, silent bool) {
	if r.state == "ready" || r.state == "ended" {
		return
	}
	was := r.state
	r.state, r.ending = "ended", e
	if was == "waiting" {
		f.answer(r.beginSeq, &msg.Error{Re: r.beginSeq, Code: e.Reason})
		f.admit()
		return
	}
	for _, m := range r.commits {
		f.answer(m.Seq, &msg.Error{Re: m.Seq, Code: e.Reason})
	}
	r.commits = nil
	if silent {
		f.release(r)
		return
	}
	f.seq++
	r.askedEnd = f.seq
	e.Seq, e.Begin = f.seq, r.begin
	f.send(&e)
	if r.exact {
		f.release(r)
	}
}

// endOne fails some request of its own accord.
func (f *fakeReceiver) endOne() bool {
	for _, r := range f.reqs {
		if (r.state == "granted" || r.state == "waiting") && f.w.rnd.Intn(2) == 0 {
			f.end(r, msg.Ended{Ending: msg.EndFailed, Reason: endedCodes[f.w.rnd.Intn(len(endedCodes))]}, false)
			return true
		}
	}
	return false
}
