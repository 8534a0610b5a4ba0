package config

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/berthkv/berth/internal/kv"
)

// receiver is a complete small configuration; tests change a line of it.
const receiver = `
pd_role: receiver
pd_peer_host: 127.0.0.1
pd_peer_init_port: 7300
pd_peer_alloc_port: 7400
pd_buffer_size: 1000
slot_bytes: 100
chunk_size: 10
`

func load(t *testing.T, yaml string, flags map[string]string, env ...string) (*Agent, error) {
	t.Helper()
	f := filepath.Join(t.TempDir(), "agent.yaml")
	if err := os.WriteFile(f, []byte(yaml), 0o600); err != nil {
		t.Fatal(err)
	}
	return Load(Sources{File: f, Env: env, Flags: flags})
}

func mustLoad(t *testing.T, yaml string, flags map[string]string, env ...string) *Agent {
	t.Helper()
	a, err := load(t, yaml, flags, env...)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func TestLoad(t *testing.T) {
	a := mustLoad(t, receiver, nil)
	if a.Capacity != 10 || a.AdmissionBypass != 10 || a.AllocPort() != 7400 || a.InitPort() != 7300 || a.BindAddress != "127.0.0.1" {
		t.Errorf("got %+v", a)
	}
	want := kv.Facts{SlotBytes: 100, Format: kv.Format2TD, DType: "uint8", ChunkTokens: 10, TPSize: 1}
	if a.Facts != want {
		t.Errorf("facts %+v, want %+v", a.Facts, want)
	}
	for _, l := range []struct {
		name string
		got  kv.Duration
		want kv.Duration
	}{
		{"pd_allocation_timeout_sec", a.AllocTimeout, 30 * kv.Second}, {"request_timeout_sec", a.RequestTimeout, 600 * kv.Second},
		{"pd_shutdown_timeout_sec", a.ShutdownTimeout, 5 * kv.Second}, {"lease_sec", a.Lease, 15 * kv.Second},
		{"unclaimed_ttl_sec", a.UnclaimedTTL, 300 * kv.Second}, {"ending_ttl_sec", a.EndingTTL, 120 * kv.Second},
		{"quarantine_sec", a.Quarantine, 30 * kv.Second}, {"write_timeout_sec", a.WriteTimeout, 10 * kv.Second},
		{"surplus_grace_sec", a.SurplusGrace, 5 * kv.Second},
	} {
		if l.got != l.want {
			t.Errorf("%s is %v by default, want %v", l.name, l.got.Seconds(), l.want.Seconds())
		}
	}
}

func TestLoad_kv_shape(t *testing.T) {
	a := mustLoad(t, `
pd_role: both
pd_peer_host: 127.0.0.1
pd_peer_alloc_port: 7400
pd_skip_proxy_notification: true
pd_buffer_size: 1e9
kv_shape: [32, 2, 256, 8, 128]
kv_dtype: bfloat16
`, nil)
	if want := int64(2 * 32 * 256 * 1024 * 2); a.SlotBytes != want || a.Facts.Format != kv.Format2LTD || a.Capacity != int(1e9/want) {
		t.Errorf("slot_bytes %d, fmt %d, %d slots; want %d bytes", a.SlotBytes, a.Facts.Format, a.Capacity, want)
	}
	if len(a.Notes) != 1 || !strings.Contains(a.Notes[0], "rounded down") {
		t.Errorf("notes %q: want one that says the buffer was rounded down", a.Notes)
	}
	a = mustLoad(t, removeOption(removeOption(removeOption(receiver, "slot_bytes"), "chunk_size"), "pd_buffer_size")+
		"kv_shape: [28, 2, 256, 8, 128]\nkv_dtype: bfloat16\npd_buffer_size: 4317511681\n", nil)
	if a.SlotBytes != 29360128 || a.Capacity != 147 || !strings.Contains(a.Notes[0], "rounded down to 4315938816") {
		t.Errorf("%d slots of %d bytes, %q", a.Capacity, a.SlotBytes, a.Notes)
	}
}

// Later sources win, and Rows tells which one did.
func TestLoad_sources(t *testing.T) {
	env := []string{"LMCACHE_CHUNK_SIZE=20", "BERTH_LEASE_SEC=2.5", "LMCACHE_LEASE_SEC=9", "LMCACHE_LOG_LEVEL=INFO", "LMCACHE_NIXL_PEER_HOST='127.0.0.2'", "HOME=/"}
	a := mustLoad(t, receiver, map[string]string{"pd_buffer_size": "500"}, env...)
	if a.ChunkSize != 20 || a.Lease != 5*kv.Second/2 || a.PeerHost != "127.0.0.2" || a.Capacity != 5 {
		t.Errorf("chunk_size %d, lease_sec %v, pd_peer_host %s, %d slots", a.ChunkSize, a.Lease.Seconds(), a.PeerHost, a.Capacity)
	}
	from := map[string]string{}
	for _, r := range a.Rows() {
		from[r.Name] = r.From
	}
	for name, want := range map[string]string{"chunk_size": "LMCACHE_CHUNK_SIZE", "lease_sec": "BERTH_LEASE_SEC", "pd_buffer_size": "flag",
		"quarantine_sec": "default", "slot_bytes": "agent.yaml:7", "receiver_allow": "unset"} {
		if !strings.HasSuffix(from[name], want) {
			t.Errorf("%s is from %q, want %q", name, from[name], want)
		}
	}
}

// r5: any buffer of at least one slot starts; r39, r59: what is missing stops it;
// r31, r32: so does what does not go together.
func TestLoad_faults(t *testing.T) {
	for _, c := range []struct {
		name string
		edit string // replaces or adds lines
		want []string
	}{
		{"unknown option", "pd_bufer_size: 7", []string{"pd_bufer_size", "nearest name is pd_buffer_size"}},
		{"bad number", "pd_buffer_size: many", []string{`pd_buffer_size`, `"many"`}},
		{"fraction", "rank: 0.5", []string{"rank", "whole number"}},
		{"bad float", "lease_sec: soon", []string{"lease_sec", `"soon"`}},
		{"negative time", "lease_sec: -1", []string{"lease_sec", "above 0"}},
		{"less than a millisecond", "lease_sec: 1e-10", []string{"lease_sec", "1e-10", "0.001"}},
		{"bad boolean", "checksum: maybe", []string{"checksum", "true or false"}},
		{"bad port", "pd_peer_alloc_port: 70000", []string{"pd_peer_alloc_port", "70000", "65535"}},
		{"buffer below one slot", "pd_buffer_size: 99", []string{"pd_buffer_size is 99", "100 bytes"}},
		{"buffer below the longest prefill", "pd_max_prefill_len: 101", []string{"pd_max_prefill_len is 101", "holds 100 tokens"}},
		{"missing host", "pd_peer_host: null", []string{"pd_peer_host is missing"}},
		{"missing role", "pd_role: null", []string{"pd_role is missing"}},
		{"unknown role", "pd_role: server", []string{"pd_role", `"server"`, "receiver"}},
		{"sync", "pd_backend_mode: sync", []string{"pd_backend_mode sync"}},
		{"unknown device", "pd_buffer_device: tpu", []string{"pd_buffer_device", `"tpu"`, "cuda"}},
		{"quoted boolean", `checksum: "yes"`, []string{"checksum", "true or false"}},
		{"unknown link", "links: [rdma]", []string{"links", `"rdma"`, "tcp"}},
		{"rank without port", "rank: 1\ntp_size: 2", []string{"pd_peer_alloc_port has 1 ports", "rank 1"}},
		{"ports for other ranks", "pd_peer_init_port: [7300, 7301]", []string{"pd_peer_init_port has 2 ports", "pd_peer_alloc_port has 1"}},
		{"one port for both", "pd_peer_init_port: 7400", []string{"pd_peer_init_port", "pd_peer_alloc_port", "both 7400"}},
		{"no PD", "enable_pd: false", []string{"enable_pd is false"}},
		{"chunk_size beside kv_shape", "slot_bytes: null\nchunk_size: 10\nkv_shape: [1, 2, 16, 1, 1]\nkv_dtype: half", []string{"chunk_size is 10", "kv_shape has 16 tokens"}},
		{"two values under two names", "pd_peer_host: 127.0.0.1\nnixl_peer_host: 10.0.0.1", []string{"pd_peer_host is 127.0.0.1", "nixl_peer_host", "10.0.0.1"}},
		{"rank beyond tp_size", "rank: 2\ntp_size: 2", []string{"rank is 2", "tp_size is 2"}},
		{"both layouts", "kv_shape: [1, 2, 10, 1, 1]", []string{"slot_bytes and kv_shape"}},
		{"slot not of whole tokens", "slot_bytes: 101", []string{"slot_bytes is 101", "chunk_size 10"}},
		{"sender without proxy", "pd_role: both", []string{"pd_proxy_host is missing"}},
		{"network", "peer_allow: [10.0.0.0/40]", []string{"peer_allow", "10.0.0.0/40"}},
		{"HTTP address without a port", "http_addr: 127.0.0.1", []string{`http_addr is "127.0.0.1"`, "host:port"}},
		{"HTTP port too large", "http_addr: 127.0.0.1:99999", []string{"127.0.0.1:99999", "0 to 65535"}},
		{"list for scalar", "rank: [1, 2]", []string{"rank", "list of 2"}},
		{"map for scalar", "rank: {a: 1}", []string{"rank", "neither a value nor a list"}},
		{"twice", "lease_sec: 3\nlease_sec: 4", []string{"lease_sec", "twice"}},
		{"no mapping", "", nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			text := receiver
			for line := range strings.Lines(c.edit) {
				name, _, _ := strings.Cut(line, ":")
				text = removeOption(text, name)
			}
			if c.want == nil {
				text, c.want = "- 1", []string{"a mapping of options is wanted"}
			}
			_, err := load(t, text+c.edit+"\n", nil)
			if err == nil {
				t.Fatal("no error")
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%q is not in: %v", w, err)
				}
			}
		})
	}
}

func removeOption(yaml, name string) string {
	var b strings.Builder
	for line := range strings.Lines(yaml) {
		if n, _, _ := strings.Cut(line, ":"); n != name {
			b.WriteString(line)
		}
	}
	return b.String()
}

func TestLoad_reports_all_faults_at_once(t *testing.T) {
	_, err := load(t, "pd_role: x\npd_bufer_size: 1\nlease_sec: -2\nrank: q\n", nil)
	if err == nil {
		t.Fatal("no error")
	}
	for _, w := range []string{"pd_role", "pd_bufer_size", "lease_sec", "rank", "kv_shape is missing"} {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%q is not in: %v", w, err)
		}
	}
	if n := strings.Count(err.Error(), "pd_role"); n != 1 {
		t.Errorf("pd_role has %d faults, one was made: %v", n, err)
	}
}

// Variables that Kubernetes sets for services named berth and berth-proxy are no
// options; a mistyped option is still one.
func TestLoad_service_links(t *testing.T) {
	links := []string{"BERTH_SERVICE_HOST=10.0.0.1", "BERTH_SERVICE_PORT=8000", "BERTH_SERVICE_PORT_HTTP=8000", "BERTH_PORT=tcp://10.0.0.1:8000",
		"BERTH_PORT_8000_TCP=tcp://10.0.0.1:8000", "BERTH_PORT_8000_TCP_PROTO=tcp", "BERTH_PORT_8000_TCP_PORT=8000", "BERTH_PORT_8000_TCP_ADDR=10.0.0.1",
		"BERTH_PROXY_SERVICE_HOST=10.0.0.2", "BERTH_PROXY_PORT=tcp://10.0.0.2:9000"}
	if _, err := load(t, receiver, nil, append(links, "BERTH_TCP_PORT=7000")...); err != nil {
		t.Error(err)
	}
	for _, typo := range []string{"BERTH_TCP_PROT=7000", "BERTH_PD_PROXI_PORT=7000", "BERTH_PORT=8000"} {
		if _, err := load(t, receiver, nil, typo); err == nil {
			t.Errorf("%s is no error", typo)
		}
	}
}

// A file that cannot be read is the one fault: what it lacks is not known.
func TestLoad_unreadable_file(t *testing.T) {
	broken := filepath.Join(t.TempDir(), "broken.yaml")
	if err := os.WriteFile(broken, []byte("pd_role: [receiver\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{broken, broken + ".not.there"} {
		_, err := Load(Sources{File: file})
		if err == nil || !strings.HasPrefix(err.Error(), "config file") || strings.Contains(err.Error(), "missing") {
			t.Errorf("%s: %v", file, err)
		}
	}
}

// LMCache's example files work as they are, once the layout and the links are
// said beside them.
func TestLoad_lmcache_examples(t *testing.T) {
	files, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(files) < 6 {
		t.Fatalf("%d example files, %v", len(files), err)
	}
	for _, f := range files {
		a, err := Load(Sources{File: f, Env: []string{"BERTH_KV_SHAPE=32,2,256,8,128", "BERTH_KV_DTYPE=bfloat16", "BERTH_LINKS=shm,tcp"}})
		if err != nil {
			t.Errorf("%s: %v", f, err)
			continue
		}
		cuda := 0
		for _, n := range a.Notes {
			if strings.Contains(n, "cuda") {
				cuda++
			}
		}
		if a.BufferDevice == "cuda" && cuda != 1 {
			t.Errorf("%s: %d notes say what cuda means, want 1: %q", f, cuda, a.Notes)
		}
	}
}

// pd_max_prefill_len may be what the pool holds exactly; 0 is not checked; a
// sender's pool is checked too.
func TestLoad_max_prefill_len(t *testing.T) {
	mustLoad(t, receiver+"pd_max_prefill_len: 100\n", nil)
	mustLoad(t, receiver+"pd_max_prefill_len: 0\n", nil)
	for _, role := range []string{"receiver", "sender"} {
		text := removeOption(receiver, "pd_role") + "pd_role: " + role + "\npd_skip_proxy_notification: true\npd_max_prefill_len: 101\n"
		if _, err := load(t, text, nil); err == nil || !strings.Contains(err.Error(), "pd_max_prefill_len is 101") {
			t.Errorf("%s: %v", role, err)
		}
	}
}

// What LMCache's converters take is taken, from a file and from its variables.
func TestLoad_lmcache_values(t *testing.T) {
	for _, c := range []struct {
		name, yaml string
		env        []string
		ok         func(*Agent) bool
	}{
		{"a scalar for a list", "pd_peer_init_port: 7300\npd_peer_alloc_port: 7400", nil, func(a *Agent) bool { return a.InitPort() == 7300 && a.AllocPort() == 7400 }},
		{"a list", "pd_peer_init_port: [7300]\npd_peer_alloc_port: [7400]", nil, func(a *Agent) bool { return a.InitPort() == 7300 && a.AllocPort() == 7400 }},
		{"commas", "pd_peer_init_port: 7300, 7301\npd_peer_alloc_port: \"7400,7401\"\nrank: 1", nil, func(a *Agent) bool { return a.InitPort() == 7301 && a.AllocPort() == 7401 }},
		{"lists in variables", "", []string{"LMCACHE_PD_PEER_INIT_PORT=7500", "LMCACHE_PD_PEER_ALLOC_PORT=[7600]"}, nil},
		{"commas in variables", "rank: 1", []string{"LMCACHE_PD_PEER_INIT_PORT=7500,7501", "LMCACHE_PD_PEER_ALLOC_PORT=7600, 7601"}, func(a *Agent) bool { return a.InitPort() == 7501 && a.AllocPort() == 7601 }},
		{"one backend", "nixl_backends: UCX", nil, func(a *Agent) bool { return len(a.NixlBackends) == 1 && a.NixlBackends[0] == "UCX" }},
		{"booleans", "save_unfull_chunk: True\nenable_pd: 1", []string{"LMCACHE_SAVE_UNFULL_CHUNK=TRUE"}, func(a *Agent) bool { return a.SaveUnfullChunk && a.EnablePD }},
		{"booleans of YAML 1.1", "save_unfull_chunk: yes\npd_skip_proxy_notification: on", nil, func(a *Agent) bool { return a.SaveUnfullChunk && a.SkipNotification }},
		{"inf", "pd_allocation_timeout_sec: inf", nil, func(a *Agent) bool { return a.AllocTimeout == kv.Forever }},
		{"infinity as YAML writes it", "pd_allocation_timeout_sec: .inf", nil, func(a *Agent) bool { return a.AllocTimeout == kv.Forever }},
		{"a device with its number", "pd_buffer_device: cuda:1", nil, func(a *Agent) bool { return len(a.Notes) == 1 && strings.Contains(a.Notes[0], "host memory") }},
		{"old names", "nixl_buffer_size: 1000\nnixl_peer_alloc_port: 7400\npd_buffer_size: null\npd_peer_alloc_port: null", nil, func(a *Agent) bool { return a.Capacity == 10 && a.AllocPort() == 7400 && len(a.Notes) == 2 }},
		{"an old name beside the new one", "nixl_role: receiver", nil, func(a *Agent) bool { return a.Role == "receiver" }},
		{"the other side's options", "pd_proxy_host: p\npd_proxy_port: 7500", nil, func(a *Agent) bool {
			return len(a.Notes) == 2 && strings.Contains(a.Notes[1], "pd_proxy_port is not used by pd_role receiver")
		}},
		{"nothing", "remote_serde: NULL", nil, func(a *Agent) bool { return len(a.Notes) == 0 }},
	} {
		text := receiver
		for line := range strings.Lines(c.yaml) {
			name, _, _ := strings.Cut(line, ":")
			text = removeOption(text, name)
		}
		a, err := load(t, text+c.yaml+"\n", nil, c.env...)
		switch {
		case c.ok == nil: // LMCache takes no brackets there either
			if err == nil {
				t.Errorf("%s: taken", c.name)
			}
		case err != nil:
			t.Errorf("%s: %v", c.name, err)
		case !c.ok(a):
			t.Errorf("%s: %+v", c.name, a)
		}
	}
}

// transfer_channel nixl is the nixl link where the build has it, and an error
// that says what to do where not; links decide when they are given.
func TestLoad_transfer_channel(t *testing.T) {
	a, err := load(t, receiver+"transfer_channel: nixl\n", nil)
	switch {
	case hasNixl && (err != nil || strings.Join(a.Links, ",") != "nixl" || a.from["links"] != "from transfer_channel"):
		t.Errorf("%+v, %v", a, err)
	case !hasNixl && (err == nil || !strings.Contains(err.Error(), "make build-nixl") || !strings.Contains(err.Error(), "set links")):
		t.Errorf("%v", err)
	}
	a = mustLoad(t, receiver+"transfer_channel: nixl\nlinks: [tcp]\n", nil)
	if strings.Join(a.Links, ",") != "tcp" {
		t.Errorf("links are %v", a.Links)
	}
	_, err = load(t, receiver+"links: [tcp, nixl]\n", nil)
	if hasNixl != (err == nil) {
		t.Errorf("links with nixl: %v", err)
	}
	if a = mustLoad(t, receiver+"transfer_channel: mock_memory\n", nil); len(a.Notes) != 1 || !strings.Contains(a.Notes[0], "mock_memory means nothing") {
		t.Errorf("notes %q", a.Notes)
	}
}

// Every option of LMCache 0.5.6 is accepted, used or not.
func TestLoad_every_lmcache_option(t *testing.T) {
	names, aliases := lmcacheNames()
	if len(names) < 100 || len(aliases) < 10 {
		t.Fatalf("%d options and %d aliases", len(names), len(aliases))
	}
	for _, n := range names {
		if isOption(n) {
			continue
		}
		a := mustLoad(t, receiver+n+": {what: ever}\n", nil)
		if len(a.Notes) == 0 || !strings.Contains(a.Notes[len(a.Notes)-1], n) {
			t.Errorf("%s is accepted without a note: %q", n, a.Notes)
		}
	}
}

func TestAllows(t *testing.T) {
	allows := Allows([]string{"10.0.0.0/8", "::1", "127.0.0.1"})
	for ip, want := range map[string]bool{"10.1.2.3": true, "11.0.0.1": false, "::1": true, "::2": false, "::ffff:10.0.0.1": true, "127.0.0.1": true, "127.0.0.2": false} {
		if got := allows(netip.MustParseAddr(ip)); got != want {
			t.Errorf("%s: %v, want %v", ip, got, want)
		}
	}
}

func FuzzYAML(f *testing.F) {
	f.Add([]byte(receiver))
	f.Add([]byte("a: &x [1]\nb: *x\n"))
	f.Add([]byte("chunk_size: 0\nslot_bytes: 5\n"))
	f.Add([]byte("chunk_size: 0\nslot_bytes: 5\npd_role: sender\npd_buffer_size: 10\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		l := newLoader()
		l.yaml(b, "fuzz")
		l.check()
	})
}

// FuzzLoad is what an operator's environment and flags may say: one "NAME=value"
// a line, a flag where the name has no prefix. Every fault begins with a name,
// and a configuration that is accepted can be shown, and loaded again from what
// is shown.
func FuzzLoad(f *testing.F) {
	for _, s := range []string{
		"pd_role=receiver\npd_peer_host=127.0.0.1\npd_peer_init_port=7300\npd_peer_alloc_port=7400\npd_buffer_size=1000\nslot_bytes=100\nchunk_size=10",
		"LMCACHE_PD_ROLE=sender\nBERTH_PD_BUFFER_SIZE='1e9'\nkv_shape=[32, 2, 256, 8, 128]\nkv_dtype=half\nLMCACHE_PD_PROXY_HOST=::1\nLMCACHE_PD_PROXY_PORT=7500",
		"BERTH_LEASE_SEC=inf\nBERTH_PEER_ALLOW=10.0.0.0/8,::/0\nLMCACHE_NIXL_PEER_HOST=\"x\"\nlinks=tcp,shm",
		"pd_role=both\npd_peer_host=::1\npd_peer_alloc_port=7400\npd_skip_proxy_notification=1\npd_buffer_size=1_000\nslot_bytes=100\nchunk_size=10\nquarantine_sec=1e-10",
		"rank=-1\ntp_size=9999999999999999999\nBERTH_CONFIG_FILE=x\nBERTH_=1\nLMCACHE_\n=",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		src := Sources{Flags: map[string]string{}}
		for line := range strings.SplitSeq(text, "\n") {
			name, v, _ := strings.Cut(line, "=")
			if strings.HasPrefix(name, "BERTH_") || strings.HasPrefix(name, "LMCACHE_") {
				src.Env = append(src.Env, line)
			} else if name != "" {
				src.Flags[name] = v
			}
		}
		a, err := Load(src)
		if err != nil {
			return
		}
		again := Sources{Flags: map[string]string{}}
		for _, r := range a.Rows() {
			if r.From != "unset" && r.From != "default" {
				again.Flags[r.Name] = strings.Trim(r.Value, "[]")
			}
		}
		b, err := Load(again)
		if err != nil {
			t.Fatalf("%q is accepted; what is shown of it is not: %v", text, err)
		}
		for i, r := range b.Rows() {
			if was := a.Rows()[i]; r.Value != was.Value {
				t.Errorf("%s was %q and is %q", r.Name, was.Value, r.Value)
			}
		}
	})
}
