package openai

import (
	"math/rand/v2"
	"strings"
	"testing"
)

// undivided is the second implementation: one engine that has all tokens' texts,
// looks for stop strings after each token and cuts there.
func undivided(tokens, stops []string, keep bool, min int) (text, stopped string) {
	for i, tok := range tokens {
		before := len(text)
		text += tok
		if i+1 <= min {
			continue
		}
		for _, stop := range stops {
			from := 0
			if i > 0 {
				from = before - len(stop) + 1
			}
			from = max(0, from)
			at := strings.Index(text[from:], stop)
			if at < 0 {
				continue
			}
			end := from + at
			if keep {
				end += len(stop)
			}
			return text[:end], stop
		}
	}
	return text, ""
}

// divided is the same answer by two engines and a boundary between them. ok is
// false for what this comparison leaves out: the second engine takes back text
// that it has given out (real ones hold it back for that), or drops text behind
// its own stop string while one across the seam is possible.
func divided(tokens, stops []string, keep bool, min int) (text, stopped string, spans, ok bool) {
	if text, stopped = undivided(tokens[:1], stops, keep, min); stopped != "" {
		return text, stopped, false, true
	}
	b, text := newBoundary(stops, keep, tokens[0])
	given := ""
	for i := 1; i < len(tokens); i++ {
		sofar, own := undivided(tokens[1:i+1], stops, keep, max(min-1, 0))
		seen := len(sofar)
		if !keep {
			seen += len(own)
		}
		if len(sofar) < len(given) || own != "" && b.open() && seen < len(strings.Join(tokens[1:i+1], "")) {
			return "", "", false, false
		}
		out, stopped := b.next(sofar[len(given):], own, i+1 > min)
		given, text = sofar, text+out
		switch {
		case stopped != "":
			return text, stopped, true, true
		case own != "":
			return text + b.flush(), own, false, true
		}
	}
	return text + b.flush(), "", false, true
}

// TestBoundary compares 100,000 random answers, cut after the first token, with
// the undivided engine's.
func TestBoundary(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	word := func(max int) string {
		b := make([]byte, rng.IntN(max+1))
		for i := range b {
			b[i] = "ab"[rng.IntN(2)]
		}
		return string(b)
	}
	spanning, compared := 0, 0
	for n := range 100_000 {
		var tokens, stops []string
		for range 1 + rng.IntN(5) {
			tokens = append(tokens, word(3))
		}
		for range 1 + rng.IntN(2) {
			stops = append(stops, word(4)+"b")
		}
		keep, min := rng.IntN(2) == 0, rng.IntN(3)
		want, wantStop := undivided(tokens, stops, keep, min)
		got, gotStop, spans, ok := divided(tokens, stops, keep, min)
		if !ok {
			continue
		}
		compared++
		if spans {
			spanning++
		}
		if got != want || gotStop != wantStop {
			t.Fatalf("case %d: tokens %q, stops %q, keep %v, min %d:\n got %q stopped by %q\nwant %q stopped by %q",
				n, tokens, stops, keep, min, got, gotStop, want, wantStop)
		}
	}
	if spanning < 1000 || compared < 80_000 {
		t.Fatalf("only %d compared, and in %d a stop string lay across the seam", compared, spanning)
	}
}
