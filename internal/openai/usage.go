package openai

import (
	"strconv"

	"github.com/tidwall/gjson"
)

// addUsage returns the usage of the whole answer: the prompt's from the first
// leg (the second had one token more), the completion's from both. Fields that
// it does not know are the second leg's. The first leg's may be missing.
func (s *Splice) addUsage(second gjson.Result) (string, error) {
	o, err := objectOf(second)
	if err != nil {
		return "", err
	}
	firstUsage, prompt, one := s.first.doc.Get("usage"), s.prompt, s.firstTokens()
	completion, _ := integer(o.Get("completion_tokens"))
	if n, ok := integer(firstUsage.Get("prompt_tokens")); ok {
		prompt = n
	}
	if n, ok := integer(firstUsage.Get("completion_tokens")); ok && !s.again {
		one = n
	}
	o.Set("prompt_tokens", strconv.FormatInt(prompt, 10))
	o.Set("completion_tokens", strconv.FormatInt(one+completion, 10))
	o.Set("total_tokens", strconv.FormatInt(prompt+one+completion, 10))
	if d := firstUsage.Get("prompt_tokens_details"); d.Exists() {
		o.Set("prompt_tokens_details", d.Raw)
	} else {
		o.Delete("prompt_tokens_details")
	}
	return o.String(), nil
}

// firstTokens is how many tokens of the answer are the first leg's.
func (s *Splice) firstTokens() int64 {
	if s.again {
		return 0
	}
	return 1
}
