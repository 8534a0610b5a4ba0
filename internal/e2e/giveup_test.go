package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/berthkv/berth"
	"github.com/berthkv/berth/client"
	"github.com/berthkv/berth/internal/proxy"
)

// A sender's agent is killed after it has accepted a request and before its
// receiver has heard of that. The engine gives it up through the next agent: the
// proxy hears so, long before its transfer timeout, and has the decode engine
// compute the prompt.
func TestLoss_sender_killed_before_the_receiver_heard(t *testing.T) {
	conf := receiving(t, 10)
	port := config(t, conf).AllocPort()
	r := startAgentProcess(t, conf)
	r.engine(t, "decoder")

	f := &front{t: t, http: &http.Client{Transport: &http.Transport{}}}
	defer f.http.CloseIdleConnections()
	var senders settings // of the sender's agents, once the proxy is there
	prefill := func(a engineAsk) error {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		s := startAgentProcess(t, senders)
		c := s.engine(t, "first")
		b := client.Begin{Req: a.Transfer.Spec.ReqID, TotalChunks: pairChunks, Host: "127.0.0.1", AllocPort: port, BerthProxy: true}
		r.signal(syscall.SIGSTOP) // it takes the connection, and says nothing: Begin is not sent
		_, err := c.Begin(ctx, b)
		s.kill()
		r.signal(syscall.SIGCONT)
		if err != nil {
			return err
		}
		<-c.Done()
		if err := c.GiveUp(ctx, b, c.Info().Incarnation); err != nil {
			return fmt.Errorf("through the agent that was lost: %w", err)
		}
		if err := c.GiveUp(ctx, b, ""); err == nil {
			return fmt.Errorf("a lost agent took the word")
		}
		return startAgentProcess(t, senders).engine(t, "first").GiveUp(ctx, b, c.Info().Incarnation)
	}
	engine := func(answer func(http.ResponseWriter, *http.Request, engineAsk)) proxy.Addr {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			var a engineAsk
			if r.Method == http.MethodGet {
				fmt.Fprint(w, `{"object":"list","data":[{"id":"m","object":"model","max_model_len":4096}]}`)
			} else if err := json.NewDecoder(r.Body).Decode(&a); err != nil {
				t.Error(err)
			} else {
				answer(w, r, a)
			}
		}))
		t.Cleanup(srv.Close)
		host, port, err := net.SplitHostPort(srv.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		n, err := strconv.Atoi(port)
		if err != nil {
			t.Fatal(err)
		}
		return proxy.Addr{Host: host, Port: n}
	}
	gaveUp := make(chan error, 1)
	p, err := berth.StartProxy(t.Context(), berth.ProxyConfig{Addr: "127.0.0.1:0", NotifyAddr: "127.0.0.1:0", HTTPAddr: "127.0.0.1:0",
		Nodes: proxy.Config{
			Prefillers: []proxy.Addr{engine(func(w http.ResponseWriter, _ *http.Request, a engineAsk) {
				f.first(w, a)
				go func() { gaveUp <- prefill(a) }()
			})},
			Decoders: []proxy.Decoder{{Addr: engine(f.decode), Receivers: []proxy.Receiver{{Host: "127.0.0.1", AllocPort: port, InitPort: config(t, conf).InitPort()}}}},
			Timeouts: proxy.Timeouts{Transfer: time.Hour},
		}}, quiet)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	f.addrs = p.Addrs()
	_, notify, err := net.SplitHostPort(f.addrs.Notify)
	if err != nil {
		t.Fatal(err)
	}
	senders = sending(10).with(settings{"pd_skip_proxy_notification": "false", "pd_proxy_host": "127.0.0.1", "pd_proxy_port": notify})

	if took := f.answered(); f.recomputed.Load() != 1 {
		t.Errorf("%d prompts were computed by the decode engine, want 1 (after %v)", f.recomputed.Load(), took)
	}
	select {
	case err := <-gaveUp:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(limit):
		t.Error("the engine is not through with it")
	}
	r.until(t, "free", allFree)
}
