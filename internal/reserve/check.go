package reserve

import "fmt"

// Check verifies the numbered invariants of Ledger and returns the first that
// does not hold.
func (l *Ledger) Check() error {
	if l.free < 0 || l.quarantined < 0 || l.lockStep < 0 || l.free+l.quarantined+l.lockStep > l.cfg.Capacity {
		return fmt.Errorf("1: free %d, quarantined %d, lock-step %d of capacity %d", l.free, l.quarantined, l.lockStep, l.cfg.Capacity)
	}
	for _, t := range []struct {
		name string
		s    *lineup
	}{{"turns", &l.turns}, {"fronts", &l.fronts}} {
		if err := t.s.check(t.s.seq); err != nil {
			return fmt.Errorf("3: %s: %w", t.name, err)
		}
	}
	waiting, lines, fronts := 0, 0, 0
	before := l.round - l.cfg.Capacity
	for ln := l.turns.seq.head; ln != 0; ln = l.turns.next(ln) {
		n, err := l.checkLine(ln)
		if err != nil {
			return fmt.Errorf("%w, in the line of sender %d", err, l.lines[ln].sender)
		}
		waiting, lines = waiting+n, lines+1
		turn := l.lines[ln].turn
		if lines > 1 && turn < before {
			return fmt.Errorf("6: a turn in round %d after one in round %d", turn, before)
		}
		before = turn
		if f := l.lines[ln].front; f != 0 {
			fronts++
			if turn-l.round > l.need(f) {
				return fmt.Errorf("6: round is %d, turn of a front of %d chunks in %d", l.round, l.need(f), turn)
			}
		}
	}
	if waiting != l.waiting || waiting != l.ids.used || waiting > l.cfg.MaxWaiting || lines != l.known.used {
		return fmt.Errorf("2: %d in %d lines, counted %d, ids of %d, senders of %d, max_waiting %d",
			waiting, lines, l.waiting, l.ids.used, l.known.used, l.cfg.MaxWaiting)
	}
	return l.checkFronts(fronts)
}

// checkLine verifies what holds for one line, and returns its length.
func (l *Ledger) checkLine(ln int32) (n int, err error) {
	p := &l.lines[ln]
	if p.queue.root == 0 || l.known.get(uint64(p.sender)) != ln {
		return 0, fmt.Errorf("2: empty, or not found")
	}
	if err := l.reqs.check(p.queue); err != nil {
		return 0, fmt.Errorf("3: %w", err)
	}
	front, chunks, arrival := int32(0), int64(0), uint64(0)
	for i := p.queue.head; i != 0; i = l.reqs.next(i) {
		in := l.infos[i]
		need := l.need(i)
		if in.line != ln || l.ids.get(l.ids.key(i)) != i || in.arrival <= arrival || need < 1 || need > l.cfg.Capacity {
			return 0, fmt.Errorf("2: request %d: %+v needs %d, after arrival %d", l.ids.key(i), in, need, arrival)
		}
		if front == 0 && need <= l.Reach() {
			front = i
		}
		if w := l.reqs.nodes[i].weight; w < 0 {
			return 0, fmt.Errorf("5: request %d has weight %d", l.ids.key(i), w)
		}
		arrival = in.arrival
		chunks += need
		n++
	}
	if front != p.front {
		return 0, fmt.Errorf("4: front is %d, should be %d", p.front, front)
	}
	all, t := l.reqs.all(p.queue.root), l.turns.nodes[ln]
	if n != p.count || chunks != p.chunks || t.lo != all.min || t.hi != all.max {
		return 0, fmt.Errorf("3: counted %d requests of %d chunks, needs %d to %d; there are %d of %d, %d to %d",
			p.count, p.chunks, t.lo, t.hi, n, chunks, all.min, all.max)
	}
	return n, nil
}

// checkFronts verifies that fronts holds exactly n lines, each with a front.
func (l *Ledger) checkFronts(n int) error {
	for ln := l.fronts.seq.head; ln != 0; ln = l.fronts.next(ln) {
		n--
		w, v := l.fronts.nodes[ln].weight, l.fronts.suffix(l.fronts.seq, ln)
		if l.lines[ln].front == 0 {
			return fmt.Errorf("4: sender %d is in fronts and has none", l.lines[ln].sender)
		}
		if w < 0 || v > l.cfg.Bypass {
			return fmt.Errorf("5: the front of sender %d has weight %d, is overtaken by %d of %d", l.lines[ln].sender, w, v, l.cfg.Bypass)
		}
	}
	if n != 0 {
		return fmt.Errorf("4: %d lines with a front are missing in fronts", n)
	}
	return nil
}

// check verifies links, heap order and summaries of a sequence.
func (f *forest) check(q sequence) error {
	head, tail := q.root, q.root
	for f.nodes[head].left != 0 {
		head = f.nodes[head].left
	}
	for f.nodes[tail].right != 0 {
		tail = f.nodes[tail].right
	}
	if q.head != head || q.tail != tail {
		return fmt.Errorf("from node %d to %d, should be %d to %d", q.head, q.tail, head, tail)
	}
	return f.checkSubtree(q.root, 0)
}

func (f *forest) checkSubtree(i, up int32) error {
	if i == 0 {
		return nil
	}
	n := f.nodes[i]
	if n.up != up || up != 0 && f.nodes[up].rank < n.rank {
		return fmt.Errorf("node %d hangs at %d, says %d", i, up, n.up)
	}
	if err := f.checkSubtree(n.left, i); err != nil {
		return err
	}
	if err := f.checkSubtree(n.right, i); err != nil {
		return err
	}
	if before, after := f.all(n.left), f.all(n.right); n.before != before || n.after != after {
		return fmt.Errorf("node %d says its subtrees are %+v and %+v, should be %+v and %+v", i, n.before, n.after, before, after)
	}
	return nil
}
