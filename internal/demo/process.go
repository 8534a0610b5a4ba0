package demo

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"time"
)

// process is one OS process of the fleet, in a process group of its own, which
// the kernel kills when this process dies: none is left behind, whatever
// happens here.
type process struct {
	name string
	args []string // of the berth binary
	log  string   // file that gets its standard error

	mu   sync.Mutex
	cmd  *exec.Cmd
	done chan struct{} // closed when the running one has exited
	err  error         // of Wait
}

// spawner starts processes from one thread that never ends, because the
// parent-death signal comes when the *thread* that started a child is gone.
type spawner struct {
	binary string
	dir    string
	calls  chan func()
}

func newSpawner(ctx context.Context, binary, dir string) *spawner {
	s := &spawner{binary: binary, dir: dir, calls: make(chan func())}
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with this goroutine
		for {
			select {
			case f := <-s.calls:
				f()
			case <-ctx.Done():
				return
			}
		}
	}()
	return s
}

// startTimeout bounds how long a process may take to serve.
const startTimeout = 20 * time.Second

// start runs p and waits for its announcement: one JSON line on standard
// output, decoded into addrs.
func (s *spawner) start(ctx context.Context, p *process, addrs any) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	logFile, err := os.OpenFile(p.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer logFile.Close() // the child has its own
	cmd := exec.Command(s.binary, p.args...)
	cmd.Dir, cmd.Stderr = s.dir, logFile
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	started := make(chan error, 1)
	select {
	case s.calls <- func() { started <- cmd.Start() }:
	case <-ctx.Done():
		return ctx.Err()
	}
	if err := <-started; err != nil {
		return fmt.Errorf("%s: %w", p.name, err)
	}
	done := make(chan struct{})
	p.mu.Lock()
	p.cmd, p.done = cmd, done
	p.mu.Unlock()

	line := make(chan []byte, 1)
	go func() {
		defer close(done)
		r := bufio.NewReader(out)
		b, _ := r.ReadBytes('\n')
		line <- b
		io.Copy(io.Discard, r)
		p.err = cmd.Wait()
	}()
	select {
	case b := <-line:
		if err := json.Unmarshal(b, addrs); err != nil {
			<-done
			return fmt.Errorf("%s did not start: %w\n%s", p.name, errors.Join(p.err, err), tail(p.log))
		}
		return nil
	case <-ctx.Done():
		p.kill()
		return fmt.Errorf("%s does not serve after %v\n%s", p.name, startTimeout, tail(p.log))
	}
}

// signal sends sig to the process group; a process that is gone is no error.
func (p *process) signal(sig syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd == nil {
		return
	}
	select {
	case <-p.done: // its number may be somebody else's by now
	default:
		syscall.Kill(-p.cmd.Process.Pid, sig)
	}
}

// kill is kill -9, and waits for the end, though not for a process that the
// kernel does not let go.
func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	p.wait(ctx)
}

// wait returns when the process has exited or ctx ends.
func (p *process) wait(ctx context.Context) bool {
	p.mu.Lock()
	done := p.done
	p.mu.Unlock()
	if done == nil {
		return true
	}
	select {
	case <-done:
		return true
	case <-ctx.Done():
		return false
	}
}

// stop asks the process to end and kills it if it does not within a bound.
func (p *process) stop() {
	p.signal(syscall.SIGTERM)
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	if !p.wait(ctx) {
		p.kill()
	}
}

// stopTimeout is above what the processes themselves take to drain.
const stopTimeout = 8 * time.Second

// tail returns the end of a log, for an error's text.
func tail(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	const last = 2000
	return fmt.Sprintf("the end of %s:\n%s", filepath.Base(path), b[max(len(b)-last, 0):])
}
