package reserve

import "encoding/binary"

// Reason is what a waiting request waits for.
type Reason uint8

const (
	Room       Reason = iota // its need is above free
	Turn                     // it would fit, but the guard's allowance is below its need
	Quarantine               // blocked by quarantine: its need is above capacity - quarantined
	LockStep                 // blocked by lock-step senders: its need is above the reach
)

func (r Reason) String() string {
	return [...]string{"room", "turn", "quarantine", "lockstep"}[r]
}

// Why explains a waiting request.
type Why struct {
	For       Reason
	Need      int64
	Free      int64
	Earmarked bool  // freed room is kept for this one
	Overtaken int64 // chunks, at most Config.Bypass
}

// Why explains why the request waits, once Next has yielded nothing; ok is false
// for one that does not wait.
func (l *Ledger) Why(id uint64) (w Why, ok bool) {
	i := l.ids.get(id)
	if i == 0 {
		return Why{}, false
	}
	w = Why{For: Turn, Need: l.need(i), Free: l.free, Overtaken: l.overtaken(i)}
	switch {
	case w.Need > l.cfg.Capacity-l.quarantined:
		w.For = Quarantine
	case w.Need > l.Reach():
		w.For = LockStep
	case w.Need > l.free:
		w.For = Room
	}
	guard := l.lines[l.fronts.seq.head].front
	w.Earmarked = i == guard && w.Overtaken == l.cfg.Bypass
	return w, true
}

// Overtaken returns the chunks that have overtaken a waiting request, at most
// Config.Bypass, and 0 for one that does not wait.
func (l *Ledger) Overtaken(id uint64) int64 {
	if i := l.ids.get(id); i != 0 {
		return l.overtaken(i)
	}
	return 0
}

func (l *Ledger) overtaken(i int32) int64 {
	ln := l.infos[i].line
	front := l.lines[ln].front
	n := l.reqs.suffix(l.lines[ln].queue, i)
	if front != 0 && l.infos[i].arrival <= l.infos[front].arrival {
		n += l.pending(ln)
	}
	return min(n, l.cfg.Bypass)
}

// Line is one sender's waiting requests.
type Line struct {
	Sender  Sender
	Waiting int
	Chunks  int64  // sum of their needs
	Oldest  uint64 // id of the oldest
}

// Lines iterates over the senders that have something waiting, in the order of
// their turns. The ledger must not be changed meanwhile.
func (l *Ledger) Lines(yield func(Line) bool) {
	for ln := l.turns.seq.head; ln != 0; ln = l.turns.next(ln) {
		p := &l.lines[ln]
		oldest := l.ids.key(p.queue.head)
		if !yield(Line{Sender: p.sender, Waiting: p.count, Chunks: p.chunks, Oldest: oldest}) {
			return
		}
	}
}

// Clone returns an independent copy.
func (l *Ledger) Clone() *Ledger {
	c := *l
	c.ids, c.known = l.ids.clone(), l.known.clone()
	c.reqs.nodes = append([]node(nil), l.reqs.nodes...)
	c.turns.nodes = append([]node(nil), l.turns.nodes...)
	c.fronts.nodes = append([]node(nil), l.fronts.nodes...)
	c.infos = append([]info(nil), l.infos...)
	c.lines = append([]line(nil), l.lines...)
	c.spare = append([]int32(nil), l.spare...)
	c.idle = append([]int32(nil), l.idle...)
	c.scratch = nil
	return &c
}

// Encode appends a canonical form of the state (not of the Config) to b: equal
// encodings behave alike, and what cannot matter any more leaves no trace in
// them: absolute rounds and arrivals, the shapes of trees, counts beyond Bypass.
// Ids and senders are written as the functions rename them, so that the caller
// can replace its counters by ranks; nil leaves them as they are.
func (l *Ledger) Encode(b []byte, id func(uint64) uint64, sender func(Sender) uint64) []byte {
	if id == nil {
		id = func(n uint64) uint64 { return n }
	}
	if sender == nil {
		sender = func(s Sender) uint64 { return uint64(s) }
	}
	put := func(n uint64) { b = binary.AppendUvarint(b, n) }
	put(uint64(l.free))
	put(uint64(l.quarantined))
	put(uint64(l.lockStep))
	for ln := l.turns.seq.head; ln != 0; ln = l.turns.next(ln) {
		p := &l.lines[ln]
		put(uint64(p.count))
		put(sender(p.sender))
		rounds := int64(0)
		if p.front != 0 {
			rounds = max(0, p.turn-l.round)
		}
		put(uint64(rounds))
		for i := p.queue.head; i != 0; i = l.reqs.next(i) {
			put(id(l.ids.key(i)))
			put(uint64(l.need(i)))
			put(uint64(l.overtaken(i)))
		}
	}
	put(0)
	for ln := l.fronts.seq.head; ln != 0; ln = l.fronts.next(ln) {
		put(sender(l.lines[ln].sender))
	}
	return b
}
