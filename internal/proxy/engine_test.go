package proxy

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/tidwall/gjson"
)

// fakeEngine speaks vLLM's API for a model of one line: a token is a byte, the
// next one is a function of all before it, and 0 is the end of text. Asked for
// everything, it is the undivided engine that a proxied answer must equal. As
// in vLLM, the text of a character comes with its last byte; and where a prompt
// ends within a character, the whole prompt comes with it.
type fakeEngine struct {
	t   testing.TB
	srv *httptest.Server
	// eos makes the model end a text of this many tokens (prompt included).
	eos int
	// accents has it write é too, which is two tokens.
	accents bool

	mu sync.Mutex
	// before, if set, sees each request for tokens first; true: it has answered.
	before hook
	seen   []seenRequest
	conns  int
}

type hook func(w http.ResponseWriter, r *http.Request, body gjson.Result) (answered bool)

func (e *fakeEngine) setHook(h hook) {
	e.mu.Lock()
	e.before = h
	e.mu.Unlock()
}

type seenRequest struct {
	path   string
	header http.Header
	body   gjson.Result
}

const contextLen = 4096

func newEngine(t testing.TB) *fakeEngine {
	e := &fakeEngine{t: t}
	e.srv = httptest.NewUnstartedServer(e)
	e.srv.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			e.mu.Lock()
			e.conns++
			e.mu.Unlock()
		}
	}
	e.srv.Start()
	t.Cleanup(e.srv.Close)
	return e
}

func (e *fakeEngine) addr() Addr {
	host, port, err := net.SplitHostPort(e.srv.Listener.Addr().String())
	if err != nil {
		e.t.Fatal(err)
	}
	n, err := strconv.Atoi(port)
	if err != nil {
		e.t.Fatal(err)
	}
	return Addr{host, n}
}

// asked returns the bodies that came to a path.
func (e *fakeEngine) asked(path string) []seenRequest {
	e.mu.Lock()
	defer e.mu.Unlock()
	var out []seenRequest
	for _, s := range e.seen {
		if s.path == path {
			out = append(out, s)
		}
	}
	return out
}

func (e *fakeEngine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	raw, err := io.ReadAll(r.Body)
	if err != nil {
		return // the caller left
	}
	body := gjson.ParseBytes(raw)
	e.mu.Lock()
	e.seen = append(e.seen, seenRequest{r.URL.Path, r.Header.Clone(), body})
	before := e.before
	e.mu.Unlock()
	if r.URL.Path != "/health" && r.URL.Path != "/v1/models" && before != nil && before(w, r, body) {
		return
	}
	switch r.URL.Path {
	case "/health":
	case "/v1/models":
		fmt.Fprintf(w, `{"object":"list","data":[{"id":"m","object":"model","max_model_len":%d}]}`, contextLen)
	case "/tokenize":
		var ids []string
		for _, c := range []byte(promptText(body)) {
			ids = append(ids, strconv.Itoa(int(c)))
		}
		fmt.Fprintf(w, `{"count":%d,"max_model_len":%d,"tokens":[%s]}`, len(ids), contextLen, strings.Join(ids, ","))
	case "/v1/completions", "/v1/chat/completions":
		e.complete(w, r, body)
	default:
		w.WriteHeader(http.StatusNotFound)
		io.WriteString(w, `{"detail":"Not Found"}`)
	}
}

// promptText is the prompt as text: for chat, a template of sorts.
func promptText(body gjson.Result) string {
	if !body.Get("messages").Exists() {
		return body.Get("prompt").Str
	}
	var b strings.Builder
	body.Get("messages").ForEach(func(_, m gjson.Result) bool {
		fmt.Fprintf(&b, "<%s>%s", m.Get("role").Str, m.Get("content").Str)
		return true
	})
	return b.String() + "<assistant>"
}

// next is the model.
func (e *fakeEngine) next(tokens []int) int {
	if e.eos > 0 && len(tokens) >= e.eos {
		return 0
	}
	if last := len(tokens) - 1; last >= 0 && tokens[last] == 0xc3 {
		return 0xa9 // é
	}
	h := 7
	for _, t := range tokens {
		h = (h*31 + t) % 1009
	}
	if e.accents && h%5 == 0 {
		return 0xc3
	}
	return int("abcd"[h%4])
}

// textOf is the text that a token adds to the ids before it, of which the first
// prompt ones were given.
func textOf(before []int, prompt, tok int) string {
	last := len(before) - 1
	switch {
	case tok == 0xc3:
		return ""
	case tok == 0xa9 && last >= prompt:
		return "é"
	case tok == 0xa9:
		b := make([]byte, 0, len(before)+1)
		for _, t := range append(before[:len(before):len(before)], tok) {
			b = append(b, byte(t))
		}
		return string(b)
	}
	return string(rune(tok))
}

// generate returns the texts, ids, finish_reason and stop_reason of an answer.
func (e *fakeEngine) generate(prompt []int, body gjson.Result) (texts []string, ids []int, finish, reason string) {
	limit := contextLen - len(prompt)
	if m := body.Get("max_tokens"); m.Type == gjson.Number {
		limit = min(limit, int(m.Int()))
	} else if !m.Exists() && !body.Get("messages").Exists() {
		limit = 16
	}
	minTokens := int(body.Get("min_tokens").Int())
	all, text := prompt, ""
	for len(ids) < limit {
		tok := e.next(all)
		if tok == 0 && len(ids) < minTokens {
			tok = int('z')
		}
		said := textOf(all, len(prompt), tok)
		all = append(all[:len(all):len(all)], tok)
		ids = append(ids, tok)
		if tok == 0 {
			return append(texts, ""), ids, "stop", "null"
		}
		before := len(text)
		text += said
		texts = append(texts, said)
		if len(ids) <= minTokens {
			continue
		}
		for _, stop := range body.Get("stop").Array() {
			at := strings.Index(text[max(0, before-len(stop.Str)+1):], stop.Str)
			if at < 0 {
				continue
			}
			end := max(0, before-len(stop.Str)+1) + at
			if body.Get("include_stop_str_in_output").Bool() {
				end += len(stop.Str)
			}
			return cut(texts, end), ids, "stop", stop.Raw
		}
	}
	return texts, ids, "length", "null"
}

// cut keeps the first n bytes of texts, in as many pieces.
func cut(texts []string, n int) []string {
	out := make([]string, len(texts))
	for i, t := range texts {
		k := min(n, len(t))
		out[i], n = t[:k], n-k
	}
	return out
}

func (e *fakeEngine) complete(w http.ResponseWriter, r *http.Request, body gjson.Result) {
	var prompt []int
	if ids := body.Get("prompt"); ids.IsArray() {
		for _, id := range ids.Array() {
			prompt = append(prompt, int(id.Int()))
		}
	} else {
		for _, c := range []byte(promptText(body)) {
			prompt = append(prompt, int(c))
		}
	}
	chat := r.URL.Path == "/v1/chat/completions"
	if m := body.Get("max_completion_tokens"); chat && m.Exists() {
		body = gjson.Parse(strings.Replace(body.Raw, "{", `{"max_tokens":`+m.Raw+`,`, 1))
	}
	texts, ids, finish, reason := e.generate(prompt, body)
	usage := func(n int) string {
		return fmt.Sprintf(`{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}`, len(prompt), len(prompt)+n, n)
	}
	head := `"id":"cmpl-` + r.Header.Get(requestIDHeader) + `","object":"text_completion","created":17,"model":"m"`
	if chat {
		head = `"id":"chatcmpl-` + r.Header.Get(requestIDHeader) + `","object":"chat.completion","created":17,"model":"m"`
	}
	wantIDs := body.Get("return_token_ids").Bool()
	if !body.Get("stream").Bool() {
		text, _ := json.Marshal(strings.Join(texts, ""))
		choice := `"index":0,"text":` + string(text)
		if chat {
			choice = `"index":0,"message":{"role":"assistant","content":` + string(text) + `,"refusal":null}`
		}
		choice += `,"logprobs":null,"finish_reason":"` + finish + `","stop_reason":` + reason
		if wantIDs {
			choice += `,"token_ids":` + list(ids)
			if !chat {
				choice += `,"prompt_token_ids":` + list(prompt)
			}
		}
		if chat && wantIDs {
			head += `,"prompt_token_ids":` + list(prompt)
		}
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{%s,"choices":[{%s}],"usage":%s,"kv_transfer_params":{"first_tok":%d}}`, head, choice, usage(len(ids)), ids[0])
		return
	}
	head = strings.Replace(head, "chat.completion", "chat.completion.chunk", 1)
	each := body.Get("stream_options.continuous_usage_stats").Bool()
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	flush := http.NewResponseController(w).Flush
	for i, text := range texts {
		quoted, _ := json.Marshal(text)
		choice := `"index":0,"text":` + string(quoted)
		if chat {
			choice = `"index":0,"delta":{"content":` + string(quoted) + `}`
			if i == 0 {
				choice = `"index":0,"delta":{"role":"assistant","content":` + string(quoted) + `}`
			}
		}
		choice += `,"logprobs":null,"finish_reason":null,"stop_reason":null`
		if i == len(texts)-1 {
			choice = strings.Replace(choice, `"finish_reason":null,"stop_reason":null`, `"finish_reason":"`+finish+`","stop_reason":`+reason, 1)
		}
		if wantIDs {
			choice += `,"token_ids":` + list(ids[i:i+1])
			if i == 0 {
				choice += `,"prompt_token_ids":` + list(prompt)
			}
		}
		extra := ""
		if each {
			extra = `,"usage":` + usage(i+1)
		}
		fmt.Fprintf(w, "data: {%s,\"choices\":[{%s}]%s}\n\n", head, choice, extra)
		flush()
	}
	if body.Get("stream_options.include_usage").Bool() {
		fmt.Fprintf(w, "data: {%s,\"choices\":[],\"usage\":%s}\n\n", head, usage(len(ids)))
	}
	io.WriteString(w, "data: [DONE]\n\n")
}

func list(ids []int) string {
	b, _ := json.Marshal(ids)
	return string(b)
}
