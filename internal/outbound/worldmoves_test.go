package outbound

import (
	"fmt"
	"slices"
	"sort"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// random does one thing that can happen, and reports whether there was one.
// When the world is quiet it does only what brings matters to an end.
func (w *world) random() bool {
	moves := []func() bool{w.legacyMoves, w.deliverToReceiver, w.deliverToSender, w.connect, w.link, w.moveData, w.sum, w.engine}
	if !w.quiet {
		moves = append(moves, w.engine, w.engine, w.engine, w.fault, w.time)
	}
	for _, i := range w.rnd.Perm(len(moves)) {
		if moves[i]() {
			return true
		}
	}
	return false
}

func (w *world) sortedConns() []*fakeConn {
	var ks []*fakeConn
	for _, k := range w.conns {
		ks = append(ks, k)
	}
	sort.Slice(ks, func(i, j int) bool { return ks[i].id < ks[j].id })
	return ks
}

func (w *world) sortedLinks() []*fakeLink {
	var ls []*fakeLink
	for _, l := range w.links {
		ls = append(ls, l)
	}
	sort.Slice(ls, func(i, j int) bool { return ls[i].id < ls[j].id })
	return ls
}

// connect finishes dials and reports connections that are gone.
func (w *world) connect() bool {
	for _, k := range w.sortedConns() {
		switch {
		case k.gone:
			delete(w.conns, k.id)
			w.step(Disconnected{Conn: k.id, Text: "gone"})
			return true
		case !k.up && !w.quiet && w.rnd.Intn(4) == 0:
			k.gone, w.lossy = true, true
			return true
		case !k.up:
			k.up = true
			w.step(Connected{Conn: k.id})
			return true
		}
	}
	return false
}

func (w *world) deliverToReceiver() bool {
	for _, k := range w.sortedConns() {
		if k.up && !k.gone && len(k.toR) > 0 {
			m := k.toR[0]
			k.toR = k.toR[1:]
			w.recvs[k.peer].receive(k, m)
			return true
		}
	}
	return false
}

func (w *world) deliverToSender() bool {
	for _, k := range w.sortedConns() {
		if k.up && !k.gone && len(k.toS) > 0 {
			m := k.toS[0]
			k.toS = k.toS[1:]
			w.step(Received{Conn: k.id, Msg: m})
			if !w.quiet && !w.legacy && w.rnd.Intn(16) == 0 { // R9: twice
				w.step(Received{Conn: k.id, Msg: m})
			}
			return true
		}
	}
	return false
}

// link makes links and ends those that are to be closed.
func (w *world) link() bool {
	for _, l := range w.sortedLinks() {
		switch {
		case l.closed:
			w.linkDown(l)
			return true
		case !l.up && !w.quiet && w.rnd.Intn(3) == 0:
			w.linkDown(l)
			return true
		case !l.up:
			l.up = true
			w.step(LinkUp{Link: l.id})
			return true
		}
	}
	return false
}

func (w *world) linkDown(l *fakeLink) {
	ids := slices.Clone(l.order)
	for _, id := range ids {
		w.letGo(l, id)
	}
	if len(ids) > 0 {
		w.step(Lost{Link: l.id, Writes: ids, Text: "closed"})
		for _, id := range slices.Clone(l.order) { // written again before we said so
			w.letGo(l, id)
		}
	}
	delete(w.links, l.id)
	w.step(LinkDown{Link: l.id, Text: "closed"})
}

// moveData lets one write get on: land, be sent, be given up.
func (w *world) moveData() bool {
	for _, l := range w.sortedLinks() {
		for _, id := range l.order {
			x := l.writes[id]
			switch {
			case x.aborted && !x.sent && w.rnd.Intn(2) == 0:
				w.letGo(l, id)
				w.step(Lost{Link: l.id, Writes: []uint64{id}, Text: "aborted"})
				return true
			case !x.landed && (l.def.OneSided == false || !x.sent):
				x.landed = true
				w.recvs[l.peer].landed(x.Generation, x.Dst)
				return true
			case !x.sent:
				x.sent = true
				w.step(Sent{Link: l.id, Writes: []uint64{id}})
				return true
			case !w.quiet && w.rnd.Intn(8) == 0 && !l.def.OneSided:
				w.letGo(l, id)
				w.step(Lost{Link: l.id, Writes: []uint64{id}, Text: "reset"})
				return true
			}
		}
	}
	return false
}

func (w *world) sum() bool {
	if len(w.sums) == 0 {
		return false
	}
	s := w.sums[0]
	w.sums = w.sums[1:]
	for _, it := range s.Items {
		w.slots[it.Slot].sum = false
	}
	w.step(Summed{Batch: s.Batch, Sums: make([]uint32, len(s.Items))})
	return true
}

// time lets a moment pass, now and then a long one.
func (w *world) time() bool {
	w.now = w.now.Add(kv.Duration(w.rnd.Int63n(int64(200 * kv.Millisecond))))
	if w.rnd.Intn(30) == 0 {
		w.now = w.now.Add(kv.Duration(w.rnd.Int63n(int64(20 * kv.Second))))
	}
	if w.now >= w.wake {
		w.step(Tick{})
	}
	return true
}

// fault breaks something.
func (w *world) fault() bool {
	switch w.rnd.Intn(12) {
	case 0:
		for _, k := range w.sortedConns() {
			if k.up && w.rnd.Intn(2) == 0 {
				k.gone, w.lossy = true, true
				return true
			}
		}
	case 1:
		for _, l := range w.sortedLinks() {
			if l.up && w.rnd.Intn(2) == 0 {
				w.linkDown(l)
				return true
			}
		}
	case 2:
		return !w.legacy && w.recvs[w.rnd.Intn(2)].endOne()
	case 3:
		w.recvs[w.rnd.Intn(2)].restart()
		w.lossy = true
		return true
	case 4:
		if len(w.engines) == 1 && w.rnd.Intn(3) != 0 {
			return false
		}
		i := w.rnd.Intn(len(w.engines))
		e := w.engines[i]
		w.engines = slices.Delete(w.engines, i, i+1)
		for _, r := range w.reqs {
			r.staged = slices.DeleteFunc(r.staged, func(s kv.SlotID) bool { return w.slots[s].engine == e })
		}
		for call, what := range w.waiting { // its calls are gone with it
			var by kv.ConnID
			var id string
			if n, _ := fmt.Sscanf(what, "stage %d %s", &by, &id); n == 2 && by == e {
				delete(w.waiting, call)
			}
		}
		w.lost = append(w.lost, e)
		w.step(EngineLost{Engine: e, Last: len(w.engines) == 0})
		if len(w.engines) == 0 {
			w.attach()
		}
		return true
	case 5:
		if len(w.lost) > 0 {
			e := w.lost[0]
			w.lost = w.lost[1:]
			w.fence(e)
			return true
		}
	case 6:
		w.attach()
		return true
	}
	return false
}

// engine lets an engine do something: begin, stage, submit, cancel.
func (w *world) engine() bool {
	e := w.engines[w.rnd.Intn(len(w.engines))]
	if w.quiet {
		return w.finishOne()
	}
	if n := w.rnd.Intn(10); n < 2 || len(w.names) == 0 {
		id := fmt.Sprintf("r%d", len(w.names))
		r := &obsRequest{id: id, total: int64(w.rnd.Intn(5)), peer: w.rnd.Intn(2), end: -1}
		w.reqs[id] = r
		before := w.c.live
		w.step(Begin{Engine: e, Call: w.newCall("begin"), ReqID: id, Total: r.total, Peer: w.peer(r), Deadline: kv.Forever, Stage: int64(w.rnd.Intn(3))})
		if w.c.live == before && w.c.reqs[id] == nil && r.ended == 0 {
			delete(w.reqs, id) // refused
			return true
		}
		w.names = append(w.names, id)
		return true
	}
	r := w.reqs[w.names[w.rnd.Intn(len(w.names))]]
	switch n := w.rnd.Intn(12); {
	case n < 4:
		w.step(Stage{Engine: e, Call: w.newCall(fmt.Sprintf("stage %d %s", e, r.id)), ReqID: r.id, N: 1 + w.rnd.Int63n(3), Deadline: kv.Forever,
			NonBlocking: w.rnd.Intn(2) == 0})
	case n < 9:
		w.submit(e, r)
	case n == 9:
		w.unstage(r, slices.Clone(r.staged))
	case n == 10:
		w.step(Cancel{Engine: e, Call: w.newCall("cancel"), ReqID: r.id, Reason: []fault.Code{"", fault.Deadline}[w.rnd.Intn(2)]})
	default: // a repeat
		w.step(Begin{Engine: e, Call: w.newCall("begin"), ReqID: r.id, Total: r.total, Peer: w.peer(r), Deadline: kv.Forever})
	}
	return true
}

func (w *world) peer(r *obsRequest) Peer {
	return Peer{Host: "d", AllocPort: 9000 + r.peer, InitPort: 8300 + r.peer}
}

// submit hands over what is staged, as the next chunks or as repeats.
func (w *world) submit(e kv.ConnID, r *obsRequest) {
	ev := Submit{Engine: e, ReqID: r.id}
	limit := r.total
	if r.end >= 0 {
		limit = r.end
	}
	used := map[int64]bool{}
	for _, s := range r.staged {
		i := r.next
		if i >= limit || w.rnd.Intn(5) == 0 { // again
			if limit == 0 {
				break
			}
			i = w.rnd.Int63n(limit)
		}
		if used[i] || i > r.next {
			continue
		}
		used[i] = true
		if i == r.next {
			r.next++
		}
		ev.Chunks = append(ev.Chunks, Chunk{Index: i, Key: fmt.Sprint(r.id, "/", i), Slot: s, Tokens: 16})
	}
	if r.end < 0 && w.rnd.Intn(6) == 0 {
		ev.HasEnd, ev.End = true, r.next
	}
	ev.Call = w.newCall("submit")
	free := map[kv.SlotID]bool{}
	for _, k := range ev.Chunks {
		free[k.Slot] = true
	}
	// If it is refused, the slots stay the engine's.
	ok := w.c.reqs[r.id] != nil && w.c.reqs[r.id].state == granted
	if ok {
		for s := range free {
			w.slots[s].engine = 0
		}
		r.staged = slices.DeleteFunc(r.staged, func(s kv.SlotID) bool { return free[s] })
		if ev.HasEnd {
			r.end = ev.End
		}
	}
	w.step(ev)
	if _, waits := w.waiting[ev.Call]; waits {
		w.failf("submit was not answered at once")
	}
}

// finishOne brings a granted request to its end by the engine's hand: with what
// it has, or by giving up.
func (w *world) finishOne() bool {
	for _, id := range w.names {
		r := w.reqs[id]
		q := w.c.reqs[id]
		if q == nil || q.state != granted || q.hasEnd {
			continue
		}
		w.unstage(r, slices.Clone(r.staged))
		if q.state == granted {
			r.end = q.highest() + 1
			r.next = r.end
			if q.submitted < r.end { // a chunk of an earlier batch is missing: it was refused
				w.step(Cancel{Engine: w.engines[0], Call: w.newCall("cancel"), ReqID: id})
				return true
			}
			w.step(Submit{Engine: w.engines[0], Call: w.newCall("submit"), ReqID: id, HasEnd: true, End: r.end})
		}
		return true
	}
	return false
}

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
