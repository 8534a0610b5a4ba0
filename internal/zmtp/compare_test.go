package zmtp

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berthkv/berth/internal/testenv"
)

// process is a child that is told to end by closing its standard input.
type process struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func startProcess(t testing.TB, cmd *exec.Cmd) *process {
	t.Helper()
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := &process{cmd, in, bufio.NewReader(out)}
	t.Cleanup(func() {
		_ = p.in.Close()
		late := time.AfterFunc(patience, func() { _ = cmd.Process.Kill() })
		_, _ = io.Copy(io.Discard, p.out)
		if err := cmd.Wait(); err != nil && !t.Failed() {
			t.Errorf("%v: %v", cmd.Args, err)
		}
		late.Stop()
	})
	return p
}

// line reads one line that the child prints; the child is killed if none comes in time.
func (p *process) line(t testing.TB) string {
	t.Helper()
	late := time.AfterFunc(patience, func() { _ = p.cmd.Process.Kill() })
	defer late.Stop()
	s, err := p.out.ReadString('\n')
	if err != nil {
		t.Fatalf("%v: %v", p.cmd.Args, err)
	}
	return strings.TrimSpace(s)
}

func (p *process) tell(t testing.TB, format string, args ...any) {
	t.Helper()
	if _, err := fmt.Fprintf(p.in, format+"\n", args...); err != nil {
		t.Fatalf("%v: %v", p.cmd.Args, err)
	}
}

// BenchmarkCompare measures this package and pyzmq's asyncio sockets in turn, client and server in two processes each, five
// times, and reports medians of the five ratios. Run it with -benchtime=1x.
func BenchmarkCompare(b *testing.B) {
	const runs = 5
	work := []struct {
		outstanding  int
		ours, theirs int       // requests a run: some half a second each
		oursNs       []float64 // a request
		theirsNs     []float64
		ratio        []float64 // ours to theirs
	}{
		{outstanding: 1, ours: 20000, theirs: 3000},
		{outstanding: 64, ours: 200000, theirs: 8000},
	}
	python := testenv.Python(b)
	pyServer := startProcess(b, exec.Command(python, "testdata/bench.py", "server"))
	pyClient := startProcess(b, exec.Command(python, "testdata/bench.py", "client", pyServer.line(b)))

	goServer := exec.Command(os.Args[0])
	goServer.Env = append(os.Environ(), benchServerEnv+"=1")
	d, err := DialDealer(testContext(b), startProcess(b, goServer).line(b), nil, Options{Identity: []byte("bench")})
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = d.Close() }()

	for b.Loop() {
		for range runs {
			for i := range work {
				w := &work[i]
				begin := time.Now()
				if err := exchange(context.Background(), d, w.ours, w.outstanding); err != nil {
					b.Fatal(err)
				}
				ours := float64(time.Since(begin).Nanoseconds()) / float64(w.ours)

				pyClient.tell(b, "%d %d", w.theirs, w.outstanding)
				var seconds float64
				if _, err := fmt.Sscan(pyClient.line(b), &seconds); err != nil {
					b.Fatal(err)
				}
				theirs := seconds * 1e9 / float64(w.theirs)
				w.oursNs, w.theirsNs = append(w.oursNs, ours), append(w.theirsNs, theirs)
				w.ratio = append(w.ratio, ours/theirs)
			}
		}
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(median(work[0].oursNs)/1e3, "rtt-us")
	b.ReportMetric(median(work[0].theirsNs)/1e3, "pyzmq-rtt-us")
	b.ReportMetric(median(work[0].ratio), "rtt-ratio")
	b.ReportMetric(1e9/median(work[1].oursNs), "req/s-64")
	b.ReportMetric(1e9/median(work[1].theirsNs), "pyzmq-req/s-64")
	b.ReportMetric(1/median(work[1].ratio), "req-ratio-64")
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return v[len(v)/2]
}
