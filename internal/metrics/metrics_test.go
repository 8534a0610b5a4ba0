package metrics

import (
	"context"
	"fmt"
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

// The contract: docs/metrics.md has exactly the names, types and labels that are
// exported, and the alert rules use nothing else.
func TestDocs(t *testing.T) {
	doc, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	// name(labels), both documented and exported; types by name.
	var documented, exported, names []string
	types := map[string]string{}
	for _, m := range regexp.MustCompile(`(?m)^\| (berth_\w+) \| (\w+) \| ([^|]*)\|`).FindAllStringSubmatch(string(doc), -1) {
		var labels []string
		for l := range strings.SplitSeq(strings.TrimSpace(m[3]), ";") {
			name, _, _ := strings.Cut(strings.TrimSpace(l), ":")
			labels = append(labels, name)
		}
		documented = append(documented, fmt.Sprintf("%s(%s)", m[1], strings.Join(labels, ",")))
		types[m[1]] = m[2]
	}
	ch := make(chan *prometheus.Desc, 100)
	agentCollector{}.Describe(ch)
	proxyCollector{}.Describe(ch)
	close(ch)
	for d := range ch {
		m := regexp.MustCompile(`fqName: "(\w+)".*variableLabels: \{(.*)\}\}`).FindStringSubmatch(d.String())
		exported, names = append(exported, fmt.Sprintf("%s(%s)", m[1], m[2])), append(names, m[1])
	}
	scraped := scrape(t, Agent(agentSource{node.NewStats()})) + scrape(t, Proxy(proxySource{}))
	for name, kind := range types {
		if m := regexp.MustCompile(`(?m)^# TYPE ` + name + ` (\w+)$`).FindStringSubmatch(scraped); m != nil && m[1] != kind {
			t.Errorf("docs/metrics.md says that %s is a %s; it is a %s", name, kind, m[1])
		}
		if (kind == "counter") != strings.HasSuffix(name, "_total") {
			t.Errorf("%s is a %s in docs/metrics.md", name, kind)
		}
	}
	slices.Sort(documented)
	slices.Sort(exported)
	if !slices.Equal(documented, exported) {
		t.Errorf("docs/metrics.md has\n%q\nexported are\n%q", documented, exported)
	}
	for _, name := range regexp.MustCompile(`berth_\w+`).FindAllString(string(doc), -1) {
		if base := strings.TrimSuffix(strings.TrimSuffix(strings.TrimSuffix(name, "_bucket"), "_sum"), "_count"); !slices.Contains(names, name) && !slices.Contains(names, base) {
			t.Errorf("%s in docs/metrics.md is not exported", name)
		}
	}
}
