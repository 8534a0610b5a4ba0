package explore

import (
	"fmt"
	"slices"

	"github.com/berthkv/berth/internal/intake"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/outbound"
)

// Kinds of events in their encodings.
const (
	evConnected byte = iota
	evDisconnected
	evReceived
	evTick
	evLanded
	evFailed
	evFenced
	evLinkLost
	evAttach
	evWait
	evClaim
	evRelease
	evEngineLost
	evEngineFenced
	evBegin
	evStage
	evUnstage
	evSubmit
	evCancel
	evCancelName
	evLinkUp
	evLinkDown
	evSent
	evLost
)

// stepR steps a receiver and does what it says.
func (w *world) stepR(r int, e event, make func() intake.Event) *step {
	s := w.x.m.stepRecv(w.recvs[r].place, e, make)
	if s.bad != "" {
		w.violate("check", "receiver %d: %s", r, s.bad)
		return s
	}
	w.recv(r).place = place{core: s.next}
	for i := range s.acts {
		a := &s.acts[i]
		w.sayAct("receiver", r, a)
		w.actR(r, a)
	}
	return s
}

// stepS steps a sender and does what it says.
func (w *world) stepS(n int, e event, make func() outbound.Event) *step {
	s := w.x.m.stepSend(w.sends[n].place, e, make)
	if s.bad != "" {
		w.violate("check", "sender %d: %s", n, s.bad)
		return s
	}
	w.send(n).place = place{core: s.next}
	for i := range s.acts {
		a := &s.acts[i]
		w.sayAct("sender", n, a)
		w.actS(n, a)
	}
	return s
}

func (w *world) actR(r int, a *act) {
	switch a.do {
	case doSend:
		w.sendToS(r, a)
	case doClose:
		if k := w.connOf(r, a.conn); k != nil {
			k.cut = true
		}
	case doDisallow:
		w.disallow(r, a.owner)
	case doOpen:
		w.open(r, a)
	case doPull:
		w.pull(r, a)
	case doRevoke:
		w.revoke(r, a)
	case doAnswer:
		w.answerR(r, a)
	case doNote:
		w.noted(r, a)
	}
}

func (w *world) actS(n int, a *act) {
	s := w.send(n)
	switch a.do {
	case doDial:
		s.conns = append(s.conns, conn{id: a.conn})
	case doClose:
		if k := s.conn(a.conn); k != nil {
			k.left, k.toS = true, nil
		}
	case doSend:
		if k := s.conn(a.conn); k != nil && k.up && !k.cut && !k.left && !k.mute {
			k.toR = append(k.toR, a.msg)
		}
	case doConnect:
		s.links = append(s.links, dataLink{id: uint64(a.link), life: a.owner[2] - 1})
	case doDisconnect:
		if l := s.link(uint64(a.link)); l != nil {
			l.closing = true
		}
	case doWrite:
		w.wrote(n, a)
	case doAbort:
		if l := s.link(uint64(a.link)); l != nil {
			for i := range l.writes {
				if slices.Contains(a.ids, l.writes[i].id) {
					l.writes[i].aborted = true
				}
			}
		}
	case doSettle:
		w.settled(n, a)
	case doRaise:
		w.raised(n, a)
	case doNotify:
		w.notified(n, a)
	case doAnswer:
		w.answerS(a)
	case doGranted:
		w.granted(n, a)
	case doEnded:
		w.ended(n, a)
	}
}

func (s *sender) conn(id kv.ConnID) *conn {
	for i := range s.conns {
		if s.conns[i].id == id {
			return &s.conns[i]
		}
	}
	return nil
}

func (s *sender) link(id uint64) *dataLink {
	for i := range s.links {
		if s.links[i].id == id {
			return &s.links[i]
		}
	}
	return nil
}

// rconn is how a receiver numbers a connection: by sender, life and number.
func rconn(n int, life uint8, id kv.ConnID) kv.ConnID {
	return kv.ConnID(n+1)<<16 | kv.ConnID(life)<<8 | (id & 0xff)
}

// recvOf is the receiver to which a sender speaks.
func (w *world) recvOf(n int) int { return n % w.x.ranks }

// connOf finds a connection by the receiver's number.
func (w *world) connOf(r int, id kv.ConnID) *conn {
	n := int(id>>16) - 1
	s := w.send(n)
	for i := range s.conns {
		if k := &s.conns[i]; w.recvOf(n) == r && k.known && rconn(n, k.life(s), k.id) == id {
			return k
		}
	}
	return nil
}

// life is that of the sender which has dialled; a former one's connections are
// marked in their number.
func (k *conn) life(s *sender) uint8 {
	if k.id&former != 0 {
		return uint8(k.id>>48) & 0x7f
	}
	return s.life
}

// former marks a connection of a former life of its sender.
const former kv.ConnID = 1 << 63

func (w *world) sendToS(r int, a *act) {
	if k := w.connOf(r, a.conn); k != nil && !k.cut && !k.left && !k.deaf {
		k.toS = append(k.toS, a.msg)
		w.drainEarly(r, a.conn, a.msg)
	}
}

// sweep tells receivers of connections that are gone, once nothing more comes
// on them, and forgets those whose end both ends know. That a receiver hears of
// it later makes no difference: nothing more gets on such a connection.
func (w *world) sweep() {
	done := func(k conn) bool { return (k.cut && k.known || k.left) && (!k.up || len(k.toR) == 0) }
	for n := range w.sends {
		if !slices.ContainsFunc(w.sends[n].conns, done) {
			continue
		}
		s := w.send(n)
		for i := 0; i < len(s.conns); i++ {
			k := &s.conns[i]
			if !done(*k) {
				continue
			}
			if k.known {
				id := rconn(n, k.life(s), k.id)
				k.known = false
				w.stepR(w.recvOf(n), ev(evDisconnected, uint64(id)), func() intake.Event { return intake.Disconnected{Conn: id} })
			}
			if k = &s.conns[i]; k.left {
				s.conns = slices.Delete(s.conns, i, i+1)
				i--
			}
		}
	}
}

// deliverR takes the first message on its way to the receiver. The receiver
// hears of the connection with the first of them.
func (w *world) deliverR(n, i int, twice bool) {
	k := &w.send(n).conns[i]
	r := w.recvOf(n)
	id := rconn(n, k.life(w.send(n)), k.id)
	m := k.toR[0]
	k.toR = k.toR[1:]
	if twice {
		k.toR = append(k.toR, w.repeated(m))
	}
	if !k.known {
		k.known = true
		w.stepR(r, ev(evConnected, uint64(id)), func() intake.Event {
			return intake.Connected{Conn: id, Identity: fmt.Sprintf("s%d", id), Remote: "-"}
		})
	}
	e := ev(evReceived, uint64(id), uint64(m))
	e.repeat = true
	before := w.x.m.core(w.recvs[r].core)
	s := w.stepR(r, e, func() intake.Event { return intake.Received{Conn: id, Msg: w.x.m.message(m)} })
	w.watchReceived(r, before, w.x.m.message(m), s)
}

// deliverS takes the first message on its way to the sender.
func (w *world) deliverS(n, i int, twice bool) {
	k := &w.send(n).conns[i]
	m := k.toS[0]
	k.toS = k.toS[1:]
	if twice {
		k.toS = append(k.toS, m)
	}
	id := k.id
	e := ev(evReceived, uint64(id), uint64(m))
	e.repeat = true
	w.stepS(n, e, func() outbound.Event { return outbound.Received{Conn: id, Msg: w.x.m.message(m)} })
}

// connect finishes a dial.
func (w *world) connect(n, i int) {
	k := &w.send(n).conns[i]
	k.up = true
	id := k.id
	w.stepS(n, ev(evConnected, uint64(id)), func() outbound.Event { return outbound.Connected{Conn: id} })
}

// gone tells a sender that a dial has failed or a connection broke.
func (w *world) gone(n, i int) {
	k := &w.send(n).conns[i]
	k.left, k.toS = true, nil
	id := k.id
	w.stepS(n, ev(evDisconnected, uint64(id)), func() outbound.Event { return outbound.Disconnected{Conn: id, Text: "gone"} })
}

// cutConn breaks a connection: of what is under way, a prefix is left in each
// direction, which may still arrive at any time.
func (w *world) cutConn(n, i, keepR, keepS int) {
	k := &w.send(n).conns[i]
	k.cut = true
	k.toR, k.toS = k.toR[:keepR], k.toS[:keepS]
}

// cutOneWay loses one direction of a connection, from now on.
func (w *world) cutOneWay(n, i int, toReceiver bool) {
	k := &w.send(n).conns[i]
	if toReceiver {
		k.mute, k.toR = true, nil
	} else {
		k.deaf, k.toS = true, nil
	}
}

// crashR kills a receiver's agent and starts it again: another incarnation with
// other memory. What it had sent may still arrive.
func (w *world) crashR(r int, keep bool) {
	rc := w.recv(r)
	for n := range w.sends {
		if w.recvOf(n) != r {
			continue
		}
		s := w.send(n)
		for i := range s.conns {
			k := &s.conns[i]
			if !k.up {
				continue
			}
			k.cut, k.known, k.toR = true, false, nil
			if !keep {
				k.toS = nil
			}
		}
		for i := range s.links {
			if s.links[i].up {
				s.links[i].dead = true
			}
			for j := range s.links[i].writes { // they go to memory that is nobody's now
				s.links[i].writes[j].stuck = false
			}
		}
		s.frames, s.stray = nil, nil
	}
	life := rc.life + 1
	*rc = receiver{place: place{core: w.x.newRecv(r, life)}, life: life, slots: make([]recvSlot, w.x.capacity), reader: 1}
	for i := range w.atts {
		if w.x.specs[i].recv == r {
			a := w.att(i)
			if a.place != unheard {
				a.place, a.gen, a.slots, a.arrival = over, 0, nil, 0
				a.at, a.claim = ending{}, unwanted // nobody is there to be asked
			}
		}
	}
	w.attachReader(r)
}

// crashS kills a sender's agent and starts it again. What it had sent may still
// arrive, one-sided writes too.
func (w *world) crashS(n int) {
	s := w.send(n)
	r := w.recvOf(n)
	for i := range s.conns {
		k := &s.conns[i]
		k.left, k.toS = true, nil
		if k.id&former == 0 {
			k.id |= former | kv.ConnID(s.life)<<48
		}
	}
	for _, l := range s.links {
		for _, x := range l.writes {
			if w.x.link == "nixl" && !x.sent && l.life == w.recvs[r].life && !l.dead {
				x.stuck = true
				s.stray = append(s.stray, x)
			}
		}
	}
	for i := range w.recvs[r].copies {
		if p := &w.recv(r).copies[i]; int(p.from) == n && !p.frozen {
			p.frozen = true
			p.seen = 0
			if st := &s.staging[p.src]; st.word == p.srcGen {
				p.seen = st.content
			}
		}
	}
	s.links = nil
	s.life++
	s.staging = make([]stagingSlot, w.x.staging)
	s.place = place{core: w.x.newSend(n, s.life)}
	w.attachEngine(n)
	for _, i := range w.prompts(n / w.x.ranks) {
		if w.x.specs[i].sender == n && w.atts[i].begun {
			w.forgotten(i)
		}
	}
}

// forgotten: the agent of an attempt has died and knows nothing of it. Its
// prompt is given up at the other ranks, unless it is ready here.
func (w *world) forgotten(i int) {
	a := w.att(i)
	failed := a.told.how == 0
	a.gone, a.waits, a.staged, a.granted = true, false, nil, false
	if a.cancel == 1 {
		a.cancel = 2
	}
	for _, j := range w.x.specs[i].ranks {
		if failed && j != i && w.atts[j].told.how == 0 {
			w.cancelAttempt(j)
		}
	}
}
