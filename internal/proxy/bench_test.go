package proxy

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/tidwall/gjson"
)

// BenchmarkProxy is a request of 16 tokens through the proxy and two legs, beside
// the same one asked of an engine directly.
func BenchmarkProxy(b *testing.B) {
	f := newFleet(b, 1, 1, true, nil)
	single := newEngine(b)
	for _, c := range []struct{ name, url string }{{"direct", single.srv.URL}, {"proxied", f.srv.URL}} {
		for _, stream := range []bool{false, true} {
			b.Run(fmt.Sprintf("%s/stream=%v", c.name, stream), func(b *testing.B) {
				body := fmt.Sprintf(`{"prompt":"hello","max_tokens":16,"stream":%v}`, stream)
				b.ReportAllocs()
				for b.Loop() {
					resp, err := f.http.Post(c.url+"/v1/completions", jsonType, strings.NewReader(body))
					if err != nil {
						b.Fatal(err)
					}
					if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != http.StatusOK {
						b.Fatal(resp.Status, err)
					}
					resp.Body.Close()
				}
			})
		}
	}
	single.srv.CloseClientConnections()
}

// BenchmarkStream is one event of the decode engine's answer on its way to the
// client, in a stream of many that come at once.
func BenchmarkStream(b *testing.B) {
	f := newFleet(b, 1, 1, true, nil)
	f.decodes[0].setHook(func(w http.ResponseWriter, r *http.Request, _ gjson.Result) bool {
		if r.URL.Path != "/v1/completions" {
			return false
		}
		w.Header().Set("Content-Type", eventType)
		event := []byte(`data: {"id":"cmpl-2","object":"text_completion","created":2,"model":"m","choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null,"stop_reason":null}]}` + "\n\n")
		for range b.N {
			w.Write(event)
			w.(http.Flusher).Flush()
		}
		io.WriteString(w, "data: [DONE]\n\n")
		return true
	})
	b.ReportAllocs()
	b.ResetTimer()
	resp, err := f.http.Post(f.srv.URL+"/v1/completions", jsonType, strings.NewReader(`{"prompt":"hello","max_tokens":4000,"stream":true}`))
	if err != nil {
		b.Fatal(err)
	}
	defer resp.Body.Close()
	if n, err := io.Copy(io.Discard, resp.Body); err != nil || n < int64(100*b.N) {
		b.Fatal(n, err)
	}
}
