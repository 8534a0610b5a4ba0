package metrics

import (
	"context"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/node"
	"github.com/berthkv/berth/internal/proxy"
)

type agentSource struct{ stats *node.Stats }

func (a agentSource) Stats() *node.Stats { return a.stats }
func (a agentSource) Status(context.Context) (node.Status, error) {
	return node.Status{
		Ready:   true,
		Pool:    &node.PoolStatus{Capacity: 10, Free: 4, Committed: 6},
		Staging: &node.StagingStatus{Capacity: 5, Free: 5},
		Waiting: 2,
		Requests: []node.RequestStatus{
			{Owner: "p1", State: "waiting", AgeSeconds: 3}, {Owner: "p1", State: "waiting", AgeSeconds: 1}, {Owner: "p2", State: "ready", AgeSeconds: 9},
		},
	}, nil
}

type proxySource struct{}

func (proxySource) Stats() proxy.Stats {
	return proxy.Stats{
		InFlight: 3, Requests: map[proxy.Outcome]uint64{proxy.Answered: 7}, Failures: map[proxy.Failure]uint64{{Step: proxy.StepDecode, Code: fault.PeerLost}: 1},
		Whole: map[string]uint64{"n": 1}, Recomputed: map[proxy.Failure]uint64{{Step: proxy.StepTransfer, Code: fault.Deadline}: 1},
		Now: map[proxy.Step]int{proxy.StepPrefill: 2}, StepSeconds: map[proxy.Step]proxy.Histogram{proxy.StepPrefill: {}},
	}
}

func scrape(t *testing.T, h http.Handler) string {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if w.Code != http.StatusOK {
		t.Fatalf("%d: %s", w.Code, w.Body)
	}
	return w.Body.String()
}

func TestAgent(t *testing.T) {
	got := scrape(t, Agent(agentSource{node.NewStats()}))
	for _, want := range []string{
		`berth_slots{state="free"} 4`, `berth_slots{state="committed"} 6`, `berth_staging_slots{state="free"} 5`, `berth_waiting_requests 2`,
		`berth_oldest_waiting_seconds{owner="p1"} 3`, `berth_ready 1`, `berth_notify_failures_total 0`,
	} {
		if !strings.Contains(got, want+"\n") {
			t.Errorf("%s is missing in\n%s", want, got)
		}
	}
	if strings.Contains(got, `owner="p2"`) {
		t.Error("an owner without a waiting request has a waiting time")
	}
}

func TestProxy(t *testing.T) {
	got := scrape(t, Proxy(proxySource{}))
	for _, want := range []string{
		`berth_proxy_requests_in_flight 3`, `berth_proxy_requests_total{outcome="answered"} 7`,
		`berth_proxy_failures_total{reason="peer_lost",step="decode"} 1`, `berth_proxy_whole_total{field="n"} 1`,
		`berth_proxy_recomputed_total{reason="deadline",step="transfer"} 1`, `berth_proxy_step_requests{step="prefill"} 2`,
		`berth_proxy_step_seconds_count{step="prefill"} 0`, `berth_proxy_first_token_seconds_count 0`,
	} {
		if !strings.Contains(got, want+"\n") {
			t.Errorf("%s is missing in\n%s", want, got)
		}
	}
}

// The contract: docs/metrics.md names exactly what is exported, and the alert
// rules use nothing else.
func TestDocs(t *testing.T) {
	doc, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	var documented []string
	for _, m := range regexp.MustCompile(`(?m)^\| (berth_\w+) \|`).FindAllStringSubmatch(string(doc), -1) {
		documented = append(documented, m[1])
	}
	var exported []string
	ch := make(chan *prometheus.Desc, 100)
	agentCollector{}.Describe(ch)
	proxyCollector{}.Describe(ch)
	close(ch)
	for d := range ch {
		exported = append(exported, regexp.MustCompile(`fqName: "(\w+)"`).FindStringSubmatch(d.String())[1])
	}
	slices.Sort(documented)
	slices.Sort(exported)
	if !slices.Equal(documented, exported) {
		t.Errorf("docs/metrics.md has\n%q\nexported are\n%q", documented, exported)
	}
	for _, name := range regexp.MustCompile(`berth_\w+`).FindAllString(string(doc), -1) {
		if !slices.Contains(exported, name) {
			t.Errorf("%s in docs/metrics.md is not exported", name)
		}
	}
}
