package metrics

import (
	"net/http"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/berthkv/berth/internal/proxy"
)

// ProxySource is what a proxy's metrics are made of.
type ProxySource interface{ Stats() proxy.Stats }

// Proxy returns the /metrics handler of a proxy.
func Proxy(s ProxySource) http.Handler { return handler(proxyCollector{s}) }

var (
	proxyInFlight   = desc("proxy_requests_in_flight", "Requests that are being served.")
	proxyRequests   = desc("proxy_requests_total", "Requests by outcome.", "outcome")
	proxyFailures   = desc("proxy_failures_total", "Requests that were not answered, by step and reason.", "step", "reason")
	proxyWhole      = desc("proxy_whole_total", "Requests sent whole to a decode engine, by the field that asked for it.", "field")
	proxyRecomputed = desc("proxy_recomputed_total", "Prompts that a decode engine computed because a leg failed, by step and reason.", "step", "reason")
	proxyNow        = desc("proxy_step_requests", "Requests in each step now.", "step")
	proxySeconds    = desc("proxy_step_seconds", "Time that requests spent in each step.", "step")
	proxyTTFT       = desc("proxy_first_token_seconds", "Time from a request's arrival to its first token.")
)

type proxyCollector struct{ s ProxySource }

func (proxyCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{proxyInFlight, proxyRequests, proxyFailures, proxyWhole, proxyRecomputed, proxyNow, proxySeconds, proxyTTFT} {
		ch <- d
	}
}

func (c proxyCollector) Collect(ch chan<- prometheus.Metric) {
	s := c.s.Stats()
	count := func(d *prometheus.Desc, v uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	ch <- prometheus.MustNewConstMetric(proxyInFlight, prometheus.GaugeValue, float64(s.InFlight))
	for k, v := range s.Requests {
		count(proxyRequests, v, string(k))
	}
	for k, v := range s.Failures {
		count(proxyFailures, v, string(k.Step), string(k.Code))
	}
	for k, v := range s.Whole {
		count(proxyWhole, v, k)
	}
	for k, v := range s.Recomputed {
		count(proxyRecomputed, v, string(k.Step), string(k.Code))
	}
	for k, v := range s.Now {
		ch <- prometheus.MustNewConstMetric(proxyNow, prometheus.GaugeValue, float64(v), string(k))
	}
	for k, h := range s.StepSeconds {
		ch <- histogram(proxySeconds, h.Counts[:], h.Sum, proxy.Bounds[:], string(k))
	}
	ch <- histogram(proxyTTFT, s.TTFT.Counts[:], s.TTFT.Sum, proxy.Bounds[:])
}
