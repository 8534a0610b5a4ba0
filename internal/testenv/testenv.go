// Package testenv provides what tests need from outside Go.
package testenv

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// requirements are what a Python peer needs: libzmq through pyzmq, and the encoder that the reference uses. A change of them
// makes the virtual environment anew.
var requirements = []string{"pyzmq==27.3.0", "msgspec==0.23.0"}

const (
	// envName is the directory in the user's cache; the number rises when its layout changes.
	envName = "venv-light-1"
	// buildTimeout bounds the download and installation, once per machine.
	buildTimeout = 5 * time.Minute
)

var python = sync.OnceValues(func() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	return ensure(filepath.Join(cache, "berth", envName), requirements)
})

// Python returns the path of a Python interpreter that has pyzmq and msgspec. The first call on a machine makes a virtual
// environment in the user's cache directory, outside the checkout; that needs python3 (3.10 or newer, with venv) and a package
// index. The test fails, and says what is missing, where there is none. Processes may call it at the same time.
func Python(t testing.TB) string {
	t.Helper()
	path, err := python()
	if err != nil {
		t.Fatalf("this test needs python3 >= 3.10 with venv and, the first time, network access for pip: %v", err)
	}
	return path
}

// ensure makes the environment in dir unless its stamp says that it is whole, and returns the interpreter.
func ensure(dir string, requirements []string) (string, error) {
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return "", err
	}
	unlock, err := lock(dir + ".lock")
	if err != nil {
		return "", err
	}
	defer unlock()

	interpreter := filepath.Join(dir, "bin", "python")
	stamp, want := filepath.Join(dir, "stamp"), strings.Join(requirements, "\n")
	if got, err := os.ReadFile(stamp); err == nil && string(got) == want {
		if _, err := os.Stat(interpreter); err == nil {
			return interpreter, nil
		}
	}
	if err := os.RemoveAll(dir); err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(context.Background(), buildTimeout)
	defer cancel()
	const version = "import sys; sys.exit(sys.version_info < (3, 10) and 'Python ' + sys.version + ' is too old')"
	pip := append([]string{"-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:"}, requirements...)
	for _, step := range []*exec.Cmd{
		exec.CommandContext(ctx, "python3", "-c", version),
		exec.CommandContext(ctx, "python3", "-m", "venv", dir),
		exec.CommandContext(ctx, interpreter, pip...),
	} {
		if out, err := step.CombinedOutput(); err != nil {
			return "", errors.Join(fmt.Errorf("%s: %w\n%s", step, err, out), os.RemoveAll(dir))
		}
	}
	return interpreter, os.WriteFile(stamp, []byte(want), 0o644)
}

// lock waits for an exclusive lock on the file, which other processes may hold for as long as an installation takes.
func lock(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	locked := make(chan error, 1)
	go func() { locked <- syscall.Flock(int(f.Fd()), syscall.LOCK_EX) }()
	select {
	case err = <-locked:
	case <-time.After(2 * buildTimeout):
		err = fmt.Errorf("%s has been locked for %v", path, 2*buildTimeout)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() { _ = f.Close() }, nil // closing releases the lock
}
