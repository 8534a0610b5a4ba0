package chaos

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// process is one OS process of the fleet that can be started again and again.
type process struct {
	name  string
	kind  string // sender agent, receiver agent, prefill engine, decode engine, proxy
	place *place
	log   string // file that gets its standard error
	make  func(start int) *exec.Cmd
	lines func(process string, line []byte) // gets its standard output after the first line; may be nil
	gone  func(process string)              // called when one start of it is over; may be nil

	mu      sync.Mutex
	starts  int
	cmd     *exec.Cmd
	stdin   io.WriteCloser
	done    chan struct{} // closed when the running one has exited
	wanted  bool          // it has not been told to end
	state   string        // how it ended
	logFull bool          // the next start's log is on a full disk
	memory  *memoryGroup  // the next start is in it, and may end by it; nil: in none
}

// startTimeout bounds how long a process may take to serve.
const startTimeout = 20 * time.Second

// id names one start of a process.
func (p *process) id(start int) string { return p.name + "#" + strconv.Itoa(start) }

func (p *process) current() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.id(p.starts)
}

// start runs the process and returns when its first line of output is there.
func (p *process) start(ctx context.Context) error {
	p.mu.Lock()
	p.starts++
	start, full, memory := p.starts, p.logFull, p.memory
	p.mu.Unlock()
	path := p.log
	if full {
		path = "/dev/full" // each write to it fails as on a disk that is full
	}
	logFile, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer logFile.Close()
	cmd := p.make(start)
	if memory != nil {
		cmd = memory.in(cmd)
	}
	cmd.Stderr = logFile
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	pr, pw, err := os.Pipe()
	if err != nil {
		return err
	}
	defer pw.Close()
	cmd.Stdout = pw
	if err := p.place.start(cmd); err != nil {
		pr.Close()
		return fmt.Errorf("%s: %w", p.name, err)
	}
	done := make(chan struct{})
	p.mu.Lock()
	p.cmd, p.stdin, p.done, p.wanted, p.state = cmd, stdin, done, memory == nil, ""
	p.mu.Unlock()
	first := make(chan error, 1)
	go p.follow(cmd, pr, start, done, first)
	timer := time.NewTimer(startTimeout)
	defer timer.Stop()
	select {
	case err = <-first:
		if err == nil {
			return nil
		}
		<-done
		p.mu.Lock()
		err = fmt.Errorf("%s did not start: %s: %w\n%s", p.name, p.state, err, tail(p.log))
		p.mu.Unlock()
		return err
	case <-timer.C:
		err = fmt.Errorf("does not serve after %v", startTimeout)
	case <-ctx.Done():
		err = ctx.Err()
	}
	p.kill()
	return fmt.Errorf("%s: %w\n%s", p.name, err, tail(p.log))
}

// follow reads the output of one start until its end.
func (p *process) follow(cmd *exec.Cmd, out *os.File, start int, done chan struct{}, first chan error) {
	r := bufio.NewReaderSize(out, 1<<20)
	line, err := r.ReadBytes('\n')
	if err == nil && !json.Valid(line) {
		err = fmt.Errorf("said %q", line)
	}
	first <- err
	for err == nil {
		if line, err = r.ReadBytes('\n'); err == nil && p.lines != nil {
			p.lines(p.id(start), line)
		}
	}
	out.Close()
	cmd.Wait()
	p.mu.Lock()
	p.state = cmd.ProcessState.String()
	p.mu.Unlock()
	close(done)
	if p.gone != nil {
		p.gone(p.id(start))
	}
}

// write sends a line to the process; one that is gone takes nothing.
func (p *process) write(v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stdin == nil {
		return errGone
	}
	_, err = p.stdin.Write(append(b, '\n'))
	return err
}

func (p *process) pid() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd == nil || !p.runningLocked() {
		return 0
	}
	return p.cmd.Process.Pid
}

func (p *process) runningLocked() bool {
	if p.done == nil {
		return false
	}
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

func (p *process) running() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.runningLocked()
}

func (p *process) signal(sig syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.runningLocked() {
		p.cmd.Process.Signal(sig)
	}
}

// want says whether its end would be a surprise.
func (p *process) want(running bool) {
	p.mu.Lock()
	p.wanted = running
	p.mu.Unlock()
}

// surprise says how the process ended if nobody wanted it to.
func (p *process) surprise() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.wanted && p.done != nil && !p.runningLocked() {
		return fmt.Sprintf("%s ended by itself: %s\n%s", p.name, p.state, tail(p.log))
	}
	return ""
}

// kill is kill -9, and waits for the end.
func (p *process) kill() { p.end(syscall.SIGKILL, 5*time.Second) }

// stop asks it to end, and kills it if it does not. It returns how it ended.
func (p *process) stop() string {
	if !p.end(syscall.SIGTERM, 10*time.Second) {
		p.kill()
		return "did not end on SIGTERM"
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.state
}

func (p *process) end(sig syscall.Signal, patience time.Duration) bool {
	p.want(false)
	p.signal(sig)
	p.mu.Lock()
	done := p.done
	if p.stdin != nil && sig == syscall.SIGTERM {
		p.stdin.Close()
	}
	p.mu.Unlock()
	if done == nil {
		return true
	}
	t := time.NewTimer(patience)
	defer t.Stop()
	select {
	case <-done:
		return true
	case <-t.C:
		return false
	}
}

// limit sets a resource limit of the running process and returns what undoes it.
func (p *process) limit(resource int, soft uint64) (heal func(), err error) {
	pid := p.pid()
	if pid == 0 {
		return nil, errGone
	}
	var old unix.Rlimit
	if err := unix.Prlimit(pid, resource, nil, &old); err != nil {
		return nil, os.NewSyscallError("prlimit", err)
	}
	if err := unix.Prlimit(pid, resource, &unix.Rlimit{Cur: soft, Max: old.Max}, nil); err != nil {
		return nil, os.NewSyscallError("prlimit", err)
	}
	return func() {
		if p.pid() == pid {
			unix.Prlimit(pid, resource, &old, nil)
		}
	}, nil
}

// footprint is what a process has of what may grow.
type footprint struct {
	RSS        int64 // bytes
	FDs        int
	Goroutines int // -1: it does not tell
}

// vmSize returns the bytes of address space of a process.
func vmSize(pid int) uint64 { return uint64(statusField(pid, "VmSize")) }

// statusField reads a field of /proc/PID/status that is in kB, in bytes.
func statusField(pid int, name string) int64 {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, name+":"); ok {
			n, _ := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			return n << 10
		}
	}
	return 0
}

func openFDs(pid int) int {
	d, err := os.ReadDir(filepath.Join("/proc", strconv.Itoa(pid), "fd"))
	if err != nil {
		return 0
	}
	return len(d)
}

// tail returns the end of a log, for an error's text.
func tail(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	const last = 3000
	return fmt.Sprintf("the end of %s:\n%s", filepath.Base(path), b[max(len(b)-last, 0):])
}
