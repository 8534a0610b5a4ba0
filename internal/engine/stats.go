package engine

import (
	"fmt"
	"io"
	"sync/atomic"
)

// counters only rise.
type counters struct {
	requests, failed, aborted, refused atomic.Uint64
	steps                              atomic.Uint64
	tokensComputed                     atomic.Uint64
	tokensLoaded                       atomic.Uint64
	tokensArrivedComputed              atomic.Uint64
	tokensGenerated                    atomic.Uint64
	sent, sendFailed                   atomic.Uint64
	batches, chunksSent, bytesSent     atomic.Uint64
	loaded, loadFailed                 atomic.Uint64
}

// Stats is a snapshot of what an engine has done and has at hand.
type Stats struct {
	Requests uint64 // accepted
	Failed   uint64 // answered with an error after that
	Aborted  uint64 // left by their client before the answer was complete
	Refused  uint64 // because a queue was full or the engine was closing
	Steps    uint64

	PromptTokensComputed uint64 // prompt positions whose KV was computed here
	PromptTokensLoaded   uint64 // and those whose KV arrived and was used
	// Prompt positions computed here although their KV had arrived: the last
	// one of a prompt that arrived whole, whose result begins the answer.
	ArrivedTokensComputed uint64
	TokensGenerated       uint64

	Sent, SendFailed uint64 // prompts sent to a receiver, by result
	Batches          uint64 // submitted
	ChunksSent       uint64
	BytesSent        uint64
	Loaded           uint64 // prompts whose KV, or a prefix of it, was used
	LoadFailed       uint64 // prompts whose KV should have arrived

	Waiting, Running int
}

// Stats returns a snapshot.
func (e *Engine) Stats() Stats {
	e.mu.Lock()
	waiting, running := e.mu.sched.Waiting(), e.mu.sched.Started()
	e.mu.Unlock()
	s := &e.stats
	return Stats{
		Requests: s.requests.Load(), Failed: s.failed.Load(), Aborted: s.aborted.Load(), Refused: s.refused.Load(), Steps: s.steps.Load(),
		PromptTokensComputed: s.tokensComputed.Load(), PromptTokensLoaded: s.tokensLoaded.Load(),
		ArrivedTokensComputed: s.tokensArrivedComputed.Load(), TokensGenerated: s.tokensGenerated.Load(),
		Sent: s.sent.Load(), SendFailed: s.sendFailed.Load(), Batches: s.batches.Load(), ChunksSent: s.chunksSent.Load(),
		BytesSent: s.bytesSent.Load(), Loaded: s.loaded.Load(), LoadFailed: s.loadFailed.Load(),
		Waiting: waiting, Running: running,
	}
}

// writeMetrics writes the counters in Prometheus' text form.
func (e *Engine) writeMetrics(w io.Writer) {
	s := e.Stats()
	for _, m := range []struct {
		name, kind, help string
		value            uint64
	}{
		{"requests_total", "counter", "Requests accepted.", s.Requests},
		{"requests_failed_total", "counter", "Accepted requests that were answered with an error.", s.Failed},
		{"requests_aborted_total", "counter", "Requests whose client left before the answer was complete.", s.Aborted},
		{"requests_refused_total", "counter", "Requests refused because a queue was full or the engine was closing.", s.Refused},
		{"requests_waiting", "gauge", "Requests that wait for their turn.", uint64(s.Waiting)},
		{"requests_running", "gauge", "Requests that are being begun, loaded, computed or sent.", uint64(s.Running)},
		{"steps_total", "counter", "Steps computed.", s.Steps},
		{"prompt_tokens_computed_total", "counter", "Prompt tokens whose KV was computed here.", s.PromptTokensComputed},
		{"prompt_tokens_loaded_total", "counter", "Prompt tokens whose KV arrived and was used.", s.PromptTokensLoaded},
		{"arrived_tokens_computed_total", "counter", "Prompt tokens that were computed here although their KV had arrived.", s.ArrivedTokensComputed},
		{"tokens_generated_total", "counter", "Tokens of answers.", s.TokensGenerated},
		{"prompts_sent_total", "counter", "Prompts whose KV was sent and is ready at the receiver.", s.Sent},
		{"prompts_send_failed_total", "counter", "Prompts whose KV was not sent, or not whole.", s.SendFailed},
		{"batches_sent_total", "counter", "Batches of chunks submitted.", s.Batches},
		{"chunks_sent_total", "counter", "Chunks submitted.", s.ChunksSent},
		{"bytes_sent_total", "counter", "Bytes of the chunks submitted.", s.BytesSent},
		{"prompts_loaded_total", "counter", "Prompts whose KV, or a prefix of it, arrived and was used.", s.Loaded},
		{"prompts_load_failed_total", "counter", "Prompts whose KV should have arrived and was not used.", s.LoadFailed},
	} {
		fmt.Fprintf(w, "# HELP berth_engine_%s %s\n# TYPE berth_engine_%s %s\nberth_engine_%s %d\n", m.name, m.help, m.name, m.kind, m.name, m.value)
	}
	if len(e.ranks) > 0 {
		fmt.Fprint(w, "# HELP berth_engine_agent_connected Whether the agent of a rank is connected.\n# TYPE berth_engine_agent_connected gauge\n")
	}
	for _, r := range e.ranks {
		up := 0
		if r.state() == nil {
			up = 1
		}
		fmt.Fprintf(w, "berth_engine_agent_connected{rank=\"%d\"} %d\n", r.number, up)
	}
}
