package main

import (
	"encoding/json"
	"io"
	"net/http"
	"os"
	"regexp"
	"strings"
	"syscall"
	"testing"
)

// load is a few prompts; the design's two pairs of 8 chunks come on top.
const load = `{"kind":"completion","stream":true,"max_tokens":4,"prompt":"a ship"}
{"kind":"chat","max_tokens":3,"messages":[{"role":"user","content":"a berth for a ship of two chunks, at least"}]}
{"kind":"completion","max_tokens":1,"prompt":[7]}
`

const asked = 3 + 4

// result is the part of `berth demo --json` that scripts rely on.
type result struct {
	Requests, Equal, Failed *int
	Chunks, Bytes           *int64
	Seconds                 *float64
	Pools                   []struct {
		Node           string
		Capacity, Free *int
	}
	Link   string
	Faults []string
}

func startDemo(t *testing.T, fault string, args ...string) *command {
	return start(t, []string{envPlant + "=" + fault}, append([]string{"demo"}, args...)...)
}

// TestDemo: all answers equal, all slots free, exit 0, over each link, and the
// result as one JSON object.
func TestDemo(t *testing.T) {
	for _, link := range []string{"tcp", "shm"} {
		t.Run(link, func(t *testing.T) {
			c := startDemo(t, "", "--json", "--link", link, "--prompts", write(t, "load.jsonl", load))
			if code := c.exit(); code != 0 {
				t.Errorf("exit code %d", code)
			}
			r := c.result()
			if r.Requests == nil || *r.Requests != asked || *r.Equal != asked || *r.Failed != 0 || len(r.Faults) != 0 {
				t.Errorf("want %d requests, all equal: %s", asked, c.stdout.String())
			}
			if r.Link != link || *r.Chunks < 4*8 || *r.Bytes == 0 || *r.Seconds <= 0 {
				t.Errorf("what was moved: %s", c.stdout.String())
			}
			if len(r.Pools) != 3 {
				t.Fatalf("%d pools, there are 3: %s", len(r.Pools), c.stdout.String())
			}
			for _, p := range r.Pools {
				if p.Capacity == nil || *p.Capacity != 10 || *p.Free != 10 || p.Node == "" {
					t.Errorf("pool %+v of %s", p, c.stdout.String())
				}
			}
			c.nothingLeft()
			if left := c.temporary(); len(left) > 0 {
				t.Errorf("left in the temporary folder: %v", left)
			}
		})
	}
}

// result decodes the one line on standard output.
func (c *command) result() (r result) {
	c.t.Helper()
	d := json.NewDecoder(strings.NewReader(c.stdout.String()))
	if err := d.Decode(&r); err != nil {
		c.t.Fatalf("standard output %q: %v", c.stdout.String(), err)
	}
	if _, err := d.Token(); err != io.EOF { //nolint:errorlint // Token returns it as it is
		c.t.Errorf("standard output has more than one object: %s", c.stdout.String())
	}
	return r
}

// TestDemo_faults: a difference, a failure, a transfer that fails and a process
// that does not start make exit code 1, and it says which; the logs are kept.
func TestDemo_faults(t *testing.T) {
	for _, f := range []struct {
		plant, load string
		want        *regexp.Regexp
	}{
		{"wrong token", load, regexp.MustCompile(`FAULT: prompt \d: token ids \[.*\], want \[.*\]`)},
		// The receiver tells the proxy and the sender: either may be heard first.
		{"no transfer", load, regexp.MustCompile(`FAULT: prompt \d: .*(the KV transfer|the transfer of request \S+) failed: .*deadline`)},
		{"no engine", load, regexp.MustCompile(`(?s)decode engine did not start.*planted`)},
		{"", `{"kind":"completion","max_tokens":4,"prompt":"` + strings.Repeat("long ", 20_000) + `"}`,
			regexp.MustCompile(`FAULT: prompt 0: HTTP 400: .*context is 4096`)},
	} {
		t.Run(f.plant, func(t *testing.T) {
			c := startDemo(t, f.plant, "--prompts", write(t, "load.jsonl", f.load))
			if code := c.exit(); code != 1 {
				t.Errorf("exit code %d, want 1", code)
			}
			out := c.rest()
			if !f.want.MatchString(out) {
				t.Errorf("want %v", f.want)
			}
			if kept := c.temporary(); len(kept) != 1 || !strings.Contains(out, kept[0]) {
				t.Errorf("want one folder of logs, and that it is named: %v", kept)
			}
		})
	}
}

// TestDemo_interrupted: Ctrl-C in every phase ends it without a finding; kill -9
// too leaves no process.
func TestDemo_interrupted(t *testing.T) {
	for _, phase := range []string{"starting", "two requests of 8", "and again", " answered, "} {
		t.Run(phase, func(t *testing.T) {
			c := startDemo(t, "", "--prompts", write(t, "load.jsonl", strings.Repeat(load, 40)))
			c.await(phase)
			c.cmd.Process.Signal(os.Interrupt)
			if code := c.exit(); code != 1 {
				t.Errorf("exit code %d, want 1", code)
			}
			if out := c.rest(); !strings.Contains(out, "interrupted") || strings.Contains(out, "FAULT") {
				t.Error("want that it was interrupted, and no finding")
			}
			if left := c.temporary(); len(left) > 0 {
				t.Errorf("left in the temporary folder: %v", left)
			}
		})
	}
	t.Run("kill -9", func(t *testing.T) {
		c := startDemo(t, "", "--prompts", write(t, "load.jsonl", strings.Repeat(load, 40)))
		c.await("two requests of 8")
		if n := len(c.processes()); n != 8 {
			t.Errorf("%d processes, want the demo, 3 agents, 3 engines and a proxy", n)
		}
		c.cmd.Process.Signal(syscall.SIGKILL)
		c.exit()
		c.nothingLeft()
	})
}

// TestDemo_keep: what it prints works, until Ctrl-C.
func TestDemo_keep(t *testing.T) {
	c := startDemo(t, "", "--keep", "--prompts", write(t, "load.jsonl", load))
	curl := regexp.MustCompile(`curl -s (\S+) -H 'Content-Type: application/json' -d '(.*)'`).FindStringSubmatch(c.await("curl"))
	if curl == nil {
		t.Fatal("no curl line")
	}
	resp, err := http.Post(curl[1], "application/json", strings.NewReader(curl[2]))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if b, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != http.StatusOK || !strings.Contains(string(b), `"choices"`) {
		t.Errorf("HTTP %d, %v: %s", resp.StatusCode, err, b)
	}
	for _, node := range []string{"prefill-1", "prefill-2", "decode"} {
		line := c.await(node, "berth status")
		args := strings.Fields(regexp.MustCompile(`berth (status --socket \S+\.sock)`).FindStringSubmatch(line)[1])
		if code, out := execute(t, args...); code != 0 || !strings.Contains(out, node) || !strings.Contains(out, "10 slots") {
			t.Errorf("berth %v: exit code %d: %s", args, code, out)
		}
		args[0] = "drain"
		if code, out := execute(t, args...); code != 0 {
			t.Errorf("berth %v: exit code %d: %s", args, code, out)
		}
		args[0] = "status"
		if _, out := execute(t, args...); !strings.Contains(out, "draining") {
			t.Errorf("drained, and the status is %s", out)
		}
	}
	c.cmd.Process.Signal(os.Interrupt)
	if code := c.exit(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	if left := c.temporary(); len(left) > 0 {
		t.Errorf("left in the temporary folder: %v", left)
	}
}
