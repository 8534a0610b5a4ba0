package engine

import (
	"strings"

	"github.com/berthkv/berth/internal/engine/model"
)

// finish says why an answer ended, in the API's words; "" while it goes on.
type finish string

const (
	finishStop   finish = "stop"   // EOS or a stop string
	finishLength finish = "length" // max_tokens
)

// limits says where an answer ends.
type limits struct {
	maxTokens int
	stop      []string
	ignoreEOS bool
}

// answer turns generated tokens into text and decides when it is complete. Text
// that may be the beginning of a stop string is held back until it is known not
// to be; a stop string itself is never text.
type answer struct {
	limits
	tokens int
	held   string // text not given out yet, a proper prefix of a stop string
}

// push takes the next token. It returns the text that is certain now, and once
// the answer is complete why, and by which stop string.
func (a *answer) push(token int) (text string, why finish, by string) {
	a.tokens++
	a.held += model.Decode([]int{token})
	if at, stop := a.stopped(); at >= 0 {
		text, a.held = a.held[:at], ""
		return text, finishStop, stop
	}
	switch {
	case token == model.EOS && !a.ignoreEOS:
		why = finishStop
	case a.tokens >= a.maxTokens:
		why = finishLength
	}
	keep := 0
	if why == "" {
		keep = a.overlap()
	}
	cut := len(a.held) - keep
	text, a.held = a.held[:cut], a.held[cut:]
	return text, why, ""
}

// stopped returns where the first stop string in the held text begins, or -1.
func (a *answer) stopped() (at int, stop string) {
	at = -1
	for _, s := range a.stop {
		if i := strings.Index(a.held, s); i >= 0 && (at < 0 || i < at) {
			at, stop = i, s
		}
	}
	return at, stop
}

// overlap returns the length of the longest end of the held text with which a
// stop string begins.
func (a *answer) overlap() (longest int) {
	for _, s := range a.stop {
		for n := min(len(s)-1, len(a.held)); n > longest; n-- {
			if strings.HasSuffix(a.held, s[:n]) {
				longest = n
			}
		}
	}
	return longest
}
