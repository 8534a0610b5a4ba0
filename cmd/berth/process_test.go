package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Environment of berth as a process, and of all that it starts.
const (
	envRun   = "TEST_BERTH_RUN"   // which test's
	envPlant = "TEST_BERTH_PLANT" // a fault to plant, plant_test.go
)

// limit bounds every wait in these tests.
const limit = 90 * time.Second

// command is a berth that a test has started.
type command struct {
	t      *testing.T
	id     string // finds the processes that it has started
	tmp    string // its temporary folder
	cmd    *exec.Cmd
	stdout bytes.Buffer
	lines  chan string // of standard error, and of standard output unless it is JSON
	text   strings.Builder
	done   chan struct{}
}

// start runs berth with some more environment. What it leaves behind fails the
// test.
func start(t *testing.T, env []string, args ...string) *command {
	t.Helper()
	tmp, err := os.MkdirTemp("", "berth") //nolint:usetesting // a unix socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(tmp) })
	c := &command{t: t, id: filepath.Base(tmp), tmp: tmp, lines: make(chan string, 10_000), done: make(chan struct{})}
	c.cmd = exec.Command(os.Args[0], args...)
	c.cmd.Env = append(append(os.Environ(), envRun+"="+c.id, "TMPDIR="+tmp, "XDG_RUNTIME_DIR="+tmp), env...)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	c.cmd.Stderr = w
	c.cmd.Stdout = w
	for _, a := range args {
		if a == "--json" {
			c.cmd.Stdout = &c.stdout
		}
	}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	go func() {
		defer close(c.lines)
		defer r.Close()
		s := bufio.NewScanner(r)
		for s.Scan() {
			c.lines <- s.Text()
		}
		io.Copy(io.Discard, r)
	}()
	go func() {
		defer close(c.done)
		c.cmd.Wait()
	}()
	t.Cleanup(func() {
		c.cmd.Process.Kill()
		<-c.done
		c.nothingLeft()
		if t.Failed() {
			t.Logf("it said:\n%s", c.said())
		}
	})
	return c
}

// await returns when a line with all of words has been said.
func (c *command) await(words ...string) string {
	c.t.Helper()
	deadline := time.After(limit)
	for {
		select {
		case line, ok := <-c.lines:
			if !ok {
				c.t.Fatalf("it ended without saying %q", words)
			}
			fmt.Fprintln(&c.text, line)
			has := true
			for _, w := range words {
				has = has && strings.Contains(line, w)
			}
			if has {
				return line
			}
		case <-deadline:
			c.t.Fatalf("it has not said %q after %v", words, limit)
		}
	}
}

// exit waits for the end and returns the exit code.
func (c *command) exit() int {
	c.t.Helper()
	select {
	case <-c.done:
	case <-time.After(limit):
		c.t.Fatalf("it has not ended after %v", limit)
	}
	return c.cmd.ProcessState.ExitCode()
}

// said returns all lines so far.
func (c *command) said() string {
	for {
		select {
		case line, ok := <-c.lines:
			if ok {
				fmt.Fprintln(&c.text, line)
				continue
			}
		default:
		}
		return c.text.String()
	}
}

// nothingLeft fails the test unless every process of the run soon is gone.
func (c *command) nothingLeft() {
	c.t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(limit)
	for {
		left := c.processes()
		if len(left) == 0 {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			for _, p := range left {
				syscall.Kill(p.pid, syscall.SIGKILL)
			}
			c.t.Errorf("left behind: %v", left)
			return
		}
	}
}

type running struct {
	pid  int
	args string
}

// processes are those of the run that are alive, this one's included.
func (c *command) processes() (out []running) {
	want := []byte(envRun + "=" + c.id + "\x00")
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, d := range dirs {
		env, err := os.ReadFile(d + "/environ") // empty for a zombie
		if err != nil || !bytes.Contains(env, want) {
			continue
		}
		args, _ := os.ReadFile(d + "/cmdline")
		var pid int
		fmt.Sscanf(filepath.Base(d), "%d", &pid)
		out = append(out, running{pid, string(bytes.ReplaceAll(args, []byte{0}, []byte{' '}))})
	}
	return out
}

// temporary returns what is in the run's temporary folder.
func (c *command) temporary() []string {
	found, _ := filepath.Glob(filepath.Join(c.tmp, "*"))
	return found
}

// execute runs a command line as a process, to its end.
func execute(t *testing.T, args ...string) (code int, out string) {
	t.Helper()
	c := start(t, nil, args...)
	code = c.exit()
	return code, c.rest()
}

// rest returns everything that an ended command has said.
func (c *command) rest() string {
	for line := range c.lines {
		fmt.Fprintln(&c.text, line)
	}
	return c.text.String()
}

func write(t *testing.T, name, text string) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestExitCodes (r41 among them): 0 done, 1 failed, 2 bad usage or configuration, and always a
// reason that names what was wrong.
func TestExitCodes(t *testing.T) {
	bad := write(t, "bad.yaml", "pd_role: recever\npd_bufer_size: 1\n")
	prompts := write(t, "prompts.jsonl", "\n{\"kind\":\"poem\"}\n")
	good := write(t, "good.yaml", "pd_role: sender\npd_buffer_size: 1024\nslot_bytes: 512\nchunk_size: 16\npd_skip_proxy_notification: true\n")
	for _, c := range []struct {
		args string
		code int
		want []string
	}{
		{"version", 0, []string{"berth"}},
		{"--help", 0, []string{"Usage"}},
		{"", 2, []string{"a command is wanted"}},
		{"demmo", 2, []string{`"demmo" is no command`, "demo"}},
		{"version now", 2, []string{"takes no arguments", "now"}},
		{"demo --linc tcp", 2, []string{"--linc"}},
		{"demo --link udp", 2, []string{"--link", "udp", "shm or tcp"}},
		{"demo --prompts " + prompts, 2, []string{"line 2", "poem"}},
		{"demo --prompts " + prompts + ".not", 2, []string{prompts + ".not"}},
		{"config --config " + good, 0, []string{"2 slots of 512 bytes", "alloc port of each rank, bound here", "bound there"}},
		{"config --config " + bad, 2, []string{"recever", "pd_bufer_size", "pd_buffer_size"}},
		{"agent --config " + bad, 2, []string{"recever", "pd_bufer_size"}},
		{"agent --config " + bad + ".not", 2, []string{bad + ".not"}},
		{"proxy --decoder-port x", 2, []string{"decoder-port"}},
		{"proxy --on-transfer-failure maybe", 2, []string{"--on-transfer-failure", "maybe", "recompute or error"}},
		{"proxy --watch-timeout 0s", 2, []string{"--watch-timeout is 0s", "above 0"}},
		{"proxy --transfer-timeout=-5s", 2, []string{"--transfer-timeout is -5s", "above 0"}},
		{"proxy --max-in-flight 0", 2, []string{"--max-in-flight is 0", "at least 1"}},
		{"proxy --log-level loud", 2, []string{"--log-level", "loud", "debug, info, warn or error"}},
		{"engine --log-level loud", 2, []string{"--log-level", "loud", "debug, info, warn or error"}},
		{"engine --chunk-size 0", 2, []string{"--chunk-size is 0", "at least 1"}},
		{"engine --role cook", 2, []string{"cook"}},
		{"status", 2, []string{"no agent's socket", "--socket"}},
		{"status --socket " + bad, 1, []string{bad}},
		{"drain --socket " + bad + ".not", 1, []string{bad + ".not"}},
		{"cancel", 2, []string{"one request's id"}},
		{"cancel a b", 2, []string{"2 are given"}},
	} {
		t.Run(c.args, func(t *testing.T) {
			code, out := execute(t, strings.Fields(c.args)...)
			if code != c.code {
				t.Errorf("exit code %d, want %d", code, c.code)
			}
			for _, w := range c.want {
				if !strings.Contains(out, w) {
					t.Errorf("%q is not in %q", w, out)
				}
			}
		})
	}
}

// Output that cannot be written is no success: a script would go on with half of it.
func TestFullDisk(t *testing.T) {
	good := write(t, "good.yaml", "pd_role: sender\npd_buffer_size: 1024\nslot_bytes: 512\nchunk_size: 16\npd_skip_proxy_notification: true\n")
	for _, args := range []string{"version", "--help", "config --config " + good, "config --json --config " + good} {
		full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(os.Args[0], strings.Fields(args)...)
		// TestMain has made this binary berth.
		cmd.Stdout = full
		var said strings.Builder
		cmd.Stderr = &said
		err = cmd.Run()
		full.Close()
		var code *exec.ExitError
		if !errors.As(err, &code) || code.ExitCode() != 1 || !strings.Contains(said.String(), "no space left") {
			t.Errorf("berth %s: %v, %q", args, err, said.String())
		}
	}
}

var errPlanted = errors.New("planted")
