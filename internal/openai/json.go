package openai

import (
	"fmt"
	"strconv"
	"unicode/utf8"

	"github.com/tidwall/gjson"
)

const (
	// MaxDepth is how deep the arrays and objects of a document may nest.
	MaxDepth = 128
	// MaxFields is how many fields an object that is edited may have.
	MaxFields = 1024
)

// Object is a JSON object as the ordered list of its fields, each with its raw
// value. Reading, setting and deleting touch one field and leave every other as
// it was. Not safe for concurrent use.
type Object struct{ fields []field }

type field struct {
	name string // unescaped
	key  string // as written, with its quotes
	raw  string
}

// ParseObject reads a document that must be one JSON object. It errs on invalid
// JSON or UTF-8, anything but an object, nesting beyond MaxDepth, more than
// MaxFields fields, and a field named twice (readers differ on which one counts,
// so an edit could be undone by the other).
func ParseObject(doc []byte) (*Object, error) {
	if !utf8.Valid(doc) {
		return nil, fmt.Errorf("not valid UTF-8")
	}
	if d := depth(doc); d > MaxDepth {
		return nil, fmt.Errorf("nested %d deep; at most %d are accepted", d, MaxDepth)
	}
	if !gjson.ValidBytes(doc) {
		return nil, fmt.Errorf("not valid JSON")
	}
	return objectOf(gjson.ParseBytes(doc))
}

// objectOf reads a value of a document that has been checked.
func objectOf(v gjson.Result) (*Object, error) {
	if !v.IsObject() {
		return nil, fmt.Errorf("not a JSON object but %s", typeName(v))
	}
	const few = 12 // are looked through, and are what events have; more are hashed
	o := &Object{fields: make([]field, 0, few)}
	var seen map[string]bool
	var err error
	v.ForEach(func(key, val gjson.Result) bool {
		if len(o.fields) == few {
			seen = make(map[string]bool)
			for _, f := range o.fields {
				seen[f.name] = true
			}
		}
		switch {
		case seen[key.Str] || seen == nil && o.find(key.Str) >= 0:
			err = fmt.Errorf("field %q is given twice", key.Str)
		case len(o.fields) == MaxFields:
			err = fmt.Errorf("more than %d fields", MaxFields)
		}
		if seen != nil {
			seen[key.Str] = true
		}
		o.fields = append(o.fields, field{key.Str, key.Raw, val.Raw})
		return err == nil
	})
	if err != nil {
		return nil, err
	}
	return o, nil
}

// depth is how deep brackets and braces nest outside strings, found without
// recursion, so that a document of brackets alone costs no stack.
func depth(doc []byte) int {
	deepest, now, inString := 0, 0, false
	for i := 0; i < len(doc); i++ {
		switch c := doc[i]; {
		case inString:
			if c == '\\' {
				i++
			} else if c == '"' {
				inString = false
			}
		case c == '"':
			inString = true
		case c == '{' || c == '[':
			now++
			deepest = max(deepest, now)
		case c == '}' || c == ']':
			now--
		}
	}
	return deepest
}

func (o *Object) find(name string) int {
	for i := range o.fields {
		if o.fields[i].name == name {
			return i
		}
	}
	return -1
}

// Get returns a field's value; one that is missing does not Exist.
func (o *Object) Get(name string) gjson.Result {
	if i := o.find(name); i >= 0 {
		return gjson.Parse(o.fields[i].raw)
	}
	return gjson.Result{}
}

// given reports whether a field is there and not null.
func (o *Object) given(name string) bool {
	i := o.find(name)
	return i >= 0 && o.fields[i].raw != "null"
}

// Set gives a field a raw JSON value, in its place or at the end.
func (o *Object) Set(name, raw string) {
	if i := o.find(name); i >= 0 {
		o.fields[i].raw = raw
		return
	}
	o.fields = append(o.fields, field{name, quote(name), raw})
}

// rename replaces a field by one of another name, in its place.
func (o *Object) rename(name, to, raw string) {
	o.Delete(to)
	if i := o.find(name); i >= 0 {
		o.fields[i] = field{to, quote(to), raw}
		return
	}
	o.Set(to, raw)
}

// Delete removes fields; one that is missing is no error.
func (o *Object) Delete(names ...string) {
	for _, n := range names {
		if i := o.find(n); i >= 0 {
			o.fields = append(o.fields[:i], o.fields[i+1:]...)
		}
	}
}

// String returns the document.
func (o *Object) String() string { return string(o.Bytes()) }

// Bytes returns the document, newly allocated.
func (o *Object) Bytes() []byte { return o.append(make([]byte, 0, o.size())) }

// size is at least the length of the document.
func (o *Object) size() int {
	n := 2
	for _, f := range o.fields {
		n += len(f.key) + len(f.raw) + 2
	}
	return n
}

func (o *Object) append(b []byte) []byte {
	b = append(b, '{')
	for i, f := range o.fields {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, f.key...)
		b = append(b, ':')
		b = append(b, f.raw...)
	}
	return append(b, '}')
}

func (o *Object) clone() *Object {
	return &Object{fields: append([]field(nil), o.fields...)}
}

// quote returns s as a JSON string.
func quote(s string) string {
	var short [64]byte // most are
	return string(gjson.AppendJSONString(short[:0], s))
}

// integer reads a JSON number that is written as an integer and fits in 64
// bits; it never goes through a float.
func integer(v gjson.Result) (int64, bool) {
	if v.Type != gjson.Number {
		return 0, false
	}
	n, err := strconv.ParseInt(v.Raw, 10, 64)
	return n, err == nil
}

func typeName(v gjson.Result) string {
	switch {
	case !v.Exists():
		return "missing"
	case v.IsObject():
		return "an object"
	case v.IsArray():
		return "an array"
	case v.IsBool():
		return "a boolean"
	case v.Type == gjson.Null:
		return "null"
	case v.Type == gjson.Number:
		return "a number"
	}
	return "a string"
}
