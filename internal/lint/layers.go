package lint

import (
	"fmt"
	"slices"
	"strings"
)

// layer is a set of packages that obey the same import rules.
type layer struct {
	name     string
	packages []string
	// imports are the layers (or single packages) of ours that it may import.
	imports []string
	// why says what a wrong import would spoil, and what to write instead.
	why string
	// std restricts imports from outside the module.
	std []ban
}

// ban forbids imports, by full path or, with a slash at the end, by prefix.
type ban struct {
	imports []string
	why     string
	except  []string // packages of the layer to which it does not apply
}

// Bans that several layers share.
var (
	noWorld = ban{
		imports: []string{"net", "net/", "os", "os/", "io/fs", "syscall", "golang.org/x/sys/", "log", "log/"},
		why:     "a core decides and touches nothing: return an action or an error, and let the shell act or log",
	}
	noTime = ban{
		imports: []string{"time", "context", "golang.org/x/time/"},
		why:     "time is handed in as kv.Instant, and a wait is a Wake action: only shells read a clock or cancel",
	}
	noConcurrency = ban{
		imports: []string{"sync", "sync/", "golang.org/x/sync/"},
		why:     "one goroutine owns a core: hand it events through the shell's mailbox instead of sharing it",
	}
	noChance = ban{
		imports: []string{"math/rand", "math/rand/", "crypto/rand"},
		why:     "the same events must give the same actions: have the shell draw, and hand the number in",
	}
	noSurface = ban{
		imports: []string{"github.com/prometheus/", "flag", "github.com/spf13/"},
		why:     "fill a Stats snapshot, which internal/metrics exports; take options in a Config, which internal/config and cmd fill",
	}
	noUnsafe = ban{
		imports: []string{"unsafe", "C"},
		why:     "memory that Go does not check is arena's and the links' business: take a []byte from there",
	}
	pure = []ban{noWorld, noTime, noConcurrency, noChance, noSurface, noUnsafe}
)

// layers is the table of style: from what knows nothing to what knows all.
// Packages of one layer do not import each other unless imports names them.
var layers = []layer{
	{
		name:     "vocabulary",
		packages: []string{"internal/kv", "internal/fault", "internal/msg", "internal/invariant"},
		imports:  []string{"vocabulary"},
		why:      "everybody imports the vocabulary: move what needs more than that up to where it is needed",
		std:      pure,
	},
	{
		name:     "ports",
		packages: []string{"internal/freeport"},
		why:      "who chooses a port for a process that starts later knows nothing of what it is for",
		std:      []ban{noSurface, noUnsafe},
	},
	{
		name:     "core",
		packages: []string{"internal/reserve", "internal/slot", "internal/session", "internal/attach"},
		imports:  []string{"vocabulary"},
		why:      "cores know only the vocabulary, so that each can be explored alone: let intake, outbound or watch compose them",
		std:      pure,
	},
	{
		name:     "composed core",
		packages: []string{"internal/intake", "internal/outbound", "internal/watch"},
		imports:  []string{"vocabulary", "core"},
		why:      "intake, outbound and watch compose cores and do not know bytes, links or each other: take a value of kv or msg, let the shell translate",
		std:      pure,
	},
	{
		name:     "codec",
		packages: []string{"internal/wire", "internal/openai", "internal/msgpack"},
		imports:  []string{"vocabulary", "internal/msgpack"},
		why:      "codecs turn bytes into values of the vocabulary and back: what a value means is decided by a core",
		std:      pure,
	},
	{
		name:     "contract",
		packages: []string{"internal/link"},
		imports:  []string{"vocabulary"},
		why:      "a contract is what adapters and shells have in common: it may name the vocabulary only",
		std:      []ban{noWorld, noConcurrency, noChance, noSurface, noUnsafe},
	},
	{
		name: "adapter",
		packages: []string{"internal/zmtp", "internal/httpconns", "internal/arena", "internal/link/gate", "internal/link/lobby",
			"internal/link/tcplink", "internal/link/shmlink", "internal/link/memlink", "internal/link/nixllink"},
		imports: []string{"vocabulary", "contract", "internal/link/gate", "internal/link/lobby"},
		why:     "an adapter carries out its own contract and can be replaced alone: take what you need as a value or a callback, the root package wires it",
		std:     []ban{noSurface, noUnsafe.but("internal/arena", "internal/link/shmlink", "internal/link/nixllink")},
	},
	{
		name:     "engine part",
		packages: []string{"internal/engine/kvcache", "internal/engine/model", "internal/engine/sched"},
		imports:  []string{"vocabulary", "engine part"},
		why:      "the model computes and the scheduler decides: both know the vocabulary only, the engine serves and transfers",
		std:      pure,
	},
	{
		name:     "shell",
		packages: []string{"internal/node", "internal/proxy", "internal/localapi", "internal/admin", "internal/engine"},
		imports:  []string{"vocabulary", "core", "composed core", "codec", "contract", "engine part", "internal/arena", "internal/httpconns", "internal/localapi"},
		why:      "a shell drives cores through interfaces that it declares itself: declare one with what you call, the root package passes the adapter in",
		std: []ban{noSurface, noUnsafe, {
			imports: []string{"net", "net/", "os", "os/", "syscall", "golang.org/x/sys/"},
			why:     "sockets and files come in through the interfaces of node.Deps, so that the node runs on memory links in tests",
			except:  []string{"internal/proxy", "internal/localapi", "internal/admin", "internal/engine"},
		}},
	},
	{
		name:     "surface",
		packages: []string{"client", "internal/config", "internal/metrics", "internal/demo", "examples"},
		imports:  []string{"vocabulary", "ports", "core", "composed core", "codec", "contract", "shell", "."},
		why:      "only the root package joins adapters to shells: use its Agent and Proxy, or take an interface",
		std: []ban{{
			imports: []string{"github.com/prometheus/"},
			why:     "internal/metrics alone knows Prometheus: fill a Stats snapshot",
			except:  []string{"internal/metrics"},
		}, noUnsafe},
	},
	{
		name:     "root",
		packages: []string{"."},
		imports:  []string{"vocabulary", "core", "composed core", "codec", "contract", "adapter", "shell", "surface"},
		why:      "the root package is the library's composition root; the command and test helpers are not for it",
		std:      []ban{noSurface, noUnsafe},
	},
	{
		name:     "measurement",
		packages: []string{"internal/bench"},
		imports:  []string{"vocabulary", "ports", "core", "codec", "contract", "adapter", "surface", "root", "internal/link/faultlink"},
		why:      "what is measured is the product: start agents and proxies through the root package or the binary; only load, ledgers and links by themselves are its own",
		std:      []ban{noSurface, noUnsafe},
	},
	{
		name:     "command",
		packages: []string{"cmd/berth"},
		imports:  []string{"vocabulary", "shell", "surface", "root", "measurement"},
		why:      "the command speaks to an agent through client and starts one through the root package",
		std:      []ban{noUnsafe},
	},
	{
		name: "test helper",
		packages: []string{"internal/link/linktest", "internal/link/faultlink", "internal/testenv", "internal/engine/enginetest", "internal/e2e", "internal/explore", "internal/chaos", "internal/lint", "interop",
			"internal/sim", "internal/sim/cmd"},
		imports: []string{"vocabulary", "ports", "core", "composed core", "codec", "contract", "adapter", "engine part", "shell", "surface", "root", "test helper"},
		why:     "a test helper may use everything but a command: run the binary",
	},
}

// but returns the ban with exceptions.
func (b ban) but(packages ...string) ban {
	b.except = packages
	return b
}

// find returns the layer of a package.
func find(table []layer, p string) *layer {
	for i := range table {
		if slices.Contains(table[i].packages, p) {
			return &table[i]
		}
	}
	return nil
}

// may reports whether packages of the layer may import a package of ours.
func (l *layer) may(table []layer, p string) bool {
	for _, entry := range l.imports {
		if of := find(table, p); entry == p || of != nil && of.name == entry {
			return true
		}
	}
	return false
}

func (b ban) hits(imported string) bool {
	return slices.ContainsFunc(b.imports, func(entry string) bool {
		return entry == imported || strings.HasSuffix(entry, "/") && strings.HasPrefix(imported, entry)
	})
}

// placed: every package is in the table, and the table has no others.
func placed(r *repo, table []layer) (out []finding) {
	exists := map[string]bool{}
	for _, p := range r.packages {
		exists[p.path] = true
		if find(table, p.path) == nil {
			out = append(out, finding{"placed", p.path, "is in no layer, so no import rule holds for it: give it one in layers.go, and a row in ARCHITECTURE.md"})
		}
	}
	seen := map[string]bool{}
	for _, l := range table {
		for _, p := range l.packages {
			if !exists[p] {
				out = append(out, finding{"placed", p, fmt.Sprintf("is listed in layer %q and does not exist: take it out, so that the table stays true", l.name)})
			}
			if seen[p] {
				out = append(out, finding{"placed", p, "is listed twice: give it one layer"})
			}
			seen[p] = true
		}
		for _, b := range l.std {
			for _, p := range b.except {
				if !slices.Contains(l.packages, p) {
					out = append(out, finding{"placed", p, fmt.Sprintf("is an exception in layer %q and not of it: take it out", l.name)})
				}
			}
		}
	}
	return out
}

// imports: what is imported is allowed by the layer. Tests may import more, since
// they compose what they test, but nobody else may import a test helper, and
// nobody the command.
func imports(r *repo, table []layer) (out []finding) {
	for _, p := range r.packages {
		l := find(table, p.path)
		if l == nil {
			continue // placed tells
		}
		for _, f := range p.files {
			if f.test {
				continue
			}
			for imported, pos := range f.imports() {
				if of, ok := r.ours(imported); ok {
					if !l.may(table, of) {
						out = append(out, finding{"imports", r.at(f, pos), fmt.Sprintf("%s of layer %q imports %s: %s", p.path, l.name, of, l.why)})
					}
					continue
				}
				for _, b := range l.std {
					if b.hits(imported) && !slices.Contains(b.except, p.path) {
						out = append(out, finding{"imports", r.at(f, pos), fmt.Sprintf("%s of layer %q imports %s: %s", p.path, l.name, imported, b.why)})
					}
				}
			}
		}
	}
	return out
}
