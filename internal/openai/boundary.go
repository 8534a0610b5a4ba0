package openai

import "strings"

// boundary looks for stop strings that begin in the first token's text and end
// in the decode engine's, which neither engine can see. It holds back the end of
// the first text for as long as it may be the beginning of a stop string.
// (A stop string inside one engine's text is that engine's affair. What an engine
// drops behind its own stop string cannot be seen: a longer one that began in the
// first token and ended there is missed.)
type boundary struct {
	stops []string
	keep  bool   // a stop string is part of the answer
	held  string // text not given out yet
	first int    // bytes of held that are the first token's; 0: nothing is open
}

// newBoundary takes the first token's text and returns what of it can go out.
func newBoundary(stops []string, keep bool, text string) (*boundary, string) {
	b := &boundary{stops: stops, keep: keep, held: text, first: len(text)}
	return b, b.release()
}

// open reports whether a stop string may still turn up.
func (b *boundary) open() bool { return b.first > 0 }

// next takes the decode engine's next text and returns what can go out. own is
// the stop string by which the engine itself ended the answer here (cut from the
// text unless stop strings are kept), "" for none; counts is false while the
// answer is too short to be ended. stopped is the stop string across the seam
// that ends the answer here, "" for none. Of several the client's order decides,
// as it does in an engine.
func (b *boundary) next(text, own string, counts bool) (out, stopped string) {
	if !b.open() {
		return text, ""
	}
	before := len(b.held)
	b.held += text
	whole := b.held
	if !b.keep {
		whole += own
	}
	for _, stop := range b.stops {
		if !counts {
			break
		}
		// It begins in the first text and ends in this one.
		from := max(0, before-len(stop)+1)
		at := strings.Index(whole[min(from, len(whole)):], stop)
		if at >= 0 && from+at < b.first {
			end := from + at
			if b.keep {
				end += len(stop)
			}
			b.held, b.first = "", 0
			return whole[:end], stop
		}
		if stop == own {
			break
		}
	}
	return b.release(), ""
}

// flush returns what is held: no more text will come.
func (b *boundary) flush() string {
	out := b.held
	b.held, b.first = "", 0
	return out
}

// release gives out what cannot be the beginning of a stop string any more.
func (b *boundary) release() string {
	for i := range b.first {
		for _, stop := range b.stops {
			if rest := b.held[i:]; len(rest) < len(stop) && strings.HasPrefix(stop, rest) {
				out := b.held[:i]
				b.held, b.first = rest, b.first-i
				return out
			}
		}
	}
	return b.flush()
}
