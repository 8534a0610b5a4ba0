package nixllink

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
)

// EnvLibrary names the library's path in the environment.
const EnvLibrary = "BERTH_NIXL_LIB"

const libraryName = "libnixl_capi.so"

// location is where a library was found, and what its place tells about it.
type location struct {
	path    string // of libnixl_capi.so
	plugins string // the folder of its plug-ins
	module  string // the Python module of the bindings it was shipped with
	version string // "" if the place does not tell
}

// find returns the library to load: the path given (of the file, or of the
// folder that has it), or BERTH_NIXL_LIB, or that of the Python environment that
// is active (VIRTUAL_ENV), or of the first python3 on PATH.
func find(path string) (location, error) {
	if path == "" {
		path = os.Getenv(EnvLibrary)
	}
	if path != "" {
		if st, err := os.Stat(path); err == nil && st.IsDir() {
			path = filepath.Join(path, libraryName)
		}
		if _, err := os.Stat(path); err != nil {
			return location{}, fmt.Errorf("nixl_lib: %w", err)
		}
		return locate(path)
	}
	var tried []string
	for _, root := range environments() {
		found, _ := filepath.Glob(filepath.Join(root, "lib*", "python3*", "site-packages", ".nixl*.mesonpy.libs", libraryName))
		if slices.Sort(found); len(found) > 0 {
			return locate(found[len(found)-1]) // the newest flavour
		}
		tried = append(tried, root)
	}
	return location{}, fmt.Errorf("nixl_lib: %s is in no Python environment (looked into %q); install the package nixl there, or set nixl_lib or %s",
		libraryName, tried, EnvLibrary)
}

// environments returns the roots of the Python environments to look into.
func environments() (roots []string) {
	if v := os.Getenv("VIRTUAL_ENV"); v != "" {
		roots = append(roots, v)
	}
	for _, name := range []string{"python3", "python"} {
		if p, err := exec.LookPath(name); err == nil {
			if root := filepath.Dir(filepath.Dir(p)); !slices.Contains(roots, root) {
				roots = append(roots, root)
			}
		}
	}
	return roots
}

var (
	libsFolder = regexp.MustCompile(`^\.(nixl(?:_cu\d+)?)\.mesonpy\.libs$`)
	majorMinor = regexp.MustCompile(`^(\d+)\.(\d+)`)
)

// locate reads what the path of a library tells.
func locate(path string) (location, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return location{}, err
	}
	dir := filepath.Dir(path)
	at := location{path: path, plugins: filepath.Join(dir, "plugins"), module: modules[0]}
	m := libsFolder.FindStringSubmatch(filepath.Base(dir))
	if m == nil {
		return at, nil
	}
	at.module = m[1] + "._bindings"
	info, _ := filepath.Glob(filepath.Join(filepath.Dir(dir), m[1]+"-*.dist-info"))
	for _, i := range info {
		at.version = filepath.Base(i)[len(m[1])+1 : len(filepath.Base(i))-len(".dist-info")]
	}
	return at, at.check()
}

// check refuses a version whose C library is not what is declared here.
func (at location) check() error {
	m := majorMinor.FindStringSubmatch(at.version)
	if m == nil {
		return nil // the symbols decide
	}
	if major, err := strconv.Atoi(m[1]); err != nil || major != 1 {
		return fmt.Errorf("nixl_lib: %s is NIXL %s; 1.x is wanted (tried with 1.5.1)", at.path, at.version)
	}
	return nil
}
