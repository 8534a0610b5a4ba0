package openai

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"
)

// FuzzObject compares reading, editing and writing with encoding/json's.
func FuzzObject(f *testing.F) {
	for _, s := range []string{
		`{}`, `{"prompt":"x","max_tokens":5}`, `{"a":1.50e+3,"b":[1,{"c":"d"}]}`, `{"kv_transfer\u005fparams":1}`,
		`{"\ud800":1}`, ` { "a" : "b\"}" } `, `{"a":1,"a":2}`, `{"":null}`, `[1]`, `{"a":{"b":{"c":[[[[]]]]}}}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, doc []byte) {
		o, err := ParseObject(doc)
		if err != nil {
			return
		}
		if got, want := decode(t, o.Bytes()), decode(t, doc); !reflect.DeepEqual(got, want) {
			t.Fatalf("%q came out as %q", doc, o.Bytes())
		}
		o.Delete("kv_transfer_params")
		o.Set("max_tokens", "1")
		o.Set("prompt", `[1,2]`)
		want := decode(t, doc)
		delete(want, "kv_transfer_params")
		want["max_tokens"] = json.Number("1")
		want["prompt"] = []any{json.Number("1"), json.Number("2")}
		if got := decode(t, o.Bytes()); !reflect.DeepEqual(got, want) {
			t.Fatalf("%q was edited to %q", doc, o.Bytes())
		}
	})
}

func decode(t *testing.T, doc []byte) map[string]any {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(doc))
	d.UseNumber()
	var v map[string]any
	if err := d.Decode(&v); err != nil {
		t.Fatalf("%q: %v", doc, err)
	}
	return v
}

// FuzzRequest: whatever is accepted makes valid requests for the engines, and
// none of them carries a client's kv_transfer_params.
func FuzzRequest(f *testing.F) {
	f.Add(true, []byte(`{"messages":[{"role":"user","content":"x"}],"max_tokens":4}`))
	f.Add(false, []byte(`{"prompt":"x","stop":["a"],"stream":true,"kv_transfer_params":{}}`))
	f.Add(false, []byte(`{"prompt":[1,2,3],"n":2,"vllm_xargs":{"kv_transfer_params":1}}`))
	f.Fuzz(func(t *testing.T, chat bool, body []byte) {
		kind := Completions
		if chat {
			kind = Chat
		}
		r, bad := ParseRequest(kind, body)
		if bad != nil {
			if !json.Valid(bad.Body()) {
				t.Fatalf("%q: the error is not JSON: %s", body, bad.Body())
			}
			return
		}
		for _, b := range [][]byte{r.WholeBody(), r.TokenizeBody()} {
			if b == nil {
				continue
			}
			if v := decode(t, b); v["kv_transfer_params"] != nil {
				t.Fatalf("%q became %q", body, b)
			}
		}
		spec := Spec{ReqID: "ours", Host: "h"}
		b := r.PrefillBody(Tokens{list: "1,2", N: 2}, &spec)
		if v := decode(t, b); !reflect.DeepEqual(v["kv_transfer_params"], decode(t, []byte(spec.prefillParams()))) {
			t.Fatalf("%q became %q", body, b)
		}
	})
}

func BenchmarkSpliceEvent(b *testing.B) {
	r, bad := ParseRequest(Chat, []byte(`{"messages":[{"role":"user","content":"x"}],"stream":true}`))
	if bad != nil {
		b.Fatal(bad)
	}
	first, err := ParseFirst([]byte(`{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"a","finish_reason":"length","token_ids":[1]}]}`))
	if err != nil {
		b.Fatal(err)
	}
	s := NewSplice(r, first, Tokens{list: "1", N: 1}, 0)
	event := []byte(`{"id":"cmpl-2","object":"text_completion","created":2,"model":"m","choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null,"stop_reason":null}]}`)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := s.Next(event); err != nil {
			b.Fatal(err)
		}
	}
}

// TestFieldTwice: wherever the two are, among few fields or many.
func TestFieldTwice(t *testing.T) {
	for _, n := range []int{2, 11, 12, 13, 14, 100} {
		for _, at := range [][2]int{{0, 1}, {0, n - 1}, {n - 2, n - 1}} {
			fields := make([]string, n)
			for i := range fields {
				fields[i] = fmt.Sprintf(`"f%d":1`, i)
			}
			if _, err := ParseObject([]byte("{" + strings.Join(fields, ",") + "}")); err != nil {
				t.Fatal(err)
			}
			fields[at[1]] = fields[at[0]]
			if _, err := ParseObject([]byte("{" + strings.Join(fields, ",") + "}")); err == nil || !strings.Contains(err.Error(), "given twice") {
				t.Errorf("%d fields, %v are the same: %v", n, at, err)
			}
		}
	}
}
