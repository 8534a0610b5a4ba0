package openai

import "github.com/tidwall/gjson"

// oneLegOnly lists the fields that two legs cannot honour, and the values with
// which each is as good as absent (null always is). With anything else the whole
// request goes to a decode engine, and the field's name is the reason.
//
// Two legs lose what hangs on the answer's first token being an output token:
// its log probability, penalties and bans that count outputs, the state of a
// grammar, the parsing of tool calls and reasoning; and they cannot fork.
var oneLegOnly = []struct {
	field   string
	neutral []string
}{
	{"n", []string{"1"}},
	{"best_of", []string{"1"}},
	{"use_beam_search", []string{"false"}},
	{"echo", []string{"false"}},
	{"suffix", []string{`""`}},
	{"logprobs", []string{"false"}},
	{"top_logprobs", []string{"0"}},
	{"prompt_logprobs", nil},
	{"tools", []string{"[]"}},
	{"functions", []string{"[]"}},
	{"response_format", []string{`{"type":"text"}`, `{"type": "text"}`}},
	{"structured_outputs", nil},
	{"guided_json", nil},
	{"guided_regex", nil},
	{"guided_choice", nil},
	{"guided_grammar", nil},
	{"structural_tag", nil},
	{"presence_penalty", []string{"0", "0.0"}},
	{"frequency_penalty", []string{"0", "0.0"}},
	{"bad_words", []string{"[]"}},
	{"truncate_prompt_tokens", nil},
	{"prompt_embeds", nil},
	{"documents", []string{"[]"}},
	{"modalities", []string{`["text"]`}},
	{"audio", nil},
	{"reasoning_effort", nil},
}

func wholeReason(doc *Object) string {
	for _, f := range oneLegOnly {
		if doc.given(f.field) && !isOneOf(doc.Get(f.field), f.neutral) {
			return f.field
		}
	}
	return ""
}

func isOneOf(v gjson.Result, raws []string) bool {
	for _, r := range raws {
		if v.Raw == r {
			return true
		}
	}
	return false
}
