package explore

import (
	"fmt"
	"io"
)

func (x *system) start() []byte { return x.root().encode() }

func pack(m move) uint32 {
	return uint32(m.kind) | uint32(m.a)<<6 | uint32(m.b)<<12 | uint32(m.c)<<18 | uint32(m.d)<<24
}

func unpack(p uint32) move {
	return move{moveKind(p & 63), uint8(p >> 6 & 63), uint8(p >> 12 & 63), uint8(p >> 18 & 63), uint8(p >> 24)}
}

// expand visits what can follow a state. A state in which nothing is under way
// is one at rest, or waits for time; without a fault nothing ever waits for
// time (R10).
func (x *system) expand(state []byte, visit func(uint32, []byte, string, string)) (goal bool, bad string) {
	w := x.decode(state)
	moves := w.moves(nil)
	goal, bad = w.judge(moves)
	if goal || bad != "" {
		return goal, bad
	}
	for _, m := range moves {
		next := x.decode(state)
		next.do(m)
		if next.bad != "" {
			visit(pack(m), nil, next.bad, "")
			continue
		}
		visit(pack(m), next.encode(), "", next.excepted)
	}
	return false, ""
}

// judge says what a state is by what can happen next.
func (w *world) judge(moves []move) (goal bool, bad string) {
	for _, m := range moves {
		if m.kind.progress() {
			return false, ""
		}
	}
	if w.rest() {
		w.checkRest()
		return true, w.bad
	}
	if w.spent == 0 {
		return false, "R10: nothing has failed, and nothing but a deadline ends what waits (deadlock)"
	}
	if len(moves) == 0 {
		return false, "R10: nothing can happen any more (deadlock)"
	}
	return false, ""
}

// describe prints a way as a script that Replay runs.
func (x *system) describe(moves []uint32, out io.Writer) {
	w := x.root()
	for _, p := range moves {
		m := unpack(p)
		fmt.Fprintln(out, w.text(m))
		w.do(m)
		if w.bad != "" {
			return
		}
		w = x.decode(w.encode())
	}
}
