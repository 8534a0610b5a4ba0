package explore

import (
	"slices"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/intake"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/outbound"
)

// Calls are numbered by what they are and whose: of one attempt at most one of
// each is out.
const (
	callBegin      kv.CallID = 100
	callStage      kv.CallID = 200
	callSubmit     kv.CallID = 300
	callUnstage    kv.CallID = 400
	callCancel     kv.CallID = 500
	callWait       kv.CallID = 600
	callClaim      kv.CallID = 700
	callRelease    kv.CallID = 800
	callAsk        kv.CallID = 900
	callCancelName kv.CallID = 1000
	callWarm       kv.CallID = 1100
)

// after does something once the step under way is carried out.
func (w *world) after(f func()) { w.todo = append(w.todo, f) }

// settle does what was put off.
func (w *world) settle() {
	for len(w.todo) > 0 && w.bad == "" {
		f := w.todo[0]
		w.todo = w.todo[1:]
		f()
	}
}

// ---- prefill engines ----

func (w *world) engineOf(n int) *engine { return w.engs[n/w.x.ranks] }

func (w *world) attachEngine(n int) {
	id := kv.ConnID(w.engineOf(n).conn)
	w.stepS(n, ev(evAttach, uint64(id)), func() outbound.Event { return outbound.EngineAttached{Engine: id, EngineID: "e"} })
}

// mayBegin: prompts are begun in the order of the queue; the ranks of one in
// ascending order, each after granted of the one before.
func (w *world) mayBegin(i int) bool {
	a, sp := w.atts[i], &w.x.specs[i]
	if a.begun || a.gone {
		return false
	}
	if sp.before >= 0 {
		b := w.atts[sp.before]
		return b.granted && b.told.how == 0
	}
	for j := range w.atts {
		if o := &w.x.specs[j]; o.engine == sp.engine && o.number < sp.number && !w.promptBegun(j) {
			return false
		}
	}
	if w.x.alike && sp.engine > 0 && sp.number == 0 && !w.promptBegun(w.firstOf(sp.engine-1)) {
		return false
	}
	if w.stagedFirst(sp.sender) >= w.x.staging {
		return false
	}
	return !w.blockedOnGrant(sp.engine)
}

func (w *world) promptBegun(i int) bool {
	for _, j := range w.x.specs[i].ranks {
		if w.atts[j].begun || w.atts[j].gone {
			return true
		}
	}
	return false
}

// firstOf is the first attempt of an engine.
func (w *world) firstOf(e int) int {
	return slices.IndexFunc(w.x.specs, func(s spec) bool { return s.engine == e })
}

func (w *world) begin(i int) {
	a, sp := w.att(i), &w.x.specs[i]
	a.begun = true
	deadline := kv.Forever
	if sp.short {
		deadline = shortTime
	}
	conn := kv.ConnID(w.engineOf(sp.sender).conn)
	w.stepS(sp.sender, ev(evBegin, uint64(i), uint64(conn)), func() outbound.Event {
		return outbound.Begin{Engine: conn, Call: callBegin + kv.CallID(i), ReqID: sp.req, Total: int64(sp.total),
			Peer: outbound.Peer{Host: "r", AllocPort: 9000 + sp.recv}, Deadline: deadline, Stage: int64(sp.stage)}
	})
}

// all reports whether every rank of an attempt's prompt is granted and goes on.
func (w *world) allGranted(i int) bool {
	for _, j := range w.x.specs[i].ranks {
		a := w.atts[j]
		if endings[a.told.how] != msg.EndReady && (!a.granted || a.told.how != 0 || a.gone || a.cancel != 0) {
			return false
		}
	}
	return true
}

// mayStage: the engine is one thread. It stages for a prompt that all ranks
// have granted, a rank after the other, and holds nothing meanwhile.
func (w *world) mayStage(i int) bool {
	a, sp := w.atts[i], &w.x.specs[i]
	if a.waits || a.stopped || a.gone || a.cancel != 0 || a.told.how != 0 || len(a.staged) > 0 || int(a.submitted) >= sp.end || !w.allGranted(i) || w.blockedOnGrant(sp.engine) {
		return false
	}
	for j := range w.atts {
		o := &w.x.specs[j]
		if o.engine == sp.engine && (w.atts[j].waits || o.sender == sp.sender && len(w.atts[j].staged) > 0) {
			return false
		}
		if j < i && slices.Contains(sp.ranks, j) && int(w.atts[j].submitted)+len(w.atts[j].staged) <= int(a.submitted) {
			return false
		}
	}
	return w.stagedFirst(sp.sender) < w.x.staging
}

func (w *world) stage(i int) {
	a, sp := w.att(i), &w.x.specs[i]
	n := min(w.x.maxStage, sp.end-int(a.submitted))
	conn := kv.ConnID(w.engineOf(sp.sender).conn)
	a.waits = true
	w.stepS(sp.sender, ev(evStage, uint64(i), uint64(n), uint64(conn)), func() outbound.Event {
		return outbound.Stage{Engine: conn, Call: callStage + kv.CallID(i), ReqID: sp.req, N: int64(n), Deadline: kv.Forever}
	})
}

// hold gives staging slots to an attempt. What its engine does not want is
// returned at once.
func (w *world) hold(i int, slots []kv.SlotID) {
	if len(slots) == 0 {
		return
	}
	a, sp := w.att(i), &w.x.specs[i]
	a.staged = append(a.staged, slots...)
	for _, s := range slots {
		w.send(sp.sender).staging[s].owner = uint8(i + 1)
	}
	switch {
	case a.told.how != 0 || len(a.staged) > sp.end-int(a.submitted):
		w.after(func() { w.unstage(i) })
	case w.x.eager:
		w.after(func() { w.submit(i) })
	}
}

func (w *world) drop(i int) []kv.SlotID {
	a, sp := w.att(i), &w.x.specs[i]
	slots := a.staged
	a.staged = nil
	for _, s := range slots {
		w.send(sp.sender).staging[s].owner = 0
	}
	return slots
}

func (w *world) unstage(i int) {
	if len(w.atts[i].staged) == 0 {
		return
	}
	sp := &w.x.specs[i]
	slots := w.drop(i)
	conn := kv.ConnID(w.engineOf(sp.sender).conn)
	e := []uint64{uint64(i), uint64(conn)}
	for _, s := range slots {
		e = append(e, uint64(s))
	}
	w.stepS(sp.sender, ev(evUnstage, e...), func() outbound.Event {
		return outbound.Unstage{Engine: conn, Call: callUnstage + kv.CallID(i), ReqID: sp.req, Slots: slices.Clone(slots)}
	})
}

// submit writes the chunks to what is staged and hands them over.
func (w *world) submit(i int) {
	a, sp := w.att(i), &w.x.specs[i]
	if len(a.staged) == 0 {
		return
	}
	slots := w.drop(i)
	first := int(a.submitted)
	for k, s := range slots {
		w.send(sp.sender).staging[s].content = contentOf(i, first+k)
	}
	conn := kv.ConnID(w.engineOf(sp.sender).conn)
	ends := first+len(slots) == sp.end && sp.end < sp.total
	e := []uint64{uint64(i), uint64(conn), uint64(first), uint64(boolInt(ends))}
	for _, s := range slots {
		e = append(e, uint64(s))
	}
	s := w.stepS(sp.sender, ev(evSubmit, e...), func() outbound.Event {
		b := outbound.Submit{Engine: conn, Call: callSubmit + kv.CallID(i), ReqID: sp.req, HasEnd: ends}
		if ends {
			b.End = int64(sp.end)
		}
		for k, s := range slots {
			b.Chunks = append(b.Chunks, outbound.Chunk{Index: int64(first + k), Key: "k" + itoa(i) + "." + itoa(first+k), Slot: s, Tokens: 16})
		}
		return b
	})
	for k := range s.acts {
		if o := &s.acts[k]; o.do == doAnswer && o.call == callSubmit+kv.CallID(i) {
			if o.err { // it has taken nothing
				for _, s := range slots {
					w.send(sp.sender).staging[s].owner = uint8(i + 1)
				}
				a.staged = slots
				w.unstage(i)
			} else {
				a.submitted += uint8(len(slots))
			}
			return
		}
	}
}

// cancelPrompt is an engine's cancel, of every rank.
func (w *world) cancelPrompt(i int) {
	for _, j := range w.x.specs[i].ranks {
		w.cancelAttempt(j)
	}
}

func (w *world) cancelAttempt(i int) {
	a, sp := w.att(i), &w.x.specs[i]
	if !a.begun {
		a.gone = true
		return
	}
	if a.gone || a.cancel != 0 {
		return
	}
	a.cancel = 1
	conn := kv.ConnID(w.engineOf(sp.sender).conn)
	w.stepS(sp.sender, ev(evCancel, uint64(i), uint64(conn)), func() outbound.Event {
		return outbound.Cancel{Engine: conn, Call: callCancel + kv.CallID(i), ReqID: sp.req, Reason: fault.Cancelled}
	})
}

// cancelName is a cancel at the receiver, by a proxy, an engine or an operator.
func (w *world) cancelName(i int) {
	sp := &w.x.specs[i]
	w.att(i).cancelled = true
	id := kv.ConnID(w.recvs[sp.recv].reader)
	w.stepR(sp.recv, ev(evCancelName, uint64(i), uint64(id)), func() intake.Event {
		return intake.CancelByName{Engine: id, Call: callCancelName + kv.CallID(i), ReqID: sp.req, Reason: fault.Cancelled}
	})
}

// ofSender finds the attempt that a sender calls by a name.
func (w *world) ofSender(n int, req string) int {
	return slices.IndexFunc(w.x.specs, func(s spec) bool { return s.sender == n && s.req == req })
}

func (w *world) ofRecv(r int, req string) int {
	return slices.IndexFunc(w.x.specs, func(s spec) bool { return s.recv == r && s.req == req })
}

func (w *world) granted(n int, a *act) {
	i := w.ofSender(n, a.req)
	if i < 0 { // warming up
		return
	}
	w.att(i).granted = true
	w.hold(i, a.slots)
}

// ended: an engine hears how an attempt ended. When one rank ends other than
// ready, it cancels the others.
func (w *world) ended(n int, a *act) {
	i := w.ofSender(n, a.req)
	if i < 0 {
		return
	}
	t := w.att(i)
	e := endingOf(a.ending, a.code)
	if t.told.how != 0 && t.told != e {
		w.violate("R5", "%s is told to have ended %s, and then %s", w.x.name(i), endings[t.told.how], a.ending)
	}
	t.told = e
	w.checkTold(i, a)
	w.after(func() { w.unstage(i) })
	if a.ending != msg.EndReady {
		for _, j := range w.x.specs[i].ranks {
			if j != i {
				w.after(func() { w.cancelAttempt(j) })
			}
		}
	}
}

// answerS is the answer to a prefill engine's call.
func (w *world) answerS(a *act) {
	i := int(a.call % 100)
	t := w.att(i)
	switch a.call - a.call%100 { // callWarm is none of them
	case callBegin:
		if a.err {
			t.told = endingOf(msg.EndFailed, a.code)
			w.checkTold(i, &act{ending: msg.EndFailed, code: a.code, text: a.text})
		}
	case callStage:
		t.waits, t.stopped = false, a.err
		w.hold(i, a.slots)
	case callCancel:
		t.cancel = 2
		if a.ending != "" && t.told.how != 0 && endings[t.told.how] != a.ending {
			w.violate("R5", "%s has ended %s; who cancels hears %s", w.x.name(i), endings[t.told.how], a.ending)
		}
	}
}

// loseEngine: a prefill engine dies and another process takes its place.
func (w *world) loseEngine(e int) {
	g := w.eng(e)
	old := g.conn
	g.lost = old
	g.conn++
	for k := range w.x.ranks {
		n := e*w.x.ranks + k
		for i := range w.sends[n].staging {
			if m := &w.send(n).staging[i]; m.owner != 0 {
				m.owner, m.lostBy = 0, old
			}
		}
	}
	for i := range w.atts {
		if w.x.specs[i].engine != e {
			continue
		}
		a := w.att(i)
		a.staged, a.waits = nil, false
		if a.begun || w.promptBegun(i) {
			a.gone = true // nobody is there to be told
		}
		if a.cancel == 1 {
			a.cancel = 2
		}
	}
	for k := range w.x.ranks {
		n := e*w.x.ranks + k
		w.stepS(n, ev(evEngineLost, uint64(old)), func() outbound.Event { return outbound.EngineLost{Engine: kv.ConnID(old), Last: true} })
		w.attachEngine(n)
	}
}

// fenceEngine: nobody can write any more what the lost engine had staged.
func (w *world) fenceEngine(e int) {
	g := w.eng(e)
	old := g.lost
	g.lost = 0
	for k := range w.x.ranks {
		n := e*w.x.ranks + k
		for i := range w.sends[n].staging {
			if m := &w.send(n).staging[i]; m.lostBy == old {
				m.lostBy = 0
			}
		}
		w.stepS(n, ev(evEngineFenced, uint64(old)), func() outbound.Event { return outbound.EngineFenced{Engine: kv.ConnID(old)} })
	}
}

// ---- decode engines ----

func (w *world) attachReader(r int) {
	id := kv.ConnID(w.recvs[r].reader)
	w.stepR(r, ev(evAttach, uint64(id)), func() intake.Event { return intake.EngineAttached{Engine: id, EngineID: "d"} })
}

func (w *world) wait(i int) {
	sp := &w.x.specs[i]
	id := kv.ConnID(w.recvs[sp.recv].reader)
	w.stepR(sp.recv, ev(evWait, uint64(i)), func() intake.Event {
		return intake.Wait{Engine: id, Call: callWait + kv.CallID(i), ReqID: sp.req, Deadline: longTime}
	})
}

func (w *world) claim(i int) {
	sp := &w.x.specs[i]
	id := kv.ConnID(w.recvs[sp.recv].reader)
	w.stepR(sp.recv, ev(evClaim, uint64(i), uint64(id)), func() intake.Event {
		return intake.Claim{Engine: id, Call: callClaim + kv.CallID(i), By: "d" + itoa(i), ReqID: sp.req}
	})
}

func (w *world) release(i int) {
	sp := &w.x.specs[i]
	rc := w.recv(sp.recv)
	for k := range rc.slots {
		if int(rc.slots[k].read) == i+1 {
			rc.slots[k].read, rc.slots[k].readBy = 0, 0
		}
	}
	w.att(i).claim = released
	id := kv.ConnID(rc.reader)
	w.stepR(sp.recv, ev(evRelease, uint64(i), uint64(id)), func() intake.Event {
		e := intake.Release{Engine: id, Call: callRelease + kv.CallID(i), By: "d" + itoa(i), ReqID: sp.req}
		if w.x.plant.is(PlantLeak) && sp.end > 1 {
			e.Chunks = []int64{0}
		}
		return e
	})
}

// answerR is the answer to a decode engine's call.
func (w *world) answerR(r int, a *act) {
	i := int(a.call % 100)
	t := w.att(i)
	switch a.call - a.call%100 {
	case callWait:
		if !a.err {
			t.answered = endingOf(a.ending, a.code)
			w.checkAnswered(i)
		}
	case callClaim:
		if a.err {
			t.claim = released // it was given back meanwhile
			return
		}
		t.claim = claimed
		for _, k := range a.claim.Chunks {
			m := &w.recv(r).slots[k.Slot]
			m.read, m.readBy = uint8(i+1), w.recvs[r].reader
			if want := contentOf(i, int(k.Index)); m.content != want {
				w.violate("R7", "chunk %d of %s is given to be read from slot %d, which holds %v", k.Index, w.x.name(i), k.Slot, m.content)
			}
		}
	}
}

// loseReader: the decode engine dies and another process takes its place; what
// it had claimed it may still read.
func (w *world) loseReader(r int) {
	rc := w.recv(r)
	old := rc.reader
	rc.readers = append(rc.readers, old)
	rc.reader++
	for i := range w.atts {
		if w.x.specs[i].recv == r && w.atts[i].claim == claimed {
			w.att(i).claim = unwanted
		}
	}
	w.stepR(r, ev(evEngineLost, uint64(old)), func() intake.Event { return intake.EngineLost{Engine: kv.ConnID(old)} })
	w.attachReader(r)
}

func (w *world) fenceReader(r, i int) {
	rc := w.recv(r)
	old := rc.readers[i]
	rc.readers = slices.Delete(rc.readers, i, i+1)
	for k := range rc.slots {
		if rc.slots[k].readBy == old {
			rc.slots[k].read, rc.slots[k].readBy = 0, 0
		}
	}
	w.stepR(r, ev(evEngineFenced, uint64(old)), func() intake.Event { return intake.EngineFenced{Engine: kv.ConnID(old)} })
}

func endingOf(how msg.Ending, why fault.Code) ending {
	return ending{how: uint8(slices.Index(endings, how)), why: uint8(slices.Index(fault.Codes, why) + 1)}
}

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}
