package arena

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
)

// limitEnv makes the test binary a process with a limit: it makes a pool and
// prints the error.
const limitEnv = "BERTH_ARENA_LIMIT"

func TestMain(m *testing.M) {
	if what := os.Getenv(limitEnv); what != "" {
		fmt.Println(underLimit(what))
		return
	}
	goleak.VerifyTestMain(m)
}

func newPool(t *testing.T, cfg Config) *Pool {
	t.Helper()
	if cfg.Name == "" {
		cfg.Name = "test pool"
	}
	p, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

func openFDs(t *testing.T) int {
	t.Helper()
	e, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(e)
}

func TestPool(t *testing.T) {
	for _, c := range []Config{
		{Slots: 1, SlotBytes: 1},
		{Slots: 3, SlotBytes: 4097},
		{Slots: 5, SlotBytes: 3 << 20, Writable: true},
		{Slots: 7, SlotBytes: 1 << 20, Anonymous: true},
		{Slots: 2, SlotBytes: 1 << 20, HugeTLB: true}, // or ordinary pages, where there are none
		{Slots: 2, SlotBytes: 8192, Lock: true},
	} {
		t.Run(fmt.Sprintf("%+v", c), func(t *testing.T) {
			before := openFDs(t)
			p := newPool(t, c)
			if p.Slots() != c.Slots || p.SlotBytes() != c.SlotBytes || int64(len(p.Bytes())) != int64(c.Slots)*c.SlotBytes || cap(p.Bytes()) != len(p.Bytes()) {
				t.Errorf("%d slots of %d bytes, %d in all", p.Slots(), p.SlotBytes(), len(p.Bytes()))
			}
			if (p.FD() < 0) != c.Anonymous {
				t.Errorf("descriptor %d", p.FD())
			}
			if !bytes.Equal(p.Bytes(), make([]byte, len(p.Bytes()))) {
				t.Error("new memory is not zero")
			}
			p.Bytes()[len(p.Bytes())-1] = 7
			p.Close()
			p.Close()
			if now := openFDs(t); now != before {
				t.Errorf("%d descriptors are open, %d were before", now, before)
			}
		})
	}
}

func TestRefused(t *testing.T) {
	for _, c := range []struct {
		slots     int
		slotBytes int64
	}{{0, 1}, {-1, 1}, {1, 0}, {1, -1}, {kv.MaxSlots + 1, 1}, {2, 1<<63 - 1}, {kv.MaxSlots, 1 << 40}} {
		_, err := New(Config{Name: "the pool", Slots: c.slots, SlotBytes: c.slotBytes})
		if fault.CodeOf(err) != fault.BadRequest || !strings.Contains(err.Error(), fmt.Sprintf("%d slots of %d bytes", c.slots, c.slotBytes)) {
			t.Errorf("%+v: %v", c, err)
		}
	}
	_, err := New(Config{Name: "the pool", Slots: 1 << 10, SlotBytes: 1 << 35}) // more than any machine of today has
	if fault.CodeOf(err) != fault.TooLarge || !strings.Contains(err.Error(), "the pool needs 35184372088832 bytes") {
		t.Errorf("32 TiB: %v", err)
	}
	if _, err := NewGenerations(0); fault.CodeOf(err) != fault.BadRequest {
		t.Errorf("no words: %v", err)
	}
	if _, err := NewGenerations(kv.MaxSlots + 1); fault.CodeOf(err) != fault.BadRequest {
		t.Errorf("one word too many: %v", err)
	}
}

// try maps a descriptor as another process would that got it, after opening it
// anew for writing where it can.
func try(t *testing.T, fd int) (writable bool) {
	t.Helper()
	rw, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(rw)
	if unix.Ftruncate(rw, 0) == nil {
		t.Error("it can be shrunk")
	}
	if unix.Ftruncate(rw, 1<<30) == nil {
		t.Error("it can be made larger")
	}
	if _, err := unix.FcntlInt(uintptr(rw), unix.F_ADD_SEALS, unix.F_SEAL_WRITE); err == nil {
		t.Error("seals can be added")
	}
	ro, err := unix.Mmap(rw, 0, 4096, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatalf("it cannot be mapped for reading: %v", err)
	}
	defer unix.Munmap(ro)
	m, err := unix.Mmap(rw, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err == nil {
		m[0] = 42
		unix.Munmap(m)
	}
	_, werr := unix.Pwrite(rw, []byte{43}, 1)
	if (err == nil) != (werr == nil) {
		t.Errorf("mapping: %v, writing: %v", err, werr)
	}
	return err == nil
}

func TestSeals(t *testing.T) {
	receive := newPool(t, Config{Slots: 2, SlotBytes: 8192})
	staging := newPool(t, Config{Slots: 2, SlotBytes: 8192, Writable: true})
	words, err := NewGenerations(3)
	if err != nil {
		t.Fatal(err)
	}
	defer words.Close()
	if try(t, receive.FD()) {
		t.Error("others can write the receive pool")
	}
	if !try(t, staging.FD()) || staging.Bytes()[0] != 42 {
		t.Error("engines cannot write the staging pool")
	}
	if try(t, words.fd) {
		t.Error("others can write the generation words")
	}
	receive.Bytes()[0] = 1 // our own mapping stays writable
	words.Store(0, 1)
}

func TestReadOnlyFD(t *testing.T) {
	p := newPool(t, Config{Slots: 1, SlotBytes: 8192, Writable: true})
	g, err := NewGenerations(3)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	for name, open := range map[string]func() (int, error){"pool": p.ReadOnlyFD, "words": g.ReadOnlyFD} {
		fd, err := open()
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
		if err != nil || flags&unix.O_ACCMODE != unix.O_RDONLY {
			t.Errorf("%s: flags %#x, %v", name, flags, err)
		}
		if cloexec, _ := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); cloexec != unix.FD_CLOEXEC {
			t.Errorf("%s: would be inherited", name)
		}
		var st unix.Stat_t
		if unix.Fstat(fd, &st); st.Mode&0o777 != 0o600 {
			t.Errorf("%s: mode %o", name, st.Mode)
		}
	}
	if _, err := newPool(t, Config{Slots: 1, SlotBytes: 1, Anonymous: true}).ReadOnlyFD(); err == nil {
		t.Error("an anonymous pool gave a descriptor")
	}
}

func TestNotInCoreDumps(t *testing.T) {
	p := newPool(t, Config{Name: "dumped pool", Slots: 1, SlotBytes: 8192})
	maps := readFile("/proc/self/smaps")
	_, entry, ok := strings.Cut(maps, fmt.Sprintf("%x-", addr(p.Bytes())))
	if !ok || !strings.Contains(entry[:strings.Index(entry, "\n")], "berth dumped pool") {
		t.Fatal("the mapping is not listed under its name")
	}
	_, flags, _ := strings.Cut(entry, "VmFlags:")
	if flags, _, _ = strings.Cut(flags, "\n"); !strings.Contains(flags, " dd") {
		t.Errorf("flags of the mapping: %s", flags)
	}
}

// Slots are touched from the lowest on, without changing what is written there
// meanwhile.
func TestTouching(t *testing.T) {
	for _, anonymous := range []bool{false, true} {
		const slots, slotBytes = 24, 1 << 20
		begun, done := make(chan struct{}), make(chan struct{})
		var mu sync.Mutex
		var seen []int
		p, err := New(Config{Name: "test pool", Slots: slots, SlotBytes: slotBytes, Anonymous: anonymous, Progress: func(n int, err error) {
			<-begun
			mu.Lock()
			defer mu.Unlock()
			if seen = append(seen, n); err != nil {
				t.Error(err)
			}
			if n == slots {
				close(done)
			}
		}})
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		for i := range p.Bytes() {
			p.Bytes()[i] = 9
		}
		close(begun)
		select {
		case <-done:
		case <-time.After(20 * time.Second):
			t.Fatal("never touched whole")
		}
		mu.Lock()
		for i := 1; i < len(seen); i++ {
			if seen[i] <= seen[i-1] {
				t.Errorf("progress went %v", seen)
			}
		}
		mu.Unlock()
		if p.Touched() != slots || !bytes.Equal(p.Bytes(), bytes.Repeat([]byte{9}, slots*slotBytes)) {
			t.Errorf("%d slots touched, or bytes changed", p.Touched())
		}
	}
}

func TestWriteTouchChangesNothing(t *testing.T) {
	b := newPool(t, Config{Slots: 1, SlotBytes: 64 << 10, Anonymous: true}).Bytes()
	for i := range b {
		b[i] = byte(i)
	}
	want := bytes.Clone(b)
	writeTouch(b, os.Getpagesize())
	if !bytes.Equal(b, want) {
		t.Error("bytes changed")
	}
}

// A pool can be closed while it is being touched.
func TestCloseWhileTouching(t *testing.T) {
	for range 20 {
		p, err := New(Config{Name: "test pool", Slots: 64, SlotBytes: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		p.Close()
	}
}

func TestGenerations(t *testing.T) {
	g, err := NewGenerations(1000)
	if err != nil {
		t.Fatal(err)
	}
	for i := range kv.SlotID(1000) {
		g.Store(i, kv.Generation(i)+1<<60)
	}
	fd, err := g.ReadOnlyFD()
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	m, err := unix.Mmap(fd, 0, 8000, unix.PROT_READ, unix.MAP_SHARED) // as a receiver does
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(m)
	if g.Load(999) != 999+1<<60 || m[8*7] != 7 || m[8*7+7] != 1<<4 {
		t.Errorf("word 999 is %d, word 7 is %x", g.Load(999), m[8*7:8*8])
	}
	g.Close()
	g.Close()
}

func TestLimits(t *testing.T) {
	free := limits{none, 0, none, none, 0, none, none}
	with := func(f func(*limits)) limits { l := free; f(&l); return l }
	for _, c := range []struct {
		name string
		l    limits
		need uint64
		lock bool
		want string // in the error, "" for none
	}{
		{"no limits", free, 1 << 60, true, ""},
		{"address space at the limit", with(func(l *limits) { l.addressSpace, l.mapped = 1000, 400 }), 600, false, ""},
		{"address space past it", with(func(l *limits) { l.addressSpace, l.mapped = 1000, 400 }), 601, false, "RLIMIT_AS"},
		{"address space used up", with(func(l *limits) { l.addressSpace, l.mapped = 1000, 1001 }), 1, false, "of which 1001 are in use"},
		{"file size", with(func(l *limits) { l.fileSize = 1000 }), 1001, false, "RLIMIT_FSIZE"},
		{"memlock without locking", with(func(l *limits) { l.memlock = 1000 }), 1001, false, ""},
		{"memlock at the limit", with(func(l *limits) { l.memlock, l.locked = 1000, 10 }), 990, true, ""},
		{"memlock past it", with(func(l *limits) { l.memlock, l.locked = 1000, 10 }), 991, true, "RLIMIT_MEMLOCK"},
		{"control group at the limit", with(func(l *limits) { l.cgroup = 1000 }), 1000, false, ""},
		{"control group past it", with(func(l *limits) { l.cgroup = 1000 }), 1001, false, "control group is 1000 bytes"},
		{"machine", with(func(l *limits) { l.available = 1000 }), 1001, false, "MemAvailable"},
	} {
		err := c.l.check("the pool", c.need, c.lock)
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%s: %v", c.name, err)
		case c.want != "" && (fault.CodeOf(err) != fault.TooLarge || !strings.Contains(err.Error(), c.want) ||
			!strings.Contains(err.Error(), fmt.Sprintf("the pool needs %d bytes", c.need))):
			t.Errorf("%s: %v", c.name, err)
		}
	}
	if l := readLimits(); l.mapped == 0 || l.available == none {
		t.Errorf("limits were not read: %+v", l)
	}
	if err := CheckMemory("both pools", 1<<55, false); fault.CodeOf(err) != fault.TooLarge {
		t.Errorf("32 PiB: %v", err)
	}
	if err := CheckMemory("both pools", 1<<20, false); err != nil {
		t.Error(err)
	}
	limit := rlimit(unix.RLIMIT_NOFILE)
	if err := CheckDescriptors("the agent", limit); err != nil {
		t.Errorf("at the limit: %v", err)
	}
	if err := CheckDescriptors("the agent", limit+1); limit != none && !strings.Contains(fmt.Sprint(err), fmt.Sprintf("the agent needs %d descriptors; the limit of open files (RLIMIT_NOFILE, ulimit -n) is %d", limit+1, limit)) {
		t.Errorf("past the limit: %v", err)
	}
}

func TestControlGroups(t *testing.T) {
	for _, c := range []struct {
		name  string
		files map[string]string
		want  uint64
	}{
		{"none", nil, none},
		{"version 2, the parent's is smaller", map[string]string{
			"/proc/self/cgroup":                "0::/a/b\n",
			"/sys/fs/cgroup/a/b/memory.max":    "5000\n",
			"/sys/fs/cgroup/a/memory.max":      "3000\n",
			"/sys/fs/cgroup/memory.max":        "max\n",
			"/sys/fs/cgroup/a/b/c/memory.max":  "1\n",
			"/sys/fs/cgroup/memory/memory.max": "1\n"}, 3000},
		{"version 1", map[string]string{
			"/proc/self/cgroup": "5:cpu:/x\n4:memory:/x/y\n0::/\n",
			"/sys/fs/cgroup/memory/x/y/memory.limit_in_bytes":  "7000\n",
			"/sys/fs/cgroup/memory/memory.limit_in_bytes":      "9223372036854771712\n",
			"/sys/fs/cgroup/memory/other/memory.limit_in_byte": "1\n"}, 7000},
		{"garbage", map[string]string{"/proc/self/cgroup": "x\n::\n0:/\n", "/sys/fs/cgroup/memory.max": "lots"}, none},
	} {
		if got := cgroupLimit(func(f string) string { return c.files[f] }); got != c.want {
			t.Errorf("%s: %d, want %d", c.name, got, c.want)
		}
	}
}

// underLimit makes a pool under a limit of the kernel's and returns the error.
func underLimit(what string) error {
	limit := map[string]int{"address space": unix.RLIMIT_AS, "descriptors": unix.RLIMIT_NOFILE, "file size": unix.RLIMIT_FSIZE}[what]
	r := unix.Rlimit{Cur: 4 << 30, Max: 4 << 30} // a Go process maps some hundred megabytes
	if limit == unix.RLIMIT_NOFILE {
		r = unix.Rlimit{Cur: 3, Max: 3} // standard input, output and error
	}
	if limit == unix.RLIMIT_FSIZE {
		r = unix.Rlimit{Cur: 1 << 20, Max: 1 << 20}
	}
	if err := unix.Setrlimit(limit, &r); err != nil {
		return err
	}
	size := int64(5 << 30)
	if limit != unix.RLIMIT_AS {
		size = 2 << 20
	}
	_, err := New(Config{Name: "the pool", Slots: 1, SlotBytes: size})
	if err == nil {
		return errors.New("no error")
	}
	return err
}

// Limits of a real process: the error names them, and nothing kills it.
func TestRealLimits(t *testing.T) {
	for what, want := range map[string]string{
		"address space": "the pool needs 5368709120 bytes; the limit of address space (RLIMIT_AS, ulimit -v) is 4294967296 bytes",
		"descriptors":   "one more descriptor is needed, the limit of open files (RLIMIT_NOFILE, ulimit -n) is 3",
		"file size":     "the pool needs 2097152 bytes; the limit of file size (RLIMIT_FSIZE, ulimit -f) is 1048576 bytes",
	} {
		exe, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(exe)
		cmd.Env = append(os.Environ(), limitEnv+"="+what)
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(out), want) {
			t.Errorf("%s: %v: %s\nwant %s", what, err, out, want)
		}
	}
}
