package explore

import "slices"

// A system is a model: moves are packed into numbers.

func (x *system) start() []byte { return x.root().encode() }

func pack(m move) uint32 {
	return uint32(m.kind) | uint32(m.a)<<6 | uint32(m.b)<<12 | uint32(m.c)<<18 | uint32(m.d)<<24
}

func unpack(p uint32) move {
	return move{moveKind(p & 63), uint8(p >> 6 & 63), uint8(p >> 12 & 63), uint8(p >> 18 & 63), uint8(p >> 24)}
}

func (x *system) faulty(m uint32) bool {
	k := unpack(m).kind
	return !k.progress() && k != mvTime
}

func (x *system) text(state []byte, m uint32) string { return x.decode(state).text(unpack(m)) }

func (x *system) moves(state []byte) (out []uint32, goal bool, bad string) {
	w := x.decode(state)
	moves := w.moves(nil)
	if goal, bad = w.judge(moves); bad != "" {
		return nil, goal, bad
	} else if goal { // all is over; but what was lost sight of may still come
		moves = slices.DeleteFunc(moves, func(m move) bool { return m.kind != mvStray && m.kind != mvUnstick })
	}
	if x.reduced && !goal && int(w.spent) == x.budget {
		if own := w.ownMoves(); own != nil {
			moves = own
		}
	}
	for _, m := range moves {
		out = append(out, pack(m))
	}
	return out, goal, ""
}

func (x *system) move(state []byte, m uint32, say func(string, ...any)) (next []byte, bad, excepted string) {
	w := x.decode(state)
	w.trace = say
	w.do(unpack(m))
	if w.bad != "" {
		return nil, w.bad, ""
	}
	return w.encode(), "", w.excepted
}

// judge says what a state is by what can happen next. One in which nothing is
// under way is at rest, or waits for time; without a fault nothing ever waits
// for time (R10), but for who was told to try again later.
func (w *world) judge(moves []move) (goal bool, bad string) {
	time := false
	for _, m := range moves {
		if m.kind.progress() {
			return false, ""
		}
		time = time || m.kind == mvTime
	}
	switch {
	case w.allEnded() && w.allFree():
		w.checkRest()
		return true, w.bad
	case !time:
		return false, w.unrest()
	case w.spent == 0 && w.x.maxWaiting == 0:
		return false, w.unrest()
	}
	return false, ""
}
