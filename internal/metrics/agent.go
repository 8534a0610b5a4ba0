// Package metrics turns snapshots into Prometheus' form. The names, units and
// labels are a contract: docs/metrics.md, which a test compares with what is
// exported.
package metrics

import (
	"context"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/berthkv/berth/internal/node"
)

// AgentSource is what an agent's metrics are made of.
type AgentSource interface {
	Stats() *node.Stats
	Status(context.Context) (node.Status, error)
}

// scrapeTimeout bounds how long a scrape waits for the loop.
const scrapeTimeout = 5 * time.Second

// Agent returns the /metrics handler of an agent.
func Agent(s AgentSource) http.Handler { return handler(agentCollector{s}) }

func handler(c prometheus.Collector) http.Handler {
	r := prometheus.NewRegistry()
	r.MustRegister(c, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return promhttp.HandlerFor(r, promhttp.HandlerOpts{MaxRequestsInFlight: 4, Timeout: 2 * scrapeTimeout})
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("berth_"+name, help, labels, nil)
}

var (
	slots         = desc("slots", "Slots of the receive pool by state; their sum is the capacity.", "state")
	stagingSlots  = desc("staging_slots", "Slots of the staging pool by state; their sum is the capacity.", "state")
	waiting       = desc("waiting_requests", "Requests that wait for admission.")
	oldestWaiting = desc("oldest_waiting_seconds", "Age of the request that has waited longest, by owner; only owners that have one.", "owner")
	sessions      = desc("sessions", "Peers with a live lease.")
	ready         = desc("ready", "1 when /ready answers 200.")
	mapped        = desc("mapped_bytes", "Bytes of peers' staging pools that are mapped here; they count in the resident set.")
	admissions    = desc("admissions_total", "Requests at their first message by result: admitted, waited (counted again when admitted), or the refusal's code.", "result")
	endings       = desc("endings_total", "Requests that ended, by side, ending and reason.", "side", "ending", "reason")
	events        = desc("events_total", "What happened to peers and memory, by side and kind.", "side", "kind")
	eventSlots    = desc("event_slots_total", "Slots or chunks that those events concerned.", "side", "kind")
	bytes         = desc("transferred_bytes_total", "Bytes of requests that became ready, by side and link.", "side", "link")
	late          = desc("late_frames_total", "Frames for slots that were not open under their generation; discarded.", "link")
	messages      = desc("messages_total", "Control messages by direction.", "direction")
	messageBytes  = desc("message_bytes_total", "Bytes of control messages by direction.", "direction")
	suppressed    = desc("log_lines_suppressed_total", "Log lines left out by the rate limit, by kind.", "kind")
	notifyFailed  = desc("notify_failures_total", "Words for the proxy that could not be sent.")
	steps         = desc("steps_total", "Events that the loop has stepped.")
	wakeups       = desc("wakeups_total", "Times that the loop has woken to events.")
	admissionWait = desc("admission_wait_seconds", "Time from begin to admission, by side.", "side")
	transfer      = desc("transfer_seconds", "Time from begin to ready as the sender sees it, by link.", "link")
)

type agentCollector struct{ s AgentSource }

func (agentCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{slots, stagingSlots, waiting, oldestWaiting, sessions, ready, mapped, admissions, endings, events,
		eventSlots, bytes, late, messages, messageBytes, suppressed, notifyFailed, steps, wakeups, admissionWait, transfer} {
		ch <- d
	}
}

func (c agentCollector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	count := func(d *prometheus.Desc, v uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
	defer cancel()
	if s, err := c.s.Status(ctx); err == nil {
		collectStatus(s, gauge)
	}
	s := c.s.Stats().Snapshot()
	for k, v := range s.Admissions {
		count(admissions, v, k)
	}
	for k, v := range s.Endings {
		count(endings, v, k[0], k[1], k[2])
	}
	for k, v := range s.Events {
		count(events, v, k[0], k[1])
	}
	for k, v := range s.Slots {
		count(eventSlots, v, k[0], k[1])
	}
	for k, v := range s.Bytes {
		count(bytes, v, k[0], k[1])
	}
	for d, m := range map[*prometheus.Desc]map[string]uint64{late: s.Late, messages: s.Messages, messageBytes: s.MsgBytes, suppressed: s.Suppressed} {
		for k, v := range m {
			count(d, v, k)
		}
	}
	count(notifyFailed, s.NotifyFail)
	count(steps, s.Steps)
	count(wakeups, s.Batches)
	for d, m := range map[*prometheus.Desc]map[string]*node.Histogram{admissionWait: s.Admission, transfer: s.Transfer} {
		for k, h := range m {
			ch <- histogram(d, h.Counts, h.Sum, node.Bounds, k)
		}
	}
}

func collectStatus(s node.Status, gauge func(*prometheus.Desc, float64, ...string)) {
	if p := s.Pool; p != nil {
		for state, n := range map[string]int{"free": p.Free, "reserved": p.Reserved, "granted": p.Granted, "committed": p.Committed,
			"claimed": p.Claimed, "quarantined": p.Quarantined} {
			gauge(slots, float64(n), state)
		}
	}
	if p := s.Staging; p != nil {
		for state, n := range map[string]int{"free": p.Free, "staged": p.Staged, "writing": p.Writing, "quarantined": p.Quarantined} {
			gauge(stagingSlots, float64(n), state)
		}
	}
	gauge(waiting, float64(s.Waiting))
	gauge(sessions, float64(s.Sessions))
	gauge(mapped, float64(s.MappedBytes))
	isReady := 0.0
	if s.Ready {
		isReady = 1
	}
	gauge(ready, isReady)
	oldest := map[string]float64{}
	for _, r := range s.Requests {
		if r.State == "waiting" {
			oldest[r.Owner] = max(oldest[r.Owner], r.AgeSeconds)
		}
	}
	for owner, age := range oldest {
		gauge(oldestWaiting, age, owner)
	}
}

// histogram makes Prometheus' cumulative buckets; counts has one more entry
// than bounds.
func histogram(d *prometheus.Desc, counts []uint64, sum float64, bounds []float64, labels ...string) prometheus.Metric {
	buckets := make(map[float64]uint64, len(bounds))
	var n uint64
	for i, b := range bounds {
		n += counts[i]
		buckets[b] = n
	}
	n += counts[len(bounds)]
	return prometheus.MustNewConstHistogram(d, n, sum, buckets, labels...)
}
