// Package lint holds the rules of this repository that compilers do not know, as
// tests: which package may import which, and a few more that a parse of the
// sources can decide. Each finding says why, and what to write instead. The tests
// run on the repository, and on a fixture that breaks every rule.
package lint

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// repo is every Go file of a module, parsed, whatever its build tags.
type repo struct {
	module   string
	fset     *token.FileSet
	packages []*pkg // by path
}

// pkg is a folder with Go files.
type pkg struct {
	path  string // in the module, "." for its root
	files []*file
}

type file struct {
	name string // from the root of the module
	test bool
	ast  *ast.File
}

// imports returns what a file imports, each with its place.
func (f *file) imports() map[string]token.Pos {
	m := map[string]token.Pos{}
	for _, s := range f.ast.Imports {
		if p, err := strconv.Unquote(s.Path.Value); err == nil {
			m[p] = s.Pos()
		}
	}
	return m
}

// load parses the module below root.
func load(root string) (*repo, error) {
	mod, err := os.ReadFile(filepath.Join(root, "go.mod"))
	if err != nil {
		return nil, err
	}
	r := &repo{fset: token.NewFileSet()}
	for line := range strings.Lines(string(mod)) {
		if m, ok := strings.CutPrefix(line, "module "); ok {
			r.module = strings.TrimSpace(m)
		}
	}
	byPath := map[string]*pkg{}
	err = filepath.WalkDir(root, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, name)
		if err != nil {
			return err
		}
		rel = filepath.ToSlash(rel)
		if d.IsDir() {
			if base := d.Name(); rel != "." && (base == "testdata" || base == "vendor" || strings.HasPrefix(base, ".") || strings.HasPrefix(base, "_")) {
				return fs.SkipDir
			}
			return nil
		}
		if path.Ext(rel) != ".go" {
			return nil
		}
		tree, err := parser.ParseFile(r.fset, name, nil, parser.ParseComments)
		if err != nil {
			return err
		}
		dir := path.Dir(rel)
		if byPath[dir] == nil {
			byPath[dir] = &pkg{path: dir}
			r.packages = append(r.packages, byPath[dir])
		}
		byPath[dir].files = append(byPath[dir].files, &file{name: rel, test: strings.HasSuffix(rel, "_test.go"), ast: tree})
		return nil
	})
	if err != nil {
		return nil, err
	}
	slices.SortFunc(r.packages, func(a, b *pkg) int { return strings.Compare(a.path, b.path) })
	return r, nil
}

// ours returns the path in the module of an import, if it is of the module.
func (r *repo) ours(imported string) (p string, ok bool) {
	if imported == r.module {
		return ".", true
	}
	return strings.CutPrefix(imported, r.module+"/")
}

// finding is one break of a rule.
type finding struct {
	rule string
	at   string // file:line, or a package
	text string // what is wrong, why, and what to write instead
}

func (f finding) String() string { return fmt.Sprintf("%s: %s: %s", f.at, f.rule, f.text) }

// at names a place as file:line.
func (r *repo) at(f *file, p token.Pos) string {
	return fmt.Sprintf("%s:%d", f.name, r.fset.Position(p).Line)
}

// calls reports whether an expression is the selection of name from the package
// that the file imports as imported.
func calls(f *file, e ast.Expr, imported, name string) bool {
	sel, ok := e.(*ast.SelectorExpr)
	if !ok || sel.Sel.Name != name {
		return false
	}
	id, ok := sel.X.(*ast.Ident)
	if !ok {
		return false
	}
	for _, s := range f.ast.Imports {
		if p, _ := strconv.Unquote(s.Path.Value); p == imported {
			local := path.Base(imported)
			if s.Name != nil {
				local = s.Name.Name
			}
			return id.Name == local
		}
	}
	return false
}
