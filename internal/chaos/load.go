package chaos

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strconv"
	"time"
)

// What a request may take. Its deadline is told to the agent; the rest is for
// stops that last longer than a lease and for a busy machine.
const (
	deadline  = 8 * time.Second
	hangAfter = deadline + 20*time.Second
	askLimit  = 20 * time.Second // a client's patience
)

// request is what one request of the load does; it follows from the seed and
// its number.
type request struct {
	number   int
	rng      *rand.Rand
	sender   int
	receiver int
	order    order
	http     bool
}

func (r *run) request(number int) request {
	rng := rand.New(rand.NewPCG(r.o.Seed, uint64(number)))
	q := request{number: number, rng: rng, sender: rng.IntN(len(r.fleet.senders)), receiver: rng.IntN(len(r.fleet.receivers))}
	to := r.fleet.receivers[q.receiver]
	q.order = order{Op: "send", Req: fmt.Sprintf("r%d", number), Attempt: uint64(number) + 1, Chunks: 1 + rng.IntN(8), Tokens: 1 + rng.IntN(chunkTokens),
		To: to.name, Host: to.place.ip.String(), Port: allocPort, Deadline: deadline, Hang: hangAfter, Seed: rng.Uint64()}
	q.order.Declare = q.order.Chunks
	switch p := rng.IntN(100); {
	case p < 20:
		q.http = true
	case p < 35:
		q.order.CancelAt = choose(rng, []string{"begun", "granted", "staged", "submitted", "ended"})
	case p < 38:
		q.order.Chunks = receiveSlots
		q.order.Declare = receiveSlots
	case p < 39:
		q.order.Declare = receiveSlots + 1 // can never fit
	case p < 40:
		q.order.Chunks, q.order.Declare = 0, 0
	case p < 45:
		q.order.Declare += 1 + rng.IntN(4) // fewer come than were announced
	case p < 50:
		q.order.Again = true // a name that had its ending
	}
	if rng.IntN(5) == 0 {
		q.order.Stage = min(q.order.Chunks, 1+rng.IntN(4))
	}
	return q
}

// orders are what engines have been told and not done.
type pending struct {
	process string
	id      uint64
}

// tell gives an engine an order and returns where its outcome will be; false if
// the engine is not there.
func (r *run) tell(n *node, o order) (pending, chan outcome, bool) {
	r.mu.Lock()
	r.lastOrder++
	o.ID = r.lastOrder
	k := pending{n.engine.current(), o.ID}
	ch := make(chan outcome, 1)
	r.orders[k] = ch
	r.mu.Unlock()
	if !n.engine.running() || n.engine.write(o) != nil || n.engine.current() != k.process {
		r.mu.Lock()
		delete(r.orders, k)
		r.mu.Unlock()
		return k, nil, false
	}
	return k, ch, true
}

// Outcomes that no engine says.
const (
	engineKilled = "engine_killed"
	engineDown   = "engine_down"
)

// engineLine takes in a line of an engine's history.
func (r *run) engineLine(process string, line []byte) {
	var e Event
	if err := json.Unmarshal(line, &e); err != nil {
		return // cut off by a kill
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.history = append(r.history, e)
	if e.Op != opDone || !e.Ret {
		return
	}
	k := pending{process, e.Order}
	if ch := r.orders[k]; ch != nil {
		delete(r.orders, k)
		ch <- outcome{e.Ending, e.Reason, e.Text}
		return
	}
	// An order that came over HTTP.
	if e.Attempt != 0 {
		r.countLocked("proxied send", outcome{e.Ending, e.Reason, e.Text})
	} else {
		r.countLocked("proxied receive", outcome{e.Ending, e.Reason, e.Text})
	}
}

// engineGone ends what one start of an engine had to do.
func (r *run) engineGone(process string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for k, ch := range r.orders {
		if k.process == process {
			delete(r.orders, k)
			ch <- outcome{ending: engineKilled}
		}
	}
}

// killed notes in the history that an engine is about to die.
func (r *run) killed(p *process) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.history = append(r.history, Event{T: clock(), Op: opDied, Engine: p.current()})
}

// usedName is the name of a request that has ended.
type usedName struct {
	req      string
	declared int
}

// move carries out a request that the runner orders at both ends.
func (r *run) move(ctx context.Context, q request) {
	o := q.order
	from, to := r.fleet.senders[q.sender], r.fleet.receivers[q.receiver]
	if o.Again {
		r.mu.Lock()
		if names := r.ended[to.name]; len(names) > 0 { // taken out: one at a time
			i := q.rng.IntN(len(names))
			// A begin with the same total would be taken for a repeat of the old one.
			o.Req, o.Declare = names[i].req, max(o.Chunks, names[i].declared+1)
			names[i] = names[len(names)-1]
			r.ended[to.name] = names[:len(names)-1]
		} else {
			o.Again = false
		}
		r.mu.Unlock()
	}
	begun := time.Now()
	_, sent, ok := r.tell(from, o)
	if !ok {
		r.count("not asked", outcome{ending: engineDown})
		pause(ctx, poll)
		return
	}
	want := order{Op: "receive", Req: o.Req, Deadline: deadline, Hang: hangAfter, Again: o.Again, Seed: o.Seed}
	k, got, waits := r.tell(to, want)
	out := <-sent // an engine answers within Hang, or is killed
	r.count("send", out)
	r.took(begun)
	if out.ending != "ready" {
		if waits { // nobody would wait for it
			t := time.NewTimer(lease / 2)
			select {
			case in := <-got:
				r.count("receive", in)
			case <-t.C:
				to.engine.write(order{Op: "cancel", ID: k.id})
				r.count("receive", <-got)
			}
			t.Stop()
		}
		return
	}
	in := outcome{ending: engineDown}
	if waits {
		in = <-got
		r.count("receive", in)
		if in.ending == refused && !o.Again && o.CancelAt == "" { // a cancel frees what is ready
			r.fault("%q was ready at %s and could not be had there: %+v", o.Req, to.name, in)
		}
	}
	for try := 0; in.ending != "ready" && slices.Contains([]string{engineKilled, engineDown, noAgent, agentOut}, in.ending) && try < 50 && !o.Again; try++ {
		// Somebody else of the decode side takes what is ready.
		pause(ctx, 2*poll)
		want.Deadline = lease
		if _, got, ok := r.tell(to, want); ok {
			in = <-got
			r.count("receive again", in)
		}
	}
	r.mu.Lock()
	if len(r.ended[to.name]) < 1000 {
		r.ended[to.name] = append(r.ended[to.name], usedName{o.Req, o.Declare})
	}
	r.mu.Unlock()
}

// ask carries out a request through the proxy, as a client does.
func (r *run) ask(ctx context.Context, q request) {
	const tokens = 6
	prompt := make([]int, q.order.Chunks*chunkTokens-q.rng.IntN(chunkTokens))
	for i := range prompt {
		prompt[i] = 1 + q.rng.IntN(1000)
	}
	if len(prompt) == 0 {
		prompt = []int{1}
	}
	body, err := json.Marshal(map[string]any{"model": "m", "prompt": prompt, "max_tokens": tokens, "return_token_ids": true, "stream": false})
	if err != nil {
		panic(err)
	}
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	leaves := q.rng.IntN(10) == 0
	if leaves { // the client hangs up
		time.AfterFunc(time.Duration(q.rng.IntN(50))*time.Millisecond, cancel)
	}
	begun := time.Now()
	where := make(chan string, 1)
	late := time.AfterFunc(askLimit-time.Second, func() { where <- r.atProxy(q.order.Req) })
	got, err := r.post(ctx, q.order.Req, body)
	if late.Stop() {
		where <- ""
	}
	at := <-where
	r.took(begun)
	switch {
	case err == nil && !slices.Equal(got, complete(prompt, tokens)):
		r.count("client", outcome{ending: "wrong answer"})
		r.fault("a client got the tokens %v to a prompt whose answer is %v", got, complete(prompt, tokens))
	case err == nil:
		r.count("client", outcome{ending: "right answer"})
	case leaves && errors.Is(ctx.Err(), context.Canceled):
		r.count("client", outcome{ending: "hung up"})
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		r.count("client", outcome{ending: "gave up"})
		r.fault("a client of %q had no answer within %v; a second before, the proxy said of it: %s", q.order.Req, askLimit, at)
	default:
		r.count("client", outcome{ending: "error", reason: errorKind(err)})
		if errors.Is(err, errWrongPrompt) {
			r.fault("a decode engine was given the KV of another prompt: %v", err)
		}
		pause(ctx, poll)
	}
}

// atProxy says where in the proxy a client's request is.
func (r *run) atProxy(id string) string {
	_, body, err := r.fleet.get(context.Background(), r.fleet.front, httpPort, "/v1/status")
	if err != nil {
		return err.Error()
	}
	var s struct {
		Requests []json.RawMessage `json:"requests"`
	}
	if err := json.Unmarshal([]byte(body), &s); err != nil {
		return err.Error()
	}
	for _, q := range s.Requests {
		if bytes.Contains(q, []byte(strconv.Quote(id))) {
			return string(q)
		}
	}
	return "nothing"
}

var errWrongPrompt = errors.New(wrongPrompt)

func errorKind(err error) string {
	var op *net.OpError
	var status httpError
	switch {
	case errors.As(err, &op):
		return op.Op
	case errors.As(err, &status):
		return "HTTP " + strconv.Itoa(int(status))
	}
	return "broken off"
}

type httpError int

func (e httpError) Error() string { return "HTTP " + strconv.Itoa(int(e)) }

func (r *run) post(ctx context.Context, id string, body []byte) ([]int, error) {
	at := net.JoinHostPort(r.fleet.front.bind, strconv.Itoa(proxyPort))
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+at+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Id", id)
	resp, err := r.clients.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxBody))
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		if bytes.Contains(b, []byte(wrongPrompt)) {
			return nil, fmt.Errorf("%w: %s", errWrongPrompt, b)
		}
		return nil, httpError(resp.StatusCode)
	}
	var a struct {
		Choices []struct {
			TokenIDs []int `json:"token_ids"`
		} `json:"choices"`
	}
	if err := json.Unmarshal(b, &a); err != nil || len(a.Choices) != 1 {
		return nil, fmt.Errorf("an answer that is none: %w: %.200s", err, b)
	}
	return a.Choices[0].TokenIDs, nil
}
