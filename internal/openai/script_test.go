package openai

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/tidwall/gjson"
)

// TestScripts runs testdata/*.txt: a request, what the engines are asked for it,
// what they answer, and what the client sees.
//
//	request chat|completions     a client's body: what it is read as
//	tokenize                     the body of POST /tokenize
//	tokenized                    its answer, or with ids=... the prompt
//	prefill [one]                the body of the first leg
//	first                        its answer: the events for the client
//	decode                       the body of the second leg
//	next                         events of its stream, one a line: the client's
//	answer                       the answer that is not streamed
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata/scripts", func(t *testing.T, path string) {
		var (
			req    *Request
			prompt Tokens
			length int64
			limit  int64
			splice *Splice
		)
		spec := &Spec{ReqID: "0a0b-7", Host: "10.0.0.9", InitPorts: []int{8300, 8301}, AllocPorts: []int{8400, 8401}}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "request":
				var bad *Error
				req, bad = ParseRequest(Kind(d.CmdArgs[0].Key), []byte(d.Input))
				if bad != nil {
					return show(bad)
				}
				prompt, length, limit, splice = req.Prompt, 0, 0, nil
				var b strings.Builder
				fmt.Fprintf(&b, "max=%d", req.MaxTokens)
				for _, f := range []struct {
					name string
					set  bool
				}{{"stream", req.Stream}, {"usage", req.Usage}, {"each", req.EachUsage}, {"ids", req.TokenIDs}} {
					if f.set {
						b.WriteString(" " + f.name)
					}
				}
				if req.MinTokens > 0 {
					fmt.Fprintf(&b, " min=%d", req.MinTokens)
				}
				if len(req.Stop) > 0 {
					fmt.Fprintf(&b, " stop=%q", req.Stop)
				}
				if req.Whole != "" {
					fmt.Fprintf(&b, " whole: %s\n%s", req.Whole, req.WholeBody())
				}
				return b.String() + "\n"
			case "tokenize":
				if body := req.TokenizeBody(); body != nil {
					return string(body) + "\n"
				}
				return fmt.Sprintf("none: %s\n", prompt)
			case "tokenized":
				var err error
				if prompt, length, err = ParseTokenized([]byte(d.Input)); err != nil {
					return err.Error() + "\n"
				}
				var bad *Error
				if limit, bad = req.Limit(prompt, length); bad != nil {
					return show(bad)
				}
				return fmt.Sprintf("%d tokens, limit %d\n", prompt.N, limit)
			case "prefill":
				return string(req.PrefillBody(prompt, spec)) + "\n"
			case "first":
				first, err := ParseFirst([]byte(d.Input))
				if err != nil {
					return err.Error() + "\n"
				}
				splice = NewSplice(req, first, prompt, limit)
				return lines(splice.Head()) + over(splice)
			case "decode":
				if d.HasArg("recompute") {
					return string(req.DecodeBody(prompt, limit, splice, nil)) + "\n"
				}
				return string(req.DecodeBody(prompt, limit, splice, spec)) + "\n"
			case "next":
				var b strings.Builder
				for line := range strings.SplitSeq(d.Input, "\n") {
					out, err := splice.Next([]byte(line))
					if err != nil {
						return b.String() + err.Error() + "\n"
					}
					b.WriteString(lines(out))
				}
				return b.String() + over(splice)
			case "answer":
				return string(splice.Answer()) + "\n"
			}
			d.Fatalf(t, "unknown command %s", d.Cmd)
			return ""
		})
	})
}

func show(e *Error) string { return fmt.Sprintf("%d %s\n", e.Status, e.Body()) }

func lines(events [][]byte) string {
	var b strings.Builder
	for _, e := range events {
		if !gjson.ValidBytes(e) {
			b.WriteString("INVALID ")
		}
		b.Write(e)
		b.WriteByte('\n')
	}
	return b.String()
}

func over(s *Splice) string {
	if s.Ended() {
		return "ended\n"
	}
	return ""
}
