package openai

import (
	"strings"
	"testing"

	"github.com/tidwall/gjson"
)

// TestParseTokens: however a list is written, it is kept as engines write it; what
// is no token id is refused.
func TestParseTokens(t *testing.T) {
	for in, want := range map[string]string{
		"[]": "", "[ ]": "", "[0]": "0", "[1,20,0,300]": "1,20,0,300", "[1, 2]": "1,2", "[1 ,2\n]": "1,2", " [7]": "7",
		"[123456789012345678]": "123456789012345678", "[9223372036854775807,1]": "9223372036854775807,1",
		"[9223372036854775808]": "!", "[-1]": "!", "[-0]": "0", "[1.0]": "!", "[1e3]": "!", `["1"]`: "!", "[1,null]": "!", "[[1]]": "!", "{}": "!", "1": "!", "": "!",
	} {
		if in != "" && !gjson.Valid(in) {
			t.Fatalf("%q is no JSON", in)
		}
		got, err := ParseTokens(gjson.Parse(in))
		n := int64(strings.Count(want, ",") + 1)
		if want == "" {
			n = 0
		}
		if want == "!" {
			if err == nil {
				t.Errorf("%q is taken as %v", in, got)
			}
		} else if err != nil || got.list != want || got.N != n {
			t.Errorf("%q: %q, %d, %v; want %q, %d", in, got.list, got.N, err, want, n)
		}
	}
}

func BenchmarkParseTokenized(b *testing.B) {
	body := []byte(`{"count":1000,"max_model_len":4096,"tokens":[` + strings.Repeat("12345,", 999) + `6]}`)
	b.ReportAllocs()
	for b.Loop() {
		if _, _, err := ParseTokenized(body); err != nil {
			b.Fatal(err)
		}
	}
}
