package openai

import (
	"fmt"
	"strconv"

	"github.com/tidwall/gjson"
)

// Tokens is a list of token ids, kept as the text of a JSON array.
type Tokens struct {
	list string // without brackets
	N    int64  // how many
}

// ParseTokens reads an array of token ids: integers from 0.
func ParseTokens(v gjson.Result) (Tokens, error) {
	if !v.IsArray() {
		return Tokens{}, fmt.Errorf("token ids are %s, not a list", typeName(v))
	}
	if n, ok := compact(v.Raw); ok {
		return Tokens{list: v.Raw[1 : len(v.Raw)-1], N: n}, nil
	}
	list := make([]byte, 0, len(v.Raw))
	n, err := int64(0), error(nil)
	v.ForEach(func(_, e gjson.Result) bool {
		id, ok := integer(e)
		if !ok || id < 0 {
			err = fmt.Errorf("token id %d is %.40s; it must be an integer of at least 0", n, e.Raw)
			return false
		}
		if n > 0 {
			list = append(list, ',')
		}
		list = strconv.AppendInt(list, id, 10)
		n++
		return true
	})
	if err != nil {
		return Tokens{}, err
	}
	return Tokens{list: string(list), N: n}, nil
}

// compact counts the integers of an array as engines write it, without spaces:
// what Tokens would keep of it is its own text. Anything else it leaves to others.
func compact(array string) (n int64, ok bool) {
	if array == "[]" {
		return 0, true
	}
	digits, zero := 0, false
	for i := 1; i < len(array); i++ {
		switch c := array[i]; {
		case '0' <= c && c <= '9' && !zero && digits < 18: // which fit in 64 bits
			zero = digits == 0 && c == '0'
			digits++
		case digits > 0 && (c == ',' || c == ']' && i == len(array)-1):
			digits, zero = 0, false
			n++
		default:
			return 0, false
		}
	}
	return n, array[len(array)-1] == ']'
}

// with returns the ids and one more.
func (t Tokens) with(id int64) Tokens {
	list := t.list
	if t.N > 0 {
		list += ","
	}
	return Tokens{list: list + strconv.FormatInt(id, 10), N: t.N + 1}
}

// String returns the JSON array.
func (t Tokens) String() string { return "[" + t.list + "]" }

// ParseTokenized reads the answer of POST /tokenize: the ids, and the model's
// context length in tokens, 0 if it is not told.
func ParseTokenized(body []byte) (ids Tokens, contextLen int64, err error) {
	o, err := ParseObject(body)
	if err != nil {
		return Tokens{}, 0, err
	}
	if ids, err = ParseTokens(o.Get("tokens")); err != nil {
		return Tokens{}, 0, err
	}
	contextLen, _ = integer(o.Get("max_model_len"))
	return ids, contextLen, nil
}

// ParseModels reads the answer of GET /v1/models: the context length in tokens
// of each model that tells it.
func ParseModels(body []byte) (map[string]int64, error) {
	o, err := ParseObject(body)
	if err != nil {
		return nil, err
	}
	data := o.Get("data")
	if !data.IsArray() {
		return nil, fmt.Errorf("data is %s, not a list", typeName(data))
	}
	lens := map[string]int64{}
	data.ForEach(func(_, m gjson.Result) bool {
		if n, ok := integer(m.Get("max_model_len")); ok {
			lens[m.Get("id").Str] = n
		}
		return len(lens) < MaxFields
	})
	return lens, nil
}
