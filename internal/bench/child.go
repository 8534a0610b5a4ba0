package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
)

// startTimeout bounds how long a child may take until it serves; LMCache takes
// up to 10 s on a quiet machine.
const startTimeout = 90 * time.Second

// stage is where the children of one benchmark run. They die with this process.
type stage struct {
	ctx      context.Context
	dir      string
	self     string // this binary
	progress io.Writer
	spawn    chan func() // runs on one thread that stays: a child's parent-death signal comes when its thread ends
	kids     []*child
}

func newStage(ctx context.Context, progress io.Writer) (*stage, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "berth-bench")
	if err != nil {
		return nil, err
	}
	s := &stage{ctx: ctx, dir: dir, self: self, progress: progress, spawn: make(chan func())}
	go func() {
		runtime.LockOSThread()
		for f := range s.spawn {
			f()
		}
	}()
	return s, nil
}

// say reports progress.
func (s *stage) say(format string, args ...any) { fmt.Fprintf(s.progress, format+"\n", args...) }

// close ends every child and removes what they left.
func (s *stage) close() {
	for _, c := range s.kids {
		c.end()
	}
	close(s.spawn)
	os.RemoveAll(s.dir)
}

// child is a process that reads JSON lines and writes JSON lines.
type child struct {
	name string
	cmd  *exec.Cmd
	in   io.WriteCloser
	log  string
	out  chan []byte // lines that are JSON objects; closed at the end
	once sync.Once
}

// start runs a program and decodes its first line into hello.
func (s *stage) start(name string, hello any, program string, args ...string) (*child, error) {
	c := &child{name: name, cmd: exec.Command(program, args...), log: filepath.Join(s.dir, name+".log"), out: make(chan []byte, 16)}
	log, err := os.Create(c.log)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	c.cmd.Stderr, c.cmd.Dir = log, s.dir
	c.cmd.Env = append(os.Environ(), "LMCACHE_LOG_LEVEL=ERROR", "PYTHONDONTWRITEBYTECODE=1")
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	started := make(chan error)
	s.spawn <- func() { started <- c.cmd.Start() }
	if err := <-started; err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	s.kids = append(s.kids, c)
	go func() {
		defer close(c.out)
		r := bufio.NewReader(out)
		for {
			b, err := r.ReadBytes('\n')
			if err != nil {
				return
			}
			if b[0] == '{' { // libraries print to it too
				c.out <- b
			}
		}
	}()
	return c, c.answer(s.ctx, hello, startTimeout)
}

// berth starts this binary.
func (s *stage) berth(name string, hello any, args ...string) (*child, error) {
	return s.start(name, hello, s.self, args...)
}

// tell writes one line.
func (c *child) tell(v any) error {
	b, err := json.Marshal(v)
	if err == nil {
		_, err = c.in.Write(append(b, '\n'))
	}
	return err
}

// answer reads one line. A line with "error" is an error.
func (c *child) answer(ctx context.Context, v any, patience time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	select {
	case b, ok := <-c.out:
		if !ok {
			return c.failed(errors.New("ended early"))
		}
		var e struct{ Error string }
		if json.Unmarshal(b, &e); e.Error != "" {
			return c.failed(errors.New(e.Error))
		}
		return json.Unmarshal(b, v)
	case <-ctx.Done():
		return c.failed(fmt.Errorf("no answer within %v: %w", patience, ctx.Err()))
	}
}

func (c *child) failed(err error) error {
	b, _ := os.ReadFile(c.log)
	return fmt.Errorf("%s: %w\n%s", c.name, err, strings.TrimSpace(string(b[max(len(b)-2000, 0):])))
}

// ask tells and waits for the answer.
func (c *child) ask(ctx context.Context, v, answer any) error {
	if err := c.tell(v); err != nil {
		return c.failed(err)
	}
	return c.answer(ctx, answer, turnTimeout)
}

func (c *child) pid() int { return c.cmd.Process.Pid }

// pause stops the process and resume lets it go on, so that one side does not
// spend the other side's time.
func (c *child) pause()  { syscall.Kill(-c.pid(), syscall.SIGSTOP) }
func (c *child) resume() { syscall.Kill(-c.pid(), syscall.SIGCONT) }

func (c *child) end() {
	c.once.Do(func() {
		syscall.Kill(-c.pid(), syscall.SIGKILL)
		for range c.out {
		}
		c.cmd.Wait()
	})
}

// ports returns n loopback ports that were free just now.
func ports(n int) ([]int, error) {
	var out []int
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer l.Close() // after all are chosen
		out = append(out, l.Addr().(*net.TCPAddr).Port)
	}
	return out, nil
}

// turnTimeout bounds one turn.
const turnTimeout = 5 * time.Minute

func jsonText(v any) (string, error) {
	b, err := json.Marshal(v)
	return string(b), err
}
