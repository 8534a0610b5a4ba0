package explore

import (
	"fmt"
	"strings"
)

// A script is a system and the moves made in it, one a line, each as text names
// it. What a search finds is printed as one, and Replay runs it.

// head is the first line of a script.
func head(name string, budget int, p Plant, blind string) string {
	s := fmt.Sprintf("explore system=%s budget=%d", name, budget)
	if p != "" {
		s += " plant=" + string(p)
	}
	if blind != "" {
		s += " blind=" + blind
	}
	return s
}

// script writes a way through a model as a script's lines.
func script(m model, moves []uint32) string {
	var b strings.Builder
	state := m.start()
	for _, mv := range moves {
		b.WriteString(m.text(state, mv) + "\n")
		next, bad, _ := m.move(state, mv, nil)
		if bad != "" {
			break
		}
		state = next
	}
	return b.String()
}

// run makes the moves of a script and tells what comes of each, and how it
// ends.
func run(m model, lines []string) string {
	var b strings.Builder
	say := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	state := m.start()
	for _, line := range lines {
		moves, goal, bad := m.moves(state)
		if goal && len(moves) == 0 || bad != "" {
			fmt.Fprintf(&b, "%s\nerror: %q comes after the end\n", verdict(goal, bad), line)
			return b.String()
		}
		found := false
		for _, mv := range moves {
			if m.text(state, mv) != line {
				continue
			}
			found = true
			b.WriteString(line + "\n")
			next, bad, excepted := m.move(state, mv, say)
			if excepted != "" {
				b.WriteString("R6, the named exception: " + excepted + "\n")
			}
			if bad != "" {
				b.WriteString("violation of " + bad + "\n")
				return b.String()
			}
			state = next
			break
		}
		if !found {
			fmt.Fprintf(&b, "error: %q cannot happen; what can:\n", line)
			for _, mv := range moves {
				b.WriteString("  " + m.text(state, mv) + "\n")
			}
			return b.String()
		}
	}
	_, goal, bad := m.moves(state)
	b.WriteString(verdict(goal, bad) + "\n")
	return b.String()
}

func verdict(goal bool, bad string) string {
	switch {
	case bad != "":
		return "violation of " + bad
	case goal:
		return "all has ended, all is free"
	}
	return "it goes on"
}
