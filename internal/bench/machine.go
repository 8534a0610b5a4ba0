package bench

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berthkv/berth"
)

// Machine is where a report was made.
type Machine struct {
	CPU     string  `json:"cpu"`
	Cores   int     `json:"cores"`
	Memory  int64   `json:"memory_bytes"`
	Kernel  string  `json:"kernel"`
	Go      string  `json:"go"`
	Berth   string  `json:"berth"`
	Race    bool    `json:"race_detector"`
	Busy    float64 `json:"busy_cores_before"` // cores that others used in the half second before
	During  float64 `json:"busy_cores_during"` // and while it ran
	Started string  `json:"started"`
}

func (m Machine) String() string {
	return fmt.Sprintf("%s, %d cores, %.0f GiB, Linux %s, %s, berth %s; others used %.2f cores before the run and %.2f during it",
		m.CPU, m.Cores, float64(m.Memory)/(1<<30), m.Kernel, m.Go, m.Berth, m.Busy, m.During)
}

// busyLimit is the share of the machine that something else may use.
const busyLimit = 0.1

// machine describes this machine, and errs when a comparison on it would mean
// nothing, unless anyway is set: then the notes say why.
func machine(anyway bool) (m Machine, notes []string, err error) {
	m = Machine{Cores: runtime.NumCPU(), Go: runtime.Version(), Berth: berth.Version(), Race: raceBuild,
		CPU: field("/proc/cpuinfo", "model name"), Started: time.Now().UTC().Format(time.RFC3339)}
	if kib, err := strconv.ParseInt(strings.TrimSuffix(field("/proc/meminfo", "MemTotal"), " kB"), 10, 64); err == nil {
		m.Memory = kib << 10
	}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		m.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	if m.Busy, err = busy(500 * time.Millisecond); err != nil {
		return m, nil, err
	}
	notes = m.doubts()
	if len(notes) > 0 && !anyway {
		return m, nil, errors.New(strings.Join(notes, "; ") + " (--anyway measures all the same, and says so)")
	}
	return m, notes, nil
}

// doubts are the reasons why a comparison would mean little.
func (m Machine) doubts() (notes []string) {
	if m.Race {
		notes = append(notes, "this build has the race detector: its figures compare with nothing")
	}
	if m.Busy > busyLimit*float64(m.Cores) {
		notes = append(notes, fmt.Sprintf("something else used %.2f of %d cores before the run: read ratios, not figures", m.Busy, m.Cores))
	}
	return notes
}

// field returns the value of the first line of a /proc file that has the name.
func field(path, name string) string {
	b, _ := os.ReadFile(path)
	for line := range strings.Lines(string(b)) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == name {
			return strings.TrimSpace(v)
		}
	}
	return "unknown"
}

// busy returns how many cores were in use during d.
func busy(d time.Duration) (float64, error) {
	before, err := readCPU()
	if err != nil {
		return 0, err
	}
	time.Sleep(d)
	after, err := readCPU()
	return after.since(before).cores(), err
}

// ticks is USER_HZ, the unit of CPU times in /proc: 100 on every Linux that Go
// runs on.
const ticks = 100

// cpuTicks is the time of all cores together, in ticks. What they were used for is
// divided by what they had, both of one reading: on a busy machine a clock would
// be read long before or after.
type cpuTicks struct{ used, all int64 }

func (c cpuTicks) since(b cpuTicks) cpuTicks { return cpuTicks{c.used - b.used, c.all - b.all} }

// cores is how many cores were in use.
func (c cpuTicks) cores() float64 {
	if c.all <= 0 {
		return 0
	}
	return float64(c.used) / float64(c.all) * float64(runtime.NumCPU())
}

// readCPU returns the time that all cores have been in use, steal included, and
// that they have had, since the machine started.
func readCPU() (c cpuTicks, err error) {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return c, err
	}
	line, _, _ := strings.Cut(string(b), "\n")
	f := strings.Fields(line) // cpu user nice system idle iowait irq softirq steal
	if len(f) < 9 {
		return c, fmt.Errorf("/proc/stat begins with %q", line)
	}
	for i := 1; i <= 8; i++ {
		n, err := strconv.ParseInt(f[i], 10, 64)
		if err != nil {
			return c, err
		}
		c.all += n
		if i != 4 && i != 5 {
			c.used += n
		}
	}
	return c, nil
}

// usage is what a process has used so far.
type usage struct {
	cpu      time.Duration
	own      int64         // bytes of resident memory that are no shared mapping (a pool is one)
	switches map[int]int64 // voluntary context switches of its live threads: wake-ups
}

// usageOf reads what the process has used. Its CPU time is that of the kernel's
// clock of the process, which threads that have ended stay in: a sum over the
// live ones would fall when one ends.
func usageOf(pid int) (u usage, err error) {
	dir := fmt.Sprintf("/proc/%d", pid)
	for _, name := range []string{"RssAnon", "RssFile"} { // RssFile is the program itself; memfds are RssShmem
		n, _ := strconv.ParseInt(strings.TrimSuffix(field(dir+"/status", name), " kB"), 10, 64)
		u.own += n << 10
	}
	var spent unix.Timespec
	if err := unix.ClockGettime(cpuClock(pid), &spent); err != nil {
		return u, fmt.Errorf("CPU time of process %d: %w", pid, err)
	}
	u.cpu = time.Duration(spent.Nano())
	tasks, err := os.ReadDir(dir + "/task")
	u.switches = make(map[int]int64, len(tasks))
	for _, t := range tasks {
		tid, _ := strconv.Atoi(t.Name())
		u.switches[tid], _ = strconv.ParseInt(field(dir+"/task/"+t.Name()+"/status", "voluntary_ctxt_switches"), 10, 64)
	}
	return u, err
}

// cpuClock names the clock of a process's CPU time, as clock_getcpuclockid does.
func cpuClock(pid int) int32 {
	const sched = 2 // CPUCLOCK_SCHED: of the whole process, in nanoseconds
	return int32(^pid<<3 | sched)
}

// wakes are the wake-ups since an earlier reading. Those of a thread that has
// ended meanwhile are not known.
func (u usage) wakes(before usage) (n int64) {
	for tid, switches := range u.switches {
		n += max(0, switches-before.switches[tid])
	}
	return n
}
