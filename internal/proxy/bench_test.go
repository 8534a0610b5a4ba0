package proxy

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
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
