package chaos

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
)

// memoryGroup is a control group with a limit of memory, of version 2 or 1. What
// goes beyond is killed by the kernel.
type memoryGroup struct{ dir string }

// newMemoryGroup makes one, where the machine lets it; to be removed.
func newMemoryGroup(limit int64) (*memoryGroup, error) {
	root, file := "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
	if b, err := os.ReadFile("/sys/fs/cgroup/cgroup.controllers"); err == nil && strings.Contains(string(b), "memory") {
		root, file = "/sys/fs/cgroup", "memory.max"
	}
	dir, err := os.MkdirTemp(root, "berth-chaos-")
	if err != nil {
		return nil, err
	}
	g := &memoryGroup{dir}
	if err := os.WriteFile(filepath.Join(dir, file), []byte(strconv.FormatInt(limit, 10)), 0); err != nil {
		g.remove()
		return nil, err
	}
	return g, nil
}

// in is the command, started in the group.
func (g *memoryGroup) in(cmd *exec.Cmd) *exec.Cmd {
	args := append([]string{"-c", `echo $$ > "$0" && exec "$@"`, filepath.Join(g.dir, "cgroup.procs")}, cmd.Args...)
	args[3] = cmd.Path
	w := exec.Command("/bin/sh", args...)
	w.Env = cmd.Env
	return w
}

// remove removes the group, whose processes are gone.
func (g *memoryGroup) remove() error {
	if err := os.Remove(g.dir); err != nil {
		return fmt.Errorf("the memory group stays: %w", err)
	}
	return nil
}
