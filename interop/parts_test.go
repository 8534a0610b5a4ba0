//go:build interop && nixl

package interop

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// figure is what one part of the whole cost.
type figure struct {
	part         string
	took         time.Duration
	ours, theirs int64 // largest resident size of a process, KiB
}

var figures []figure

// The largest resident size in this part of any process with Berth in it that was
// started, and of any LMCache process.
var ours, theirs peak

type peak struct {
	mu  sync.Mutex
	kib int64
}

// note looks at a process while it lives.
func (p *peak) note(pid int) { p.max(highWater(strconv.Itoa(pid))) }

func (p *peak) max(kib int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.kib = max(p.kib, kib)
}

func (p *peak) take() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.kib
	p.kib = 0
	return n
}

// highWater is a process's largest resident size so far, in KiB.
func highWater(pid string) int64 {
	b, _ := os.ReadFile("/proc/" + pid + "/status")
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			n, _ := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			return n
		}
	}
	return 0
}

// part measures a test to its end, what it cleans up included.
func part(t *testing.T, name string) {
	start := time.Now()
	os.WriteFile("/proc/self/clear_refs", []byte("5"), 0) // the high-water mark starts anew
	t.Cleanup(func() {
		figures = append(figures, figure{name, time.Since(start), max(ours.take(), highWater("self")), theirs.take()})
	})
}

// TestMain says what each part cost.
func TestMain(m *testing.M) {
	start := time.Now()
	code := m.Run()
	stopForks()
	for _, f := range figures {
		fmt.Printf("interop: %-50s %4.0f s, peak MiB: Berth's process %4d, an LMCache process %4d\n", f.part, f.took.Seconds(), f.ours>>10, f.theirs>>10)
	}
	fmt.Printf("interop: %.0f s in all\n", time.Since(start).Seconds())
	os.Exit(code)
}
