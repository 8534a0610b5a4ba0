package explore

import (
	"slices"
	"strconv"
	"strings"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/intake"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

func itoa(n int) string { return strconv.Itoa(n) }

// noted follows an attempt at its receiver.
func (w *world) noted(r int, a *act) {
	i := w.ofRecv(r, a.req)
	if i < 0 {
		return
	}
	t := w.att(i)
	switch a.note {
	case intake.NoteWaiting:
		if t.place != unheard {
			w.violate("R9", "%s waits again", w.x.name(i))
		}
		t.place = waiting
		t.arrival = 1
		for j := range w.atts {
			if j != i && w.x.specs[j].recv == r {
				t.arrival = max(t.arrival, w.atts[j].arrival+1)
			}
		}
	case intake.NoteAdmitted:
		if t.place == admitted || t.place == over {
			w.violate("R9", "%s is admitted again", w.x.name(i))
		}
		t.place = admitted
		w.overtake(r, i)
		t.arrival, t.passed = 0, 0
	case intake.NoteRefused:
		if a.code == fault.Busy {
			return
		}
		w.endsAt(i, msg.EndFailed, a)
	case intake.NoteEnded:
		w.endsAt(i, a.ending, a)
	case intake.NoteTrusted:
		t.trusted = true
	}
}

// overtake is R8: what waits is passed by at most admission_bypass_chunks. What
// waits behind a request of its own sender is not passed by others'; what
// cannot be served before a quarantine ends is not held back.
func (w *world) overtake(r, by int) {
	first := w.atts[by].arrival
	for j := range w.atts {
		b, sp := w.atts[j], &w.x.specs[j]
		if j == by || sp.recv != r || b.place != waiting || first != 0 && b.arrival > first {
			continue
		}
		front := true
		for k := range w.atts {
			o := &w.x.specs[k]
			front = front && !(k != j && o.recv == r && o.sender == sp.sender && w.atts[k].place == waiting && w.atts[k].arrival < b.arrival)
		}
		if !front && w.x.specs[by].sender != sp.sender || sp.total > w.x.capacity-w.quarantined(r) {
			continue
		}
		b = w.att(j)
		b.passed += uint8(w.x.specs[by].total)
		if int(b.passed) > w.x.bypass {
			w.violate("R8", "%s waits and is overtaken by %d chunks; admission_bypass_chunks is %d", w.x.name(j), b.passed, w.x.bypass)
		}
	}
}

func (w *world) quarantined(r int) int { return w.x.m.core(w.recvs[r].core).quarantined }

// endsAt is R5 at the receiver: an attempt ends once. What is ready has its own
// bytes in every slot.
func (w *world) endsAt(i int, how msg.Ending, a *act) {
	t := w.att(i)
	if t.at.how != 0 {
		w.violate("R5", "%s has ended %s, and ends again: %s", w.x.name(i), endings[t.at.how], how)
	}
	t.at, t.place, t.arrival = endingOf(how, a.code), over, 0
	w.checkAnswered(i)
	if how != msg.EndReady {
		t.claim = unwanted
		return
	}
	for k := range w.x.specs[i].end {
		s := t.slots[k]
		if c := w.recvs[w.x.specs[i].recv].slots[s].content; c != contentOf(i, k) {
			w.violate("R7", "%s is ready; slot %d, of its chunk %d, holds %v", w.x.name(i), s, k, c)
		}
	}
}

// checkAnswered: who asks hears the ending that stands.
func (w *world) checkAnswered(i int) {
	t := w.att(i)
	if t.at.how != 0 && t.answered.how != 0 && t.at != t.answered {
		w.violate("R5", "%s has ended %s; who waited heard %s", w.x.name(i), endings[t.at.how], endings[t.answered.how])
	}
}

// checkTold is R5 at the other end. The receiver decides; only a sender that
// has lost it, or that it has lost, gives its own verdict, which is never ready.
func (w *world) checkTold(i int, a *act) {
	t := w.att(i)
	own := a.code == fault.PeerLost || t.at == endingOf(msg.EndFailed, fault.PeerLost) && a.ending != msg.EndReady
	switch {
	case a.ending == msg.EndReady && endings[t.at.how] != msg.EndReady && w.recvs[w.x.specs[i].recv].life == 0:
		w.violate("R5", "%s is told to be ready; its receiver says %q", w.x.name(i), endings[t.at.how])
	case own || t.at.how == 0:
	case endings[t.at.how] != a.ending:
		w.violate("R5", "%s is told to have ended %s; its receiver has decided %s", w.x.name(i), a.ending, endings[t.at.how])
	}
}

// checkPatience is R10: a wait is ended by its event. Requests have no deadline
// here, unless it is meant to come first; so what no event ends waits for ever.
// A lease, a quarantine and a time to be claimed, one after the other, pass in
// fewer than maxIdle steps.
func (w *world) checkPatience() {
	if w.idle > maxIdle {
		w.bad = w.unrest()
	}
}

// unrest says what is wrong with a state that nothing leads out of.
func (w *world) unrest() string {
	if w.allEnded() {
		return "R12: all has ended, and not all is free"
	}
	return "R10: what waits is ended by no event (deadlock)"
}

const maxIdle = 24

// notified: the proxy hears ready once, and only of what is.
func (w *world) notified(n int, a *act) {
	v, ok := w.x.m.message(a.msg).(*msg.ProxyNotif)
	if !ok {
		return
	}
	i := w.ofSender(n, v.ReqID)
	if i < 0 {
		return
	}
	t := w.att(i)
	if t.notified {
		w.violate("R5", "the proxy is told of %s twice", w.x.name(i))
	}
	t.notified = true
	if endings[t.at.how] != msg.EndReady && w.recvs[w.x.specs[i].recv].life == 0 {
		w.violate("R5", "the proxy is told that %s is ready; its receiver says %q", w.x.name(i), endings[t.at.how])
	}
}

// watchReceived is R2 and R4: what is impossible is refused in the step that
// receives it, with both numbers, and leaves nothing behind; a grant is whole.
func (w *world) watchReceived(r int, before *coreState, m msg.Message, s *step) {
	b, ok := m.(*msg.Begin)
	if !ok || w.bad != "" {
		return
	}
	i := w.ofRecv(r, b.ReqID)
	if i < 0 {
		return
	}
	refused, told := false, false
	for k := range s.acts {
		a := &s.acts[k]
		if a.do == doNote && a.req == b.ReqID && int(b.TotalChunks) > w.x.capacity {
			refused = a.note == intake.NoteRefused
			if !refused && a.note != intake.NoteEnded {
				w.violate("R4", "%s can never be served (%d chunks of %d), and is not refused", w.x.name(i), b.TotalChunks, w.x.capacity)
			}
		}
		if a.do != doSend {
			continue
		}
		switch v := w.x.m.message(a.msg).(type) {
		case *msg.Granted:
			if v.Re == b.Seq && int64(len(v.Slots)) != b.TotalChunks {
				w.violate("R2", "%s is granted %d slots; it has reserved %d", w.x.name(i), len(v.Slots), b.TotalChunks)
			}
		case *msg.Error:
			if v.Re == b.Seq && v.Code == fault.TooLarge {
				told = true
				if !strings.Contains(v.Text, itoa(int(b.TotalChunks))) || !strings.Contains(v.Text, itoa(w.x.capacity)) {
					w.violate("R4", "the refusal does not name both numbers: %s", v.Text)
				}
			}
		}
	}
	if !refused {
		return
	}
	if after := w.x.m.core(s.next); after.free < before.free || after.live > before.live {
		w.violate("R4", "%s was refused and leaves something behind", w.x.name(i))
	}
	if !told {
		w.violate("R4", "%s can never be served (%d chunks of %d), and is not told at once", w.x.name(i), b.TotalChunks, w.x.capacity)
	}
}

// checkState checks what holds in every state.
func (w *world) checkState() {
	for i := range w.atts {
		t := w.atts[i]
		if !t.granted && t.told.how == 0 && (len(t.staged) > 0 || t.place == waiting && w.waitsWithStaging(i)) {
			w.violate("R3", "%s is not granted, and holds staging slots", w.x.name(i))
		}
		if t.place == waiting && (t.gen != 0 || len(t.slots) > 0) {
			w.violate("R3", "%s waits for admission, and holds slots %v", w.x.name(i), t.slots)
		}
	}
	for r := range w.recvs {
		c := w.x.m.core(w.recvs[r].core)
		if c.sum != c.capacity || c.negative {
			w.violate("R1", "the slots of receiver %d sum to %d of %d", r, c.sum, c.capacity)
		}
		held := 0
		for _, s := range w.recvs[r].slots {
			if w.exact() && s.gen != 0 || s.read != 0 {
				held++
			}
		}
		if w.exact() && held > c.capacity-c.free {
			w.violate("R1", "%d slots of receiver %d are open or read; %d of %d are free", held, r, c.free, c.capacity)
		}
		if most := w.x.maxWaiting; most > 0 && c.waiting > most {
			w.violate("R11", "%d requests wait at receiver %d, at most %d may", c.waiting, r, most)
		}
	}
}

// maxWaiting is what receivers are told, if config does not say.
const maxWaiting = 8

// ended reports whether every attempt has ended, and whoever asked was answered.
func (w *world) allEnded() bool {
	for i := range w.atts {
		t := w.atts[i]
		if !t.gone && (!t.begun || t.told.how == 0) || t.cancel == 1 || t.waits || len(t.staged) > 0 || t.place == waiting || t.place == admitted {
			return false
		}
	}
	for n := range w.sends {
		if w.x.m.core(w.sends[n].core).live != 0 {
			return false
		}
	}
	return true
}

// allFree reports whether every slot of every pool is: R12.
func (w *world) allFree() bool {
	for r := range w.recvs {
		if c := w.x.m.core(w.recvs[r].core); c.free != c.capacity {
			return false
		}
	}
	for n := range w.sends {
		if c := w.x.m.core(w.sends[n].core); c.free != c.capacity {
			return false
		}
	}
	return true
}

// checkRest asks once more, when all is over: R5, who asks later gets the same.
func (w *world) checkRest() {
	for i := range w.atts {
		t, sp := w.atts[i], &w.x.specs[i]
		if t.at.how == 0 || w.recvs[sp.recv].life != 0 {
			continue
		}
		s := w.x.m.stepRecv(w.recvs[sp.recv].place, ev(evWait, uint64(callAsk), uint64(i)), func() intake.Event {
			return intake.Wait{Engine: kv.ConnID(w.recvs[sp.recv].reader), Call: callAsk + kv.CallID(i), ReqID: sp.req, Deadline: longTime}
		})
		k := slices.IndexFunc(s.acts, func(a act) bool { return a.do == doAnswer && a.call == callAsk+kv.CallID(i) })
		if k < 0 || s.acts[k].err || endingOf(s.acts[k].ending, s.acts[k].code) != t.at {
			w.violate("R5", "%s has ended %s; who asks later hears something else", w.x.name(i), endings[t.at.how])
		}
	}
}
