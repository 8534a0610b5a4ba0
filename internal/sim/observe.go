package sim

import (
	"encoding/binary"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/berthkv/berth/internal/explore"
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/intake"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
	"github.com/berthkv/berth/internal/localapi"
	"github.com/berthkv/berth/internal/msg"
)

func digits(n int) string { return strconv.Itoa(n) }

func durationOf(d kv.Duration) time.Duration { return time.Duration(d) }

// ending is how a request ended.
type ending struct {
	how msg.Ending
	why fault.Code
}

// place is where a request is at its receiver.
type place uint8

const (
	unheard place = iota
	waiting
	admitted
	ended
)

// seen is what the observer remembers of a request.
type seen struct {
	life   int // of the receiver's process that knows it
	place  place
	marked bool // a proxy's cancel came before it began
	at     ending
	alone  bool  // nothing of its sender waited when it came, and it was never blocked
	passed int64 // chunks that came later and were admitted while it waits
	waited kv.Duration
	since  kv.Instant  // waiting: when it came; ended: when
	stood  kv.Duration // by its receiver until since
	left   bool
	gen    kv.Generation
	slots  []kv.SlotID
	claim  []localapi.Chunk
}

// ledger is what the observer remembers of a receiver's process.
type ledger struct {
	seats   []seat
	waits   []int // requests, by arrival
	live    []int // admitted or waiting, some of them over by now
	entered int   // request that was admitted last
	trusted map[kv.Generation]bool
	owes    *request // refused, and its sender not told yet
}

// seat is the register of a receive slot.
type seat struct {
	gen     kv.Generation
	req     int
	chunk   int
	open    bool
	revoked bool
	reader  int // request of which the engine reads it, from 1
}

// content is what the bytes of a chunk are made of.
func (q *request) content(chunk int) uint64 {
	x := uint64(q.ID)<<24 ^ uint64(chunk) + 1
	x *= 0x9e3779b97f4a7c15
	return x ^ x>>29
}

func (q *request) key(chunk int) string { return q.name + "." + digits(chunk) }

// bytes of a chunk.
func (q *request) bytes(chunk int) int {
	if chunk == q.End-1 {
		return perChunk / shape * q.Tokens
	}
	return perChunk
}

// fill writes a content; holds reports whether it is there. Every byte depends
// on its place, so that two halves of different chunks are never taken for one.
func fill(b []byte, c uint64) {
	for i := 0; i+8 <= len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], (c+uint64(i))*0xd6e8feb86659fd93)
	}
}

func holds(b []byte, c uint64) bool {
	i := 0
	for ; i+8 <= len(b); i += 8 {
		if binary.LittleEndian.Uint64(b[i:]) != (c+uint64(i))*0xd6e8feb86659fd93 {
			return false
		}
	}
	return i == len(b) || binary.LittleEndian.Uint32(b[i:]) == uint32((c+uint64(i))*0xd6e8feb86659fd93)
}

// ---- the receive slots: R6, R7 ----

func (r *receiver) opened(gen kv.Generation, slots []kv.SlotID) {
	i := r.entered
	q := &r.w.requests[i]
	if q.gen != 0 || q.place != admitted {
		r.w.violate("R5", "%s opens slots %v under generation %d for nobody", r.name, slots, gen)
		return
	}
	q.gen, q.slots = gen, slices.Clone(slots)
	for k, s := range slots {
		t := &r.seats[s]
		if t.open && (r.mode != link.OneSided || !t.revoked) {
			r.w.violate("R6", "slot %d of %s is opened under generation %d while it is open under %d", s, r.name, gen, t.gen)
		}
		if t.reader != 0 {
			r.w.violate("R6", "slot %d of %s is handed to %s while the engine reads %s there", s, r.name, q.name, r.w.requests[t.reader-1].name)
		}
		*t = seat{gen: gen, req: i, chunk: k, open: true}
	}
}

func (r *receiver) revoked(gen kv.Generation, slots []kv.SlotID) {
	for _, s := range slots {
		if t := &r.seats[s]; t.gen == gen {
			t.revoked = true
		}
	}
}

func (r *receiver) fenced(gen kv.Generation, slots []kv.SlotID) {
	for _, s := range slots {
		if t := &r.seats[s]; t.gen == gen {
			t.open = false
		}
	}
}

// landed: the bytes in the slot are those of its chunk.
func (r *receiver) landed(l link.Landing) {
	t := &r.seats[l.Slot]
	if !t.open || t.gen != l.Generation {
		r.w.violate("R6", "something lands in slot %d of %s under generation %d, which is open under %d", l.Slot, r.name, l.Generation, t.gen)
		return
	}
	r.holdsOwn("lands", l.Slot)
}

// holdsOwn checks that a slot holds the chunk for which it was handed out.
func (r *receiver) holdsOwn(when string, s kv.SlotID) {
	t := &r.seats[s]
	q := &r.w.requests[t.req]
	if !holds(r.pool.Slot(s)[:q.bytes(t.chunk)], q.content(t.chunk)) {
		r.w.violate("R7", "chunk %d of %s %s in slot %d of %s, which holds something else", t.chunk, q.name, when, s, r.name)
	}
}

// strikes: over a one-sided link, what moves belongs to whoever has the slot.
func (r *receiver) strikes(s kv.SlotID, gen kv.Generation) {
	if r.trusted[gen] {
		return
	}
	if t := &r.seats[s]; t.gen != gen && t.gen != 0 {
		r.w.violate("R6", "a write under generation %d touches slot %d of %s, which is open under %d", gen, s, r.name, t.gen)
	}
	if t := &r.seats[s]; t.reader != 0 {
		r.w.violate("R6", "a write under generation %d touches slot %d of %s while the engine reads it", gen, s, r.name)
	}
}

// claimed: the decode engine may read.
func (r *receiver) claimed(q *request, c *localapi.Claimed) {
	if q.at.how != msg.EndReady || q.claim != nil {
		r.w.violate("R7", "%s is claimed; it is %q at %s", q.name, q.at.how, r.name)
	}
	if len(c.Chunks) != q.End {
		r.w.violate("R7", "%s has %d chunks and %d are claimed", q.name, q.End, len(c.Chunks))
		return
	}
	q.claim = c.Chunks
	for k, ch := range c.Chunks {
		t := &r.seats[ch.Slot]
		if int(ch.Index) != k || ch.Key != q.key(k) || int(ch.Bytes) != q.bytes(k) || t.reader != 0 || t.gen != q.gen {
			r.w.violate("R7", "chunk %d of %s is claimed as %+v", k, q.name, ch)
			return
		}
		t.reader = r.w.byName[q.name] + 1
		r.holdsOwn("is claimed", ch.Slot)
	}
}

// readOver: the engine has read it, and nothing has changed meanwhile.
func (r *receiver) readOver(q *request) {
	for _, ch := range q.claim {
		r.holdsOwn("was read", ch.Slot)
		r.seats[ch.Slot].reader = 0
	}
	q.claim = nil
}

// ---- what a receiver decides ----

// noted follows a request at its receiver.
func (r *receiver) noted(note any) {
	n, ok := note.(intake.Note)
	if !ok {
		return
	}
	w := r.w
	w.hash.add(uint64(n.Kind)<<40 ^ uint64(len(n.ReqID)) ^ uint64(n.Count))
	if w.tracing() {
		if t := explore.ShowNote(n); t != "" {
			w.say("%s: %s", r.name, t)
		}
	}
	if n.Kind == intake.NoteViolation && r.mode != link.Pull { // a pull from a sender that is gone looks like one
		w.violate("check", "%s says that %s has broken the protocol: %s", r.name, n.Owner, n.Text)
	}
	i, ok := w.byName[n.ReqID]
	if !ok {
		return
	}
	q := &w.requests[i]
	switch n.Kind {
	case intake.NoteWaiting:
		r.heardOf(q)
		if q.place != unheard {
			w.violate("R9", "%s waits again at %s", q.name, r.name)
		}
		q.place, q.passed = waiting, 0
		r.from(q)
		q.alone = !slices.ContainsFunc(r.waits, func(j int) bool { return w.requests[j].Sender == q.Sender })
		r.waits = append(r.waits, i)
		r.lives(i)
		if len(r.waits) > w.sc.MaxWaiting {
			w.violate("R11", "%d requests wait at %s; max_waiting is %d", len(r.waits), r.name, w.sc.MaxWaiting)
		}
		if q.Chunks > w.sc.Capacity {
			w.violate("R4", "%s waits for %d slots of %d", q.name, q.Chunks, w.sc.Capacity)
		}
	case intake.NoteAdmitted:
		r.heardOf(q)
		if q.place == admitted || q.place == ended {
			w.violate("R9", "%s is admitted again at %s", q.name, r.name)
		}
		r.overtakes(i)
		r.waitsNoMore(i)
		if q.place == unheard {
			r.lives(i)
		}
		q.place, q.waited = admitted, n.Wait
		r.entered = i
		w.report.admitted(q)
	case intake.NoteRefused:
		r.heardOf(q)
		if n.Reason == fault.Busy {
			r.waitsNoMore(i)
			q.place = unheard
			w.report.Busy++
			return
		}
		if q.marked && q.at.why == n.Reason {
			return
		}
		if n.Reason == fault.TooLarge {
			r.owes = q
		}
		r.endsAt(i, ending{msg.EndFailed, n.Reason})
	case intake.NoteEnded:
		r.heardOf(q)
		q.marked = q.place == unheard
		r.endsAt(i, ending{n.Ending, n.Reason})
	case intake.NoteUnclaimed:
		r.onTime(q, w.sc.Lease, "to be claimed")
	case intake.NoteTrusted:
		// R6's named exception: whoever may still write, or read, is trusted to be
		// gone.
		r.trusted[q.gen] = true
		for _, ch := range q.claim {
			r.seats[ch.Slot].reader = 0
		}
		q.claim = nil
		w.report.Trusted++
	}
}

func (r *receiver) heardOf(q *request) {
	if q.life != r.life {
		q.seen = seen{life: r.life, left: q.left}
	}
}

// lives notes a live request, to be forgotten with the receiver's process.
func (r *receiver) lives(i int) {
	if len(r.live) == cap(r.live) {
		r.live = slices.DeleteFunc(r.live, func(j int) bool { return r.w.requests[j].place == ended })
	}
	r.live = append(r.live, i)
}

func (r *receiver) waitsNoMore(i int) {
	if k := slices.Index(r.waits, i); k >= 0 {
		r.waits = slices.Delete(r.waits, k, k+1)
	}
}

// overtakes is R8: a request that was alone of its sender when it came, and was
// never blocked by a quarantine, sees at most admission_bypass_chunks admitted
// that came later; any request sees at most so many of its own sender's while it
// is not blocked.
func (r *receiver) overtakes(by int) {
	w := r.w
	if len(r.waits) == 0 {
		return
	}
	q := &w.requests[by]
	reach := -1
	for _, j := range r.waits {
		if j == by {
			return // the rest came later
		}
		o := &w.requests[j]
		if !o.alone && o.Sender != q.Sender {
			continue
		}
		if reach < 0 {
			reach = w.sc.Capacity - r.node.Pool().Quarantined
		}
		if o.Chunks > reach {
			continue
		}
		o.passed += int64(q.Chunks)
		w.report.overtaken(o)
		if o.passed > w.sc.Bypass {
			w.violate("R8", "%s waits at %s and sees %d chunks admitted that came later; admission_bypass_chunks is %d", o.name, r.name, o.passed, w.sc.Bypass)
		}
	}
}

// turned is called after each turn. R4: who can never be served hears of it in
// the step that receives it.
func (r *receiver) turned() {
	if r.owes != nil {
		r.w.violate("R4", "%s is refused at %s, and its sender is not told", r.owes.name, r.name)
		r.owes = nil
	}
	r.blocks()
}

// blocks: what is blocked for a while has its place among other senders' only
// from when it is not: see package reserve.
func (r *receiver) blocks() {
	if len(r.waits) == 0 {
		return
	}
	reach := r.w.sc.Capacity - r.node.Pool().Quarantined
	if reach == r.w.sc.Capacity {
		return
	}
	for _, j := range r.waits {
		if o := &r.w.requests[j]; o.Chunks > reach {
			o.alone = false
		}
	}
}

// endsAt is R5 at the receiver: a request ends once; what is ready has its own
// bytes.
func (r *receiver) endsAt(i int, e ending) {
	q := &r.w.requests[i]
	if q.at.how != "" {
		r.w.violate("R5", "%s has ended %s at %s, and ends again: %s", q.name, q.at, r.name, e)
	}
	if q.place == waiting && e.why == fault.Deadline {
		r.onTime(q, 2*r.w.sc.Lease, "to be admitted")
	}
	r.waitsNoMore(i)
	q.at, q.place = e, ended
	r.from(q)
	if e.how != msg.EndReady {
		return
	}
	for k := range q.End {
		if s := q.slots[k]; r.seats[s].gen == q.gen {
			r.holdsOwn("is ready", s)
		} else {
			r.w.violate("R7", "%s is ready without its slot %d", q.name, s)
		}
	}
}

// from notes since when something of a request runs at its receiver.
func (r *receiver) from(q *request) { q.since, q.stood = r.w.now, r.host.stood }

// onTime is R10 at the receiver: what a time ends is ended at that time, not when
// something else happens to step the core.
func (r *receiver) onTime(q *request, d kv.Duration, what string) {
	slack := r.w.sc.Lease/60 + r.host.stood - q.stood
	if r.host.stood != q.stood {
		slack += r.w.sc.Lease // after a stop it reads first what had come meanwhile
	}
	if late := r.w.now.Sub(q.since) - d; late > slack {
		r.w.violate("R10", "%s had %g s %s at %s, and is ended %.3f s late", q.name, d.Seconds(), what, r.name, late.Seconds())
	}
}

func (e ending) String() string {
	if e.why == "" {
		return string(e.how)
	}
	return string(e.how) + " (" + string(e.why) + ")"
}

// lost: the receiver's process is gone, with all it knew.
func (r *receiver) lost() {
	for _, i := range r.live {
		q := &r.w.requests[i]
		q.claim = nil
	}
	r.waits, r.live = nil, nil
}

// known reports whether the process that knows a request is still there.
func (w *world) known(q *request) bool {
	r := w.receivers[q.Receiver]
	return r.up && q.life == r.life
}

// ---- what others are told of it ----

// toldSender is R5 at the sender: one ending, the receiver's; only a sender that
// has lost it, or that it has lost, gives its own verdict, which is never ready.
func (w *world) toldSender(s *sender, q *request, e ending, text string, alone bool) {
	if q.told.how != "" {
		w.violate("R5", "%s is told that %s is %s, and then %s", s.name, q.name, q.told, e)
	}
	q.told = e
	if e.why == fault.TooLarge {
		if !strings.Contains(text, digits(q.Chunks)) || !strings.Contains(text, digits(w.sc.Capacity)) {
			w.violate("R4", "the refusal of %s does not name both numbers: %s", q.name, text)
		}
	} else if q.Chunks > w.sc.Capacity && q.at.why == fault.TooLarge && w.known(q) && e.why != fault.PeerLost && !alone {
		w.violate("R4", "%s can never be served, and hears %s", q.name, e)
	}
	if !alone {
		w.isTrue(q, e, s.name)
	}
	w.inTime(q, &s.host, "its engine hears the end of")
}

// isTrue checks an ending that somebody hears against what the receiver has
// decided.
func (w *world) isTrue(q *request, e ending, who string) {
	own := e.how != msg.EndReady && (q.marked || e.why == fault.PeerLost || q.at == ending{msg.EndFailed, fault.PeerLost})
	switch {
	case own || !w.known(q):
	case e.how == msg.EndReady && q.at.how != msg.EndReady:
		w.violate("R5", "%s hears that %s is ready; its receiver says %q", who, q.name, q.at)
	case q.at.how != "" && q.at.how != e.how:
		w.violate("R5", "%s hears that %s is %s; its receiver says %s", who, q.name, e, q.at)
	}
}

func (w *world) toldCanceller(s *sender, q *request, e ending) {
	w.isTrue(q, e, s.name+", which cancels,")
}

// answeredWait is the decode engine's answer.
func (r *receiver) answeredWait(q *request, e ending) { r.w.isTrue(q, e, r.name+"'s engine") }

// toldProxy: a proxy may give up by its own clock, or believe a sender that lost
// the receiver; else it hears what the receiver has decided.
func (w *world) toldProxy(p *proxy, q *request, e ending) {
	if e.why != fault.Deadline {
		w.isTrue(q, e, p.name)
	}
	w.inTime(q, &p.host, "it hears the end of")
}

// inTime is R10: whoever waits for a request hears its end by its deadline, and
// a lease more if its receiver is silent.
func (w *world) inTime(q *request, h *host, what string) {
	if late := kv.Duration(w.now) - q.At - q.Deadline - h.stood; late > 4*w.sc.Lease {
		w.violate("R10", "%s is late: %s %s %.3f s after its deadline", h.name, what, q.name, late.Seconds())
	}
}

func (w *world) isOver(q *request, outcome string) {
	w.open--
	w.report.over(q, outcome)
	w.hash.add(uint64(len(outcome)) ^ uint64(q.ID))
	if w.tracing() {
		w.say("%s is over: %s", q.name, outcome)
	}
}

// ---- the end ----

// rested: nothing is under way any more, and everything is free.
func (w *world) rested() (ok bool, why string) {
	for _, r := range w.receivers {
		if !r.up {
			return false, r.name + " is down"
		}
		if p := r.node.Pool(); p.Free != p.Capacity {
			return false, r.name + ": " + digits(p.Free) + " of " + digits(p.Capacity) + " slots are free"
		}
		if s := r.node.Peek(); s.Waiting != 0 || len(s.Requests) != 0 {
			return false, r.name + ": " + digits(len(s.Requests)) + " requests live"
		}
	}
	for _, x := range w.senders {
		if !x.up {
			return false, x.name + " is down"
		}
		if s := x.node.Peek(); s.Staging.Free != s.Staging.Capacity || len(s.Requests) != 0 {
			return false, x.name + ": " + digits(s.Staging.Free) + " of " + digits(s.Staging.Capacity) + " staging slots are free, " + digits(len(s.Requests)) + " requests live"
		}
	}
	return true, ""
}

// look is called from time to time once all has arrived and no fault lasts.
func (w *world) look() {
	const patience = 12 // leases: a deadline, a lease, a quarantine, a time to be claimed
	ok, why := false, ""
	if w.open == 0 {
		if ok, why = w.rested(); ok {
			w.done = true
			return
		}
	}
	if w.quiet == 0 {
		w.quiet = w.now
	}
	if w.now.Sub(w.quiet) > patience*w.sc.Lease {
		if w.open > 0 {
			for i := range w.requests {
				if q := &w.requests[i]; !q.over {
					w.violate("R10", "%s is not over: its sender's engine was told %q, its receiver says %q", q.name, q.told, q.at)
					return
				}
			}
		}
		w.violate("R12", "all has ended, and not all is free: %s", why)
	}
}

// finish checks what must hold when all is over.
func (w *world) finish() {
	for _, h := range w.hosts {
		h.verify()
	}
	for i := range w.requests {
		q := &w.requests[i]
		if s := w.senders[q.Sender]; q.state == begun {
			w.violate("R10", "%s was begun, and the engine of %s was never told its end", q.name, s.name)
		}
	}
	for _, s := range w.senders {
		for i, t := range s.seats {
			if t.engine != 0 || t.dead != 0 || t.writes != 0 {
				w.violate("R12", "staging slot %d of %s is free and has a hand on it: %+v", i, s.name, t)
			}
		}
	}
}
