//go:build interop && nixl

package interop

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/berthkv/berth"
)

// Every option that the installed LMCache has is accepted, under its old names
// too: those that Berth does not use are noted.
func TestOptions(t *testing.T) {
	part(t, "8 LMCache's options")
	names := startPeers(t, 1)[0].do(command{"op": "options"}).Keys
	if len(names) < 100 {
		t.Fatalf("LMCache has %d options", len(names))
	}
	for _, name := range names {
		f := filepath.Join(t.TempDir(), "lmcache.yaml")
		// A value that no option of Berth's takes.
		if err := os.WriteFile(f, fmt.Appendf(nil, "pd_role: sender\npd_skip_proxy_notification: true\nslot_bytes: 256\npd_buffer_size: 1024\n%s: {some: thing}\n", name), 0o600); err != nil {
			t.Fatal(err)
		}
		cfg, err := berth.LoadConfig(berth.Sources{File: f})
		switch {
		case err == nil && !strings.Contains(strings.Join(cfg.Notes, "\n"), name+" ("):
			t.Errorf("%s is neither used nor noted: %q", name, cfg.Notes)
		case err != nil && strings.Contains(err.Error(), "is not known"):
			t.Error(err)
		}
	}
}
