//go:build interop && nixl

package interop

import (
	"context"
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// buildLimit is for two builds of everything.
const buildLimit = 6 * time.Minute

// The default binary is static and says what to do about transfer_channel nixl;
// the other has the link, and names what is missing when it starts.
func TestBinaries(t *testing.T) {
	part(t, "1 the two binaries")
	dir := t.TempDir()
	file := filepath.Join(dir, "lmcache.yaml")
	if err := os.WriteFile(file, []byte("pd_role: sender\ntransfer_channel: nixl\npd_skip_proxy_notification: true\nslot_bytes: 65536\npd_buffer_size: 1048576\n"+
		"http_addr: 127.0.0.1:0\nlocal_socket: "+filepath.Join(dir, "s")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), buildLimit)
	defer cancel()
	berth := func(bin string, args ...string) (string, error) {
		cmd := exec.CommandContext(ctx, bin, args...)
		cmd.Env = withoutBerth(os.Environ())
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	build := func(name, target string) string {
		bin := filepath.Join(dir, name)
		cmd := exec.CommandContext(ctx, "make", "-C", "..", target, "BIN="+bin)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("make %s: %v\n%s", target, err, out)
		}
		return bin
	}
	dynamic := func(bin string) bool {
		f, err := elf.Open(bin)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		for _, p := range f.Progs {
			if p.Type == elf.PT_INTERP {
				return true
			}
		}
		return false
	}

	plain := build("plain", "build")
	if dynamic(plain) {
		t.Error("the default binary is not static")
	}
	if out, err := berth(plain, "config", "--config", file); err == nil || !strings.Contains(out, "make build-nixl") || !strings.Contains(out, "set links") {
		t.Errorf("the default binary with transfer_channel nixl: %v\n%s", err, out)
	}
	if out, err := berth(plain, "config", "--config", file, "--links", "tcp"); err != nil {
		t.Errorf("the default binary with links beside it: %v\n%s", err, out)
	}

	nixl := build("nixl", "build-nixl")
	if out, err := berth(nixl, "config", "--config", file); err != nil || !strings.Contains(out, "from transfer_channel") {
		t.Errorf("%v\n%s", err, out)
	}
	if out, err := berth(nixl, "agent", "--config", file, "--nixl_lib", filepath.Join(dir, "none.so")); err == nil || !strings.Contains(out, "nixl_lib") || !strings.Contains(out, "none.so") {
		t.Errorf("an agent without the library: %v\n%s", err, out)
	}
}

// withoutBerth is the environment without what these tests are told in it, which
// would be options.
func withoutBerth(env []string) (out []string) {
	for _, e := range env {
		if !strings.HasPrefix(e, "BERTH_") {
			out = append(out, e)
		}
	}
	return out
}
