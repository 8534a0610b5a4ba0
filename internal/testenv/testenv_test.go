package testenv

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestPythonHasTheLibraries(t *testing.T) {
	out, err := exec.Command(Python(t), "-c", "import zmq, msgspec; print(zmq.__version__, msgspec.__version__)").CombinedOutput()
	if err != nil || strings.TrimSpace(string(out)) != "27.3.0 0.23.0" {
		t.Fatalf("got %q, %v", out, err)
	}
}

// Without python3 the error says so, and nothing half-made is left to be taken for an environment later.
func TestMissingPythonIsAnError(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	dir := filepath.Join(t.TempDir(), "env")
	for range 2 {
		if _, err := ensure(dir, []string{"pyzmq"}); err == nil || !strings.Contains(err.Error(), "python3") {
			t.Fatalf("got %v", err)
		}
	}
}
