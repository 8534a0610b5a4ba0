package reserve

// The order of admission: every change of lines, turns and fronts is here.

// pick returns the request that may be admitted now, 0 if none: the first that
// fits in the order of turns, unless that would take the guard beyond Bypass;
// then the guard, if it fits; else the first that its allowance permits.
func (l *Ledger) pick() int32 {
	limit := min(l.free, l.Reach())
	i := l.firstFit(limit)
	if i == 0 {
		return 0
	}
	// It fits, so it is not blocked, so there are fronts.
	guard := l.lines[l.fronts.seq.head].front
	allowance := l.cfg.Bypass - l.fronts.all(l.fronts.seq.root).sum
	switch {
	case i == guard || l.need(i) <= allowance:
		return i
	case l.need(guard) <= limit:
		return guard
	}
	return l.firstFit(min(limit, allowance))
}

// firstFit returns the first request with a need of at most limit, 0 if none.
func (l *Ledger) firstFit(limit int64) int32 {
	ln := l.turns.first(l.turns.seq, limit)
	if ln == 0 {
		return 0
	}
	return l.reqs.first(l.lines[ln].queue, limit)
}

func (l *Ledger) need(i int32) int64 { return int64(l.reqs.nodes[i].lo) }

// push puts a new request at the end of its sender's line.
func (l *Ledger) push(id uint64, s Sender, need int64) int32 {
	ln := l.known.get(uint64(s))
	if ln == 0 {
		ln = l.openLine(s)
	}
	var i int32
	if n := len(l.spare); n > 0 {
		i, l.spare = l.spare[n-1], l.spare[:n-1]
	} else {
		i = l.reqs.grow()
		l.infos = append(l.infos, info{})
	}
	l.arrived++
	l.infos[i] = info{arrival: l.arrived, line: ln}
	l.ids.put(id, i)
	l.reqs.reset(i, int32(need), int32(need))
	p := &l.lines[ln]
	l.reqs.insert(&p.queue, 0, i)
	p.count++
	p.chunks += need
	l.waiting++
	if p.front == 0 {
		l.setFront(ln, 0)
	} else {
		l.measure(ln)
	}
	return i
}

// admit takes a request that pick returned out of its line, with its slots, and
// counts it against those that it overtakes.
func (l *Ledger) admit(i int32) {
	ln, need := l.infos[i].line, l.need(i)
	l.free -= need
	l.round = max(l.round, l.lines[ln].turn)
	if i == l.lines[ln].front {
		l.fronts.add(l.fronts.prev(ln), need)
		l.unsetFront(ln)
		l.take(i, need)
		l.setFront(ln, 0)
		return
	}
	l.fronts.add(l.fronts.seq.tail, need)
	l.take(i, need)
	l.setTurn(ln, l.round+need)
}

// drop takes a request out of its line that is not admitted.
func (l *Ledger) drop(i int32) {
	ln := l.infos[i].line
	if i == l.lines[ln].front {
		saved := l.saved(ln)
		l.unsetFront(ln)
		l.take(i, 0)
		l.setFront(ln, saved)
		return
	}
	if l.take(i, 0); l.lines[ln].queue.root != 0 {
		l.measure(ln)
	}
}

// take removes a request that overtakes the older ones of its line by passing
// chunks. The last of a line closes it; else the line must be measured.
func (l *Ledger) take(i int32, passing int64) {
	ln := l.infos[i].line
	p := &l.lines[ln]
	l.reqs.add(l.reqs.prev(i), passing)
	l.reqs.remove(&p.queue, i)
	p.count--
	p.chunks -= l.need(i)
	l.ids.remove(i)
	l.spare = append(l.spare, i)
	l.waiting--
	if p.queue.root == 0 {
		l.closeLine(ln)
	}
}

// refront finds the fronts anew after the reach has changed; limit is the lower
// of the old reach and the new one.
func (l *Ledger) refront(limit int64) {
	l.scratch = l.turns.appendAbove(l.scratch[:0], l.turns.seq.root, limit)
	for _, ln := range l.scratch {
		p := &l.lines[ln]
		if l.reqs.first(p.queue, l.Reach()) == p.front {
			continue
		}
		saved := int64(0)
		if p.front != 0 {
			saved = l.saved(ln)
			l.unsetFront(ln)
		}
		l.setFront(ln, saved)
	}
}

// setFront gives a line without a front the one it should have, if any, and
// with it its turn, when as many rounds have passed as the front needs beyond
// what the line has saved.
func (l *Ledger) setFront(ln int32, saved int64) {
	p := &l.lines[ln]
	if p.queue.root == 0 {
		return // closed
	}
	p.front = l.reqs.first(p.queue, l.Reach())
	if p.front == 0 {
		l.measure(ln)
		return
	}
	overtaken := min(l.reqs.suffix(p.queue, p.front), l.cfg.Bypass)
	at, sum := l.fronts.firstBelow(l.fronts.seq, overtaken)
	l.fronts.reset(ln, 0, 0)
	l.fronts.insert(&l.fronts.seq, at, ln)
	l.fronts.pass(ln, sum-overtaken)
	l.setTurn(ln, l.round+max(0, l.need(p.front)-saved))
}

// unsetFront leaves a line without a front for a moment, and adds what others
// have overtaken it by to the request itself.
func (l *Ledger) unsetFront(ln int32) {
	p := &l.lines[ln]
	l.reqs.add(p.front, l.pending(ln))
	l.fronts.remove(&l.fronts.seq, ln)
	p.front = 0
}

// pending returns by how much the front of a line was overtaken that is not
// written at the request itself.
func (l *Ledger) pending(ln int32) int64 {
	p := &l.lines[ln]
	return max(0, l.fronts.suffix(l.fronts.seq, ln)-l.reqs.suffix(p.queue, p.front))
}

// saved returns the chunks that a line with a front has saved for it.
func (l *Ledger) saved(ln int32) int64 {
	return l.need(l.lines[ln].front) - max(0, l.lines[ln].turn-l.round)
}

// setTurn measures a line and moves it to the end of those that have their turn
// in that round, or before it.
func (l *Ledger) setTurn(ln int32, round int64) {
	l.turns.remove(&l.turns.seq, ln)
	needs := l.reqs.all(l.lines[ln].queue.root)
	l.turns.reset(ln, needs.min, needs.max)
	l.insertTurn(ln, round)
}

// insertTurn puts a line after all that have their turn in that round, or before
// it.
func (l *Ledger) insertTurn(ln int32, round int64) {
	l.lines[ln].turn = round
	after := int32(0)
	if t := l.turns.seq.tail; t != 0 && l.lines[t].turn > round {
		for i := l.turns.seq.root; i != 0; {
			if l.lines[i].turn > round {
				after, i = i, l.turns.nodes[i].left
			} else {
				i = l.turns.nodes[i].right
			}
		}
	}
	l.turns.insert(&l.turns.seq, after, ln)
}

// measure tells turns the smallest and the largest need in a line.
func (l *Ledger) measure(ln int32) {
	needs := l.reqs.all(l.lines[ln].queue.root)
	l.turns.setNeeds(ln, needs.min, needs.max)
}

func (l *Ledger) openLine(s Sender) int32 {
	var ln int32
	if n := len(l.idle); n > 0 {
		ln, l.idle = l.idle[n-1], l.idle[:n-1]
	} else {
		ln = l.turns.grow()
		l.fronts.grow()
		l.lines = append(l.lines, line{})
	}
	l.lines[ln] = line{sender: s}
	l.known.put(uint64(s), ln)
	l.turns.reset(ln, 0, 0)
	l.insertTurn(ln, l.round)
	return ln
}

func (l *Ledger) closeLine(ln int32) {
	l.turns.remove(&l.turns.seq, ln)
	l.known.remove(ln)
	l.idle = append(l.idle, ln)
}
