package demo

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"
)

// prompt is a line of examples/prompts.jsonl.
type prompt struct {
	Kind      string          `json:"kind"` // completion or chat
	Stream    bool            `json:"stream"`
	MaxTokens int             `json:"max_tokens"`
	Prompt    json.RawMessage `json:"prompt,omitempty"`   // text or token ids
	Messages  json.RawMessage `json:"messages,omitempty"` // of a chat
}

// readPrompts reads the load; every line must be whole.
func readPrompts(r io.Reader) ([]prompt, error) {
	var out []prompt
	s := bufio.NewScanner(r)
	s.Buffer(nil, 1<<20)
	for line := 1; s.Scan(); line++ {
		if len(bytes.TrimSpace(s.Bytes())) == 0 {
			continue
		}
		var p prompt
		d := json.NewDecoder(bytes.NewReader(s.Bytes()))
		d.DisallowUnknownFields()
		if err := d.Decode(&p); err != nil {
			return nil, fmt.Errorf("line %d: %w", line, err)
		}
		if p.Kind != "completion" && p.Kind != "chat" {
			return nil, fmt.Errorf("line %d: kind is %q, not completion or chat", line, p.Kind)
		}
		out = append(out, p)
	}
	return out, s.Err()
}

// answer is what a server gave to a prompt.
type answer struct {
	tokens     []int
	text       string
	finish     string
	firstToken time.Duration // of a streamed one
	nodes      []string      // engines that the proxy chose, from its headers
}

func (p prompt) path() string {
	if p.Kind == "chat" {
		return "/v1/chat/completions"
	}
	return "/v1/completions"
}

func (p prompt) body(model string) []byte {
	m := map[string]any{"model": model, "max_tokens": p.MaxTokens, "temperature": 0, "stream": p.Stream, "return_token_ids": true}
	if p.Kind == "chat" {
		m["messages"] = p.Messages
	} else {
		m["prompt"] = p.Prompt
	}
	b, _ := json.Marshal(m) // plain values
	return b
}

// choice is the part of an answer, or of a streamed piece of one, that counts.
type choice struct {
	Text     string `json:"text"`
	TokenIDs []int  `json:"token_ids"`
	Delta    struct {
		Content string `json:"content"`
	} `json:"delta"`
	Message struct {
		Content string `json:"content"`
	} `json:"message"`
	FinishReason *string `json:"finish_reason"`
}

type piece struct {
	Choices []choice        `json:"choices"`
	Error   json.RawMessage `json:"error"`
}

// maxAnswer bounds an answer that is not streamed.
const maxAnswer = 8 << 20

// ask sends a prompt to a server and reads the whole answer.
func ask(ctx context.Context, c *http.Client, addr, model string, p prompt) (a answer, err error) {
	start := time.Now()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+p.path(), bytes.NewReader(p.body(model)))
	if err != nil {
		return a, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.Do(req)
	if err != nil {
		return a, err
	}
	defer resp.Body.Close()
	a.nodes = append(resp.Header.Values("X-Berth-Prefill"), resp.Header.Values("X-Berth-Decode")...)
	if resp.StatusCode != http.StatusOK {
		b, _ := io.ReadAll(io.LimitReader(resp.Body, 4096))
		return a, fmt.Errorf("HTTP %d: %s", resp.StatusCode, bytes.TrimSpace(b))
	}
	if !p.Stream {
		b, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
		if err != nil {
			return a, err
		}
		return a, a.add(b)
	}
	return a, a.stream(resp.Body, start)
}

// stream reads server-sent events up to [DONE].
func (a *answer) stream(r io.Reader, start time.Time) error {
	s := bufio.NewScanner(r)
	s.Buffer(nil, 1<<20)
	for s.Scan() {
		data, ok := strings.CutPrefix(s.Text(), "data: ")
		switch {
		case !ok:
			continue
		case data == "[DONE]":
			return nil
		}
		if err := a.add([]byte(data)); err != nil {
			return err
		}
		if a.firstToken == 0 && len(a.tokens) > 0 {
			a.firstToken = time.Since(start)
		}
	}
	if s.Err() != nil {
		return s.Err()
	}
	return fmt.Errorf("the stream ended without [DONE]")
}

// add takes in a whole answer or a piece of one.
func (a *answer) add(b []byte) error {
	var p piece
	if err := json.Unmarshal(b, &p); err != nil {
		return fmt.Errorf("answer %.200q: %w", b, err)
	}
	if p.Error != nil {
		return fmt.Errorf("error event: %s", p.Error)
	}
	for _, c := range p.Choices {
		a.tokens = append(a.tokens, c.TokenIDs...)
		a.text += c.Text + c.Delta.Content + c.Message.Content
		if c.FinishReason != nil {
			a.finish = *c.FinishReason
		}
	}
	return nil
}

// differs says how b is another answer than a, "" when they are equal.
func (a answer) differs(b answer) string {
	switch {
	case len(a.tokens) == 0:
		return "no token ids"
	case !slices.Equal(a.tokens, b.tokens):
		return fmt.Sprintf("token ids %v, want %v", a.tokens, b.tokens)
	case a.text != b.text:
		return fmt.Sprintf("text %q, want %q", a.text, b.text)
	case a.finish != b.finish:
		return fmt.Sprintf("finish_reason %q, want %q", a.finish, b.finish)
	}
	return ""
}
