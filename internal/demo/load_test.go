package demo

import (
	"encoding/json"
	"testing"

	"github.com/berthkv/berth/examples"
)

// TestLoad: the built-in load has at least 64 prompts, streamed and not,
// completions and chats, from one token to as many chunks as the pool has.
func TestLoad(t *testing.T) {
	f, err := examples.Open("")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	prompts, err := readPrompts(f)
	if err != nil {
		t.Fatal(err)
	}
	kinds := map[[2]any]int{}
	shortest, longest := 1<<20, 0
	for _, p := range prompts {
		kinds[[2]any{p.Kind, p.Stream}]++
		if p.Kind == "completion" { // a byte is a token, and so is an element of a list
			n := len(p.Prompt) - 2
			if p.Prompt[0] == '[' {
				var ids []int
				if err := json.Unmarshal(p.Prompt, &ids); err != nil {
					t.Fatal(err)
				}
				n = len(ids)
			}
			shortest, longest = min(shortest, n), max(longest, n)
		}
	}
	if len(prompts) < 64 || len(kinds) != 4 {
		t.Errorf("%d prompts of the kinds %v", len(prompts), kinds)
	}
	if shortest != 1 || longest < (poolSlots-1)*chunkTokens {
		t.Errorf("the shortest has %d tokens, the longest %d: %.1f chunks", shortest, longest, float64(longest)/chunkTokens)
	}
}
