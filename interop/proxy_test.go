//go:build interop && nixl

package interop

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berthkv/berth"
	"github.com/berthkv/berth/client"
	"github.com/berthkv/berth/internal/proxy"
)

// spec is the disagg_spec of a prefill request.
type spec struct {
	ReqID string `json:"req_id"`
	Host  string `json:"receiver_host"`
	Init  []int  `json:"receiver_init_port"`
	Alloc []int  `json:"receiver_alloc_port"`
}

// stub is an engine behind the proxy: it answers with one token and lets a test
// move the KV in its place.
type stub struct {
	srv     *httptest.Server
	prefill func(spec) error // of a prefill engine, before its answer
	decode  func(req string) error
}

func startStub(t *testing.T, prefill func(spec) error, decode func(string) error) *stub {
	s := &stub{prefill: prefill, decode: decode}
	s.srv = httptest.NewServer(s)
	t.Cleanup(s.srv.Close)
	return s
}

func (s *stub) addr() proxy.Addr {
	host, port, _ := net.SplitHostPort(s.srv.Listener.Addr().String())
	n, _ := strconv.Atoi(port)
	return proxy.Addr{Host: host, Port: n}
}

func (s *stub) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	raw, _ := io.ReadAll(r.Body)
	switch r.URL.Path {
	case "/health":
		return
	case "/v1/models":
		io.WriteString(w, `{"object":"list","data":[{"id":"m","object":"model","max_model_len":4096}]}`)
		return
	case "/tokenize":
		io.WriteString(w, `{"count":3,"max_model_len":4096,"tokens":[1,2,3]}`)
		return
	}
	var body struct {
		Stream bool
		Params struct {
			Spec spec `json:"disagg_spec"`
		} `json:"kv_transfer_params"`
	}
	if err := json.Unmarshal(raw, &body); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	var err error
	if s.prefill != nil {
		err = s.prefill(body.Params.Spec)
	} else {
		err = s.decode(body.Params.Spec.ReqID)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	const head = `"id":"cmpl-1","created":1,"model":"m","object":"text_completion"`
	if !body.Stream {
		fmt.Fprintf(w, `{%s,"choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":[97],"prompt_token_ids":[1,2,3]}],`+
			`"usage":{"prompt_tokens":3,"total_tokens":4,"completion_tokens":1},"kv_transfer_params":{"first_tok":97}}`, head)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	fmt.Fprintf(w, "data: {%s,\"choices\":[{\"index\":0,\"text\":\"b\",\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null,\"token_ids\":[98]}]}\n\n", head)
	fmt.Fprintf(w, "data: {%s,\"choices\":[],\"usage\":{\"prompt_tokens\":4,\"total_tokens\":5,\"completion_tokens\":1}}\n\ndata: [DONE]\n\n", head)
}

func startProxy(t *testing.T, policy proxy.Policy, notify int, prefill, decode *stub, rs ...*agent) *berth.Proxy {
	t.Helper()
	d := proxy.Decoder{Addr: decode.addr()}
	for _, r := range rs {
		d.Receivers = append(d.Receivers, proxy.Receiver{Host: "127.0.0.1", InitPort: r.target().init, AllocPort: r.target().alloc})
	}
	logs := &logBuffer{}
	p, err := berth.StartProxy(t.Context(), berth.ProxyConfig{Addr: "127.0.0.1:0", NotifyAddr: fmt.Sprint("127.0.0.1:", notify), HTTPAddr: "127.0.0.1:0",
		Nodes: proxy.Config{Prefillers: []proxy.Addr{prefill.addr()}, Decoders: []proxy.Decoder{d}, Policy: policy}, DialTimeout: 5 * time.Second},
		slog.New(slog.NewJSONHandler(logs, &slog.HandlerOptions{Level: slog.LevelDebug})))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Close()
		if t.Failed() {
			t.Logf("log of the proxy:\n%s", logs.tail())
		}
	})
	return p
}

func ask(t *testing.T, p *berth.Proxy) (int, string) {
	t.Helper()
	c := &http.Client{Timeout: limit, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := c.Post("http://"+p.Addrs().HTTP+"/v1/completions", "application/json", strings.NewReader(`{"model":"m","prompt":"abc","max_tokens":2}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// moved is what a prefill stub has sent.
type moved struct {
	mu      sync.Mutex
	keys    []string
	digests []string
}

// Real LMCache senders' ProxyNotif drives Berth's proxy: the decode engine is
// asked when the word of every rank is in, and finds the bytes.
func TestProxy_LMCache_senders(t *testing.T) {
	part(t, "5 LMCache's ProxyNotif to Berth's proxy")
	notify := freePort(t)
	ranks := settings{"tp_size": "2", "pd_peer_host": "127.0.0.1"}
	init0, init1, alloc0, alloc1 := freePort(t), freePort(t), freePort(t), freePort(t)
	ranks["pd_peer_init_port"], ranks["pd_peer_alloc_port"] = fmt.Sprintf("%d,%d", init0, init1), fmt.Sprintf("%d,%d", alloc0, alloc1)
	var rs []*agent
	for i := range 2 {
		ranks["rank"] = strconv.Itoa(i)
		rs = append(rs, receiving(t, plain, 10, ranks))
	}
	p := startPeers(t, 1)[0]
	var senders []*lmcacheSender
	for i := range 2 {
		c := open(plain, fmt.Sprint("s", i), "sender", 10, 20)
		c["proxy"], c["rank"], c["ranks"] = notify, i, 2
		p.do(c)
		senders = append(senders, &lmcacheSender{p, fmt.Sprint("s", i), plain})
	}
	m := &moved{}
	const repeated = 4
	var late sync.WaitGroup
	defer late.Wait()
	put := func(s *lmcacheSender, sp spec, keys []string) ([]string, error) {
		c := s.command(target{}, sp.ReqID, keys, len(keys), true, 5)
		c["host"], c["init"], c["alloc"] = sp.Host, sp.Init, sp.Alloc
		r := s.try(c)
		if r.Error != "" {
			return nil, fmt.Errorf("%s", r.Error)
		}
		return r.SHA256, nil
	}
	asked := 0
	prefill := startStub(t, func(sp spec) error {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.keys, m.digests = plain.keys(3), nil
		asked++
		if asked == repeated {
			// A word that comes twice on one connection counts once: the second rank's
			// bytes are not there yet.
			d, err := put(senders[0], sp, m.keys)
			if err != nil {
				return err
			}
			m.digests = append(m.digests, d...)
			senders[0].do(command{"op": "word", "at": senders[0].at, "req": sp.ReqID})
			late.Go(func() {
				if e, err := rs[0].engine.Wait(ctxFor(t), sp.ReqID, 300*time.Millisecond); err == nil {
					t.Errorf("%s has ended with one rank's words: %+v", sp.ReqID, e)
				}
				m.mu.Lock()
				defer m.mu.Unlock()
				d, err := put(senders[1], sp, m.keys)
				if err != nil {
					t.Error(err)
				}
				m.digests = append(m.digests, d...)
			})
			return nil
		}
		for _, s := range senders {
			d, err := put(s, sp, m.keys)
			if err != nil {
				return err
			}
			m.digests = append(m.digests, d...)
		}
		return nil
	}, nil)
	decoded := 0
	decode := startStub(t, nil, func(req string) error {
		m.mu.Lock()
		defer m.mu.Unlock()
		decoded++
		var got []string
		for _, r := range rs {
			got = append(got, r.claim("by-"+req, req)...)
			r.release("by-"+req, req)
		}
		same(t, req, got, m.digests)
		return nil
	})
	proxy := startProxy(t, proxy.Fail, notify, prefill, decode, rs...)
	for i := range 5 {
		if code, body := ask(t, proxy); code != http.StatusOK || !strings.Contains(body, `"ab"`) {
			t.Fatalf("answer %d: %d %s", i, code, body)
		}
	}
	if decoded != 5 {
		t.Errorf("the decode engine was asked %d times", decoded)
	}
	for _, r := range rs {
		r.untilFree()
	}
}

// A failure that a receiver knows reaches Berth's proxy through Watch; one that
// none can know, since it cannot be reached, through the sender's Ending.
func TestProxy_failures(t *testing.T) {
	part(t, "5 failures to Berth's proxy")
	decode := startStub(t, nil, func(req string) error { t.Errorf("%s is decoded", req); return nil })
	send := func(s *agent, sp spec, alloc int) (*client.Transfer, error) {
		return s.engine.Begin(ctxFor(t), client.Begin{Req: sp.ReqID, TotalChunks: 4, Host: sp.Host, InitPort: sp.Init[0], AllocPort: alloc, BerthProxy: true})
	}
	t.Run("Watch", func(t *testing.T) {
		notify := freePort(t)
		r := receiving(t, plain, 10, nil)
		s := sending(t, plain, 8, notify, nil)
		prefill := startStub(t, func(sp spec) error {
			tr, err := send(s, sp, sp.Alloc[0])
			if err == nil {
				<-tr.Granted()
				_, err = tr.Cancel(ctxFor(t), "internal", "the engine has failed")
			}
			return err
		}, nil)
		p := startProxy(t, proxy.Fail, notify, prefill, decode, r)
		if code, body := ask(t, p); code != http.StatusBadGateway {
			t.Errorf("%d %s", code, body)
		}
		r.untilFree()
	})
	t.Run("Ending", func(t *testing.T) {
		notify := freePort(t)
		r := receiving(t, plain, 10, nil)
		s := sending(t, plain, 8, notify, settings{"receiver_allow": "10.9.9.9"})
		prefill := startStub(t, func(sp spec) error {
			tr, err := send(s, sp, freePort(t))
			if err == nil {
				<-tr.Ended()
			}
			return nil
		}, nil)
		p := startProxy(t, proxy.Fail, notify, prefill, decode, r)
		if code, body := ask(t, p); code != http.StatusBadGateway {
			t.Errorf("%d %s", code, body)
		}
	})
}

// A Berth sender's words reach the reference's own PULL socket, decoded by its
// own code: one for each request that is ready, none for others.
func TestProxy_LMCache_PULL(t *testing.T) {
	part(t, "5 Berth's ProxyNotif to a pyzmq PULL")
	p := startPeers(t, 1)[0]
	port := p.do(command{"op": "pull"}).Port
	r := p.receiver(plain, "r", 10, newTarget(t), 20)
	s := sending(t, plain, 8, port, nil)
	var want []string
	for i := range 3 {
		keys := plain.keys(2)
		tr := s.begin(r.target, fmt.Sprint("word", i), 2)
		s.granted(tr)
		if i == 1 {
			tr.Cancel(ctxFor(t), "cancelled", "test")
			s.ended(tr)
			continue
		}
		s.send(tr, keys, 2, 0)
		s.ended(tr)
		want = append(want, tr.Req())
	}
	if got := p.do(command{"op": "words", "count": 2}).Keys; strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("the proxy has heard %v, want %v", got, want)
	}
}
