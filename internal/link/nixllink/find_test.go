package nixllink

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// install makes a file where a wheel of NIXL puts its library.
func install(t *testing.T, root, wheel, version string) string {
	t.Helper()
	site := filepath.Join(root, "lib", "python3.11", "site-packages")
	libs := filepath.Join(site, "."+wheel+".mesonpy.libs")
	for _, dir := range []string{libs, filepath.Join(site, wheel+"-"+version+".dist-info")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	file := filepath.Join(libs, libraryName)
	if err := os.WriteFile(file, []byte("no library"), 0o644); err != nil {
		t.Fatal(err)
	}
	return file
}

// The path given wins, then BERTH_NIXL_LIB, then the active environment, then
// the first Python on PATH.
func TestFind(t *testing.T) {
	option, env, active, onPath := t.TempDir(), t.TempDir(), t.TempDir(), t.TempDir()
	given := install(t, option, "nixl_cu12", "1.5.1")
	named := install(t, env, "nixl_cu13", "1.5.1")
	install(t, active, "nixl_cu12", "1.4.0")
	newest := install(t, active, "nixl_cu13", "1.4.0")
	last := install(t, onPath, "nixl", "1.0.1")
	if err := os.MkdirAll(filepath.Join(onPath, "bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(onPath, "bin", "python3"), []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", filepath.Join(onPath, "bin"))
	for _, c := range []struct{ path, env, active, want, module, version string }{
		{given, named, active, given, "nixl_cu12._bindings", "1.5.1"},
		{filepath.Dir(given), named, active, given, "nixl_cu12._bindings", "1.5.1"}, // its folder
		{"", named, active, named, "nixl_cu13._bindings", "1.5.1"},
		{"", "", active, newest, "nixl_cu13._bindings", "1.4.0"},
		{"", "", "", last, "nixl._bindings", "1.0.1"},
	} {
		t.Setenv(EnvLibrary, c.env)
		t.Setenv("VIRTUAL_ENV", c.active)
		at, err := find(c.path)
		if err != nil || at.path != c.want || at.module != c.module || at.version != c.version || at.plugins != filepath.Join(filepath.Dir(c.want), "plugins") {
			t.Errorf("find(%q) with %q and %q: %+v, %v", c.path, c.env, c.active, at, err)
		}
	}
}

// What is missing is named.
func TestFind_missing(t *testing.T) {
	empty := t.TempDir()
	t.Setenv(EnvLibrary, "")
	t.Setenv("VIRTUAL_ENV", empty)
	t.Setenv("PATH", empty)
	for path, want := range map[string][]string{
		"":                              {"nixl_lib", libraryName, empty, EnvLibrary},
		filepath.Join(empty, "none.so"): {"nixl_lib", "none.so"},
		empty:                           {"nixl_lib", libraryName},
	} {
		_, err := find(path)
		if err == nil {
			t.Errorf("find(%q) finds something", path)
			continue
		}
		for _, w := range want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("find(%q): %v does not name %s", path, err, w)
			}
		}
	}
}

// Only 1.x is what is declared here; a file without a version is decided by its
// functions.
func TestFind_version(t *testing.T) {
	for version, ok := range map[string]bool{"1.0.0": true, "1.5.1": true, "1.12rc1": true, "0.9.2": false, "2.0.0": false} {
		root := t.TempDir()
		_, err := find(install(t, root, "nixl_cu13", version))
		if (err == nil) != ok || err != nil && !strings.Contains(err.Error(), version) {
			t.Errorf("NIXL %s: %v", version, err)
		}
	}
	plain := filepath.Join(t.TempDir(), libraryName)
	if err := os.WriteFile(plain, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if at, err := find(plain); err != nil || at.module != modules[0] || at.version != "" {
		t.Errorf("%+v, %v", at, err)
	}
}
