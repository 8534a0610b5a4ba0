// Package config reads an agent's configuration: a YAML file, then the
// environment, then flags, under LMCache's names so that an operator's file
// works as it is. All faults are reported at once, each with its option's name.
package config

import (
	_ "embed"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/berthkv/berth/internal/kv"
)

// option is one row of the table that everything here works from.
type option struct {
	name string
	def  string // default as an operator would write it; "" means none
	doc  string
	set  func(*Agent, value) error
	show func(*Agent) string
}

// value is what a source gave: a scalar, or a list of them.
type value struct {
	items  []string
	isList bool
	plain  bool // a scalar without quotes in YAML
}

func (v value) scalar() (string, error) {
	if v.isList && len(v.items) != 1 {
		return "", fmt.Errorf("is a list of %d values; one is wanted", len(v.items))
	}
	return v.items[0], nil
}

// list splits "a,b,c" too, as LMCache does.
func (v value) list() []string {
	if v.isList {
		return v.items
	}
	var out []string
	for _, s := range strings.Split(v.items[0], ",") {
		if s = strings.TrimSpace(s); s != "" {
			out = append(out, s)
		}
	}
	return out
}

func text(name, def, doc string, at func(*Agent) *string, oneOf ...string) option {
	if len(oneOf) > 0 {
		doc += " (" + strings.Join(oneOf, ", ") + ")"
	}
	return option{name, def, doc,
		func(a *Agent, v value) error {
			s, err := v.scalar()
			if err != nil {
				return err
			}
			if len(oneOf) > 0 && !slices.Contains(oneOf, s) {
				return fmt.Errorf("is %q; it must be one of %s", s, strings.Join(oneOf, ", "))
			}
			*at(a) = s
			return nil
		},
		func(a *Agent) string { return *at(a) }}
}

// device reads cpu or cuda, with a number or not.
func device(name, def, doc string, at func(*Agent) *string) option {
	o := text(name, def, doc, at)
	o.set = func(a *Agent, v value) error {
		s, err := v.scalar()
		if err != nil {
			return err
		}
		kind, _, _ := strings.Cut(s, ":")
		if kind != "cpu" && kind != "cuda" {
			return fmt.Errorf("is %q; it must be one of cpu, cuda", s)
		}
		*at(a) = kind
		return nil
	}
	return o
}

func boolean(name, def, doc string, at func(*Agent) *bool) option {
	return option{name, def, doc,
		func(a *Agent, v value) error {
			s, err := v.scalar()
			if err != nil {
				return err
			}
			switch s = strings.ToLower(s); {
			case s == "true" || s == "1" || v.plain && (s == "yes" || s == "on"): // LMCache reads YAML 1.1
				*at(a) = true
			case s == "false" || s == "0" || v.plain && (s == "no" || s == "off"):
				*at(a) = false
			default:
				return fmt.Errorf("is %q; it must be true or false", s)
			}
			return nil
		},
		func(a *Agent) string { return strconv.FormatBool(*at(a)) }}
}

func integer(name, def, doc string, min, max int64, at func(*Agent) *int64) option {
	return option{name, def, doc,
		func(a *Agent, v value) error {
			s, err := v.scalar()
			if err != nil {
				return err
			}
			n, err := wholeNumber(s)
			if err != nil {
				return err
			}
			if n < min || n > max {
				return fmt.Errorf("is %d; it must be %d to %d", n, min, max)
			}
			*at(a) = n
			return nil
		},
		func(a *Agent) string { return strconv.FormatInt(*at(a), 10) }}
}

// wholeNumber also takes 1e9 and 1_000, which YAML and Python write.
func wholeNumber(s string) (int64, error) {
	if n, err := strconv.ParseInt(strings.ReplaceAll(s, "_", ""), 10, 64); err == nil {
		return n, nil
	}
	if f, err := strconv.ParseFloat(s, 64); err == nil && f == math.Trunc(f) && math.Abs(f) < 1<<53 {
		return int64(f), nil
	}
	return 0, fmt.Errorf("is %q; a whole number is wanted", s)
}

// seconds reads a float, also "inf".
func seconds(name, def, doc string, at func(*Agent) *kv.Duration) option {
	return option{name, def, doc,
		func(a *Agent, v value) error {
			s, err := v.scalar()
			if err != nil {
				return err
			}
			f, err := strconv.ParseFloat(s, 64)
			switch {
			case err != nil || math.IsNaN(f):
				return fmt.Errorf("is %q; seconds are wanted, or inf", s)
			case f <= 0:
				return fmt.Errorf("is %s; it must be above 0", s)
			case f < 1e-3: // what peers are told in milliseconds would not be what counts here
				return fmt.Errorf("is %s; it must be at least 0.001", s)
			case f > 1e9:
				*at(a) = kv.Forever
			default:
				*at(a) = kv.Duration(f * float64(kv.Second))
			}
			return nil
		},
		func(a *Agent) string {
			if *at(a) == kv.Forever {
				return "inf"
			}
			return strconv.FormatFloat(at(a).Seconds(), 'g', -1, 64)
		}}
}

func texts(name, def, doc string, at func(*Agent) *[]string, oneOf ...string) option {
	if len(oneOf) > 0 {
		doc += " (of " + strings.Join(oneOf, ", ") + ")"
	}
	return option{name, def, doc,
		func(a *Agent, v value) error {
			l := v.list()
			for i, s := range l {
				if len(oneOf) > 0 && !slices.Contains(oneOf, s) {
					return fmt.Errorf("has %q; it may have %s", s, strings.Join(oneOf, ", "))
				}
				if slices.Contains(l[:i], s) {
					return fmt.Errorf("has %q twice", s)
				}
			}
			*at(a) = l
			return nil
		},
		func(a *Agent) string { return "[" + strings.Join(*at(a), ", ") + "]" }}
}

func integers(name, def, doc string, min, max int64, at func(*Agent) *[]int64) option {
	return option{name, def, doc,
		func(a *Agent, v value) error {
			var out []int64
			for _, s := range v.list() {
				n, err := wholeNumber(s)
				if err != nil {
					return err
				}
				if n < min || n > max {
					return fmt.Errorf("has %d; it must be %d to %d", n, min, max)
				}
				out = append(out, n)
			}
			*at(a) = out
			return nil
		},
		func(a *Agent) string { return strings.ReplaceAll(fmt.Sprint(*at(a)), " ", ", ") }}
}

//go:embed lmcache_options.txt
var lmcacheOptions string

// lmcacheNames returns LMCache's option names and its aliases.
func lmcacheNames() (names []string, aliases map[string]string) {
	aliases = map[string]string{}
	for line := range strings.Lines(lmcacheOptions) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		if old, now, ok := strings.Cut(line, " = "); ok {
			aliases[old] = now
			continue
		}
		names = append(names, line)
	}
	return names, aliases
}
