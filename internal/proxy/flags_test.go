package proxy

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/berthkv/berth/internal/kv"
)

// TestParseNodes: the expansions of LMCache's example proxy, and what is refused.
func TestParseNodes(t *testing.T) {
	show := func(pre []Addr, dec []Decoder) string {
		var b strings.Builder
		for _, a := range pre {
			fmt.Fprintf(&b, " P %s", a)
		}
		for _, d := range dec {
			fmt.Fprintf(&b, " D %s", d.Addr)
			for _, r := range d.Receivers {
				fmt.Fprintf(&b, " (%s %d %d)", r.Host, r.InitPort, r.AllocPort)
			}
		}
		return b.String()[1:]
	}
	for _, c := range []struct {
		name   string
		change func(*Flags)
		want   string   // the nodes
		faults []string // or what the error says
	}{
		{"defaults", func(*Flags) {}, "P localhost:8100 D localhost:8200 (localhost 8300 8400)", nil},
		{"counted", func(f *Flags) { f.NumPrefillers, f.NumDecoders = 2, 2 },
			"P localhost:8100 P localhost:8101 D localhost:8200 (localhost 8300 8400) D localhost:8201 (localhost 8301 8401)", nil},
		{"counted, ranks", func(f *Flags) { f.NumDecoders, f.DecoderInitPort, f.DecoderAllocPort = 2, "8300,8310", "8400,8410" },
			"P localhost:8100 D localhost:8200 (localhost 8300 8400) (localhost 8310 8410) D localhost:8201 (localhost 8301 8401) (localhost 8311 8411)", nil},
		{"one host, ports", func(f *Flags) { f.PrefillerPort = "8100, 9000" },
			"P localhost:8100 P localhost:9000 D localhost:8200 (localhost 8300 8400)", nil},
		{"hosts, one port", func(f *Flags) { f.PrefillerHost, f.DecoderHost = "a, b", "c,d" },
			"P a:8100 P b:8100 D c:8200 (c 8300 8400) D d:8200 (d 8300 8400)", nil},
		{"hosts and ports", func(f *Flags) { f.PrefillerHost, f.PrefillerPort, f.NumPrefillers = "a,b", "1,2", 2 },
			"P a:1 P b:2 D localhost:8200 (localhost 8300 8400)", nil},
		{"ranks", func(f *Flags) { f.DecoderInitPort, f.DecoderAllocPort = "8300,8301", "8400,8401" },
			"P localhost:8100 D localhost:8200 (localhost 8300 8400) (localhost 8301 8401)", nil},
		{"IPv6 (r63)", func(f *Flags) { f.PrefillerHost, f.DecoderHost = "[::1]", "fe80::1" },
			"P [::1]:8100 D [fe80::1]:8200 (fe80::1 8300 8400)", nil},
		{"unequal", func(f *Flags) { f.PrefillerHost, f.PrefillerPort = "a,b", "1,2,3" },
			"", []string{"--prefiller-host names 2 hosts and --prefiller-port 3 ports"}},
		{"wrong count", func(f *Flags) { f.DecoderHost, f.NumDecoders = "a,b", 3 },
			"", []string{"--num-decoders is 3, but --decoder-host and --decoder-port name 2"}},
		{"count of none", func(f *Flags) { f.NumPrefillers = 0 }, "", []string{"--num-prefillers is 0; it must be at least 1"}},
		{"unequal ranks", func(f *Flags) { f.DecoderInitPort = "8300,8301" },
			"", []string{"--decoder-init-port names 2 ports and --decoder-alloc-port 1"}},
		{"all faults at once", func(f *Flags) {
			f.PrefillerPort, f.DecoderHost, f.DecoderAllocPort = "x", "", "0,65536"
		}, "", []string{`--prefiller-port: "x" is no port`, `--decoder-host: "" is no host`, "--decoder-alloc-port: port 0 is outside 1 to 65535", "port 65536 is outside"}},
		{"counted past the last port", func(f *Flags) { f.PrefillerPort, f.NumPrefillers = "65535", 2 },
			"", []string{"--num-prefillers is 2 and --prefiller-port is 65535: port 65536 would be above 65535"}},
		{"receivers counted past it", func(f *Flags) { f.DecoderAllocPort, f.NumDecoders = "65535", 2 },
			"", []string{"--decoder-alloc-port: port 65536 is outside"}},
		{"one receiver for two", func(f *Flags) { f.DecoderPort = "8200,8201" },
			"", []string{"--decoder-init-port: localhost:8300 is named twice", "--decoder-alloc-port: localhost:8400 is named twice"}},
		{"counted into each other", func(f *Flags) { f.NumDecoders, f.DecoderInitPort, f.DecoderAllocPort = 2, "8300,8310", "8400,8401" },
			"", []string{"--decoder-alloc-port: localhost:8401 is named twice"}},
		{"one engine twice", func(f *Flags) { f.PrefillerPort = "8100,8100" }, "", []string{"--prefiller-port: localhost:8100 is named twice"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := DefaultFlags
			c.change(&f)
			pre, dec, err := ParseNodes(f)
			if err == nil {
				if diff := cmp.Diff(c.want, show(pre, dec)); diff != "" {
					t.Error(diff)
				}
				return
			}
			for _, text := range c.faults {
				if !strings.Contains(err.Error(), text) {
					t.Errorf("%v does not say %s", err, text)
				}
			}
			if c.faults == nil {
				t.Error(err)
			}
		})
	}
}

// TestConfig: all faults at once.
func TestConfig(t *testing.T) {
	_, err := New(Config{
		Decoders: []Decoder{{Addr: Addr{"h", 1}}}, Policy: "hope", MaxInFlight: -1, Timeouts: Timeouts{Write: -time.Second},
	}, newWatcher(t))
	if err == nil {
		t.Fatal("accepted")
	}
	for _, text := range []string{"no prefill engine", "the decode engine h:1 has no receiver", `"hope"; it must be "recompute" or "error"`,
		"no incarnation", "MaxInFlight is -1", "the timeout Write is -1s"} {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("%v does not say %s", err, text)
		}
	}
	c := Config{MaxInFlight: 7, Timeouts: Timeouts{Write: time.Hour}}.withDefaults()
	if c.MaxInFlight != 7 || c.Timeouts.Write != time.Hour || c.MaxBody != defaults.MaxBody || c.Timeouts.Prefill != defaults.Timeouts.Prefill || c.Policy != Recompute {
		t.Errorf("%+v", c)
	}
}

// TestNodes: prefill engines in turn, decode engines by load, drained ones never.
func TestNodes(t *testing.T) {
	ns := &nodes{all: []*node{{name: "a"}, {name: "b"}, {name: "c"}}}
	var turn string
	for range 5 {
		turn += ns.take(false).name
	}
	if turn != "abcab" {
		t.Errorf("round robin: %s", turn)
	}
	busy := &nodes{all: []*node{{name: "a", inFlight: 2}, {name: "b", inFlight: 1}, {name: "c", inFlight: 2}}}
	var load string
	for range 4 {
		load += busy.take(true).name
	}
	if load != "bcab" && load != "bcba" {
		t.Errorf("by load: %s", load)
	}
	for _, n := range ns.all {
		ns.drain(n.name, true)
	}
	if n := ns.take(true); n != nil {
		t.Errorf("took %s, which is drained", n.name)
	}
}

// TestLogIsLimited: an event in a storm costs few lines, and the next one says
// how many were left out.
func TestLogIsLimited(t *testing.T) {
	var b bytes.Buffer
	l := newLimitedLog(slog.New(slog.NewTextHandler(&b, nil)))
	for range 10 * logBurst {
		l.warn("storm", "text", "request_id", "r", "req_id", kv.Incarnation{1}.Short())
	}
	l.warn("other", "text")
	if n := strings.Count(b.String(), "event=storm"); n < logBurst || n > 3*logBurst {
		t.Errorf("%d lines", n)
	}
	if !strings.Contains(b.String(), "event=other") {
		t.Error("another event was limited too")
	}
}
