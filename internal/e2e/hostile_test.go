package e2e

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/berthkv/berth"
	"github.com/berthkv/berth/client"
)

var quiet = slog.New(slog.DiscardHandler)

var hostileReport = flag.Bool("hostile", false, "measure what honest requests take without and with each attack (make hostile)")

// victim is a receiver in a process of its own, so that its memory, descriptors
// and goroutines are nobody else's.
type victim struct {
	*child
	t     *testing.T
	port  int
	slots int
	shm   string // path
}

func startVictim(t *testing.T, s settings) *victim {
	t.Helper()
	c := startAgentProcess(t, s)
	port, err := strconv.Atoi(s["pd_peer_alloc_port"])
	if err != nil {
		t.Fatal(err)
	}
	bytes, err := strconv.Atoi(s["pd_buffer_size"])
	if err != nil {
		t.Fatal(err)
	}
	return &victim{child: c, t: t, port: port, slots: bytes / slotBytes, shm: strings.TrimSuffix(c.addrs.Local, ".sock") + ".shm"}
}

// usage is what a process holds. Memory is the anonymous part of its resident
// size: the pools are shared memory and no part of it.
type usage struct{ memory, descriptors, goroutines int64 }

func (v *victim) usage() usage {
	v.t.Helper()
	var u usage
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", v.cmd.Process.Pid))
	if err != nil {
		v.t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, "RssAnon:"); ok {
			kb, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			if err != nil {
				v.t.Fatal(err)
			}
			u.memory = kb << 10
		}
	}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", v.cmd.Process.Pid))
	if err != nil {
		v.t.Fatal(err)
	}
	u.descriptors = int64(len(fds))
	for line := range strings.Lines(get(v.t, v.addrs.HTTP, "/metrics")) {
		if rest, ok := strings.CutPrefix(line, "go_goroutines "); ok {
			n, err := strconv.ParseFloat(strings.TrimSpace(rest), 64)
			if err != nil {
				v.t.Fatal(err)
			}
			u.goroutines = int64(n)
		}
	}
	return u
}

// pair is the honest pair: engines of a sender and of the victim that exchange
// requests.
type pair struct {
	t                *testing.T
	v                *victim
	sender, receiver *client.Client
	n                int
	label            string
}

const pairChunks = 4

// request moves one request and compares every byte of it.
func (p *pair) request() time.Duration {
	p.t.Helper()
	p.n++
	began := time.Now()
	if err := transfer(p.t.Context(), p.sender, p.receiver, fmt.Sprintf("%s-%d", p.label, p.n), p.v.port); err != nil {
		p.t.Fatal(err)
	}
	return time.Since(began)
}

// transfer moves a request of pairChunks chunks and compares every byte of it.
func transfer(ctx context.Context, sender, receiver *client.Client, req string, port int) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	fail := func(what string, err error) error { return fmt.Errorf("%s: %s: %w", req, what, err) }
	tr, err := sender.Begin(ctx, client.Begin{Req: req, TotalChunks: pairChunks, Host: "127.0.0.1", AllocPort: port, BerthProxy: true})
	if err != nil {
		return fail("begin", err)
	}
	select {
	case <-tr.Granted():
	case <-tr.Ended():
		return fail("instead of being granted", tr.Ending().Err())
	case <-ctx.Done():
		return fail("granted", ctx.Err())
	}
	slots, err := tr.Stage(ctx, pairChunks)
	if err != nil {
		return fail("stage", err)
	}
	var chunks []client.Staged
	for i, s := range slots {
		copy(sender.Staging(s), chunkData(req, i))
		chunks = append(chunks, client.Staged{Index: int64(i), Key: fmt.Sprintf("%s/%d", req, i), Slot: s, Tokens: chunkTokens})
	}
	if err := tr.Submit(ctx, chunks, pairChunks); err != nil {
		return fail("submit", err)
	}
	select {
	case <-tr.Ended():
	case <-ctx.Done():
		return fail("ended", ctx.Err())
	}
	if err := tr.Ending().Err(); err != nil {
		return fail("ending", err)
	}
	if e, err := receiver.Wait(ctx, req, limit); err != nil || e.Err() != nil {
		return fail("wait", errors.Join(err, e.Err()))
	}
	got, err := receiver.Claim(ctx, "by-"+req, req)
	if err != nil || len(got.Chunks) != pairChunks {
		return fail(fmt.Sprintf("claim of %d chunks", len(got.Chunks)), err)
	}
	for i, ch := range got.Chunks {
		if !bytes.Equal(receiver.Receive(ch.Slot)[:ch.Bytes], chunkData(req, i)) {
			return fmt.Errorf("%s: chunk %d in slot %d has other bytes than were sent", req, i, ch.Slot)
		}
	}
	return receiver.Release(ctx, "by-"+req, req)
}

// attackTime is how long an attack goes on, at least.
const attackTime = time.Second

// requests are n of them.
func (p *pair) requests(n int) (took []time.Duration) {
	for range n {
		took = append(took, p.request())
	}
	return took
}

func p99(took []time.Duration) float64 {
	slices.Sort(took)
	return took[min(len(took)-1, len(took)*99/100)].Seconds() * 1000
}

// TestHostile sets each attack of the table on one agent, while an honest pair
// goes on and a newcomer arrives. Every honest request ends complete with its own
// bytes; the agent's memory stays within what its limits let the attack hold; and
// afterwards every slot, descriptor and goroutine is back.
func TestHostile(t *testing.T) {
	// A busy machine must not be taken for a lost peer.
	s := receiving(t, 64).with(settings{"tcp_connections": "2", "log_level": "error", "lease_sec": "6"})
	v := startVictim(t, s)
	sender := startAgent(t, sending(64).with(settings{"log_level": "error", "lease_sec": "6"}))
	honest := &pair{t: t, v: v, label: "honest", sender: sender.engine(t), receiver: v.engine(t, "decoder")}
	w := &world{v: v, t: t, client: honest.sender}
	honest.requests(20) // everything is there that ever will be
	if *hostileReport {
		t.Log("| attack | p99 without it, ms | p99 with it, ms | ratio | memory, MiB | at most | descriptors |")
		t.Log("| --- | --- | --- | --- | --- | --- | --- |")
	}
	for _, a := range attacks {
		t.Run(a.name, func(t *testing.T) {
			v.t, honest.t, w.t = t, t, t
			v.settled(usage{})
			before := v.usage()
			n := 12
			var calm []time.Duration
			if *hostileReport {
				n = 400
				calm = honest.requests(n / 2)
			}
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			w.on = make(chan struct{})
			failed := make(chan error, 1)
			go func() { failed <- a.run(ctx, w) }()
			select {
			case <-w.on:
			case err := <-failed:
				t.Fatalf("the attack did not begin: %v", err)
			case <-time.After(2 * limit):
				t.Fatal("the attack does not begin")
			}
			peak := before
			under := []time.Duration{}
			for began := time.Now(); len(under) < n || time.Since(began) < attackTime; {
				under = append(under, honest.request())
				if len(under)%16 == 1 {
					now := v.usage()
					peak.memory, peak.descriptors = max(peak.memory, now.memory), max(peak.descriptors, now.descriptors)
				}
				if len(under) == n/2 {
					if err := w.newcomer(t.Context()); err != nil {
						t.Fatalf("a newcomer: %v", err)
					}
				}
			}
			stop()
			if err := <-failed; err != nil && !errors.Is(err, context.Canceled) {
				t.Fatalf("the attack broke off: %v", err)
			}
			peak.memory = max(peak.memory, v.usage().memory)
			// Go's collector lets the heap grow to twice what is in use.
			bound := before.memory + shadow*(2*a.holds+64<<20)
			if peak.memory > bound {
				t.Errorf("%d MiB of memory, at most %d may be: %d before, %d held by the attack", peak.memory>>20, bound>>20, before.memory>>20, a.holds>>20)
			}
			v.settled(before)
			if *hostileReport {
				calm = append(calm, honest.requests(n/2)...)
				without, with := p99(calm), p99(under)
				t.Logf("| %s | %.1f | %.1f | %.2f | %d | %d | %d |", a.name, without, with, with/without, (peak.memory-before.memory)>>20, (2*a.holds+64<<20)>>20, peak.descriptors-before.descriptors)
			}
		})
		if t.Failed() {
			return // the next attacks would find an agent that is not as it was
		}
	}
}

// settled waits until every slot is free, and until no more descriptors and
// goroutines are there than before, if that is given.
func (v *victim) settled(before usage) {
	v.t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(limit)
	for {
		s, err := v.status(v.t)
		if err != nil {
			v.t.Fatal(err)
		}
		checkR1(v.t, s)
		u := v.usage()
		// A connection of an honest client, and what asks here, may come and go.
		back := before == usage{} || u.descriptors <= before.descriptors+3 && u.goroutines <= before.goroutines+6
		if allFree(s) && len(s.Requests) == 0 && back {
			return
		}
		select {
		case <-tick.C:
		case <-v.done:
			v.t.Fatal("the agent is gone")
		case <-deadline:
			v.t.Fatalf("not as before after %v: %+v, it was %+v; pool %+v, staging %+v, requests %+v", limit, u, before, s.Pool, s.Staging, s.Requests)
		}
	}
}

// world is what an attack knows.
type world struct {
	v      *victim
	t      *testing.T
	client *client.Client // of the honest sender
	on     chan struct{}  // closed by the attack when it is under way
	n      int            // newcomers so far
}

// begun says that the attack is under way.
func (w *world) begun() { close(w.on) }

// newcomer is a sender that comes during an attack, and is as welcome as ever.
func (w *world) newcomer(ctx context.Context) error {
	w.n++
	name := fmt.Sprint("newcomer-", w.n)
	sender, receiver, end, err := w.sender(ctx, name)
	if err != nil {
		return err
	}
	defer end()
	return transfer(ctx, sender, receiver, name, w.v.port)
}

// sender starts another sender, with its engine and a connection of the
// victim's.
func (w *world) sender(ctx context.Context, name string) (sender, receiver *client.Client, end func(), err error) {
	dir, err := os.MkdirTemp("", "berth")
	if err != nil {
		return nil, nil, nil, err
	}
	var undo []func()
	end = func() {
		for _, f := range slices.Backward(undo) {
			f()
		}
	}
	undo = append(undo, func() { os.RemoveAll(dir) })
	cfg, err := berth.LoadConfig(berth.Sources{Flags: sending(8).with(settings{"log_level": "error", "tcp_connections": "1", "node": name,
		"links": []string{"tcp", "shm"}[w.n%2], "local_socket": filepath.Join(dir, "a.sock")})})
	if err == nil {
		var a *berth.Agent
		if a, err = berth.StartAgent(ctx, cfg, quiet); err == nil {
			undo = append(undo, func() { a.Close() })
			if sender, err = dialEngine(a.Addrs().Local, name, layout, 0); err == nil {
				undo = append(undo, func() { sender.Close() })
				if receiver, err = dialEngine(w.v.addrs.Local, "decoder", layout, 0); err == nil {
					undo = append(undo, func() { receiver.Close() })
				}
			}
		}
	}
	if err != nil {
		end()
	}
	return sender, receiver, end, err
}
