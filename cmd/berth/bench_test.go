package main

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berthkv/berth/internal/bench"
	"github.com/berthkv/berth/internal/testenv"
)

// measure runs a benchmark and returns its report. Each row must be whole, and
// each of want must begin the name of one.
func measure(t *testing.T, want []string, args ...string) bench.Report {
	t.Helper()
	args = append([]string{"bench"}, append(args, "--anyway", "--json", "--repeat", "2")...)
	stdout, stderr, err := invoke(t, args...)
	if err != nil {
		t.Fatalf("%v: %v\n%s", args, err, stderr)
	}
	var r bench.Report
	d := json.NewDecoder(strings.NewReader(stdout))
	d.DisallowUnknownFields()
	if err := d.Decode(&r); err != nil {
		t.Fatalf("%v prints %q: %v", args, stdout, err)
	}
	if r.Bench != args[1] || r.Machine.Cores < 1 || r.Machine.CPU == "" || r.Machine.Kernel == "" || r.Machine.Memory == 0 {
		t.Errorf("%v: %+v", args, r)
	}
	var names []string
	for _, row := range r.Rows {
		names = append(names, row.Name)
		if row.Unit == "" || row.Checks == "" || row.Value <= 0 && !maybe(row.Name) {
			t.Errorf("%v: row %+v", args, row)
		}
		if (row.Baseline == nil) != (row.Ratio == nil) || (row.Baseline == nil) != (row.Against == "") || row.Ratio != nil && *row.Ratio <= 0 && !maybe(row.Name) {
			t.Errorf("%v: row %+v has half a baseline", args, row)
		}
	}
	for _, w := range want {
		found := false
		for _, name := range names {
			found = found || strings.HasPrefix(name, w)
		}
		if !found {
			t.Errorf("%v: no row %q in %q", args, w, names)
		}
	}
	if stderr == "" {
		t.Errorf("%v: no progress in %q", args, stderr)
	}
	return r
}

// maybe says that a figure need not be above 0.
func maybe(name string) bool {
	for _, s := range []string{": allocations", ": wake-ups", ": added to the engine's own, p50", ": added to the engine's own, p99"} {
		if strings.HasSuffix(name, s) {
			return true
		}
	}
	return strings.HasPrefix(name, "idle ") && strings.HasSuffix(name, ": CPU")
}

func TestBenchControl(t *testing.T) {
	t.Parallel()
	measure(t, []string{"3 connections, 2 keys, closed: rate", "3 connections, 2 keys, fixed at ", "1 connection, 2 keys, closed: p99", "1 pyzmq client, 2 keys, closed: p50"},
		"control", "--clients", "3", "--keys", "2", "--count", "30", "--pattern", "fixed", "--python", testenv.Python(t))
}

func TestBenchTransfer(t *testing.T) {
	t.Parallel()
	r := measure(t, []string{"in-process API, tcp, poisson at 500/s, 2 senders x 2 in flight, 4 x 4 KiB: rate", "local API, tcp, poisson at 500/s, 2 senders x 2 in flight, 4 x 4 KiB: begin to ready, p99"},
		"transfer", "--parts", "inside,local", "--senders", "2", "--inflight", "2", "--chunks", "4", "--slot-bytes", "4096", "--slots", "32", "--count", "20",
		"--link", "tcp", "--checksum", "--pattern", "poisson", "--rate", "500")
	for _, row := range r.Rows {
		if !strings.Contains(row.Checks, "checksums") || strings.Contains(row.Checks, "off") {
			t.Errorf("%s: checks %q", row.Name, row.Checks)
		}
	}
}

func TestBenchWrites(t *testing.T) {
	t.Parallel()
	r := measure(t, []string{"shm write, ", "tcp write, 2 connections, 16 KiB: rate", "tcp write, 2 connections, 512 KiB: CPU",
		"2 senders, 24 and 16 x 512 KiB, tcp at 1/8 of its rate each, together: ", "2 senders, 24 and 16 x 512 KiB, tcp at 1/8 of its rate each, together while a request waits"},
		"transfer", "--parts", "write,shared", "--sizes", "16,512", "--volume", "4")
	for _, row := range r.Rows {
		if row.Ratio == nil {
			t.Errorf("%s is compared with nothing", row.Name)
		}
	}
}

func TestBenchProxy(t *testing.T) {
	t.Parallel()
	const what = "streamed, poisson at 100/s, prompt of 50 bytes, 3 tokens: "
	r := measure(t, []string{what + "first token, p50", what + "added to the engine's own, p99", what + "proxy's CPU a request"},
		"proxy", "--rate", "100", "--count", "20", "--prompt", "50", "--tokens", "3")
	for _, row := range r.Rows {
		if row.Ratio != nil && row.Against != "httputil.ReverseProxy" {
			t.Errorf("%s is compared with %s", row.Name, row.Against)
		}
	}
}

func TestBenchAgent(t *testing.T) {
	t.Parallel()
	measure(t, []string{"start, pool of 1 MiB", "pages of a pool: touching", "pages of a pool: copies", "idle receiver, no peer: wake-ups", "idle sender, after transfers, a session and an engine: memory",
		"one receiver, 1 senders: memory", "one receiver, 5 senders: begin to granted", "one sender, 10 slots: process to /ready", "one sender, 100 slots: begin to granted, closed, p99"},
		"agent", "--pool", "1", "--idle", "10ms", "--senders", "1,5", "--slots", "10,100", "--count", "10")
}

// TestBenchLedger is not parallel: it counts the allocations of this process.
func TestBenchLedger(t *testing.T) {
	r := measure(t, []string{"admit", "first that fits", "cancel", "admitted at once", "life of a slot"},
		"ledger", "--waiting", "100,1000", "--senders", "3", "--time", "1ms")
	for _, row := range r.Rows {
		if strings.HasSuffix(row.Name, ": allocations") && row.Value != 0 {
			t.Errorf("%s: %v", row.Name, row.Value)
		}
	}
}

// TestBenchPlot: the page is written, and a path that cannot be is said.
func TestBenchPlot(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "plot.html")
	args := []string{"bench", "control", "--anyway", "--quiet", "--repeat", "1", "--count", "5", "--clients", "2", "--keys", "1", "--plot"}
	stdout, stderr, err := invoke(t, append(args, file)...)
	if err != nil || stderr != "" || !strings.Contains(stdout, "2 connections, 1 keys, closed [") {
		t.Fatalf("%v; printed %q and %q", err, stdout, stderr)
	}
	page, err := os.ReadFile(file)
	if err != nil || strings.Count(string(page), "<svg") != 3 {
		t.Errorf("%v; the page is %s", err, page)
	}
	if _, _, err := invoke(t, append(args, t.TempDir())...); err == nil || !strings.Contains(err.Error(), "is a directory") {
		t.Error(err)
	}
}

// TestBenchInterrupted: who stops it gets no half report, and TestMain sees that
// nothing is left.
func TestBenchInterrupted(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var out strings.Builder
	cmd := rootCommand()
	cmd.SetArgs([]string{"bench", "transfer", "--anyway", "--parts", "local", "--count", "1000000"})
	cmd.SetOut(&out)
	cmd.SetErr(interrupter{cancel})
	if err := cmd.ExecuteContext(ctx); !errors.Is(err, context.Canceled) || out.Len() > 0 {
		t.Errorf("%v; printed %q", err, out.String())
	}
}

// interrupter cancels at the first line of progress.
type interrupter struct{ cancel func() }

func (i interrupter) Write(b []byte) (int, error) {
	i.cancel()
	return len(b), nil
}

// What is wrong is said before anything is started, with the flag's name.
func TestBenchRefuses(t *testing.T) {
	for want, args := range map[string]string{
		"a benchmark is wanted":                      "",
		"\"contol\" is one":                          "contol",
		"unknown flag: --seconds":                    "ledger --seconds 3",
		"--repeat is 0; it must be 1 to 1000":        "ledger --anyway --repeat 0",
		"--waiting is 0; it must be 1 to 10000000":   "ledger --waiting 0",
		"--senders is 0":                             "ledger --senders 0",
		"--clients is 257; it must be 1 to 256":      "control --clients 257",
		"need 512 slots; the pools have 400":         "control --clients 64",
		"--keys is -1":                               "control --keys -1",
		"--count is 0":                               "control --count 0",
		"--rate is -3":                               "control --rate -3",
		"none of closed, fixed, poisson":             "control --pattern uniform",
		"--against is \"vllm\"":                      "control --against vllm",
		"no Python for the reference":                "control --anyway --against lmcache --python /nonexistent",
		"--parts has \"all\"":                        "transfer --parts all",
		"--parts is empty":                           "transfer --parts=",
		"--sizes has 3072 bytes":                     "transfer --sizes 3",
		"--volume is 0":                              "transfer --volume 0",
		"--link is \"nixl\"; it must be shm or tcp":  "transfer --link nixl",
		"--slot-bytes is 100; it must be a multiple": "transfer --slot-bytes 100",
		"--chunks is 81 and --slots 160":             "transfer --chunks 81",
		"against LMCache it must be a multiple of":   "transfer --against lmcache --slot-bytes 256",
		"needs requests a second above 0":            "transfer --pattern fixed",
		"--senders is 65; it must be 1 to 64":        "transfer --senders 65",
		"--inflight is 0":                            "transfer --inflight 0",
		"--tokens is 1":                              "proxy --tokens 1",
		"--prompt is 0":                              "proxy --prompt 0",
		"--inflight is 257; it must be 1 to 256":     "proxy --inflight 257",
		"--rate is 0; pattern poisson":               "proxy --rate 0",
		"--pool is 0":                                "agent --pool 0",
		"--idle is 0":                                "agent --idle 0s",
		"--slots has 7; a request has 8 chunks":      "agent --slots 7",
		"--slots is 0; it must be 1 to 1048576":      "agent --slots 0",
		"--senders is 4001; it must be 1 to 4000":    "agent --senders 4001",
		"no worker is called \"idle\"":               `worker {"What":"idle"}`,
		"worker: invalid character":                  "worker x",
	} {
		stdout, _, err := invoke(t, append([]string{"bench"}, strings.Fields(args)...)...)
		if err == nil || !strings.Contains(err.Error(), want) || stdout != "" {
			t.Errorf("bench %s: %v (printed %q), want %q", args, err, stdout, want)
		}
	}
	for _, args := range []string{"ledger --repeat 0 --anyway", "control --clients 0", "ledger --waiting x"} {
		_, _, err := invoke(t, append([]string{"bench"}, strings.Fields(args)...)...)
		var u usageError
		if !errors.As(err, &u) {
			t.Errorf("bench %s: %v is no usage error", args, err)
		}
	}
}
