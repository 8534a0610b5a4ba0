package config

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"sort"
	"strings"

	"github.com/agnivade/levenshtein"
	"go.yaml.in/yaml/v3"
)

// Sources are where an agent's configuration comes from, the later ones
// winning.
type Sources struct {
	File  string            // path of a YAML file; "" for none
	Env   []string          // "NAME=value", as os.Environ gives them
	Flags map[string]string // option → value
}

// maxFile bounds a configuration file; theFile is its name in faults, which no
// option has.
const (
	maxFile = 1 << 20
	theFile = "config file"
)

// Load reads, fills defaults and checks. The error joins every fault found,
// each beginning with its option's name.
func Load(s Sources) (*Agent, error) {
	l := newLoader()
	for _, o := range options {
		if o.def != "" {
			l.set(o, value{items: []string{o.def}}, "default")
		}
	}
	if s.File != "" {
		l.file(s.File)
	}
	l.env(s.Env)
	for name, v := range s.Flags {
		l.give(name, value{items: []string{v}}, "flags", "flag")
	}
	l.check()
	if len(l.faults) > 0 {
		return nil, errors.Join(l.faults...)
	}
	return l.agent, nil
}

type loader struct {
	agent   *Agent
	names   []string          // LMCache's
	aliases map[string]string // LMCache's
	given   map[string]bool   // options that some source named
	spelled map[spelling]written
	faults  []error
	faulty  map[string]bool // options that they are of
}

func newLoader() *loader {
	l := &loader{agent: &Agent{from: map[string]string{}}, given: map[string]bool{}, spelled: map[spelling]written{}, faulty: map[string]bool{}}
	l.names, l.aliases = lmcacheNames()
	return l
}

// check finds what contradicts or is missing. What was wrong in itself when it
// was read has been said, and of a file that cannot be read nothing is missing.
func (l *loader) check() {
	read := maps.Clone(l.faulty)
	if read[theFile] {
		return
	}
	l.agent.check(l.given, func(option, format string, args ...any) {
		if !read[option] {
			l.fault(option, format, args...)
		}
	})
}

// A source may write an option under its name and under an old one, but not
// with two values: neither would be the later.
type (
	spelling struct{ source, option string }
	written  struct{ name, value string }
)

func (l *loader) fault(name, format string, args ...any) {
	l.faulty[name] = true
	l.faults = append(l.faults, fmt.Errorf("%s %s", name, fmt.Sprintf(format, args...)))
}

func (l *loader) note(format string, args ...any) {
	l.agent.Notes = append(l.agent.Notes, fmt.Sprintf(format, args...))
}

func (l *loader) set(o option, v value, from string) {
	if err := o.set(l.agent, v); err != nil {
		l.fault(o.name, "(%s) %v", from, err)
		return
	}
	l.agent.from[o.name] = from
}

// give takes a value under a name that somebody wrote in a source; from says
// where exactly.
func (l *loader) give(name string, v value, source, from string) {
	real := name
	if now, ok := l.aliases[name]; ok {
		real = now
		l.note("%s (%s) is an old name of %s", name, from, now)
	}
	i := slices.IndexFunc(options, func(o option) bool { return o.name == real })
	switch {
	case i >= 0:
		at, now := spelling{source, real}, written{name, strings.Join(v.items, ", ")}
		if old, ok := l.spelled[at]; ok && old.value != now.value {
			l.fault(old.name, "is %s and %s (%s) is %s: they are one option", old.value, name, from, now.value)
		}
		l.spelled[at] = now
		l.given[real] = true
		l.set(options[i], v, from)
	case slices.Contains(l.names, real):
		l.note("%s (%s) is an option of LMCache that means nothing here", name, from)
	default:
		l.fault(name, "(%s) is not known; the nearest name is %s", from, l.nearest(name))
	}
}

func (l *loader) nearest(name string) string {
	best, bestD := "", 1<<30
	for _, o := range options {
		if d := levenshtein.ComputeDistance(name, o.name); d < bestD {
			best, bestD = o.name, d
		}
	}
	for _, n := range l.names {
		if d := levenshtein.ComputeDistance(name, n); d < bestD {
			best, bestD = n, d
		}
	}
	return best
}

func (l *loader) file(path string) {
	f, err := os.Stat(path)
	if err == nil && f.Size() > maxFile {
		err = fmt.Errorf("%s has %d bytes, at most %d are read", path, f.Size(), maxFile)
	}
	var b []byte
	if err == nil {
		b, err = os.ReadFile(path)
	}
	if err != nil {
		l.fault(theFile, "%v", err)
		return
	}
	l.yaml(b, path)
}

func (l *loader) yaml(b []byte, path string) {
	var doc yaml.Node
	if err := yaml.Unmarshal(b, &doc); err != nil {
		l.fault(theFile, "%s: %v", path, err)
		return
	}
	if len(doc.Content) == 0 {
		return // empty file
	}
	root := doc.Content[0]
	if root.Kind != yaml.MappingNode {
		l.fault(theFile, "%s: a mapping of options is wanted", path)
		return
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(root.Content); i += 2 {
		k, n := root.Content[i], root.Content[i+1]
		from := fmt.Sprintf("%s:%d", path, k.Line)
		if seen[k.Value] {
			l.fault(k.Value, "(%s) is there twice", from)
			continue
		}
		seen[k.Value] = true
		v, ok := nodeValue(n)
		switch {
		case ok:
			l.give(k.Value, v, path, from)
		case n.Tag == "!!null": // not given
		case slices.Contains(l.names, k.Value) && !isOption(k.Value):
			l.note("%s (%s) is an option of LMCache that means nothing here", k.Value, from)
		default:
			l.fault(k.Value, "(%s) is neither a value nor a list of values", from)
		}
	}
}

func isOption(name string) bool {
	return slices.ContainsFunc(options, func(o option) bool { return o.name == name })
}

// nodeValue reads a scalar or a list of scalars.
func nodeValue(n *yaml.Node) (value, bool) {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	switch n.Kind {
	case yaml.ScalarNode:
		v := value{items: []string{n.Value}, plain: n.Style == 0}
		if n.Tag == "!!float" && strings.TrimPrefix(strings.ToLower(n.Value), "+") == ".inf" {
			v.items[0] = "inf"
		}
		return v, n.Tag != "!!null"
	case yaml.SequenceNode:
		v := value{isList: true}
		for _, c := range n.Content {
			if c.Kind != yaml.ScalarNode {
				return value{}, false
			}
			v.items = append(v.items, c.Value)
		}
		return v, true
	}
	return value{}, false
}

// env reads BERTH_<OPTION>, and LMCACHE_<OPTION> for LMCache's own names. Other
// LMCACHE_ variables are LMCache's business.
func (l *loader) env(env []string) {
	env = slices.Clone(env)
	sort.Strings(env) // BERTH_ before LMCACHE_
	for i := len(env) - 1; i >= 0; i-- {
		name, v, ok := strings.Cut(env[i], "=")
		if !ok {
			continue
		}
		v = unquote(v)
		if opt, ok := strings.CutPrefix(name, "BERTH_"); ok && opt != "CONFIG_FILE" && !isServiceLink(name, v) {
			l.give(strings.ToLower(opt), value{items: []string{v}}, "BERTH_", name)
		}
		opt, ok := strings.CutPrefix(name, "LMCACHE_")
		if !ok {
			continue
		}
		opt = strings.ToLower(opt)
		if _, alias := l.aliases[opt]; alias || slices.Contains(l.names, opt) {
			l.give(opt, value{items: []string{v}}, "LMCACHE_", name)
		}
	}
}

// serviceLink is a variable that Kubernetes gives to every container for a
// service, say one named berth or berth-proxy: no option of ours.
var serviceLink = regexp.MustCompile(`_SERVICE_(HOST|PORT(_[A-Z0-9_]+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$`)

func isServiceLink(name, v string) bool {
	return serviceLink.MatchString(name) || strings.HasSuffix(name, "_PORT") && strings.Contains(v, "://")
}

func unquote(s string) string {
	if len(s) >= 2 && (s[0] == '"' || s[0] == '\'') && s[len(s)-1] == s[0] {
		return s[1 : len(s)-1]
	}
	return s
}

// FileFromEnv is the file that BERTH_CONFIG_FILE, or else LMCACHE_CONFIG_FILE,
// names.
func FileFromEnv() string {
	if f := os.Getenv("BERTH_CONFIG_FILE"); f != "" {
		return f
	}
	return os.Getenv("LMCACHE_CONFIG_FILE")
}

// Flag is an option as a command-line flag.
type Flag struct{ Name, Doc, Default string }

// Flags lists every option.
func Flags() []Flag {
	out := make([]Flag, len(options))
	for i, o := range options {
		out[i] = Flag{o.name, o.doc, o.def}
	}
	return out
}

// Row is one line of `berth config`.
type Row struct{ Name, Value, From, Doc string }

// Rows returns every option's effective value and where it came from.
func (a *Agent) Rows() []Row {
	out := make([]Row, len(options))
	for i, o := range options {
		from := a.from[o.name]
		if from == "" {
			from = "unset"
		}
		out[i] = Row{o.name, o.show(a), from, o.doc}
	}
	return out
}
