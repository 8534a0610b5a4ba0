package e2e

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/berthkv/berth"
	"github.com/berthkv/berth/client"
)

// status asks a child over HTTP, as an operator does.
func (c *child) status(t testing.TB) (berth.Status, error) {
	var s berth.Status
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+c.addrs.HTTP+"/v1/status", nil)
	if err != nil {
		return s, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return s, err
	}
	defer resp.Body.Close()
	defer http.DefaultClient.CloseIdleConnections()
	return s, json.NewDecoder(resp.Body).Decode(&s)
}

func (c *child) until(t testing.TB, what string, ok func(berth.Status) bool) berth.Status {
	t.Helper()
	return until(t, what, func() (berth.Status, error) { return c.status(t) }, ok)
}

// r42, fault 12: a sender is killed between the grant and the data. Its room is
// free again within the lease, with the reason in log, counter and ending, and
// not before.
func TestLoss_sender_killed(t *testing.T) {
	for _, link := range []string{"shm", "tcp"} {
		t.Run(link, func(t *testing.T) {
			r := startAgent(t, receiving(t, 10).with(settings{"links": link}))
			receiver := r.engine(t)
			s := startAgentProcess(t, sending(10).with(settings{"links": link}))
			sender := s.engine(t, "engine")
			tr := begin(t, sender, "lost", 8, r.port())
			granted(t, tr)
			if err := tr.Submit(ctxFor(t), stage(t, sender, tr, 0, 3), client.NoEnd); err != nil {
				t.Fatal(err)
			}
			r.until(t, "committed", func(s berth.Status) bool { return s.Pool.Committed == 3 })
			waited := make(chan client.Ending, 1)
			go func() {
				e, _ := receiver.Wait(ctxFor(t), "lost", limit)
				waited <- e
			}()
			r.until(t, "granted", func(s berth.Status) bool { return s.Pool.Granted == 5 })
			s.kill()
			r.until(t, "free", allFree)
			if e := <-waited; e.Ending != "failed" || e.Reason != client.PeerLost {
				t.Errorf("the decode engine heard %+v, want failed(peer_lost)", e)
			}
			r.logs.await(t, "request_ended", "lost", "peer_lost")
			if body := get(t, r.Addrs().HTTP, "/metrics"); !strings.Contains(body, `berth_endings_total{ending="failed",reason="peer_lost",side="receive"} 1`) {
				t.Error("the ending is not counted")
			}
		})
	}
}

// A receiver is killed: the prefill engine hears it within the lease, its
// staging slots come back, and the next request to the restarted receiver works
// (fault 17, r83).
func TestLoss_receiver_killed(t *testing.T) {
	for _, link := range []string{"shm", "tcp"} {
		t.Run(link, func(t *testing.T) {
			s := startAgent(t, sending(10).with(settings{"links": link}))
			sender := s.engine(t)
			conf := receiving(t, 10).with(settings{"links": link})
			r := startAgentProcess(t, conf)
			cfg := config(t, conf)
			tr := begin(t, sender, "gone", 8, cfg.AllocPort())
			granted(t, tr)
			chunks := stage(t, sender, tr, 0, 3)
			r.kill()
			if err := tr.Submit(ctxFor(t), chunks, client.NoEnd); err != nil { // it has ended already
				unstage(t, tr, chunks)
			}
			if e := ended(t, tr); e.Ending != "failed" || e.Reason != client.PeerLost {
				t.Errorf("ended %+v, want failed(peer_lost)", e)
			}
			s.until(t, "free", allFree)

			r = startAgentProcess(t, conf)
			receiver := r.engine(t, "engine")
			tr = begin(t, sender, "again", 4, cfg.AllocPort())
			granted(t, tr)
			send(t, sender, tr, 4)
			receive(t, receiver, "again", 4)
		})
	}
}

// A decode engine is killed while it reads: its slots are quarantined until its
// process is gone, which the agent sees, and then free.
func TestLoss_decode_engine_killed(t *testing.T) {
	r := startAgent(t, receiving(t, 10).with(settings{"quarantine_sec": "600"}))
	s := startAgent(t, sending(10))
	sender := s.engine(t)
	e := startEngineProcess(t, r.Addrs().Local)
	tr := begin(t, sender, "read", 5, r.port())
	granted(t, tr)
	send(t, sender, tr, 5)
	e.do(t, order{Op: "wait", Req: "read"})
	if got := e.do(t, order{Op: "claim", Req: "read"}); got.N != 5 {
		t.Fatalf("%d chunks claimed", got.N)
	}
	if st := r.status(t); st.Pool.Claimed != 5 {
		t.Fatalf("%+v: want 5 claimed", *st.Pool)
	}
	e.kill()
	r.until(t, "free", allFree)
	r.until(t, "without engine", func(s berth.Status) bool { return !s.Ready && strings.Contains(s.NotReady, "engine") })
	r.engine(t) // a new engine is accepted at once
}

// A prefill engine is killed while it holds staged slots and has a request that
// is not submitted whole: both are given back. What was submitted whole goes on.
func TestLoss_prefill_engine_killed(t *testing.T) {
	r := startAgent(t, receiving(t, 20))
	s := startAgent(t, sending(10).with(settings{"quarantine_sec": "600"}))
	receiver := r.engine(t)
	e := startEngineProcess(t, s.Addrs().Local)
	e.do(t, order{Op: "begin", Req: "whole", Total: 3, Port: r.port()})
	e.do(t, order{Op: "begin", Req: "part", Total: 6, Port: r.port()})
	e.do(t, order{Op: "stage", Req: "whole", Total: 3})
	e.do(t, order{Op: "submit", Req: "whole", Total: 3})
	e.do(t, order{Op: "stage", Req: "part", Total: 2})
	e.kill()
	receive(t, receiver, "whole", 3)
	r.until(t, "free", allFree)
	s.until(t, "free", allFree)
	r.logs.await(t, "request_ended", "part", "cancelled")
}

// A sender is stopped for longer than the lease and goes on: its requests have
// ended, and nothing that it still sends is taken for anything (r35, r68, r81).
func TestLoss_sender_stopped_longer_than_the_lease(t *testing.T) {
	for _, link := range []string{"shm", "tcp"} {
		t.Run(link, func(t *testing.T) {
			r := startAgent(t, receiving(t, 10).with(settings{"links": link}))
			receiver := r.engine(t)
			s := startAgentProcess(t, sending(10).with(settings{"links": link}))
			sender := s.engine(t, "engine")
			tr := begin(t, sender, "stopped", 8, r.port())
			granted(t, tr)
			s.signal(syscall.SIGSTOP)
			r.until(t, "free", allFree)
			s.signal(syscall.SIGCONT)
			if e := ended(t, tr); e.Ending != "failed" || e.Reason != client.PeerLost {
				t.Errorf("ended %+v, want failed(peer_lost)", e)
			}
			tr = begin(t, sender, "next", 8, r.port())
			granted(t, tr)
			send(t, sender, tr, 8)
			receive(t, receiver, "next", 8)
			r.until(t, "free", allFree)
			s.until(t, "free", allFree)
		})
	}
}

// A receiver is stopped for longer than the lease: it wakes to heartbeats that
// wait, and judges nobody by its own absence. Senders that waited gave their own
// verdict; both sides agree that the request has ended.
func TestLoss_receiver_stopped_longer_than_the_lease(t *testing.T) {
	conf := receiving(t, 10)
	r := startAgentProcess(t, conf)
	cfg := config(t, conf)
	s := startAgent(t, sending(10))
	sender := s.engine(t)
	tr := begin(t, sender, "stopped", 8, cfg.AllocPort())
	granted(t, tr)
	r.signal(syscall.SIGSTOP)
	if e := ended(t, tr); e.Ending != "failed" || e.Reason != client.PeerLost {
		t.Errorf("ended %+v, want failed(peer_lost)", e)
	}
	s.until(t, "free", allFree)
	r.signal(syscall.SIGCONT)
	r.until(t, "free", allFree)
	receiver := r.engine(t, "engine")
	tr = begin(t, sender, "next", 8, cfg.AllocPort())
	granted(t, tr)
	send(t, sender, tr, 8)
	receive(t, receiver, "next", 8)
}

// r40, r92: SIGTERM drains: what is live may end, what does not is cut off in
// time, and the process exits with 0.
func TestShutdown(t *testing.T) {
	r := startAgentProcess(t, receiving(t, 10))
	cfg := config(t, receiving(t, 10))
	_ = cfg
	s := startAgentProcess(t, sending(10))
	sender := s.engine(t, "engine")
	st, err := r.status(t)
	if err != nil || st.Pool == nil {
		t.Fatal(err)
	}
	start := time.Now()
	for _, c := range []*child{s, r} {
		c.signal(syscall.SIGTERM)
		select {
		case <-c.done:
		case <-time.After(limit):
			t.Fatal("still running")
		}
		if code := c.state.ExitCode(); code != 0 {
			t.Errorf("exit code %d\n%s", code, c.log.String())
		}
	}
	<-sender.Done()
	t.Logf("both were gone after %v", time.Since(start))
}

// An admitted request keeps a draining receiver; it may still end well.
func TestShutdown_admitted_request_ends_well(t *testing.T) {
	conf := receiving(t, 10).with(settings{"pd_shutdown_timeout_sec": "20"})
	r := startAgentProcess(t, conf)
	cfg := config(t, conf)
	s := startAgent(t, sending(10))
	sender, receiver := s.engine(t), r.engine(t, "engine")
	tr := begin(t, sender, "last", 4, cfg.AllocPort())
	granted(t, tr)
	r.signal(syscall.SIGTERM)
	r.until(t, "draining", func(s berth.Status) bool { return s.Draining && s.NotReady == "draining" })
	late := begin(t, sender, "late", 1, cfg.AllocPort())
	send(t, sender, tr, 4)
	receive(t, receiver, "last", 4)
	select {
	case <-r.done:
	case <-time.After(limit):
		t.Fatal("still running")
	}
	if code := r.state.ExitCode(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	if e := ended(t, late); e.Ending == "ready" {
		t.Errorf("a request begun while draining ended %+v", e)
	}
	s.until(t, "free", allFree)
}
