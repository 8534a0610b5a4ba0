package proxy

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/tidwall/gjson"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/msg"
)

// TestScripts runs testdata/scripts/*.txt: what goes wrong where, and what the
// client, the engines and the receivers see of it.
//
//	fleet [policy=error] [eos=N] [impatient=STEP]   new engines, receivers, proxy
//	prefill|decode [at=PATH] [deliver] HOW          what that engine does (deliver:
//	                                                after its transfer has ended):
//	    ok | nothing | cut                          answer | never answer | cut the connection
//	    hold                                        answer, but its transfer never ends
//	    say | status=N                              answer with the input
//	    events [end|hang]                           stream the input, then cut the connection
//	                                                (end it in good order | fall silent)
//	watch HOW                                       what the receivers do:
//	    ok | refuse | reject | stall | failed reason=CODE
//	post PATH [quiet]                               a client's request (quiet: what
//	                                                engines see of it is a matter of time)
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata/scripts", func(t *testing.T, path string) {
		var f *fleet
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "fleet":
				f = newFleet(t, 1, 1, true, func(c *Config) {
					d.MaybeScanArgs(t, "policy", (*string)(&c.Policy))
					var step string
					d.MaybeScanArgs(t, "impatient", &step)
					for name, limit := range map[string]*time.Duration{
						"tokenize": &c.Timeouts.Tokenize, "watch": &c.Timeouts.Watch, "prefill": &c.Timeouts.Prefill,
						"transfer": &c.Timeouts.Transfer, "start": &c.Timeouts.DecodeStart, "idle": &c.Timeouts.DecodeIdle,
					} {
						if name == step {
							*limit = 50 * time.Millisecond
						}
					}
					d.MaybeScanArgs(t, "answer", &c.MaxAnswer)
					d.MaybeScanArgs(t, "event", &c.MaxEvent)
				})
				d.MaybeScanArgs(t, "eos", &f.prefills[0].eos)
				d.MaybeScanArgs(t, "eos", &f.decodes[0].eos)
			case "prefill":
				f.prefills[0].setHook(misbehave(t, f, d, true))
			case "decode":
				f.decodes[0].setHook(misbehave(t, f, d, false))
			case "watch":
				f.script(t, d)
			case "post":
				status, h, answer := f.post(d.CmdArgs[0].Key, d.Input, requestIDHeader, "r1")
				var b strings.Builder
				fmt.Fprintf(&b, "%d %s", status, h.Get("Content-Type"))
				if r := h.Get("Retry-After"); r != "" {
					fmt.Fprintf(&b, ", retry after %s", r)
				}
				fmt.Fprintf(&b, "\n%s", strings.ReplaceAll(answer, "\n\n", "\n"))
				if !strings.HasSuffix(answer, "\n") {
					b.WriteByte('\n')
				}
				return b.String() + f.report(!d.HasArg("quiet"))
			default:
				d.Fatalf(t, "unknown command %s", d.Cmd)
			}
			return ""
		})
	})
}

// report says what the engines were asked since the last report (if asked), how
// the watches ended, and what was counted.
func (f *fleet) report(asked bool) string {
	s := f.settled()
	var b strings.Builder
	b.WriteString("--")
	for _, e := range []struct {
		name string
		e    *fakeEngine
	}{{"prefill", f.prefills[0]}, {"decode", f.decodes[0]}} {
		e.e.mu.Lock()
		for _, r := range e.e.seen {
			if !asked {
				break
			}
			fmt.Fprintf(&b, " %s%s", e.name, r.path)
			if spec := r.body.Get("kv_transfer_params.disagg_spec"); spec.Exists() {
				b.WriteString("(kv)")
			}
		}
		e.e.seen = nil
		e.e.mu.Unlock()
	}
	for _, how := range f.watcher.endings() {
		b.WriteString(", watch " + how)
	}
	f.watcher.mu.Lock()
	f.watcher.order = nil
	f.watcher.mu.Unlock()
	b.WriteString("\n--")
	count := func(what string, n uint64) {
		if n > 0 {
			fmt.Fprintf(&b, " %s=%d", what, n)
		}
	}
	for _, o := range Outcomes {
		count(string(o), s.Requests[o])
	}
	for _, step := range Steps {
		for _, code := range fault.Codes {
			count(fmt.Sprintf("failed:%s/%s", step, code), s.Failures[Failure{step, code}])
			count(fmt.Sprintf("recomputed:%s/%s", step, code), s.Recomputed[Failure{step, code}])
		}
	}
	for _, why := range slices.Sorted(maps.Keys(s.Whole)) {
		count("whole:"+why, s.Whole[why])
	}
	return b.String() + "\n"
}

// script sets what receivers do from now on.
func (f *fleet) script(t *testing.T, d *datadriven.TestData) {
	r := receivers{outcome: Ending{Ending: msg.EndReady}}
	switch how := d.CmdArgs[0].Key; how {
	case "ok":
	case "refuse":
		r.refuse = fault.New(fault.Busy, "%s", d.Input)
	case "reject":
		r.reject = fault.New(fault.PeerLost, "%s", d.Input)
	case "stall":
		r.stall = true
	case "failed":
		var reason string
		d.ScanArgs(t, "reason", &reason)
		r.outcome = Ending{Ending: msg.EndFailed, Reason: fault.Code(reason), Text: d.Input, Rank: 1}
	default:
		d.Fatalf(t, "unknown way %s", how)
	}
	f.watcher.be(r)
}

// misbehave returns what an engine does with requests to one path.
func misbehave(t *testing.T, f *fleet, d *datadriven.TestData, deliver bool) hook {
	at, status, input, args := "/v1/completions", 0, d.Input, d.CmdArgs
	d.MaybeScanArgs(t, "at", &at)
	d.MaybeScanArgs(t, "status", &status)
	has := func(arg string) bool {
		return slices.ContainsFunc(args, func(a datadriven.CmdArg) bool { return a.Key == arg })
	}
	kind := "application/json"
	if has("events") {
		kind = eventType
	}
	return func(w http.ResponseWriter, r *http.Request, body gjson.Result) bool {
		if r.URL.Path != at || has("ok") || has("hold") {
			if deliver && !has("hold") {
				f.deliver(w, r, body)
			}
			return false
		}
		if has("deliver") {
			f.deliver(w, r, body)
		}
		if has("nothing") { // it takes the request and never answers
			<-r.Context().Done()
			return true
		}
		if has("cut") {
			panic(http.ErrAbortHandler)
		}
		w.Header().Set("Content-Type", kind)
		if status == 429 {
			w.Header().Set("Retry-After", "7")
		}
		if status != 0 {
			w.WriteHeader(status)
		}
		for line := range strings.SplitSeq(input, "\n") {
			io.WriteString(w, line)
			if has("events") {
				io.WriteString(w, "\n\n")
			}
		}
		http.NewResponseController(w).Flush()
		switch {
		case has("hang"):
			<-r.Context().Done()
		case has("events") && !has("end"):
			panic(http.ErrAbortHandler)
		}
		return true
	}
}
