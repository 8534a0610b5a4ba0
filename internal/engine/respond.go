package engine

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"time"

	"github.com/berthkv/berth/internal/fault"
)

// usage counts a request's tokens.
type usage struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
	Total      int `json:"total_tokens"`
}

// reply is a whole answer, or one event of a streamed one. Absent and null
// fields are as vLLM writes them.
type reply struct {
	ID             string       `json:"id"`
	Object         string       `json:"object"`
	Created        int64        `json:"created"`
	Model          string       `json:"model"`
	Choices        []choice     `json:"choices"`
	Usage          *usage       `json:"usage"`
	PromptTokenIDs []int        `json:"prompt_token_ids,omitempty"` // chat
	KVTransfer     *transferred `json:"kv_transfer_params,omitempty"`
}

// transferred is what the answer of a prefill says beside it, to a proxy.
type transferred struct {
	FirstToken int         `json:"first_tok"`
	Failed     *whyNotSent `json:"failed,omitempty"`
}

// whyNotSent says that the prompt's KV will not come.
type whyNotSent struct {
	Code fault.Code `json:"code"`
	Text string     `json:"text"`
}

type choice struct {
	Index          int      `json:"index"`
	Text           *string  `json:"text,omitempty"`    // completions
	Message        *message `json:"message,omitempty"` // chat, whole
	Delta          *message `json:"delta,omitempty"`   // chat, streamed
	Logprobs       *int     `json:"logprobs"`
	FinishReason   *finish  `json:"finish_reason"`
	StopReason     *string  `json:"stop_reason"`
	TokenIDs       []int    `json:"token_ids,omitempty"`
	PromptTokenIDs []int    `json:"prompt_token_ids,omitempty"` // completions
}

type message struct {
	Role    string  `json:"role,omitempty"`
	Content *string `json:"content,omitempty"`
}

// responder writes one request's answer.
type responder struct {
	e       *Engine
	w       http.ResponseWriter
	r       *request
	c       *call
	chat    bool
	created int64
	tokens  int // of the answer so far
}

// respond writes the answer, whole or streamed.
func (e *Engine) respond(ctx context.Context, w http.ResponseWriter, r *request, c *call, chat bool) error {
	p := &responder{e: e, w: w, r: r, c: c, chat: chat, created: now()}
	if c.Stream {
		return p.stream(ctx)
	}
	return p.whole(ctx)
}

// part is a run of consecutive pieces.
type part struct {
	text   string
	tokens []int
	finish finish
	stop   string
}

// take waits for what there is of the answer.
func (p *responder) take(ctx context.Context) (part, error) {
	pieces, err := p.r.out.take(ctx)
	if err != nil {
		return part{}, err
	}
	var text strings.Builder
	var out part
	for _, x := range pieces {
		text.WriteString(x.text)
		out.tokens = append(out.tokens, x.token)
		out.finish, out.stop = x.finish, x.stop
	}
	out.text = text.String()
	p.tokens += len(out.tokens)
	return out, nil
}

// reply returns an answer or event of one choice.
func (p *responder) reply(object string, ch choice) reply {
	return reply{ID: p.id(), Object: object, Created: p.created, Model: p.e.cfg.Name, Choices: []choice{ch}}
}

func (p *responder) id() string {
	if p.chat {
		return "chatcmpl-" + p.r.name
	}
	return "cmpl-" + p.r.name
}

func (p *responder) usage() *usage {
	n := len(p.r.prompt)
	return &usage{Prompt: n, Completion: p.tokens, Total: n + p.tokens}
}

// choice returns what a part says, without its text.
func (p *responder) choice(x part) choice {
	var ch choice
	if x.finish != "" {
		ch.FinishReason = &x.finish
	}
	if x.stop != "" {
		ch.StopReason = &x.stop
	}
	if p.c.ReturnTokenIDs {
		ch.TokenIDs = x.tokens
	}
	return ch
}

func (p *responder) whole(ctx context.Context) error {
	var all part
	for all.finish == "" {
		x, err := p.take(ctx)
		if err != nil {
			return err
		}
		all.text += x.text
		all.tokens = append(all.tokens, x.tokens...)
		all.finish, all.stop = x.finish, x.stop
	}
	ch := p.choice(all)
	var out reply
	if p.chat {
		ch.Message = &message{Role: "assistant", Content: &all.text}
		out = p.reply("chat.completion", ch)
	} else {
		ch.Text = &all.text
		out = p.reply("text_completion", ch)
	}
	p.promptTokens(&out)
	out.Usage = p.usage()
	if p.c.KVTransfer != nil && p.c.KVTransfer.RetFirstTok {
		out.KVTransfer = &transferred{FirstToken: all.tokens[0], Failed: p.e.whyNotSent(p.r)}
	}
	p.deadline()
	writeJSON(p.w, http.StatusOK, out)
	return nil
}

// promptTokens adds the prompt's tokens, where they are asked for, at the place
// that vLLM gives them.
func (p *responder) promptTokens(out *reply) {
	switch {
	case !p.c.ReturnTokenIDs:
	case p.chat:
		out.PromptTokenIDs = p.r.prompt
	default:
		out.Choices[0].PromptTokenIDs = p.r.prompt
	}
}

func (p *responder) stream(ctx context.Context) error {
	// Whatever goes wrong before the first token still has a status.
	x, err := p.take(ctx)
	if err != nil {
		return err
	}
	p.w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	p.w.Header().Set("Cache-Control", "no-cache")
	for first := true; ; first = false {
		if err := p.event(p.part(x, first)); err != nil {
			return nil // the client has left
		}
		if x.finish != "" {
			break
		}
		if x, err = p.take(ctx); err != nil {
			_, body := errorBody(err)
			_ = p.event(body) // and no [DONE]
			return nil
		}
	}
	if p.c.StreamOptions != nil && p.c.StreamOptions.IncludeUsage {
		last := p.reply(p.object(), choice{})
		last.Choices, last.Usage = []choice{}, p.usage()
		if err := p.event(last); err != nil {
			return nil
		}
	}
	_ = p.write("[DONE]")
	return nil
}

func (p *responder) object() string {
	if p.chat {
		return "chat.completion.chunk"
	}
	return "text_completion"
}

// part returns the event for a part of the answer.
func (p *responder) part(x part, first bool) reply {
	ch := p.choice(x)
	if p.chat {
		ch.Delta = &message{Content: &x.text}
		if first {
			ch.Delta.Role = "assistant"
		}
	} else {
		ch.Text = &x.text
	}
	out := p.reply(p.object(), ch)
	if first {
		p.promptTokens(&out)
	}
	return out
}

func (p *responder) event(v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // our own types always encode
	}
	return p.write(string(b))
}

func (p *responder) write(data string) error {
	p.deadline()
	if _, err := p.w.Write([]byte("data: " + data + "\n\n")); err != nil {
		return err
	}
	return http.NewResponseController(p.w).Flush()
}

// deadline bounds the next write: a client that reads nothing is cut off. A
// ResponseWriter that knows no deadlines (a recorder in a test) blocks nobody.
func (p *responder) deadline() {
	_ = http.NewResponseController(p.w).SetWriteDeadline(time.Now().Add(p.e.cfg.WriteTimeout))
}
