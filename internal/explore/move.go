package explore

import (
	"fmt"
	"slices"

	"github.com/berthkv/berth/internal/intake"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/outbound"
)

// moveKind is what can happen next.
type moveKind uint8

const (
	// Progress: sooner or later each of these happens by itself.
	mvBegin moveKind = iota
	mvStage
	mvSubmit
	mvClaim
	mvRelease
	mvConnect
	mvToR
	mvToS
	mvGoneS
	mvLinkUp
	mvLinkEnds
	mvSend
	mvGiveUp
	mvArrive
	mvComplete
	mvCopy
	mvCopied
	mvFence
	mvLinkLost
	mvFenceEngine
	mvFenceReader
	mvTickR
	mvTickS
	// Time passes until somebody wants to be woken.
	mvTime
	// What hangs or was lost sight of may happen, or never.
	mvStray
	mvUnstick
	// Faults.
	mvBreak
	mvOneWay
	mvDialFails
	mvLinkFails
	mvTwiceR
	mvTwiceS
	mvLate
	mvCancel
	mvCancelName
	mvCrashR
	mvCrashS
	mvBreakData
	mvLoseLink
	mvStick
	mvIgnore
	mvLoseReader
	mvLoseEngine
)

func (k moveKind) progress() bool { return k < mvTime }
func (k moveKind) fault() bool    { return k >= mvBreak }

var moveNames = [...]string{"begin", "stage", "submit", "claim", "release", "connect", "to-receiver", "to-sender", "hears-loss",
	"link-up", "link-down", "send", "give-up", "arrive", "write-done", "copy", "copied", "fence", "link-lost",
	"fence-engine", "fence-reader", "tick-receiver", "tick-sender", "time", "stray-write", "stuck-write", "break", "one-way", "dial-fails", "link-fails",
	"twice-to-receiver", "twice-to-sender", "late", "cancel", "cancel-at-receiver", "crash-receiver", "crash-sender", "break-data", "lose-link", "stick", "ignore",
	"lose-reader", "lose-engine"}

// move is one of them, with what it is about.
type move struct {
	kind       moveKind
	a, b, c, d uint8
}

func mv(kind moveKind, args ...int) move {
	m := move{kind: kind}
	for i, p := range []*uint8{&m.a, &m.b, &m.c, &m.d} {
		if i < len(args) {
			*p = uint8(args[i])
		}
	}
	return m
}

// moves lists what can happen next. Time passes by itself only when nothing
// else is under way; else it is a fault that something is so late. A wake-up
// that is due as soon as a message may take comes at any time: each core has a
// clock of its own, and that one runs ahead.
func (w *world) moves(out []move) []move {
	for i := range w.atts {
		out = w.attemptMoves(out, i)
	}
	for n := range w.sends {
		out = w.senderMoves(out, n)
	}
	for r := range w.recvs {
		out = w.receiverMoves(out, r)
	}
	for e := range w.engs {
		if w.engs[e].lost != 0 {
			out = append(out, mv(mvFenceEngine, e))
		}
	}
	progress := slices.ContainsFunc(out, func(m move) bool { return m.kind.progress() })
	may := func(f faultSet) bool { return w.x.faults&f != 0 && int(w.spent) < w.x.budget }
	if d := w.next(); d < horizon && d > atOnce {
		switch {
		case !progress:
			out = append(out, mv(mvTime))
		case may(faultLate):
			out = append(out, mv(mvLate))
		}
	}
	if int(w.spent) < w.x.budget {
		out = w.faultMoves(out, may)
	}
	return out
}

// next is the time until some core wants to be woken.
func (w *world) next() kv.Duration {
	d := kv.Forever
	for r := range w.recvs {
		d = min(d, w.x.m.left(w.recvs[r].place))
	}
	for n := range w.sends {
		d = min(d, w.x.m.left(w.sends[n].place))
	}
	return d
}

func (w *world) attemptMoves(out []move, i int) []move {
	a := w.atts[i]
	if w.mayBegin(i) {
		out = append(out, mv(mvBegin, i))
	}
	if w.mayStage(i) {
		out = append(out, mv(mvStage, i))
	}
	if len(a.staged) > 0 && !w.x.eager {
		out = append(out, mv(mvSubmit, i))
	}
	if endings[a.at.how] == "ready" && a.place == over {
		switch a.claim {
		case unclaimed:
			out = append(out, mv(mvClaim, i))
		case claimed:
			out = append(out, mv(mvRelease, i))
		}
	}
	return out
}

func (w *world) senderMoves(out []move, n int) []move {
	s := w.sends[n]
	r := w.recvOf(n)
	for i := range s.conns {
		k := &s.conns[i]
		if !k.up {
			if !k.left {
				out = append(out, mv(mvConnect, n, i))
			}
			continue
		}
		if len(k.toR) > 0 && !w.holdsBack(n) {
			out = append(out, mv(mvToR, n, i))
		}
		if len(k.toS) > 0 && !k.left {
			out = append(out, mv(mvToS, n, i))
		}
		if k.cut && !k.left && len(k.toS) == 0 {
			out = append(out, mv(mvGoneS, n, i))
		}
	}
	for i := range s.links {
		l := &s.links[i]
		if l.closing || l.dead || !l.up && l.life != w.recvs[r].life {
			out = append(out, mv(mvLinkEnds, n, i))
			continue
		}
		if !l.up {
			out = append(out, mv(mvLinkUp, n, i))
			continue
		}
		for j := range l.writes {
			x := &l.writes[j]
			switch {
			case x.sent:
			case w.x.link == "tcp":
				out = append(out, mv(mvSend, n, i, j))
			case x.stuck:
				out = append(out, mv(mvUnstick, n, i, j))
			default:
				out = append(out, mv(mvComplete, n, i, j))
			}
			if x.aborted && !x.sent && !x.stuck {
				out = append(out, mv(mvGiveUp, n, i, j))
			}
		}
	}
	for i := range s.frames {
		out = append(out, mv(mvArrive, n, i))
	}
	for i := range s.stray {
		out = append(out, mv(mvStray, n, i))
	}
	if w.x.m.left(s.place) <= atOnce {
		out = append(out, mv(mvTickS, n))
	}
	return out
}

func (w *world) receiverMoves(out []move, r int) []move {
	rc := w.recvs[r]
	for i := range rc.copies {
		p := &rc.copies[i]
		switch {
		case rc.slots[p.slot].revoked:
		case p.copying:
			out = append(out, mv(mvCopied, r, i))
		default:
			out = append(out, mv(mvCopy, r, i))
		}
	}
	for i := range rc.fences {
		out = append(out, mv(mvFence, r, i))
	}
	for i := range rc.lost {
		out = append(out, mv(mvLinkLost, r, i))
	}
	for i := range rc.readers {
		out = append(out, mv(mvFenceReader, r, i))
	}
	if w.x.m.left(rc.place) <= atOnce {
		out = append(out, mv(mvTickR, r))
	}
	return out
}

func (w *world) faultMoves(out []move, may func(faultSet) bool) []move {
	for n := range w.sends {
		s := w.sends[n]
		for i := range s.conns {
			k := &s.conns[i]
			switch {
			case k.left || k.cut:
			case !k.up:
				if may(faultDial) {
					out = append(out, mv(mvDialFails, n, i))
				}
			default:
				if may(faultBreak) {
					for x := range len(k.toR) + 1 {
						for y := range len(k.toS) + 1 {
							out = append(out, mv(mvBreak, n, i, x, y))
						}
					}
				}
				if may(faultOneWay) && !k.mute && !k.deaf {
					out = append(out, mv(mvOneWay, n, i, 0), mv(mvOneWay, n, i, 1))
				}
				if may(faultDuplicate) {
					if len(k.toR) > 0 {
						out = append(out, mv(mvTwiceR, n, i))
					}
					if len(k.toS) > 0 {
						out = append(out, mv(mvTwiceS, n, i))
					}
				}
			}
		}
		for i := range s.links {
			l := &s.links[i]
			if l.closing || l.dead {
				continue
			}
			if !l.up {
				if may(faultDial) {
					out = append(out, mv(mvLinkFails, n, i))
				}
				continue
			}
			if may(faultData) {
				out = append(out, mv(mvLoseLink, n, i))
				if len(l.writes) > 0 {
					out = append(out, mv(mvBreakData, n, i, 0))
					if len(s.frames) > 0 {
						out = append(out, mv(mvBreakData, n, i, 1))
					}
				}
			}
			if may(faultStuck) && w.x.link == "nixl" {
				for j := range l.writes {
					if !l.writes[j].sent && !l.writes[j].stuck {
						out = append(out, mv(mvStick, n, i, j))
					}
				}
			}
		}
		if may(faultCrashS) && w.used(n) {
			out = append(out, mv(mvCrashS, n))
		}
	}
	for i := range w.atts {
		a := w.atts[i]
		if may(faultCancel) && a.begun && !a.gone && a.cancel == 0 && w.x.specs[i].rank == 0 && a.claim != released {
			out = append(out, mv(mvCancel, i))
		}
		if may(faultCancel) && !a.cancelled && (a.place == waiting || a.place == admitted || a.place == over && a.claim == unclaimed) {
			out = append(out, mv(mvCancelName, i))
		}
		if may(faultReader) && a.place == over && endings[a.at.how] == "ready" && a.claim == unclaimed {
			out = append(out, mv(mvIgnore, i))
		}
	}
	for r := range w.recvs {
		if may(faultReader) && slices.ContainsFunc(w.recvs[r].slots, func(s recvSlot) bool { return s.read != 0 }) {
			out = append(out, mv(mvLoseReader, r))
		}
		if may(faultCrashR) && w.met(r) {
			out = append(out, mv(mvCrashR, r, 0), mv(mvCrashR, r, 1))
		}
	}
	for e := range w.engs {
		if may(faultEngine) && w.engs[e].lost == 0 && w.busy(e) {
			out = append(out, mv(mvLoseEngine, e))
		}
	}
	return out
}

// used: a sender has something to lose.
func (w *world) used(n int) bool {
	s := w.sends[n]
	for i := range w.atts {
		if a := w.atts[i]; w.x.specs[i].sender == n && a.begun && a.told.how == 0 {
			return true
		}
	}
	return len(s.conns) > 0 && slices.ContainsFunc(s.conns, func(k conn) bool { return k.up && !k.left })
}

// met: a receiver knows somebody.
func (w *world) met(r int) bool {
	for n := range w.sends {
		if w.recvOf(n) == r && slices.ContainsFunc(w.sends[n].conns, func(k conn) bool { return k.known }) {
			return true
		}
	}
	return false
}

func (w *world) busy(e int) bool {
	for i := range w.atts {
		if a := w.atts[i]; w.x.specs[i].engine == e && a.begun && a.told.how == 0 && !a.gone {
			return true
		}
	}
	return false
}

// do makes a move.
func (w *world) do(m move) {
	a, b, c := int(m.a), int(m.b), int(m.c)
	if m.kind.fault() {
		w.spent++
	}
	switch m.kind {
	case mvBegin:
		w.begin(a)
	case mvStage:
		w.stage(a)
	case mvSubmit:
		w.submit(a)
	case mvClaim:
		w.claim(a)
	case mvRelease:
		w.release(a)
	case mvConnect:
		w.connect(a, b)
	case mvToR:
		w.deliverR(a, b, false)
	case mvToS:
		w.deliverS(a, b, false)
	case mvTwiceR:
		w.deliverR(a, b, true)
	case mvTwiceS:
		w.deliverS(a, b, true)
	case mvGoneS, mvDialFails:
		w.gone(a, b)
	case mvLinkUp:
		w.linkUp(a, b)
	case mvLinkEnds, mvLinkFails:
		w.linkEnds(a, b)
	case mvSend:
		w.take(a, b, c)
	case mvGiveUp:
		w.giveUp(a, b, c)
	case mvArrive:
		w.arrive(a, b)
	case mvComplete, mvUnstick:
		w.complete(a, b, c)
	case mvCopy:
		w.copy(a, b)
	case mvCopied:
		w.copied(a, b)
	case mvFence:
		w.fence(a, b)
	case mvLinkLost:
		w.linkLost(a, b)
	case mvFenceEngine:
		w.fenceEngine(a)
	case mvFenceReader:
		w.fenceReader(a, b)
	case mvTickR:
		w.recv(a).lag += w.x.m.left(w.recvs[a].place)
		w.stepR(a, ev(evTick), func() intake.Event { return intake.Tick{} })
	case mvTickS:
		w.send(a).lag += w.x.m.left(w.sends[a].place)
		w.stepS(a, ev(evTick), func() outbound.Event { return outbound.Tick{} })
	case mvTime:
		w.idle++
		w.checkPatience()
		w.pass()
	case mvLate:
		w.pass()
	case mvStray:
		w.strayLands(a, b)
	case mvBreak:
		w.cutConn(a, b, c, int(m.d))
	case mvOneWay:
		w.cutOneWay(a, b, c == 1)
	case mvCancel:
		w.cancelPrompt(a)
	case mvCancelName:
		w.cancelName(a)
	case mvCrashR:
		w.crashR(a, b == 1)
	case mvCrashS:
		w.crashS(a)
	case mvBreakData:
		w.breakData(a, b, c == 1)
	case mvLoseLink:
		w.loseLink(a, b)
	case mvStick:
		w.send(a).links[b].writes[c].stuck = true
	case mvIgnore:
		w.att(a).claim = unwanted
	case mvLoseReader:
		w.loseReader(a)
	case mvLoseEngine:
		w.loseEngine(a)
	}
	w.settle()
	w.sweep()
	if w.bad == "" {
		w.checkState()
	}
}

// pass lets time pass until the first wake-up.
func (w *world) pass() {
	d := w.next()
	for r := range w.recvs {
		w.recv(r).lag += d
	}
	for n := range w.sends {
		w.send(n).lag += d
	}
	w.say("  %g s pass", d.Seconds())
}

// text is a move as scripts write it.
func (w *world) text(m move) string {
	a, b, c := int(m.a), int(m.b), int(m.c)
	name := moveNames[m.kind]
	link := func() string { return fmt.Sprintf("s%d link %d", a, w.sends[a].links[b].id) }
	write := func() string {
		x := &w.sends[a].links[b].writes[c]
		return fmt.Sprintf("%s s%d %s chunk %d write %d", name, a, w.x.name(int(x.att)), x.chunk, x.id)
	}
	cn := func() string {
		k := &w.sends[a].conns[b]
		if k.id&former != 0 {
			return fmt.Sprintf("s%d conn %d of life %d", a, k.id&0xff, k.life(w.sends[a]))
		}
		return fmt.Sprintf("s%d conn %d", a, k.id&0xff)
	}
	switch m.kind {
	case mvBegin, mvStage, mvSubmit, mvClaim, mvRelease, mvCancel, mvCancelName, mvIgnore:
		return name + " " + w.x.name(a)
	case mvConnect, mvGoneS, mvDialFails:
		return name + " " + cn()
	case mvToR, mvTwiceR:
		return name + " " + cn() + ": " + ShowMsg(w.x.m.message(w.sends[a].conns[b].toR[0]))
	case mvToS, mvTwiceS:
		return name + " " + cn() + ": " + ShowMsg(w.x.m.message(w.sends[a].conns[b].toS[0]))
	case mvBreak:
		k := &w.sends[a].conns[b]
		return fmt.Sprintf("%s %s: %d of %d still reach the receiver, %d of %d the sender", name, cn(), c, len(k.toR), m.d, len(k.toS))
	case mvOneWay:
		return fmt.Sprintf("%s %s: what goes to the %s is lost", name, cn(), [...]string{"sender", "receiver"}[c])
	case mvLinkUp, mvLinkEnds, mvLinkFails, mvLoseLink:
		return name + " " + link()
	case mvBreakData:
		return fmt.Sprintf("%s %s: %s", name, link(), [...]string{"what is on its way is lost", "what is on its way may still come"}[c])
	case mvSend, mvGiveUp, mvComplete, mvUnstick, mvStick:
		return write()
	case mvArrive:
		f := &w.sends[a].frames[b]
		return fmt.Sprintf("%s s%d frame %d of %s for slot %d generation %d", name, a, b, w.x.name(int(f.att)), f.dst, f.gen)
	case mvCopy, mvCopied:
		p := &w.recvs[a].copies[b]
		return fmt.Sprintf("%s r%d slot %d from %d of s%d generation %d", name, a, p.slot, p.src, p.from, p.gen)
	case mvFence:
		f := &w.recvs[a].fences[b]
		return fmt.Sprintf("%s r%d %v generation %d", name, a, f.slots, f.gen)
	case mvLinkLost:
		return fmt.Sprintf("%s r%d s%d", name, a, w.recvs[a].lost[b])
	case mvFenceReader:
		return fmt.Sprintf("%s r%d connection %d", name, a, w.recvs[a].readers[b])
	case mvFenceEngine, mvLoseEngine:
		return fmt.Sprintf("%s e%d", name, a)
	case mvTickR, mvLoseReader:
		return fmt.Sprintf("%s r%d", name, a)
	case mvCrashR:
		return fmt.Sprintf("%s r%d: what it had sent %s", name, a, [...]string{"is lost", "may still come"}[b])
	case mvTickS, mvCrashS:
		return fmt.Sprintf("%s s%d", name, a)
	case mvStray:
		x := &w.sends[a].stray[b]
		return fmt.Sprintf("%s s%d %s chunk %d write %d generation %d", name, a, w.x.name(int(x.att)), x.chunk, x.id, x.gen)
	}
	return name
}
