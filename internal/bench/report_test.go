package bench

import (
	"encoding/json"
	"errors"
	"io"
	"math"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func TestReport(t *testing.T) {
	var r Report
	r.add("a: rate", "GB/s", "all on", "memcpy", []float64{2, 4}, []float64{1, 4})
	r.add("a: CPU", "s/GB", "all on", "", []float64{3}, nil)
	r.add("b: rate", "GB/s", "none", "memcpy", []float64{1, 1}, []float64{0, 1}) // no ratio to nothing
	r.add("c: rate", "GB/s", "none", "memcpy", []float64{-1, 1}, []float64{1, 1})
	r.note("%d of %d", 1, 2)
	two, root := 2.5, math.Sqrt2 // of the ratios 2 and 1
	want := []Row{
		{Name: "a: rate", Value: 3, Unit: "GB/s", CI: &[2]float64{3 - 12.71, 3 + 12.71}, Against: "memcpy", Baseline: &two, Ratio: &root,
			RatioCI: &[2]float64{math.Pow(2, 0.5-12.71/2), math.Pow(2, 0.5+12.71/2)}, Checks: "all on"},
		{Name: "a: CPU", Value: 3, Unit: "s/GB", Checks: "all on"},
		{Name: "b: rate", Value: 1, Unit: "GB/s", CI: &[2]float64{1, 1}, Checks: "none"},
		{Name: "c: rate", Value: 0, Unit: "GB/s", CI: &[2]float64{-12.71, 12.71}, Checks: "none"},
	}
	if d := cmp.Diff(want, r.Rows, cmp.Comparer(func(a, b float64) bool { return a-b < 1e-9 && b-a < 1e-9 })); d != "" {
		t.Errorf("rows (-want +got):\n%s", d)
	}
	var text, raw strings.Builder
	if err := errors.Join(r.WriteText(&text), r.WriteJSON(&raw)); err != nil {
		t.Fatal(err)
	}
	for _, w := range []string{"a [all on]\n", "  rate  3 GB/s", "memcpy", "1.41", "note: 1 of 2"} {
		if !strings.Contains(text.String(), w) {
			t.Errorf("no %q in\n%s", w, text.String())
		}
	}
	if strings.Count(text.String(), "a [all on]") != 1 {
		t.Errorf("the name of a measurement is repeated:\n%s", text.String())
	}
	var back map[string]any
	if err := json.Unmarshal([]byte(raw.String()), &back); err != nil || back["rows"] == nil || back["machine"] == nil {
		t.Error(back, err)
	}
	for v, want := range map[float64]string{0: "0", 0.00123456: "0.00123", 12.345: "12.3", 99.96: "100", 12345.6: "12346", -5: "-5"} {
		if got := figure(v); got != want {
			t.Errorf("figure(%v) = %s, want %s", v, got, want)
		}
	}
}

// TestPlot: the page needs nothing else, and takes names as text.
func TestPlot(t *testing.T) {
	var r Report
	r.Bench = "<transfer>"
	r.add("a & b: rate", "GB/s", "all on", "", []float64{2}, nil)
	var page strings.Builder
	if err := r.WritePlot(&page); err != nil || strings.Contains(page.String(), "<svg") {
		t.Errorf("a plot of nothing: %v", err)
	}
	r.plots = []plot{{"case <a>", []curve{{"ours <1>", histogram([]time.Duration{1e3, 1e6})}, {"theirs", histogram([]time.Duration{1e9})}}}}
	page.Reset()
	if err := r.WritePlot(&page); err != nil {
		t.Fatal(err)
	}
	for _, w := range []string{"&lt;transfer&gt;", "a &amp; b", "<svg", "case &lt;a&gt;", "ours &lt;1&gt;", "<polyline", ">1s<", ">10µs<"} {
		if !strings.Contains(page.String(), w) {
			t.Errorf("no %q in the page", w)
		}
	}
	for _, w := range []string{"src=", "href=", "NaN", "Inf"} {
		if strings.Contains(page.String(), w) {
			t.Errorf("%q in the page", w)
		}
	}
	if strings.Count(page.String(), "<polyline") != 2 {
		t.Error("not one line for each curve")
	}
}

// TestCompare: a warm-up that does not count, then turns in which the sides take
// turns at being first; a side that fails is named.
func TestCompare(t *testing.T) {
	var progress strings.Builder
	r := &run{Options: Options{Repeat: 3, Progress: &progress}, Report: &Report{}, stage: &stage{ctx: t.Context()}}
	order := ""
	sideOf := func(name string, first float64) side {
		n := -1.0
		return side{name, nil, func() (sample, error) {
			order += name[:1]
			n++
			return sample{[]float64{first + n, 2}, histogram([]time.Duration{time.Millisecond})}, nil
		}}
	}
	means, err := r.compare("case", "all on", []metric{{"rate", "per second"}, {"p50", "µs"}}, sideOf("ours", 10), sideOf("theirs", 1))
	if err != nil {
		t.Fatal(err)
	}
	if order != "ottootto" {
		t.Errorf("the order was %s", order)
	}
	if d := cmp.Diff([][]float64{{12, 2}, {3, 2}}, means); d != "" {
		t.Error(d)
	}
	if len(r.Rows) != 2 || r.Rows[0].Name != "case: rate" || *r.Rows[0].Baseline != 3 || r.Rows[1].Value != 2 || len(r.plots) != 1 || len(r.plots[0].curves) != 2 || r.plots[0].curves[1].hist.TotalCount() != 3 {
		t.Errorf("%+v, %d plots", r.Rows, len(r.plots))
	}
	if !strings.Contains(progress.String(), "theirs 3/3, rate 4 per second, p50 2 µs") {
		t.Errorf("progress %q", progress.String())
	}
	r.Progress = io.Discard
	if _, err := r.compare("case", "", nil, side{"ours", nil, func() (sample, error) { return sample{}, io.EOF }}); !errors.Is(err, io.EOF) || !strings.Contains(err.Error(), "case: ours") {
		t.Error(err)
	}
}

func TestMachine(t *testing.T) {
	m, notes, err := machine(true)
	if err != nil || m.Cores < 1 || m.Memory < 1<<20 || m.Kernel == "" || m.CPU == "" || m.CPU == "unknown" || m.Busy < 0 || m.Busy > float64(m.Cores)*1.1 {
		t.Errorf("%+v, %v", m, err)
	}
	for _, c := range []struct {
		race   bool
		busy   float64
		refuse bool
	}{{false, 0, false}, {false, 0.39, false}, {false, 0.41, true}, {true, 0, true}} {
		m := Machine{Cores: 4, Race: c.race, Busy: c.busy}
		if got := m.doubts(); (len(got) > 0) != c.refuse {
			t.Errorf("%+v: %q", m, got)
		}
	}
	if (len(notes) > 0) != (m.Race || m.Busy > busyLimit*float64(m.Cores)) {
		t.Errorf("%+v: notes %q", m, notes)
	}
	if m.Race {
		if _, _, err := machine(false); err == nil || !strings.Contains(err.Error(), "--anyway") {
			t.Errorf("a build with the race detector measures: %v", err)
		}
	}
}

// A share of what the machine had: no reading is divided by a time that another
// clock has seen.
func TestCores(t *testing.T) {
	n := float64(runtime.NumCPU())
	for _, c := range []struct {
		used, all int64
		want      float64
	}{{0, 0, 0}, {0, 100, 0}, {50, 100, n / 2}, {100, 100, n}} {
		before := cpuTicks{used: 7, all: 9}
		if got := (cpuTicks{before.used + c.used, before.all + c.all}).since(before).cores(); got != c.want {
			t.Errorf("%d of %d ticks are %v cores, want %v", c.used, c.all, got, c.want)
		}
	}
}

func TestUsage(t *testing.T) {
	before, err := usageOf(os.Getpid())
	for start := cpuTime(); cpuTime()-start < 20*time.Millisecond; {
	}
	after, err2 := usageOf(os.Getpid())
	if d := after.cpu - before.cpu; err != nil || err2 != nil || d < time.Millisecond || after.own < 1<<20 || after.wakes(usage{}) < 1 {
		t.Errorf("20 ms of work count as %v (%+v), %v, %v", d, after, err, err2)
	}
	if u, err := usageOf(1 << 30); err == nil {
		t.Errorf("usage of nobody: %+v", u)
	}
	if n := (usage{switches: map[int]int64{1: 7, 3: 4}}).wakes(usage{switches: map[int]int64{1: 5, 2: 90}}); n != 6 {
		t.Errorf("%d wake-ups, want 2 of a thread that was there and 4 of a new one", n)
	}
}

// What a thread has used is not lost with it.
func TestUsageOfEndedThread(t *testing.T) {
	worked, goOn := make(chan usage), make(chan struct{})
	var work func()
	work = func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine, but for the first, which is held
		if unix.Gettid() == os.Getpid() {
			go work()
			<-goOn
			runtime.UnlockOSThread()
			return
		}
		for start := cpuTime(); cpuTime()-start < 50*time.Millisecond; {
		}
		u, _ := usageOf(os.Getpid())
		worked <- u
		<-goOn
	}
	go work()
	before := <-worked
	close(goOn)
	for ended := false; !ended; runtime.Gosched() {
		after, err := usageOf(os.Getpid())
		if err != nil {
			t.Fatal(err)
		}
		if after.cpu < before.cpu {
			t.Fatalf("%v of CPU, and %v before a thread ended", after.cpu, before.cpu)
		}
		for tid := range before.switches {
			_, there := after.switches[tid]
			ended = ended || !there
		}
	}
}
