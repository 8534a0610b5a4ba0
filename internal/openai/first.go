package openai

import (
	"fmt"
	"strings"

	"github.com/tidwall/gjson"
)

// First is what the prefill engine answered: the first token.
type First struct {
	Token    int64
	HasToken bool // false only if the token ended the answer and its id is not told
	Text     string
	Finish   string // "length" if the token is the first of more, or what it ended the answer with
	// Failed is the code of why the prompt's KV will not come, with its text: ""
	// if the engine knows of nothing.
	Failed, FailedText string

	doc    *Object
	choice *Object
}

// ParseFirst reads the answer of the first leg, a completion of one token. The
// token's id comes from choices[0].token_ids, or from LMCache's
// kv_transfer_params.first_tok. An answer without it is an error: the decode leg
// could not go on from it. An engine of ours that knows by then that the KV will
// not come says so: kv_transfer_params.failed {code, text}.
func ParseFirst(body []byte) (*First, error) {
	doc, err := ParseObject(body)
	if err != nil {
		return nil, err
	}
	choice, err := onlyChoice(doc.Get("choices").Array())
	if err != nil {
		return nil, err
	}
	text := choice.Get("text")
	if text.Type != gjson.String {
		return nil, fmt.Errorf("choices[0].text is %s", typeName(text))
	}
	f := &First{Text: text.Str, Finish: choice.Get("finish_reason").Str, doc: doc, choice: choice}
	if f.Finish == "abort" || f.Finish == "error" {
		return nil, fmt.Errorf("choices[0].finish_reason is %q", f.Finish)
	}
	ids := choice.Get("token_ids").Array()
	if len(ids) > 1 {
		return nil, fmt.Errorf("choices[0].token_ids has %d tokens; one was asked for", len(ids))
	}
	transfer := doc.Get("kv_transfer_params")
	f.Failed, f.FailedText = transfer.Get("failed.code").Str, transfer.Get("failed.text").Str
	id := transfer.Get("first_tok")
	if len(ids) == 1 {
		id = ids[0]
	}
	f.Token, f.HasToken = integer(id)
	f.HasToken = f.HasToken && f.Token >= 0
	if !f.HasToken && !f.Ended() {
		return nil, fmt.Errorf("neither choices[0].token_ids nor kv_transfer_params.first_tok tells the first token")
	}
	return f, nil
}

// Ended reports whether the first token ended the answer (end of text, a stop
// string or token).
func (f *First) Ended() bool { return f.Finish != "" && f.Finish != "length" }

// half reports whether the token may be a part of a character only, or of several
// that its text does not show: engines keep such a text back ("", or up to U+FFFD)
// until the rest has come. Its text then belongs to the token that follows.
func (f *First) half() bool {
	return !f.Ended() && (f.Text == "" || strings.HasSuffix(f.Text, "\ufffd"))
}

// onlyChoice returns the choice of an answer or event that has just one.
func onlyChoice(choices []gjson.Result) (*Object, error) {
	if len(choices) != 1 {
		return nil, fmt.Errorf("choices has %d entries; one was asked for", len(choices))
	}
	return objectOf(choices[0])
}
