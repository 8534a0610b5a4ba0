package admin

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/url"
	"testing"
)

// FuzzRequest is any request to an operator's port: it is answered, with what
// its path promises or an error, whatever the method and query are.
func FuzzRequest(f *testing.F) {
	for _, s := range []string{"/health", "/ready?x=%00", "/v1/status?verbose=1;a", "/metrics", "//health/../ready", "/v1/status/", "/%2e%2e/metrics"} {
		f.Add("GET", s, byte(0))
	}
	f.Add("POST", "/ready", byte(1))
	f.Add("HEAD", "/v1/status", byte(2))
	f.Fuzz(func(t *testing.T, method, target string, state byte) {
		u, err := url.ParseRequestURI(target)
		if err != nil || method == "" {
			return
		}
		var notReady string
		var fails error
		switch state % 3 {
		case 1:
			notReady = "draining"
		case 2:
			fails = errors.New("the loop is gone")
		}
		h := Handler(Source{
			Status:  func(context.Context) (any, string, error) { return map[string]int{"a": 1}, notReady, fails },
			Metrics: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}),
		})
		w := httptest.NewRecorder()
		h.ServeHTTP(w, (&http.Request{Method: method, URL: u, RequestURI: target, Host: "h", Header: http.Header{}}).WithContext(t.Context()))
		get := method == http.MethodGet || method == http.MethodHead
		switch {
		case w.Code == http.StatusOK && get:
			if u.Path == "/ready" && state%3 != 0 {
				t.Errorf("ready, though %q, %v", notReady, fails)
			}
			if u.Path == "/v1/status" && method == http.MethodGet && !json.Valid(w.Body.Bytes()) {
				t.Errorf("the status is not JSON: %q", w.Body)
			}
		case w.Code == http.StatusServiceUnavailable && get && state%3 != 0:
		case w.Code == http.StatusNotFound, w.Code == http.StatusMethodNotAllowed, w.Code == http.StatusTemporaryRedirect, w.Code == http.StatusMovedPermanently,
			w.Code == http.StatusBadRequest:
		default:
			t.Errorf("%s %s, state %d: %d %s", method, target, state, w.Code, w.Body)
		}
	})
}
