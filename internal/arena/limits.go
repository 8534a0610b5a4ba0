package arena

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/berthkv/berth/internal/fault"
)

// none stands for "no limit" and "not known".
const none = math.MaxUint64

// limits is what can stand in the way of a pool, in bytes.
type limits struct {
	addressSpace uint64 // RLIMIT_AS
	mapped       uint64 // of it in use
	fileSize     uint64 // RLIMIT_FSIZE, which holds for memory files too
	memlock      uint64 // RLIMIT_MEMLOCK
	locked       uint64 // of it in use
	cgroup       uint64 // the smallest memory limit above us
	available    uint64 // what the machine can still give
}

// check reports the first limit that need bytes would break. A system that
// overcommits would let the pool be made, and kill the process when it fills.
func (l limits) check(name string, need uint64, lock bool) error {
	for _, c := range []struct {
		limit, used uint64
		what        string
		applies     bool
	}{
		{l.addressSpace, l.mapped, "the limit of address space (RLIMIT_AS, ulimit -v)", true},
		{l.fileSize, 0, "the limit of file size (RLIMIT_FSIZE, ulimit -f)", true},
		{l.memlock, l.locked, "the limit of locked memory (RLIMIT_MEMLOCK, ulimit -l)", lock},
		{l.cgroup, 0, "the memory limit of the control group", true},
		{l.available, 0, "the memory available on this machine (MemAvailable)", true},
	} {
		if !c.applies || c.limit == none || (c.limit >= c.used && need <= c.limit-c.used) {
			continue
		}
		inUse := ""
		if c.used > 0 {
			inUse = fmt.Sprintf(", of which %d are in use", c.used)
		}
		return fault.New(fault.TooLarge, "%s needs %d bytes; %s is %d bytes%s", name, need, c.what, c.limit, inUse)
	}
	return nil
}

// CheckMemory reports whether need bytes in all, of several pools, could be
// had. The error names need and the limit in the way.
func CheckMemory(name string, need int64, lock bool) error {
	return readLimits().check(name, uint64(need), lock)
}

// CheckDescriptors reports whether the process may have need descriptors open
// at once.
func CheckDescriptors(name string, need uint64) error {
	if limit := rlimit(unix.RLIMIT_NOFILE); need > limit {
		return fault.New(fault.TooLarge, "%s needs %d descriptors; the limit of open files (RLIMIT_NOFILE, ulimit -n) is %d", name, need, limit)
	}
	return nil
}

// explain adds the limit that an error of the kernel speaks of.
func explain(name, doing string, need int64, err error) error {
	hint := ""
	switch {
	case errors.Is(err, unix.EMFILE):
		hint = fmt.Sprintf("; one more descriptor is needed, the limit of open files (RLIMIT_NOFILE, ulimit -n) is %d", rlimit(unix.RLIMIT_NOFILE))
	case errors.Is(err, unix.ENOMEM), errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EPERM):
		hint = fmt.Sprintf("; %d bytes are needed, %d are available (MemAvailable), the limit of locked memory is %d",
			need, meminfo("MemAvailable:")<<10, rlimit(unix.RLIMIT_MEMLOCK))
	case errors.Is(err, unix.EFBIG):
		hint = fmt.Sprintf("; %d bytes are needed, the limit of file size (RLIMIT_FSIZE, ulimit -f) is %d", need, rlimit(unix.RLIMIT_FSIZE))
	}
	return fmt.Errorf("cannot %s %s: %w%s", doing, name, err, hint)
}

func readLimits() limits {
	l := limits{
		addressSpace: rlimit(unix.RLIMIT_AS),
		fileSize:     rlimit(unix.RLIMIT_FSIZE),
		memlock:      rlimit(unix.RLIMIT_MEMLOCK),
		cgroup:       cgroupLimit(readFile),
		available:    none,
	}
	if f := strings.Fields(readFile("/proc/self/statm")); len(f) > 0 {
		l.mapped = number(f[0], 0) * uint64(os.Getpagesize())
	}
	for line := range strings.Lines(readFile("/proc/self/status")) {
		if rest, ok := strings.CutPrefix(line, "VmLck:"); ok {
			l.locked = number(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 0) << 10
		}
	}
	if kb := meminfo("MemAvailable:"); kb > 0 {
		l.available = kb << 10
	}
	if os.Geteuid() == 0 {
		l.memlock = none // CAP_IPC_LOCK
	}
	return l
}

// cgroupLimit returns the smallest memory limit of this process's control
// group and those above it, of either version.
func cgroupLimit(read func(string) string) uint64 {
	limit := uint64(none)
	for line := range strings.Lines(read("/proc/self/cgroup")) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) != 3 {
			continue
		}
		root, file := "/sys/fs/cgroup", "memory.max"
		if parts[0] != "0" {
			if parts[1] != "memory" {
				continue
			}
			root, file = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
		}
		for dir := path.Clean("/" + parts[2]); ; dir = path.Dir(dir) {
			limit = min(limit, number(strings.TrimSpace(read(path.Join(root, dir, file))), none))
			if dir == "/" {
				break
			}
		}
	}
	return limit
}

func rlimit(what int) uint64 {
	var r unix.Rlimit
	if err := unix.Getrlimit(what, &r); err != nil {
		return none
	}
	return r.Cur
}

// readFile returns a small file of the kernel's, "" if it cannot be read: a
// limit that cannot be learnt is not checked.
func readFile(name string) string {
	b, err := os.ReadFile(name)
	if err != nil {
		return ""
	}
	return string(b)
}

func number(s string, otherwise uint64) uint64 {
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return otherwise
	}
	return n
}

func addr(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }
