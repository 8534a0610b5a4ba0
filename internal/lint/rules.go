package lint

import (
	"fmt"
	"go/ast"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// rule finds what breaks it.
type rule struct {
	name string
	find func(r *repo, table []layer) []finding
}

var rules = []rule{
	{"placed", placed},
	{"imports", imports},
	{"goroutines", goroutines},
	{"sleep", sleep},
	{"skip", skip},
	{"comment", comment},
	{"unfinished", unfinished},
	{"contexts", contexts},
	{"deadlines", deadlines},
}

// inLayer reports whether a package is in one of the named layers.
func inLayer(table []layer, p string, names ...string) bool {
	l := find(table, p)
	return l != nil && slices.Contains(names, l.name)
}

// visit calls visit for every node of the files of a kind.
func (r *repo) visit(wanted func(*pkg, *file) bool, visit func(*pkg, *file, ast.Node)) {
	for _, p := range r.packages {
		for _, f := range p.files {
			if wanted(p, f) {
				ast.Inspect(f.ast, func(n ast.Node) bool {
					if n != nil {
						visit(p, f, n)
					}
					return true
				})
			}
		}
	}
}

// goroutines: what is pure starts none, and neither do its tests.
func goroutines(r *repo, table []layer) (out []finding) {
	r.visit(func(p *pkg, _ *file) bool {
		return inLayer(table, p.path, "vocabulary", "core", "composed core", "codec")
	}, func(_ *pkg, f *file, n ast.Node) {
		what := ""
		switch n := n.(type) {
		case *ast.GoStmt:
			what = "a go statement"
		case *ast.SelectStmt:
			what = "a select statement"
		case *ast.ChanType:
			what = "a channel"
		case *ast.CallExpr:
			if sel, ok := n.Fun.(*ast.SelectorExpr); ok && sel.Sel.Name == "Parallel" && f.test {
				what = "a parallel test"
			}
		}
		if what != "" {
			out = append(out, finding{"goroutines", r.at(f, n.Pos()),
				what + ": a core is stepped by one goroutine, and a test of it needs no other: return an action, call Step again"})
		}
	})
	return out
}

// sleep: a test waits for what it waits for.
func sleep(r *repo, table []layer) (out []finding) {
	r.visit(func(p *pkg, f *file) bool { return f.test || inLayer(table, p.path, "test helper") }, func(_ *pkg, f *file, n ast.Node) {
		if call, ok := n.(*ast.CallExpr); ok && calls(f, call.Fun, "time", "Sleep") {
			out = append(out, finding{"sleep", r.at(f, n.Pos()),
				"time.Sleep in a test is too short on a slow machine and too long on any other: wait for the event, with a deadline"})
		}
	})
	return out
}

// skip: a test that does not run is no test.
func skip(r *repo, _ []layer) (out []finding) {
	r.visit(func(_ *pkg, f *file) bool { return f.test }, func(_ *pkg, f *file, n ast.Node) {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return
		}
		sel, ok := call.Fun.(*ast.SelectorExpr)
		if !ok || !slices.Contains([]string{"Skip", "Skipf", "SkipNow"}, sel.Sel.Name) {
			return
		}
		if id, ok := sel.X.(*ast.Ident); ok && slices.Contains([]string{"t", "tb", "b", "f"}, id.Name) {
			out = append(out, finding{"skip", r.at(f, n.Pos()), "a test that is skipped guards nothing: make it run, or take it out"})
		}
	})
	return out
}

// comment: a package says once what it is.
func comment(r *repo, _ []layer) (out []finding) {
	for _, p := range r.packages {
		var names, docs []string
		for _, f := range p.files {
			if f.test {
				continue
			}
			name := f.ast.Name.Name
			names = append(names, name)
			if f.ast.Doc == nil {
				continue
			}
			docs = append(docs, path.Base(f.name))
			if text := f.ast.Doc.Text(); name != "main" && !strings.HasPrefix(text, "Package "+name+" ") {
				out = append(out, finding{"comment", f.name, fmt.Sprintf("the package comment begins otherwise than \"Package %s \": go doc shows it as it is", name)})
			}
		}
		if len(names) == 0 {
			continue // tests only
		}
		switch len(docs) {
		case 1:
		case 0:
			out = append(out, finding{"comment", p.path, "has no package comment: say in one file what it is for, who uses it and what it does not do"})
		default:
			out = append(out, finding{"comment", p.path, fmt.Sprintf("has a package comment in %s: keep one", strings.Join(docs, ", "))})
		}
	}
	return out
}

var marker = regexp.MustCompile(`\b(TODO|FIXME|XXX|HACK)\b`)

// unfinished: what is merged is finished.
func unfinished(r *repo, _ []layer) (out []finding) {
	for _, p := range r.packages {
		for _, f := range p.files {
			for _, group := range f.ast.Comments {
				for _, c := range group.List {
					if m := marker.FindString(c.Text); m != "" {
						out = append(out, finding{"unfinished", r.at(f, c.Pos()), m + " in a comment: do it, or open an issue and say nothing here"})
					}
				}
			}
		}
	}
	return out
}

// contexts: outside tests a context that nothing ends is only the root of one
// that something ends.
func contexts(r *repo, table []layer) (out []finding) {
	ends := []string{"WithCancel", "WithCancelCause", "WithTimeout", "WithTimeoutCause", "WithDeadline", "WithDeadlineCause"}
	ended := map[ast.Expr]bool{} // first arguments of calls that end them, or do not wait
	wanted := func(p *pkg, f *file) bool { return !f.test && !inLayer(table, p.path, "test helper") }
	r.visit(wanted, func(_ *pkg, f *file, n ast.Node) {
		call, is := n.(*ast.CallExpr)
		if !is {
			return
		}
		if calls(f, call.Fun, "context", "TODO") {
			out = append(out, finding{"contexts", r.at(f, n.Pos()), "context.TODO: take the caller's context"})
		}
		sel, is := call.Fun.(*ast.SelectorExpr)
		if is && len(call.Args) > 0 && (sel.Sel.Name == "LogAttrs" || calls(f, sel, "os/signal", "NotifyContext") ||
			slices.ContainsFunc(ends, func(name string) bool { return calls(f, sel, "context", name) })) {
			ended[call.Args[0]] = true
		}
	})
	r.visit(wanted, func(_ *pkg, f *file, n ast.Node) {
		if call, is := n.(*ast.CallExpr); is && calls(f, call.Fun, "context", "Background") && !ended[call] {
			out = append(out, finding{"contexts", r.at(f, n.Pos()),
				"context.Background is a wait without an end: take the caller's context, or put it into context.WithTimeout or WithCancel at once"})
		}
	})
	return out
}

// endless are calls that wait as long as the other side likes.
var endless = []struct{ pkg, name, instead string }{
	{"net", "Dial", "net.Dialer.DialContext, or net.DialTimeout"},
	{"crypto/tls", "Dial", "tls.Dialer.DialContext"},
	{"net/http", "Get", "http.NewRequestWithContext and a client of your own"},
	{"net/http", "Head", "http.NewRequestWithContext and a client of your own"},
	{"net/http", "Post", "http.NewRequestWithContext and a client of your own"},
	{"net/http", "PostForm", "http.NewRequestWithContext and a client of your own"},
	{"net/http", "NewRequest", "http.NewRequestWithContext"},
	{"net/http", "DefaultClient", "a client of your own, with limits"},
	{"net/http", "ListenAndServe", "an http.Server with ReadHeaderTimeout"},
}

// deadlines: a wait has a deadline (R10, r106), as far as that can be seen cheaply.
func deadlines(r *repo, table []layer) (out []finding) {
	r.visit(func(p *pkg, f *file) bool { return !f.test && !inLayer(table, p.path, "test helper") }, func(_ *pkg, f *file, n ast.Node) {
		switch n := n.(type) {
		case *ast.SelectorExpr:
			for _, e := range endless {
				if calls(f, n, e.pkg, e.name) {
					out = append(out, finding{"deadlines", r.at(f, n.Pos()), fmt.Sprintf("%s.%s waits as long as the other side likes: use %s", path.Base(e.pkg), e.name, e.instead)})
				}
			}
		case *ast.CompositeLit:
			if n.Type != nil && calls(f, n.Type, "net/http", "Server") && !hasField(n, "ReadHeaderTimeout") {
				out = append(out, finding{"deadlines", r.at(f, n.Pos()), "http.Server without ReadHeaderTimeout lets a silent client hold a connection: set it"})
			}
		}
	})
	return out
}

func hasField(lit *ast.CompositeLit, name string) bool {
	return slices.ContainsFunc(lit.Elts, func(e ast.Expr) bool {
		kv, ok := e.(*ast.KeyValueExpr)
		if !ok {
			return false
		}
		id, ok := kv.Key.(*ast.Ident)
		return ok && id.Name == name
	})
}

// check runs every rule and returns the findings in order of place.
func check(r *repo, table []layer) (out []finding) {
	for _, x := range rules {
		out = append(out, x.find(r, table)...)
	}
	slices.SortFunc(out, func(a, b finding) int {
		fa, la := place(a.at)
		fb, lb := place(b.at)
		if c := strings.Compare(fa, fb); c != 0 {
			return c
		}
		if la != lb {
			return la - lb
		}
		return strings.Compare(a.String(), b.String())
	})
	return out
}

// place splits file:line.
func place(at string) (name string, line int) {
	if i := strings.LastIndexByte(at, ':'); i >= 0 {
		line, _ = strconv.Atoi(at[i+1:])
		return at[:i], line
	}
	return at, 0
}
