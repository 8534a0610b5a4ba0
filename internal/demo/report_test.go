package demo

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"
)

// agentWith is a node whose agent says that its receive pool has so many free
// slots of 10.
func agentWith(t *testing.T, free int) *node {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"pool": {"capacity": 10, "free": %d}}`, free)
	}))
	t.Cleanup(srv.Close)
	n := &node{name: "decode"}
	n.agentAddrs.HTTP = strings.TrimPrefix(srv.URL, "http://")
	return n
}

// TestReport: a slot that does not come back is a fault, and so is each failure
// but those that what was broken explains; a wrong answer is never explained.
func TestReport(t *testing.T) {
	at := func(s int) time.Time { return time.Unix(int64(s), 0) }
	prefill := answer{nodes: []string{"p1", "d"}}
	for _, c := range []struct {
		name    string
		results []result
		free    int
		excused int
		faults  []string // the beginning of each
	}{
		{"all well", []result{{prompt: 0}, {prompt: 1}}, 10, 0, nil},
		{"missing slot", []result{{prompt: 0}}, 9, 0, []string{"decode receive pool: 9 of 10 slots are free"}},
		{"failure", []result{{prompt: 3, start: at(1), end: at(2), answer: prefill, fault: "HTTP 502"}}, 10, 0, []string{"prompt 3: HTTP 502"}},
		{"in flight at what was killed", []result{{start: at(9), end: at(11), answer: prefill, fault: "HTTP 502"}}, 10, 1, nil},
		{"sent before it was ready again", []result{{start: at(12), end: at(13), answer: prefill, fault: "HTTP 502"}}, 10, 1, nil},
		{"sent afterwards", []result{{start: at(16), end: at(17), answer: prefill, fault: "HTTP 502"}}, 10, 0, []string{"prompt 0: HTTP 502"}},
		{"at another engine", []result{{start: at(9), end: at(11), answer: answer{nodes: []string{"p2", "d"}}, fault: "HTTP 502"}}, 10, 0, []string{"prompt 0: HTTP 502"}},
		{"wrong answer in flight", []result{{start: at(9), end: at(11), answer: prefill, wrong: true, fault: "token ids"}}, 10, 0, []string{"prompt 0: token ids"}},
		{"cut by the client", []result{{cut: true, fault: "cut"}}, 10, 1, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := &run{o: Options{Out: io.Discard}, results: c.results, start: time.Now(),
				outages: []outage{{what: "kill -9", engine: "p1", from: at(10), till: at(15)}},
				fleet:   &fleet{http: &http.Client{Timeout: 5 * time.Second}, nodes: []*node{agentWith(t, c.free)}}}
			defer d.fleet.http.CloseIdleConnections()
			ctx, cancel := context.WithCancel(t.Context())
			cancel() // slots have had their time to come back
			rep, err := d.report(ctx)
			if err != nil {
				t.Fatal(err)
			}
			if rep.Excused != c.excused || rep.Requests != len(c.results) || rep.Equal+rep.Failed+rep.Excused != rep.Requests {
				t.Errorf("%+v", rep)
			}
			if !slices.Equal(rep.Faults, c.faults) && (len(rep.Faults) > 0 || len(c.faults) > 0) {
				t.Errorf("faults %q, want %q", rep.Faults, c.faults)
			}
			if rep.OK() != (len(c.faults) == 0) {
				t.Errorf("OK is %v with %q", rep.OK(), rep.Faults)
			}
		})
	}
}

// TestDiffers: token ids, text and the reason of the end all count.
func TestDiffers(t *testing.T) {
	a := answer{tokens: []int{1, 2}, text: "ab", finish: "length"}
	for name, b := range map[string]answer{
		"token":  {tokens: []int{1, 3}, text: "ab", finish: "length"},
		"length": {tokens: []int{1}, text: "ab", finish: "length"},
		"text":   {tokens: []int{1, 2}, text: "a", finish: "length"},
		"finish": {tokens: []int{1, 2}, text: "ab", finish: "stop"},
	} {
		if a.differs(b) == "" {
			t.Errorf("another %s is no difference", name)
		}
	}
	if d := a.differs(a); d != "" {
		t.Errorf("an answer differs from itself: %s", d)
	}
	if (answer{}).differs(answer{}) == "" {
		t.Error("no token ids are no answer")
	}
}

// TestReadPrompts: a line that is none is named.
func TestReadPrompts(t *testing.T) {
	for text, want := range map[string]string{
		"\n{\"kind\":\"poem\"}\n":                          "line 2",
		"{\"kind\":\"chat\"}\nno JSON\n":                   "line 2",
		"{\"kind\":\"chat\",\"temprature\":1}\n":           "temprature",
		"{\"kind\":\"chat\"}" + strings.Repeat(" ", 1<<20): "too long",
	} {
		if _, err := readPrompts(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.30q: %v, want %q", text, err, want)
		}
	}
}
