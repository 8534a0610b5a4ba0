package localapi

import (
	"os"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// sleeper is a process, and its pidfd.
func sleeper(t *testing.T) (*exec.Cmd, *os.File) {
	t.Helper()
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	fd, err := unix.PidfdOpen(cmd.Process.Pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	return cmd, os.NewFile(uintptr(fd), "pidfd")
}

// TestPIDUsedAgain: a process that gets the pid of one that has just exited is
// another process, also while nobody has noticed that exit; each is reported gone
// when it is, and no other.
func TestPIDUsedAgain(t *testing.T) {
	gone := make(chan int, 10)
	p := newProcesses(func(n int) { gone <- n })
	t.Cleanup(p.close)
	next := func() int {
		t.Helper()
		select {
		case n := <-gone:
			return n
		case <-time.After(patience):
			t.Fatal("nobody is gone")
			return 0
		}
	}
	const pid = 77 // as both say
	for round := range 20 {
		first, f := sleeper(t)
		a := p.connected(pid, f)
		if !p.watch(a) {
			t.Fatal("not watched")
		}
		again, err := unix.PidfdOpen(first.Process.Pid, unix.PIDFD_NONBLOCK)
		if err != nil {
			t.Fatal(err)
		}
		if same := p.connected(pid, os.NewFile(uintptr(again), "pidfd")); same != a {
			t.Fatalf("a second connection of process %d is of process %d", a.number, same.number)
		}
		p.disconnected(a)
		first.Process.Kill()
		if round%2 == 0 { // as soon as the kernel says so: our watcher has hardly come to it
			fd, err := unix.PidfdOpen(first.Process.Pid, 0)
			if err != nil {
				t.Fatal(err)
			}
			unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1)
			unix.Close(fd)
		} else {
			first.Wait()
		}
		second, f2 := sleeper(t)
		b := p.connected(pid, f2)
		if b.number == a.number {
			t.Fatalf("the next process of pid %d has the number of the one that has exited", pid)
		}
		p.watch(b)
		if n := next(); n != a.number {
			t.Fatalf("process %d is gone, %d was killed", n, a.number)
		}
		p.disconnected(a)
		p.disconnected(b)
		second.Process.Kill()
		if n := next(); n != b.number {
			t.Fatalf("process %d is gone, %d was killed", n, b.number)
		}
		if len(p.byPID) != 0 || len(p.watched) != 0 {
			t.Fatalf("%d and %d processes are left", len(p.byPID), len(p.watched))
		}
	}
}
