package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/tidwall/gjson"

	"github.com/berthkv/berth/client"
)

// leg is one exchange of a proxy with an engine.
type leg struct {
	Port int // of the engine
	Path string
	Body string
}

// bodies is what a stub answers an order with: the legs of the request that its
// decode half saw last.
type bodies struct{ Legs []leg }

// replayed marks a leg that the baseline carries: no transfer comes with it.
const replayed = "X-Bench-Replayed"

// stub is a prefill and a decode engine that answer at once. A prefill moves one
// chunk through real agents, a decode reads it.
type stub struct {
	work     Work
	sender   *client.Client
	receiver *client.Client
	stager   stager
	ctx      context.Context
	wg       sync.WaitGroup // transfers and reads

	mu     sync.Mutex
	legs   map[string][]leg // by req_id; what is read is forgotten
	tokens leg
	last   []leg
	err    error // the first of a transfer or read
}

// stubWorker serves the prefill half on w.Ports[0] and the decode half on
// w.Ports[1].
func stubWorker(ctx context.Context, w Work) (obey, func(), error) {
	s := &stub{work: w, stager: stager{submitted: make(chan struct{})}, legs: map[string][]leg{}}
	var end closing
	var cancel func()
	s.ctx, cancel = context.WithCancel(ctx)
	end.add(func() { cancel(); s.wg.Wait() })
	for _, c := range []struct {
		to **client.Client
		w  Work
	}{{&s.receiver, Work{Socket: w.Socket, Slot: w.Slot}}, {&s.sender, Work{Agent: w.Agent, Slot: w.Slot}}} {
		got, done, err := c.w.engine(ctx)
		if err != nil {
			end.run()
			return nil, nil, err
		}
		*c.to = got
		end = append(closing{done}, end...) // after the transfers
	}
	prefill, decode := http.NewServeMux(), http.NewServeMux()
	prefill.HandleFunc("POST /tokenize", s.tokenize)
	prefill.HandleFunc("POST /v1/completions", s.prefill)
	decode.HandleFunc("POST /v1/completions", s.decode)
	for i, h := range []http.Handler{prefill, decode} {
		done, err := serve(w.Ports[i], h)
		if err != nil {
			end.run()
			return nil, nil, err
		}
		end.add(done)
	}
	return func(order, func(any) error) (any, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		return bodies{s.last}, s.err
	}, end.run, nil
}

// closing is what undoes a start, run in reverse.
type closing []func()

func (c *closing) add(f func()) { *c = append(*c, f) }

func (c *closing) run() {
	for i := len(*c) - 1; i >= 0; i-- {
		(*c)[i]()
	}
}

func serve(port int, h http.Handler) (done func(), err error) {
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return nil, err
	}
	srv := &http.Server{Handler: h, ReadHeaderTimeout: answerTimeout}
	go srv.Serve(l)
	return func() { srv.Close() }, nil
}

func (s *stub) read(w http.ResponseWriter, r *http.Request) (gjson.Result, bool) {
	b, err := io.ReadAll(r.Body)
	if err == nil && !gjson.ValidBytes(b) {
		err = errors.New("the body is no JSON")
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return gjson.Result{}, false
	}
	return gjson.ParseBytes(b), true
}

func (s *stub) tokenize(w http.ResponseWriter, r *http.Request) {
	body, ok := s.read(w, r)
	if !ok {
		return
	}
	s.mu.Lock()
	s.tokens = leg{s.work.Ports[0], "/tokenize", body.Raw}
	s.mu.Unlock()
	prompt := body.Get("prompt").Str
	out := fmt.Appendf(nil, `{"count":%d,"max_model_len":1000000,"tokens":`, len(prompt))
	sep := byte('[')
	for i := range len(prompt) { // a token is a byte
		out = strconv.AppendInt(append(out, sep), int64(prompt[i]), 10)
		sep = ','
	}
	w.Header().Set("Content-Type", "application/json")
	w.Write(append(out, "]}"...))
}

const answerHead = `{"id":"cmpl-1","object":"text_completion","created":17,"model":"m","choices":[{"index":0,"text":"a","logprobs":null,`

func (s *stub) prefill(w http.ResponseWriter, r *http.Request) {
	body, ok := s.read(w, r)
	if !ok {
		return
	}
	if r.Header.Get(replayed) == "" {
		spec := body.Get("kv_transfer_params.disagg_spec")
		req, port := spec.Get("req_id").Str, int(spec.Get("receiver_alloc_port.0").Int())
		s.mu.Lock()
		s.legs[req] = []leg{s.tokens, {s.work.Ports[0], r.URL.Path, body.Raw}}
		s.mu.Unlock()
		s.wg.Go(func() {
			s.failed(s.stager.send(s.ctx, s.sender, req, 1, port, func() error { return nil }))
		})
	}
	w.Header().Set("Content-Type", "application/json")
	io.WriteString(w, answerHead+`"finish_reason":"length","stop_reason":null,"token_ids":[97]}],"usage":{"prompt_tokens":1,"total_tokens":2,"completion_tokens":1},"kv_transfer_params":{"first_tok":97}}`)
}

func (s *stub) failed(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil && err != nil && s.ctx.Err() == nil {
		s.err = err
	}
}

func (s *stub) decode(w http.ResponseWriter, r *http.Request) {
	body, ok := s.read(w, r)
	if !ok {
		return
	}
	if req := body.Get("kv_transfer_params.disagg_spec.req_id").Str; req != "" && r.Header.Get(replayed) == "" {
		s.mu.Lock()
		s.last = append(s.legs[req], leg{s.work.Ports[1], r.URL.Path, body.Raw})
		delete(s.legs, req)
		s.mu.Unlock()
		s.wg.Go(func() {
			_, err := s.receiver.Claim(s.ctx, req, req)
			if err == nil {
				err = s.receiver.Release(s.ctx, req, req)
			}
			s.failed(err)
		})
	}
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	out := http.NewResponseController(w)
	n := body.Get("max_tokens").Int()
	for i := range n {
		finish := "null"
		if i == n-1 {
			finish = `"length"`
		}
		fmt.Fprintf(w, "data: %s\"finish_reason\":%s,\"stop_reason\":null,\"token_ids\":[97]}]}\n\n", answerHead, finish)
		out.Flush()
	}
	if body.Get("stream_options.include_usage").Bool() {
		fmt.Fprintf(w, "data: {\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"created\":17,\"model\":\"m\",\"choices\":[],"+
			"\"usage\":{\"prompt_tokens\":1,\"total_tokens\":%d,\"completion_tokens\":%d}}\n\n", n+1, n)
	}
	io.WriteString(w, "data: [DONE]\n\n")
}

// reverseWorker is Go's own proxy: what comes at w.Ports[2+i] goes to w.Ports[i].
func reverseWorker(_ context.Context, w Work) (obey, func(), error) {
	var end closing
	transport := &http.Transport{MaxIdleConnsPerHost: 256, DisableCompression: true, ResponseHeaderTimeout: answerTimeout}
	end.add(transport.CloseIdleConnections)
	for i := range 2 {
		p := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: net.JoinHostPort("127.0.0.1", strconv.Itoa(w.Ports[i]))})
		p.Transport = transport
		done, err := serve(w.Ports[2+i], http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			// Else the server closes the client's body when the answer begins, and an engine that answers at once
			// is faster than the transport, which has yet to see the end of that body: it would break off the answer.
			http.NewResponseController(w).EnableFullDuplex()
			p.ServeHTTP(w, r)
		}))
		if err != nil {
			end.run()
			return nil, nil, err
		}
		end.add(done)
	}
	return func(order, func(any) error) (any, error) { return struct{}{}, nil }, end.run, nil
}

// caller is an HTTP client with connections that it keeps.
type caller struct{ http.Client }

func newCaller() *caller {
	return &caller{http.Client{Timeout: answerTimeout, Transport: &http.Transport{MaxIdleConnsPerHost: 256, DisableCompression: true}}}
}

// post sends a body and reads all of the answer; first is when its first bytes
// came.
func (c *caller) post(ctx context.Context, port int, path, body, header string) (first time.Time, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://127.0.0.1:"+strconv.Itoa(port)+path, bytes.NewReader([]byte(body)))
	if err != nil {
		return first, err
	}
	req.Header.Set("Content-Type", "application/json")
	if header != "" {
		req.Header.Set(header, "1")
	}
	resp, err := c.Do(req)
	if err != nil {
		return first, err
	}
	defer resp.Body.Close()
	var head [1024]byte
	n, err := io.ReadAtLeast(resp.Body, head[:], 1)
	first = time.Now()
	if err != nil {
		return first, fmt.Errorf("%s: %w", path, err)
	}
	if resp.StatusCode != http.StatusOK {
		return first, fmt.Errorf("%s: %s: %s", path, resp.Status, head[:n])
	}
	_, err = io.Copy(io.Discard, resp.Body)
	return first, err
}
