//go:build nixl

package nixllink

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// A library that is none, that lacks a function or that has no plug-ins is an
// error that says so, and the real one can be loaded after it.
func TestLoad_refused(t *testing.T) {
	dir := t.TempDir()
	cc := os.Getenv("CC")
	if cc == "" {
		cc = "cc"
	}
	young := filepath.Join(dir, libraryName)
	source := filepath.Join(dir, "young.c")
	if err := os.WriteFile(source, []byte("int nixl_capi_create_agent(void) { return 0; }\nint nixl_capi_destroy_agent(void) { return 0; }\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(cc, "-shared", "-fPIC", "-o", young, source).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	text := filepath.Join(dir, "text.so")
	if err := os.WriteFile(text, []byte("no library"), 0o644); err != nil {
		t.Fatal(err)
	}
	loaded := opened.path // by another test: one library stays for the process's life
	opened.path = ""
	t.Cleanup(func() { opened.path = loaded })
	t.Setenv("NIXL_PLUGIN_DIR", "")
	if _, err := Load(young); err == nil || !strings.Contains(err.Error(), "no plug-ins") || !strings.Contains(err.Error(), "NIXL_PLUGIN_DIR") {
		t.Errorf("a library without plug-ins: %v", err)
	}
	if err := os.Mkdir(filepath.Join(dir, "plugins"), 0o755); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{young: "nixl_capi_get_local_md", text: "text.so"} {
		if _, err := Load(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want an error that names %s", filepath.Base(path), err, want)
		}
	}
	os.Unsetenv("NIXL_PLUGIN_DIR") // what Load has set
	if _, err := Load(""); err != nil {
		t.Error(err)
	}
	loaded = opened.path
	if _, err := Load(young); err == nil || !strings.Contains(err.Error(), "is loaded already") {
		t.Errorf("a second library: %v", err)
	}
}
