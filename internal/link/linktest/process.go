package linktest

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/berthkv/berth/internal/arena"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
)

// childEnv tells a test binary to be one end of a link.
const childEnv = "BERTH_LINKTEST_CHILD"

// childConfig is what the parent tells the child, as JSON in childEnv.
type childConfig struct {
	Role      string // "sender" or "receiver"
	Peer      link.Peer
	Slots     int
	SlotBytes int64
	Gen       kv.Generation
}

// Main is the TestMain of a test binary whose links run in two processes.
func Main(m *testing.M, h *Harness) {
	s := os.Getenv(childEnv)
	if s == "" {
		os.Exit(m.Run())
	}
	var cfg childConfig
	if err := json.Unmarshal([]byte(s), &cfg); err != nil {
		panic(err)
	}
	if err := child(h, cfg); err != nil {
		fmt.Println("error:", err)
		os.Exit(1)
	}
}

// child is one end of a link until its standard input ends, which is not
// before it is killed.
func child(h *Harness, cfg childConfig) error {
	tb := &testing.B{} // only for harnesses that want to fail a test
	pool, err := arena.New(arena.Config{Name: "child's pool", Slots: cfg.Slots, SlotBytes: cfg.SlotBytes, Writable: cfg.Role == "sender"})
	if err != nil {
		return err
	}
	gens, err := arena.NewGenerations(cfg.Slots)
	if err != nil {
		return err
	}
	ev := newEvents()
	if cfg.Role == "receiver" {
		recv := h.NewReceiver(tb, ReceiverConfig{Incarnation: cfg.Peer.Incarnation, Pool: poolOf(pool)}, ev.receiverEvents())
		recv.Allow(cfg.Peer.Self, cfg.Peer.Secret)
		recv.Open(cfg.Peer.Self, cfg.Gen, []kv.SlotID{0})
		fmt.Println("ready", recv.Offer())
	} else {
		r := &rig{h: h, events: ev, peer: cfg.Peer, opts: options{slots: cfg.Slots, slotBytes: cfg.SlotBytes}, spool: pool, gens: gens}
		r.send = h.NewSender(tb, SenderConfig{Pool: poolOf(pool), Staging: pool, Generations: gens})
		conn, err := r.tryConnect(cfg.Peer)
		if err != nil {
			return err
		}
		for i := range pool.Bytes() {
			pool.Bytes()[i] = byte(i)
		}
		gens.Store(0, 1)
		if h.Caps.Mode != link.Pull {
			conn.Write([]link.Write{{ID: 1, Dst: 0, Generation: cfg.Gen, Bytes: cfg.SlotBytes}})
		}
		fmt.Println("ready")
	}
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// spawn starts a child and returns what it said after "ready", and how to kill it.
func (r *rig) spawn(cfg childConfig) (word string, kill func()) {
	r.t.Helper()
	cfg.Slots, cfg.SlotBytes = r.opts.slots, r.opts.slotBytes
	b, err := json.Marshal(cfg)
	r.must(err)
	exe, err := os.Executable()
	r.must(err)
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), childEnv+"="+string(b))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	r.must(err)
	out, err := cmd.StdoutPipe()
	r.must(err)
	r.must(cmd.Start())
	kill = func() {
		cmd.Process.Kill()
		in.Close()
		cmd.Wait()
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	word, ok := strings.CutPrefix(strings.TrimSpace(line), "ready")
	if err != nil || !ok {
		kill()
		r.t.Fatalf("the other process said %q: %v", line, err)
	}
	return strings.TrimSpace(word), kill
}

func senderKilled(r *rig) {
	p := r.peer
	p.Self[5]++
	r.recv.Allow(p.Self, p.Secret)
	r.nextGen++
	gen := r.nextGen
	r.recv.Open(p.Self, gen, []kv.SlotID{0})
	p.Addr = r.recv.Offer()
	_, kill := r.spawn(childConfig{Role: "sender", Peer: p, Gen: gen})
	if r.h.Caps.Mode == link.Pull {
		r.recv.Pull(p.Self, gen, []link.PullItem{{Slot: 0, Src: 0, SrcGen: 1, Bytes: r.opts.slotBytes}})
	}
	if reportsLanding(r.h) {
		r.await("the other process's chunk", func(e *log) bool { return len(e.landed[at{0, gen}]) == 1 })
	}
	kill()
	r.await("the killed owner to be lost", func(e *log) bool { return e.ownerLost[p.Self] != nil })
	r.revoke(gen, 0)
	own := r.open(0) // this process's own sender is unharmed
	r.arrive(r.move(own, 0, 100))
}

func receiverKilled(r *rig) {
	p := r.peer
	p.Incarnation[5]++
	addr, kill := r.spawn(childConfig{Role: "receiver", Peer: p, Gen: 1})
	p.Addr = addr
	conn, err := r.tryConnect(p)
	if err != nil {
		kill()
		r.t.Fatal(err)
	}
	var c *chunk
	if r.h.Caps.Mode != link.Pull {
		c = r.stage(1000)
		conn.Write([]link.Write{{ID: c.id, Src: c.src, Dst: 0, Generation: 1, Bytes: 1000}})
		r.await("the write to be sent", func(e *log) bool { return e.sent[c.id] == 1 })
	}
	kill()
	r.await("the link to be down", func(e *log) bool { return len(e.down) == 1 })
	r.look(func(e *log) {
		if c != nil && e.lost[c.id] != 1 {
			r.t.Errorf("the unanswered write was lost %d times", e.lost[c.id])
		}
	})
	r.must(conn.Close())
	gen := r.open(0) // the link to the other receiver is unharmed
	r.arrive(r.move(gen, 0, 100))
}
