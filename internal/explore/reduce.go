package explore

import "slices"

// Reduction: once no fault can come any more, some orders of moves need not be
// tried. An engine with its agents is alone while nothing that anybody else may
// do touches it before it has moved itself: nothing of it is under way or waits
// at a receiver. Then every order in which the others go on first leads, by the
// same steps, to where its own moves first lead too (its moves are a persistent
// set), and only its moves are tried. What is checked is checked in the step
// that does it or in what one engine or receiver has, so nothing is missed; and
// a state that is left out reaches one that is not by a move of that engine.
//
// TestReduction checks, on whole graphs without reduction, that being alone ends
// by an own move only, that the moves of others and own ones commute, and that
// the states of rest are the same.

// ownMoves are the moves of the first engine that is alone and can move.
func (w *world) ownMoves() []move {
	for e := range w.engs {
		if w.alone(e) {
			if own := w.movesOf(e); len(own) > 0 {
				return own
			}
		}
	}
	return nil
}

// movesOf are what an engine and its agents can do by themselves.
func (w *world) movesOf(e int) (out []move) {
	for _, i := range w.prompts(e) {
		if w.mayBegin(i) {
			out = append(out, mv(mvBegin, i))
		}
		if w.mayStage(i) {
			out = append(out, mv(mvStage, i))
		}
		if len(w.atts[i].staged) > 0 && !w.x.eager {
			out = append(out, mv(mvSubmit, i))
		}
	}
	for k := range w.x.ranks {
		out = w.senderMoves(out, e*w.x.ranks+k)
	}
	if w.engs[e].lost != 0 {
		out = append(out, mv(mvFenceEngine, e))
	}
	return out
}

// alone: nothing that another does touches the engine or its agents.
func (w *world) alone(e int) bool {
	if w.x.alike && e > 0 && !w.promptBegun(w.firstOf(e)) {
		return false // it may begin once the engine before it has
	}
	for k := range w.x.ranks {
		n := e*w.x.ranks + k
		s, r := w.sends[n], w.recvs[w.recvOf(n)]
		switch {
		case len(s.frames)+len(s.stray) > 0, slices.Contains(r.lost, uint8(n)), w.x.m.left(r.place) <= atOnce:
			return false
		case slices.ContainsFunc(s.conns, func(k conn) bool { return len(k.toR) > 0 }):
			return false
		case slices.ContainsFunc(r.copies, func(p pull) bool { return int(p.from) == n }):
			return false
		}
		for i := range s.links { // a one-sided write is in the receiver's memory at once
			if w.x.link == "nixl" && slices.ContainsFunc(s.links[i].writes, func(x write) bool { return !x.sent }) {
				return false
			}
		}
	}
	return !slices.ContainsFunc(w.prompts(e), func(i int) bool { return w.atts[i].place == waiting })
}
