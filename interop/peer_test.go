//go:build interop && nixl

package interop

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A peer is a Python process with real LMCache backends. Importing LMCache costs
// seconds and 650 MiB, so one process does it, and each peer is a fork of it,
// made before there is a backend: a process of its own, to be killed for real.

// forkLimit bounds the import of LMCache.
const forkLimit = 4 * time.Minute

var forks struct {
	once  sync.Once
	path  string // of the socket: a connection to it makes a peer
	stdin io.Closer
	cmd   *exec.Cmd
	err   error
}

// python is the interpreter that has LMCache.
func python(t testing.TB) string {
	p := os.Getenv("BERTH_LMCACHE_PYTHON")
	if p == "" {
		t.Fatal("BERTH_LMCACHE_PYTHON is not set: run these tests with make interop")
	}
	return p
}

func startForks(python string) error {
	dir, err := os.MkdirTemp("", "berth")
	if err != nil {
		return err
	}
	forks.path = filepath.Join(dir, "s")
	cmd := exec.Command(python, "peers/lmcache_peer.py", forks.path)
	cmd.Env = append(os.Environ(), "LMCACHE_LOG_LEVEL=INFO")
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if forks.stdin, err = cmd.StdinPipe(); err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	forks.cmd = cmd
	timer := time.AfterFunc(forkLimit, func() { cmd.Process.Kill() })
	defer timer.Stop()
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		return fmt.Errorf("LMCache is not imported after %v: %q, %w", forkLimit, line, err)
	}
	return nil
}

// stopForks ends the process that makes peers.
func stopForks() {
	if forks.cmd != nil {
		forks.stdin.Close() // it exits
		forks.cmd.Wait()
		os.RemoveAll(filepath.Dir(forks.path))
	}
}

// peerProcess is one peer.
type peerProcess struct {
	t    testing.TB
	conn net.Conn
	out  *bufio.Reader
	pid  int
	fd   int    // pidfd
	log  string // path
	dead bool
	mu   sync.Mutex // one command at a time
}

func startPeers(t testing.TB, n int) []*peerProcess {
	t.Helper()
	py := python(t)
	forks.once.Do(func() { forks.err = startForks(py) })
	if forks.err != nil {
		t.Fatal(forks.err)
	}
	ps := make([]*peerProcess, n)
	for i := range ps {
		ps[i] = startPeer(t)
	}
	return ps
}

func startPeer(t testing.TB) *peerProcess {
	t.Helper()
	log, err := os.CreateTemp(t.TempDir(), "peer")
	if err != nil {
		t.Fatal(err)
	}
	log.Close()
	p := &peerProcess{t: t, log: log.Name()}
	if p.conn, err = net.Dial("unix", forks.path); err != nil {
		t.Fatal(err)
	}
	p.out = bufio.NewReader(p.conn)
	r := p.try(command{"log": p.log})
	if !r.Ready {
		t.Fatalf("an LMCache process said %+v\n%s", r, p.tail())
	}
	p.pid = r.Pid
	if p.fd, err = unix.PidfdOpen(p.pid, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("log of an LMCache process:\n%s", p.tail())
		}
	})
	return p
}

// signal sends to the peer and its helpers.
func (p *peerProcess) signal(s syscall.Signal) {
	p.t.Helper()
	if err := syscall.Kill(-p.pid, s); err != nil {
		p.t.Fatal(err)
	}
}

// kill is kill -9, and waits.
func (p *peerProcess) kill() {
	p.t.Helper()
	if p.dead {
		return
	}
	p.dead = true
	theirs.note(p.pid)
	syscall.Kill(-p.pid, syscall.SIGKILL)
	gone := []unix.PollFd{{Fd: int32(p.fd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(gone, int(limit.Milliseconds()))
		if err == unix.EINTR {
			continue
		}
		if n != 1 {
			p.t.Errorf("an LMCache process is not gone %v after kill -9: %v", limit, err)
		}
		break
	}
	unix.Close(p.fd)
	p.conn.Close()
}

func (p *peerProcess) tail() string {
	b, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	return string(b[max(0, len(b)-12000):])
}

// read reads one answer; a peer that gives none in time is of no use any more.
func (p *peerProcess) read(most time.Duration) (r reply) {
	p.t.Helper()
	p.conn.SetReadDeadline(time.Now().Add(most))
	line, err := p.out.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &r)
	}
	if err != nil {
		r.Error = fmt.Sprintf("no answer: %v", err)
	}
	return r
}

type reply struct {
	Ready    bool
	Pid      int
	Port     int
	Error    string
	SHA256   []string
	Free     int
	Reserved int
	Waiting  int
	Keys     []string
	Tracked  []string
	Removed  int
}

type command map[string]any

// try sends a command; its error is in the reply.
func (p *peerProcess) try(c command) reply {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, err := p.conn.Write(append(c.encode(), '\n')); err != nil {
		return reply{Error: err.Error()}
	}
	return p.read(limit)
}

func (c command) encode() []byte {
	b, err := json.Marshal(c)
	if err != nil {
		panic(err)
	}
	return b
}

func (p *peerProcess) do(c command) reply {
	p.t.Helper()
	r := p.try(c)
	if r.Error != "" {
		p.t.Fatalf("%v: %s\n%s", c, r.Error, p.tail())
	}
	return r
}

func open(l layout, at, role string, slots int, timeout float64) command {
	return command{"op": "open", "at": at, "role": role, "slots": slots, "shape": l.shape(), "dtype": l.dtype, "mla": l.mla, "timeout": timeout}
}

// lmcacheSender is one real sender.
type lmcacheSender struct {
	*peerProcess
	at string
	l  layout
}

func (p *peerProcess) sender(l layout, at string, slots, notify int) *lmcacheSender {
	p.t.Helper()
	c := open(l, at, "sender", slots, 20)
	c["proxy"] = notify
	p.do(c)
	return &lmcacheSender{p, at, l}
}

// put submits one batch and returns the digests of its chunks.
func (s *lmcacheSender) put(to target, req string, keys []string, total int, last bool, lastToks int) []string {
	s.t.Helper()
	return s.do(s.command(to, req, keys, total, last, lastToks)).SHA256
}

func (s *lmcacheSender) command(to target, req string, keys []string, total int, last bool, lastToks int) command {
	return command{"op": "put", "at": s.at, "req": req, "host": "127.0.0.1", "init": []int{to.init}, "alloc": []int{to.alloc}, "keys": keys, "total": total,
		"last": last, "seed": seeds.Add(1), "last_toks": lastToks}
}

var seeds atomic.Int64

func (s *lmcacheSender) state() reply { s.t.Helper(); return s.do(command{"op": "state", "at": s.at}) }

// until waits for a state of the sender.
func (s *lmcacheSender) until(what string, ok func(reply) bool) {
	s.t.Helper()
	poll(s.t, what, func() (any, bool) { x := s.state(); return x, ok(x) })
}

func (s *lmcacheSender) cancel(req string) {
	s.t.Helper()
	s.do(command{"op": "cancel", "at": s.at, "req": req})
}

// target is a receiver of either kind.
type target struct{ init, alloc int }

// lmcacheReceiver is one real receiver.
type lmcacheReceiver struct {
	*peerProcess
	target
	at string
}

func (p *peerProcess) receiver(l layout, at string, slots int, to target, timeout float64) *lmcacheReceiver {
	p.t.Helper()
	c := open(l, at, "receiver", slots, timeout)
	c["host"], c["init"], c["alloc"] = "127.0.0.1", to.init, to.alloc
	p.do(c)
	return &lmcacheReceiver{p, to, at}
}

func newTarget(t testing.TB) target { return target{freePort(t), freePort(t)} }

func (r *lmcacheReceiver) state() reply {
	r.t.Helper()
	return r.do(command{"op": "state", "at": r.at})
}

func (r *lmcacheReceiver) digests(keys []string) []string {
	r.t.Helper()
	return r.do(command{"op": "get", "at": r.at, "keys": keys}).SHA256
}

func (r *lmcacheReceiver) remove(keys []string) int {
	r.t.Helper()
	return r.do(command{"op": "remove", "at": r.at, "keys": keys}).Removed
}

// until waits for a state of the receiver.
func (r *lmcacheReceiver) until(what string, ok func(reply) bool) {
	r.t.Helper()
	poll(r.t, what, func() (any, bool) { s := r.state(); return s, ok(s) })
}

func (r *lmcacheReceiver) untilFree(n int) {
	r.t.Helper()
	r.until(fmt.Sprintf("%d free and nothing reserved", n), func(s reply) bool { return s.Free == n && s.Reserved == 0 })
}

// poll asks until ok, for what has no event.
func poll(t testing.TB, what string, ask func() (any, bool)) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(limit)
	for {
		got, ok := ask()
		if ok {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("not %s after %v: %+v", what, limit, got)
		}
	}
}
