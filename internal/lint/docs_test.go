package lint

import (
	"go/ast"
	"go/token"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// TestDocsNameTests: every test that a document names exists, with its package
// and its subtest: `TestX`, `package.TestX`, `package.TestX/subtest`.
func TestDocsNameTests(t *testing.T) {
	r, err := load("../..")
	if err != nil {
		t.Fatal(err)
	}
	docs, err := filepath.Glob("../../docs/*.md")
	if err != nil || len(docs) == 0 {
		t.Fatalf("%v: %v", docs, err)
	}
	top, _ := filepath.Glob("../../*.md")
	found := 0
	for _, name := range append(docs, top...) {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		found += len(testNames.FindAllSubmatch(text, -1))
		for _, f := range missingTests(r, "../..", string(text)) {
			t.Errorf("%s: %s", filepath.Base(name), f)
		}
	}
	if found < 30 {
		t.Fatalf("only %d tests are named: the search is broken", found)
	}
}

// TestDocsNameTests_broken: what does not exist is found.
func TestDocsNameTests_broken(t *testing.T) {
	r, err := load("../..")
	if err != nil {
		t.Fatal(err)
	}
	for name, exists := range map[string]bool{
		"TestDocsNameTests":                                    true,
		"lint.TestDocsNameTests":                               true,
		"lint.TestNothing":                                     false,
		"nothing.TestDocsNameTests":                            false,
		"TestNothing":                                          false,
		"outbound.TestScripts/legacy_dead.txt":                 true,
		"outbound.TestScripts/legacy_alive.txt":                false,
		"config.TestLoad_faults/unknown_role":                  true,
		"config.TestLoad_faults/unknown_rule":                  false,
		"e2e.TestLMCache_receiver/receiver_fail_fast_overflow": true,
	} {
		if got := len(missingTests(r, "../..", "`"+name+"`")) == 0; got != exists {
			t.Errorf("%s: exists %v, want %v", name, got, exists)
		}
	}
}

// TestScripts: a script that a document names is there, and none lies beside the
// folder of scripts that its package runs.
func TestScripts(t *testing.T) {
	docs, _ := filepath.Glob("../../docs/*.md")
	top, _ := filepath.Glob("../../*.md")
	found := 0
	for _, name := range append(docs, top...) {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range scriptNames.FindAllSubmatch(text, -1) {
			found++
			if _, err := os.Stat("../../" + string(m[1])); err != nil {
				t.Errorf("%s: %v", filepath.Base(name), err)
			}
		}
	}
	if found < 5 {
		t.Fatalf("only %d scripts are named: the search is broken", found)
	}
	scripts, err := filepath.Glob("../*/testdata/scripts")
	if err != nil || len(scripts) < 5 {
		t.Fatalf("%v: %v", scripts, err)
	}
	for _, dir := range scripts {
		stray, _ := filepath.Glob(filepath.Dir(dir) + "/*.txt")
		for _, s := range stray {
			t.Errorf("%s is not in %s: nothing runs it", s, dir)
		}
	}
}

var scriptNames = regexp.MustCompile("`(internal/[a-z_/]*testdata/[a-z_/]*\\.txt)`")

// TestArchitectureNamesPackages: the table of layers has every package, since
// layers.go says so.
func TestArchitectureNamesPackages(t *testing.T) {
	b, err := os.ReadFile("../../ARCHITECTURE.md")
	if err != nil {
		t.Fatal(err)
	}
	named := map[string]bool{".": true} // "root package"
	for _, m := range regexp.MustCompile("`([a-z0-9/]+)(?:\\{([a-z0-9,]+)\\})?`").FindAllStringSubmatch(string(b), -1) {
		for last := range strings.SplitSeq(m[2], ",") {
			named[m[1]+last] = true
		}
	}
	for _, l := range layers {
		for _, p := range l.packages {
			if !named[p] {
				t.Errorf("%s is in no row of ARCHITECTURE.md", p)
			}
		}
	}
}

var testNames = regexp.MustCompile("`(?:(\\w+)\\.)?(Test[A-Z]\\w*|Fuzz[A-Z]\\w*|Benchmark[A-Z]\\w*)(?:/([^`]*))?`")

// missingTests returns the tests that a text names and that are not there.
func missingTests(r *repo, root, text string) (missing []string) {
	for _, m := range testNames.FindAllStringSubmatch(text, -1) {
		if !slices.ContainsFunc(r.packages, func(p *pkg) bool {
			return (m[1] == "" || path.Base(p.path) == m[1]) && hasTest(p, root, m[2], m[3])
		}) {
			missing = append(missing, strings.Trim(m[0], "`")+" does not exist")
		}
	}
	return missing
}

// hasTest looks for a test function, and for its subtest among the words that
// the function has and the files of testdata.
func hasTest(p *pkg, root, name, sub string) bool {
	for _, f := range p.files {
		for _, d := range f.ast.Decls {
			if d, ok := d.(*ast.FuncDecl); ok && f.test && d.Recv == nil && d.Name.Name == name {
				return sub == "" || hasFile(filepath.Join(root, p.path, "testdata"), sub) || hasWords(d, sub)
			}
		}
	}
	return false
}

func hasFile(dir, name string) (found bool) {
	filepath.WalkDir(dir, func(_ string, d os.DirEntry, err error) error {
		found = found || err == nil && d.Name() == name
		return nil
	})
	return found
}

func hasWords(d *ast.FuncDecl, sub string) (found bool) {
	ast.Inspect(d, func(n ast.Node) bool {
		if l, ok := n.(*ast.BasicLit); ok && l.Kind == token.STRING {
			s, err := strconv.Unquote(l.Value)
			s = strings.TrimSuffix(strings.ReplaceAll(s, " ", "_"), "/")
			found = found || err == nil && s == sub
		}
		return true
	})
	return found
}
