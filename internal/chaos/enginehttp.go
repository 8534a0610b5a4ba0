package chaos

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"hash/fnv"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/berthkv/berth/client"
)

// The engine's side of what the proxy asks: a token is a number, and the model
// is one line, so that everybody knows the answer to a prompt.

const (
	contextLen   = 4096
	maxBody      = 1 << 20
	httpDeadline = 8 * time.Second  // of a transfer that the proxy asked for
	claimWait    = 2 * lease        // for one that is ready, as the proxy says
	httpHang     = 60 * time.Second // after which one that has no ending is a fault
)

// nextToken is the model.
func nextToken(tokens []int) int {
	h := uint32(7)
	for _, t := range tokens {
		h = h*31 + uint32(t)
	}
	return int(h%997) + 1
}

// complete is the whole answer to a prompt.
func complete(prompt []int, n int) []int {
	all := prompt[:len(prompt):len(prompt)]
	for range n {
		all = append(all, nextToken(all))
	}
	return all[len(prompt):]
}

// promptSums are the checksums of a prompt's chunks.
func promptSums(prompt []int) []uint32 {
	var out []uint32
	for at := 0; at < len(prompt); at += chunkTokens {
		h := crc32.NewIEEE()
		for _, t := range prompt[at:min(at+chunkTokens, len(prompt))] {
			binary.Write(h, binary.LittleEndian, uint32(t))
		}
		out = append(out, h.Sum32())
	}
	return out
}

// httpBody is what the engine reads of a completion.
type httpBody struct {
	Prompt    []int `json:"prompt"`
	MaxTokens int   `json:"max_tokens"`
	Stream    bool  `json:"stream"`
	Transfer  struct {
		Spec *struct {
			ReqID string `json:"req_id"`
			Host  string `json:"receiver_host"`
			Ports []int  `json:"receiver_alloc_port"`
		} `json:"disagg_spec"`
	} `json:"kv_transfer_params"`
}

// serve starts the HTTP server.
func (e *engine) serve(ctx context.Context) error {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"object":"list","data":[{"id":"m","object":"model","max_model_len":%d}]}`, contextLen)
	})
	mux.HandleFunc("POST /v1/completions", func(w http.ResponseWriter, r *http.Request) {
		var b httpBody
		raw, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
		if err == nil {
			err = json.Unmarshal(raw, &b)
		}
		if err != nil || len(b.Prompt) == 0 {
			http.Error(w, fmt.Sprintf(`{"error":{"message":"body: %v"}}`, err), http.StatusBadRequest)
			return
		}
		if b.Stream {
			e.decode(r.Context(), w, b)
		} else {
			e.prefill(ctx, w, b)
		}
	})
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", e.cfg.HTTP)
	if err != nil {
		return err
	}
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	go srv.Serve(l)
	return nil
}

// httpOrder makes an order of what came over HTTP.
func (e *engine) httpOrder(op, req string) order {
	e.mu.Lock()
	e.lastID++
	id := e.lastID
	e.mu.Unlock()
	h := fnv.New64a()
	fmt.Fprintf(h, "%s %d", e.cfg.Process, id)
	return order{ID: id, Op: op, Req: req, Deadline: httpDeadline, Hang: httpHang, Seed: id, Attempt: h.Sum64() | 1<<63}
}

// prefill answers with the tokens asked for, of a prompt that is to be moved the
// first one, and moves its KV meanwhile. What its agent does not accept it
// refuses: nobody else could tell the proxy.
func (e *engine) prefill(ctx context.Context, w http.ResponseWriter, b httpBody) {
	if spec := b.Transfer.Spec; spec != nil && e.cfg.Sends && len(spec.Ports) == 1 {
		o := e.httpOrder("send", spec.ReqID)
		sums := promptSums(b.Prompt)
		o.Chunks, o.Declare, o.Tokens = len(sums), len(sums), len(b.Prompt)-(len(sums)-1)*chunkTokens
		o.Host, o.Port = spec.Host, spec.Ports[0]
		o.To = e.cfg.Names[net.JoinHostPort(o.Host, strconv.Itoa(o.Port))]
		begun := make(chan bool, 1)
		go func() {
			ctx, cancel := context.WithTimeout(ctx, o.Hang)
			defer cancel()
			out := e.send(ctx, o, sums, begun)
			e.done(o, out)
			if out.ending == agentOut {
				e.giveUp(ctx, o)
			}
			select {
			case begun <- false:
			default:
			}
		}()
		if !<-begun {
			http.Error(w, `{"error":{"message":"the agent does not take it"}}`, http.StatusServiceUnavailable)
			return
		}
	}
	answer := complete(b.Prompt, max(b.MaxTokens, 1))
	ids, err := json.Marshal(answer)
	if err != nil {
		panic(err)
	}
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprintf(w, `{"id":"cmpl-1","object":"text_completion","created":17,"model":"m","choices":[{"index":0,"text":"x","logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":%s}],"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}}`,
		ids, len(b.Prompt), len(b.Prompt)+len(answer), len(answer))
}

// giveUp says of a request that this engine's agent was lost with, through the
// agent that is there now, that nothing will come of it. The lost one may not have
// told the receiver that it began; then nobody else could tell the proxy.
func (e *engine) giveUp(ctx context.Context, o order) {
	ctx, cancel := context.WithTimeout(ctx, o.Deadline)
	defer cancel()
	a := e.use()
	for ; a == nil && ctx.Err() == nil; a = e.use() {
		pause(ctx, redial)
	}
	if a == nil {
		return
	}
	defer e.drop(a)
	// An agent's begin that was cut off may not have reached it either: so the same
	// agent is told too.
	a.GiveUp(ctx, client.Begin{Req: o.Req, Host: o.Host, AllocPort: o.Port, Deadline: o.Deadline}, "")
}

// decode waits for the prompt's KV, if it comes by name, and streams the rest of
// the answer. KV of another prompt is answered with an error.
func (e *engine) decode(ctx context.Context, w http.ResponseWriter, b httpBody) {
	if spec := b.Transfer.Spec; spec != nil {
		ctx, cancel := context.WithTimeout(ctx, httpHang)
		defer cancel()
		o := e.httpOrder("receive", spec.ReqID)
		o.Attempt, o.Deadline = 0, claimWait
		want := promptSums(b.Prompt[:len(b.Prompt)-1])
		r := e.receive(ctx, o, func(tags []tag) error {
			for i, t := range tags {
				if i >= len(want) || t.prompt != want[i] {
					return fmt.Errorf("chunk %d of %q has the KV of another prompt", i, o.Req)
				}
			}
			return nil
		})
		e.done(o, r) // what has not come is computed
		if r.ending == wrongPrompt {
			http.Error(w, `{"error":{"message":"`+wrongPrompt+`"}}`, http.StatusInternalServerError)
			return
		}
	}
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	tokens := complete(b.Prompt, b.MaxTokens)
	for i, t := range tokens {
		finish := "null"
		if i == len(tokens)-1 {
			finish = `"length"`
		}
		fmt.Fprintf(w, "data: {\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"created\":17,\"model\":\"m\",\"choices\":[{\"index\":0,\"text\":\"x\",\"logprobs\":null,\"finish_reason\":%s,\"stop_reason\":null,\"token_ids\":[%d]}]}\n\n", finish, t)
	}
	io.WriteString(w, "data: [DONE]\n\n")
}
