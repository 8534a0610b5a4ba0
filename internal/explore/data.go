package explore

import (
	"slices"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/intake"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/outbound"
)

// The three kinds of links, each with every hand that can touch a slot:
//
//	tcp    a write is sent (the link reads the staging slot), its frame travels
//	       and lands; a reader that is interrupted has a hand on the slot until
//	       its fence
//	shm    the receiver's copier reads the source's word, copies, reads it again
//	nixl   a write lands in the receiver's memory at any time until it is done
//
// R6 is checked where a slot is handed out (nobody may have a hand on it) and
// where memory is touched (it must be the toucher's).

func (w *world) exact() bool { return w.x.link != "nixl" }

// attOf finds the attempt that has a generation at a receiver.
func (w *world) attOf(r int, gen kv.Generation) int {
	for i := range w.atts {
		if w.x.specs[i].recv == r && w.atts[i].gen == gen && gen != 0 {
			return i
		}
	}
	return -1
}

// open hands slots out to be written.
func (w *world) open(r int, a *act) {
	rc := w.recv(r)
	att := -1
	for i := range w.atts { // the admission that was noted last
		if w.x.specs[i].recv == r && w.atts[i].place == admitted && w.atts[i].gen == 0 {
			att = i
		}
	}
	if att < 0 {
		w.violate("R5", "receiver %d opens slots %v for nobody", r, a.slots)
		return
	}
	w.att(att).gen, w.att(att).slots = a.gen, a.slots
	for _, s := range a.slots {
		m := &rc.slots[s]
		if w.exact() && m.gen != 0 {
			w.violate("R6", "slot %d of receiver %d is opened under generation %d while it is open under %d", s, r, a.gen, m.gen)
		}
		if m.filling != 0 {
			w.violate("R6", "slot %d of receiver %d is handed to %s while bytes of %s are being written there", s, r, w.x.name(att), w.x.name(int(m.filling)-1))
		}
		if m.read != 0 {
			w.violate("R6", "slot %d of receiver %d is handed to %s while the engine reads %s there", s, r, w.x.name(att), w.x.name(int(m.read)-1))
		}
		w.checkStray(r, s, att)
		*m = recvSlot{gen: a.gen, content: m.content}
	}
	if w.x.plant.is(PlantCommitOnGrant) {
		w.after(func() {
			for _, s := range a.slots {
				w.land(r, s, a.gen)
			}
		})
	}
}

// checkStray looks for one-sided writes that may still land in a slot.
func (w *world) checkStray(r int, s kv.SlotID, att int) {
	check := func(x *write) {
		if x.dst != s || x.sent && !x.stuck {
			return
		}
		if w.atts[x.att].trusted {
			w.excepted = "slot " + itoa(int(s)) + " is handed to " + w.x.name(att) + " while a write of " + w.x.name(int(x.att)) + " may still land there: its writer is trusted to be gone"
			return
		}
		w.violate("R6", "slot %d of receiver %d is handed to %s while a write of %s may still land there", s, r, w.x.name(att), w.x.name(int(x.att)))
	}
	if w.exact() {
		return
	}
	for n := range w.sends {
		if w.recvOf(n) != r {
			continue
		}
		for i := range w.sends[n].stray {
			check(&w.send(n).stray[i])
		}
		for i := range w.sends[n].links {
			l := &w.send(n).links[i]
			if l.life != w.recvs[r].life || l.dead {
				continue
			}
			for j := range l.writes {
				check(&l.writes[j])
			}
		}
	}
}

// pull starts copies out of a sender's staging pool.
func (w *world) pull(r int, a *act) {
	n, life := owner(a.owner)
	for _, p := range a.pulls {
		rc := w.recv(r)
		rc.copies = append(rc.copies, pull{from: uint8(n), gen: a.gen, slot: p.Slot, src: p.Src, srcGen: p.SrcGen, att: uint8(max(w.attOf(r, a.gen), 0)),
			frozen: life != w.sends[n].life})
	}
}

// revoke closes slots; whoever fills them is interrupted, and lets go in its
// own time.
func (w *world) revoke(r int, a *act) {
	if !w.exact() {
		return
	}
	rc := w.recv(r)
	f := fence{gen: a.gen}
	for _, s := range a.slots {
		if m := &rc.slots[s]; m.gen == a.gen && !m.revoked {
			m.revoked = true
			f.slots = append(f.slots, s)
			w.fill(r, s, a.gen)
		}
	}
	if len(f.slots) == 0 {
		return
	}
	if w.x.plant.is(PlantFreeOnCancel) {
		for _, s := range f.slots { // whoever fills them goes on
			m := &rc.slots[s]
			m.gen, m.revoked, m.landed = 0, false, false
		}
		w.after(func() { w.fenced(r, f) })
		return
	}
	rc.fences = append(rc.fences, f)
}

// fill notes that a reader may be filling a slot that is revoked: any frame for
// it that is on its way may have begun.
func (w *world) fill(r int, s kv.SlotID, gen kv.Generation) {
	if w.recvs[r].slots[s].landed {
		return
	}
	for n := range w.sends {
		for _, f := range w.sends[n].frames {
			if w.recvOf(n) == r && f.dst == s && f.gen == gen {
				w.recv(r).slots[s].filling = f.att + 1
			}
		}
	}
}

// fence lets whoever fills revoked slots let go, and says so.
func (w *world) fence(r, i int) {
	rc := w.recv(r)
	f := rc.fences[i]
	rc.fences = slices.Delete(rc.fences, i, i+1)
	for _, s := range f.slots {
		m := &rc.slots[s]
		m.gen, m.revoked, m.landed, m.filling = 0, false, false, 0
	}
	rc.copies = slices.DeleteFunc(rc.copies, func(p pull) bool { return p.gen == f.gen && slices.Contains(f.slots, p.slot) })
	if w.x.plant.is(PlantDropFence) {
		return
	}
	w.fenced(r, f)
}

func (w *world) fenced(r int, f fence) {
	e := []uint64{uint64(f.gen)}
	for _, s := range f.slots {
		e = append(e, uint64(s))
	}
	w.stepR(r, ev(evFenced, e...), func() intake.Event { return intake.Fenced{Generation: f.gen, Slots: slices.Clone(f.slots)} })
}

func (w *world) land(r int, s kv.SlotID, gen kv.Generation) {
	w.stepR(r, ev(evLanded, uint64(s), uint64(gen)), func() intake.Event {
		return intake.Landed{Slot: s, Generation: gen, Bytes: chunkBytes}
	})
}

// touch puts bytes into a receive slot.
func (w *world) touch(r int, s kv.SlotID, c content, att int) {
	m := &w.recv(r).slots[s]
	if m.read != 0 {
		w.violate("R6", "bytes of %s are written to slot %d of receiver %d while the engine reads %s there", w.x.name(att), s, r, w.x.name(int(m.read)-1))
	}
	m.content = c
}

// disallow closes an owner's data connections.
func (w *world) disallow(r int, i kv.Incarnation) {
	n, life := owner(i)
	s := w.send(n)
	if life == s.life {
		for j := range s.links {
			if l := &s.links[j]; l.life == w.recvs[r].life {
				l.dead = true
			}
		}
	}
	w.dropFrames(n, life)
}

// dropFrames loses what is on its way over a stream.
func (w *world) dropFrames(n int, life uint8) {
	s := w.send(n)
	s.frames = slices.DeleteFunc(s.frames, func(f frame) bool { return f.life == life })
}

// ---- the sending half ----

func (w *world) wrote(n int, a *act) {
	l := w.send(n).link(uint64(a.link))
	if l == nil || !l.up || l.closing {
		w.violate("check", "sender %d writes over link %d, which is not up", n, a.link)
		return
	}
	for _, x := range a.writes {
		att, chunk := w.chunkAt(n, x.Generation, x.Dst)
		if att < 0 {
			w.violate("R6", "sender %d writes to slot %d under generation %d, which it was not granted", n, x.Dst, x.Generation)
			return
		}
		l.writes = append(l.writes, write{id: x.ID, src: x.Src, dst: x.Dst, gen: x.Generation, att: uint8(att), chunk: uint8(chunk)})
	}
}

// chunkAt says which chunk of which of a sender's attempts a slot is for. The
// receiver may have been started again since; then nothing matches, and it does
// not matter: the link is dead.
func (w *world) chunkAt(n int, gen kv.Generation, s kv.SlotID) (att, chunk int) {
	other := -1
	for i := range w.atts {
		a := w.att(i)
		if w.x.specs[i].sender != n {
			continue
		}
		if a.gen == gen {
			if k := slices.Index(a.slots, s); k >= 0 {
				return i, k
			}
		}
		if a.granted {
			other = i
		}
	}
	return other, 0
}

// settled forgets writes that the receiver has answered for. What still comes
// of a one-sided one that was not done is on its own now.
func (w *world) settled(n int, a *act) {
	s := w.send(n)
	l := s.link(uint64(a.link))
	if l == nil {
		return
	}
	l.writes = slices.DeleteFunc(l.writes, func(x write) bool {
		if !slices.Contains(a.ids, x.id) {
			return false
		}
		if !w.exact() && !x.sent && !l.dead {
			s.stray = append(s.stray, x)
		}
		return true
	})
}

// raised hands staging slots out. R6: nobody may still read or write them.
func (w *world) raised(n int, a *act) {
	s := w.send(n)
	for _, x := range a.raise {
		m := &s.staging[x.Slot]
		if m.owner != 0 || m.lostBy != 0 {
			w.violate("R6", "staging slot %d of sender %d is handed out while an engine has it", x.Slot, n)
		}
		for _, l := range s.links {
			for _, y := range l.writes {
				if y.src == x.Slot {
					w.violate("R6", "staging slot %d of sender %d is handed out while write %d has it", x.Slot, n, y.id)
				}
			}
		}
		if !w.x.plant.is(PlantNoGeneration) {
			m.word = x.Generation
		}
		m.content = 0
	}
}

// take lets a stream take a chunk's bytes from its staging slot.
func (w *world) take(n, l, i int) {
	s := w.send(n)
	x := &s.links[l].writes[i]
	c := s.staging[x.src].content
	if want := contentOf(int(x.att), int(x.chunk)); c != want {
		w.violate("R6", "the link reads %v from staging slot %d of sender %d; it was given %v", c, x.src, n, want)
	}
	s.frames = append(s.frames, frame{dst: x.dst, gen: x.gen, content: c, att: x.att, life: s.life})
	if x.aborted { // it had begun: it is finished, and then given up
		w.giveUp(n, l, i)
		return
	}
	x.sent = true
	w.wasSent(n, s.links[l].id, x.id)
}

func (w *world) wasSent(n int, link, id uint64) {
	w.stepS(n, ev(evSent, link, id), func() outbound.Event {
		return outbound.Sent{Link: outbound.LinkID(link), Writes: []uint64{id}}
	})
}

// giveUp reports an aborted write as lost.
func (w *world) giveUp(n, l, i int) {
	k := &w.send(n).links[l]
	id := k.writes[i].id
	k.writes = slices.Delete(k.writes, i, i+1)
	w.wasLost(n, k.id, []uint64{id})
}

func (w *world) wasLost(n int, link uint64, ids []uint64) {
	w.stepS(n, ev(evLost, append([]uint64{link}, ids...)...), func() outbound.Event {
		return outbound.Lost{Link: outbound.LinkID(link), Writes: ids, Text: "lost"}
	})
}

// arrive: a frame comes to its end: its bytes are in the slot, or it is discarded.
// That a reader fills the slot for a while before matters only when it is
// revoked meanwhile: see revoke.
func (w *world) arrive(n, i int) {
	s := w.send(n)
	f := s.frames[i]
	s.frames = slices.Delete(s.frames, i, i+1)
	r := w.recvOf(n)
	m := &w.recv(r).slots[f.dst]
	switch {
	case m.filling == f.att+1 && w.x.plant.is(PlantFreeOnCancel): // nobody has interrupted its reader
		w.touch(r, f.dst, f.content, int(f.att))
		m.filling = 0
	case m.gen != f.gen || m.landed || m.revoked:
	default:
		m.landed = true
		w.touch(r, f.dst, f.content, int(f.att))
		w.land(r, f.dst, f.gen)
	}
}

// complete: a one-sided write lands and is done.
func (w *world) complete(n, l, i int) {
	x := w.sends[n].links[l].writes[i]
	w.strike(n, &x)
	k := &w.send(n).links[l]
	if x.aborted {
		w.giveUp(n, l, i)
		return
	}
	k.writes[i].sent, k.writes[i].stuck = true, false
	w.wasSent(n, k.id, x.id)
}

// strike is the memory's side of a one-sided write.
func (w *world) strike(n int, x *write) {
	r := w.recvOf(n)
	m := &w.recv(r).slots[x.dst]
	if m.gen == x.gen {
		w.touch(r, x.dst, contentOf(int(x.att), int(x.chunk)), int(x.att))
		return
	}
	if m.gen == 0 { // never opened in this life
		return
	}
	if w.atts[x.att].trusted {
		w.excepted = "a late write of " + w.x.name(int(x.att)) + " lands in slot " + itoa(int(x.dst)) + ", which is another's: its writer was trusted to be gone"
		return // the search goes on as if it had not
	}
	w.violate("R6", "a late write of %s lands in slot %d of receiver %d, which is open under generation %d", w.x.name(int(x.att)), x.dst, r, m.gen)
}

// strayLands: a write of which its sender knows nothing any more lands.
func (w *world) strayLands(n, i int) {
	s := w.send(n)
	x := s.stray[i]
	s.stray = slices.Delete(s.stray, i, i+1)
	w.strike(n, &x)
}

// copy: the copier has read the source's word and begins.
func (w *world) copy(r, i int) {
	p := &w.recv(r).copies[i]
	if !p.frozen {
		st := &w.sends[p.from].staging[p.src]
		if st.word != p.srcGen && !w.x.plant.is(PlantNoGeneration) {
			w.copyFails(r, i)
			return
		}
		p.seen = st.content
	} else if p.seen == 0 {
		w.copyFails(r, i)
		return
	}
	p.copying = true
	w.recv(r).slots[p.slot].filling = p.att + 1
	w.touch(r, p.slot, 0, int(p.att))
}

// copied: the copier reads the word again.
func (w *world) copied(r, i int) {
	p := w.recvs[r].copies[i]
	m := &w.recv(r).slots[p.slot]
	c := p.seen
	if !p.frozen {
		st := &w.sends[p.from].staging[p.src]
		if st.word != p.srcGen && !w.x.plant.is(PlantNoGeneration) {
			w.copyFails(r, i)
			return
		}
		if st.content != p.seen {
			c = 0 // torn
		}
	} else if c == 0 {
		w.copyFails(r, i)
		return
	}
	w.recv(r).copies = slices.Delete(w.recv(r).copies, i, i+1)
	m.filling, m.landed = 0, true
	w.touch(r, p.slot, c, int(p.att))
	w.land(r, p.slot, p.gen)
}

func (w *world) copyFails(r, i int) {
	p := w.recvs[r].copies[i]
	w.recv(r).copies = slices.Delete(w.recv(r).copies, i, i+1)
	w.recv(r).slots[p.slot].filling = 0
	w.stepR(r, ev(evFailed, uint64(p.slot), uint64(p.gen)), func() intake.Event {
		return intake.Failed{Slot: p.slot, Generation: p.gen, Err: fault.New(fault.StaleGeneration, "the source changed")}
	})
}

// linkUp: the link's own hello is through.
func (w *world) linkUp(n, l int) {
	k := &w.send(n).links[l]
	k.up = true
	id := k.id
	w.stepS(n, ev(evLinkUp, id), func() outbound.Event { return outbound.LinkUp{Link: outbound.LinkID(id)} })
}

// linkEnds: a link is closed or gone; every write over it is reported first.
func (w *world) linkEnds(n, l int) {
	s := w.send(n)
	k := &s.links[l]
	id := k.id
	var ids []uint64
	for _, x := range k.writes {
		ids = append(ids, x.id)
	}
	k.writes = nil
	if len(ids) > 0 {
		w.wasLost(n, id, ids)
	}
	s.links = slices.DeleteFunc(s.links, func(k dataLink) bool { return k.id == id })
	w.stepS(n, ev(evLinkDown, id), func() outbound.Event { return outbound.LinkDown{Link: outbound.LinkID(id), Text: "down"} })
}

// breakData: a data connection breaks; its writes are lost to the sender. What
// the receiver's kernel has of it may still come, beside the repetition.
func (w *world) breakData(n, l int, keep bool) {
	s := w.send(n)
	if !keep {
		w.dropFrames(n, s.life)
	}
	k := &s.links[l]
	var ids []uint64
	for _, x := range k.writes {
		ids = append(ids, x.id)
	}
	k.writes = nil
	w.wasLost(n, k.id, ids)
}

// loseLink: a sender's data path is gone for good, at both ends.
func (w *world) loseLink(n, l int) {
	s := w.send(n)
	s.links[l].dead = true
	w.dropFrames(n, s.life)
	rc := w.recv(w.recvOf(n))
	if !slices.Contains(rc.lost, uint8(n)) {
		rc.lost = append(rc.lost, uint8(n))
	}
}

// linkLost: the receiver notices.
func (w *world) linkLost(r, i int) {
	rc := w.recv(r)
	n := rc.lost[i]
	rc.lost = slices.Delete(rc.lost, i, i+1)
	who := sendIncarnation(int(n), w.sends[n].life)
	w.stepR(r, ev(evLinkLost, uint64(n), uint64(w.sends[n].life)), func() intake.Event {
		return intake.LinkLost{Owner: who, Link: w.x.link, Text: "gone"}
	})
}
