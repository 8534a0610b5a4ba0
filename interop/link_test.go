//go:build interop && nixl

package interop

import (
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

// runTests builds the tests of a package and runs them as a process of their
// own.
func runTests(t *testing.T, folder string, build []string, args ...string) {
	t.Helper()
	bin := filepath.Join(t.TempDir(), "tests")
	if out, err := exec.CommandContext(t.Context(), "go", append(append([]string{"test", "-c", "-o", bin}, build...), folder)...).CombinedOutput(); err != nil {
		t.Fatalf("%s does not build: %v\n%s", folder, err, out)
	}
	cmd := exec.CommandContext(t.Context(), bin, append([]string{"-test.v", "-test.timeout=5m"}, args...)...)
	cmd.Dir = folder
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%s: %v\n%s", folder, err, out)
	}
	if testing.Verbose() {
		t.Logf("%s", out)
	}
	if u, ok := cmd.ProcessState.SysUsage().(*syscall.Rusage); ok {
		ours.max(u.Maxrss)
	}
}

// The nixl link's conformance suite and what else its package tests, with the
// real library; processes that write are killed for real.
func TestLink(t *testing.T) {
	part(t, "1 the nixl link, with the real library")
	runTests(t, "../internal/link/nixllink", []string{"-race", "-tags", "nixl"})
}

// The counterparts of the reference's own tests (docs/lmcache.md).
func TestReference(t *testing.T) {
	part(t, "6 the reference's own tests, over the wire")
	runTests(t, "../internal/e2e", []string{"-race"}, "-test.run=^TestLMCache_")
}
