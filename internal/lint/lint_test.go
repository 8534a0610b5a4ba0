package lint

import (
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
)

// TestRepository: the repository keeps its rules.
func TestRepository(t *testing.T) {
	r, err := load("../..")
	if err != nil {
		t.Fatal(err)
	}
	if len(r.packages) < 20 {
		t.Fatalf("found only %d packages: the walk is broken", len(r.packages))
	}
	for _, f := range check(r, layers) {
		t.Error(f)
	}
}

// fixtureTable is the table for testdata/broken: ours, with its own packages.
var fixtureTable = func() []layer {
	own := map[string][]string{
		"vocabulary":    {"kv"},
		"ports":         {"ports"},
		"core":          {"core", "ledger"},
		"composed core": {"composed"},
		"codec":         {"codec"},
		"contract":      {"contract"},
		"adapter":       {"tcp", "shm"},
		"engine part":   {"part"},
		"shell":         {"shell"},
		"surface":       {"surface", "ghost"},
		"root":          {"."},
		"measurement":   {"bench"},
		"command":       {"cmd"},
		"test helper":   {"helper", "surface"},
	}
	table := slices.Clone(layers)
	for i := range table {
		table[i].packages = own[table[i].name]
		table[i].std = slices.Clone(table[i].std)
		for j := range table[i].std {
			if table[i].std[j].except = nil; table[i].name == "adapter" {
				table[i].std[j].except = []string{"shm"}
			}
		}
	}
	table[0].std = append(table[0].std, ban{except: []string{"elsewhere"}})
	return table
}()

// TestBroken: each rule can fail. The fixture breaks all of them, and keeps them
// beside, in the ways that could be taken for a break.
func TestBroken(t *testing.T) {
	r, err := load("testdata/broken")
	if err != nil {
		t.Fatal(err)
	}
	found := check(r, fixtureTable)
	datadriven.RunTest(t, "testdata/broken.txt", func(*testing.T, *datadriven.TestData) string {
		var out strings.Builder
		for _, f := range found {
			out.WriteString(f.String() + "\n")
		}
		return out.String()
	})
	for _, x := range rules {
		if !slices.ContainsFunc(found, func(f finding) bool { return f.rule == x.name }) {
			t.Errorf("rule %q finds nothing in the fixture: it cannot fail", x.name)
		}
	}
}

// TestEveryLayerRestricts: each layer's list and each ban is broken somewhere in
// the fixture, so that no row of the table is for show.
func TestEveryLayerRestricts(t *testing.T) {
	r, err := load("testdata/broken")
	if err != nil {
		t.Fatal(err)
	}
	found := imports(r, fixtureTable)
	for _, l := range fixtureTable {
		reasons := []string{l.why}
		for _, b := range l.std {
			if len(b.imports) > 0 {
				reasons = append(reasons, b.why)
			}
		}
		for _, why := range reasons {
			if !slices.ContainsFunc(found, func(f finding) bool {
				return strings.Contains(f.text, `of layer "`+l.name+`"`) && strings.HasSuffix(f.text, why)
			}) {
				t.Errorf("nothing in the fixture is found by layer %q for the reason %q", l.name, why)
			}
		}
	}
}
