package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Bounds of a child's answers.
const (
	startTimeout = 90 * time.Second // until it serves; LMCache takes up to 10 s on a quiet machine
	turnTimeout  = 5 * time.Minute
)

// stage is where the children of one run are. They die with this process.
type stage struct {
	ctx   context.Context
	dir   string
	self  string      // this binary
	spawn chan func() // runs on one thread that stays: a child's parent-death signal comes when its thread ends
	kids  []*child
	spent time.Duration // CPU time of the children that have ended
}

func newStage(ctx context.Context) (*stage, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "berth-bench")
	if err != nil {
		return nil, err
	}
	s := &stage{ctx: ctx, dir: dir, self: self, spawn: make(chan func())}
	go func() {
		runtime.LockOSThread()
		for f := range s.spawn {
			f()
		}
	}()
	return s, nil
}

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
	stage *stage
	name  string
	cmd   *exec.Cmd
	in    io.WriteCloser
	log   string
	out   chan []byte // lines that are JSON objects; closed at the end
	once  sync.Once
}

// start runs a program and decodes its first line into hello.
func (s *stage) start(name string, hello any, program string, args ...string) (*child, error) {
	c := &child{stage: s, name: name, cmd: exec.Command(program, args...), log: filepath.Join(s.dir, name+".log"), out: make(chan []byte, 16)}
	log, err := os.Create(c.log)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	c.cmd.Stderr, c.cmd.Dir = log, s.dir
	c.cmd.Env = []string{"LMCACHE_LOG_LEVEL=ERROR", "PYTHONDONTWRITEBYTECODE=1"}
	for _, v := range os.Environ() { // what configures agents is not for these
		if !strings.HasPrefix(v, "BERTH_") && !strings.HasPrefix(v, "LMCACHE_") {
			c.cmd.Env = append(c.cmd.Env, v)
		}
	}
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
	return c, c.answer(hello, startTimeout)
}

// tell writes one line.
func (c *child) tell(v any) error {
	b, err := json.Marshal(v)
	if err == nil {
		_, err = c.in.Write(append(b, '\n'))
	}
	if err != nil {
		return c.failed(err)
	}
	return nil
}

// answer reads one line. A line with "error" is an error.
func (c *child) answer(v any, patience time.Duration) error {
	ctx, cancel := context.WithTimeout(c.stage.ctx, patience)
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
		if err := c.stage.ctx.Err(); err != nil { // somebody stops all
			return err
		}
		return c.failed(fmt.Errorf("no answer within %v", patience))
	}
}

// failed adds the end of the child's log to an error.
func (c *child) failed(err error) error {
	b, _ := os.ReadFile(c.log)
	return fmt.Errorf("%s: %w\n%s", c.name, err, strings.TrimSpace(string(b[max(len(b)-2000, 0):])))
}

// ask tells and waits for the answer.
func (c *child) ask(v, answer any) error {
	if err := c.tell(v); err != nil {
		return err
	}
	return c.answer(answer, turnTimeout)
}

func (c *child) pid() int { return c.cmd.Process.Pid }

// pause stops the process and resume lets it go on, so that one side does not
// spend the other side's time.
func (c *child) pause()  { syscall.Kill(-c.pid(), syscall.SIGSTOP) }
func (c *child) resume() { syscall.Kill(-c.pid(), syscall.SIGCONT) }

func (c *child) end() {
	c.once.Do(func() {
		if u, err := usageOf(c.pid()); err == nil {
			c.stage.spent += u.cpu
		}
		syscall.Kill(-c.pid(), syscall.SIGKILL)
		for range c.out {
		}
		c.cmd.Wait()
	})
}

// used sums what children have used so far.
func used(kids []*child) (sum usage, err error) {
	sum.switches = map[int]int64{}
	for _, k := range kids {
		u, err := usageOf(k.pid())
		if err != nil {
			return sum, err
		}
		sum.cpu += u.cpu
		maps.Copy(sum.switches, u.switches) // a thread's number is no other process's
	}
	return sum, nil
}
