package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// asBerth makes this binary the command instead of its test.
const asBerth = "TEST_AS_BERTH"

// TestMain lets tests start this binary as berth, in a temporary folder of their
// own, and fails if a process or a file is left.
func TestMain(m *testing.M) {
	if os.Getenv(asBerth) != "" && !slices.Contains(os.Args, "-test.fuzzworker") { // which inherits what its parent sets below
		plant(os.Getenv(envPlant))
		main()
	}
	os.Setenv(asBerth, "1")
	tmp, err := os.MkdirTemp("", "berth-cmd")
	if err != nil {
		panic(err)
	}
	os.Setenv("TMPDIR", tmp)
	code := m.Run()
	if err := goleak.Find(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	for _, left := range leftIn(tmp) {
		fmt.Fprintln(os.Stderr, "left behind:", left)
		code = 1
	}
	os.RemoveAll(tmp)
	os.Exit(code)
}

// leftIn returns the files in a folder and the processes that run there.
func leftIn(dir string) []string {
	left, _ := filepath.Glob(filepath.Join(dir, "*"))
	procs, _ := filepath.Glob("/proc/[0-9]*/cwd")
	for _, p := range procs {
		if cwd, err := os.Readlink(p); err == nil && strings.HasPrefix(cwd, dir+"/") {
			left = append(left, p+" -> "+cwd)
		}
	}
	return left
}

// invoke runs a command line in this process.
func invoke(t *testing.T, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	var out, errs strings.Builder
	cmd := rootCommand()
	cmd.SetOut(&out)
	cmd.SetErr(&errs)
	cmd.SetArgs(args)
	err = cmd.ExecuteContext(ctx)
	return out.String(), errs.String(), err
}
