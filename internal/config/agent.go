package config

import (
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
)

// Version is the build's version, set by the linker.
var Version = "unknown"

// Agent is an agent's effective configuration. Load fills and checks it.
type Agent struct {
	EnablePD         bool
	Role             string // sender, receiver, both
	BufferSize       int64  // bytes of each pool
	BufferDevice     string
	PeerHost         string
	PeerInitPorts    []int64
	PeerAllocPorts   []int64
	ProxyHost        string
	ProxyPort        int64
	AllocTimeout     kv.Duration
	ShutdownTimeout  kv.Duration
	PollInterval     kv.Duration
	MaxPrefillLen    int64
	BackendMode      string
	SkipNotification bool
	TransferChannel  string
	NixlBackends     []string
	ChunkSize        int64
	SaveUnfullChunk  bool

	Node           string
	Rank           int64
	TPSize         int64
	Links          []string
	BindAddress    string
	TCPPort        int64
	TCPConnections int64
	NixlLib        string
	NixlModule     string
	NixlPort       int64
	HTTPAddr       string
	LocalSocket    string
	KVShape        []int64
	KVDType        string
	SlotBytes      int64
	PeerAllow      []string
	ReceiverAllow  []string
	PeerDialect    string
	LegacyData     string
	Checksum       bool
	HugePages      bool
	LogLevel       string

	RequestTimeout  kv.Duration
	Lease           kv.Duration
	UnclaimedTTL    kv.Duration
	EndingTTL       kv.Duration
	Quarantine      kv.Duration
	WriteTimeout    kv.Duration
	SurplusGrace    kv.Duration
	DialTimeout     kv.Duration
	MaxWaiting      int64
	AdmissionBypass int64 // 0: one capacity
	Window          int64

	// Derived by check.
	Facts    kv.Facts
	Shape    []int64 // of a full chunk
	Capacity int     // slots of each pool
	Notes    []string

	// Decorate, if set, wraps the sending half of each link, to measure or test
	// with a slow or faulty one. No option sets it.
	Decorate func(link.Sender) link.Sender

	from map[string]string // option → where its value came from
}

// Sends and Receives say which pools the agent has.
func (a *Agent) Sends() bool    { return a.Role == "sender" || a.Role == "both" }
func (a *Agent) Receives() bool { return a.Role == "receiver" || a.Role == "both" }

// AllocPort and InitPort are this rank's ports.
func (a *Agent) AllocPort() int { return int(a.PeerAllocPorts[a.Rank]) }
func (a *Agent) InitPort() int {
	if a.Rank < int64(len(a.PeerInitPorts)) {
		return int(a.PeerInitPorts[a.Rank])
	}
	return 0
}

const maxBytes = 1 << 50

// options is the table of every option that means something here. LMCache's
// come first.
var options = []option{
	boolean("enable_pd", "true", "must not be false", func(a *Agent) *bool { return &a.EnablePD }),
	text("pd_role", "", "which side this agent is", func(a *Agent) *string { return &a.Role }, "sender", "receiver", "both"),
	integer("pd_buffer_size", "", "bytes of the pool (of each, with role both), rounded down to whole slots", 1, maxBytes, func(a *Agent) *int64 { return &a.BufferSize }),
	device("pd_buffer_device", "cpu", "cpu; cuda means host memory here", func(a *Agent) *string { return &a.BufferDevice }),
	text("pd_peer_host", "", "receiver: the address under which senders reach it", func(a *Agent) *string { return &a.PeerHost }),
	integers("pd_peer_init_port", "", "receiver: init port of each rank, bound here for LMCache senders' handshake", 1, 65535, func(a *Agent) *[]int64 { return &a.PeerInitPorts }),
	integers("pd_peer_alloc_port", "", "receiver: alloc port of each rank, bound here for all control messages", 1, 65535, func(a *Agent) *[]int64 { return &a.PeerAllocPorts }),
	text("pd_proxy_host", "", "sender: host of the proxy's notify port", func(a *Agent) *string { return &a.ProxyHost }),
	integer("pd_proxy_port", "", "sender: the proxy's notify port, bound there", 1, 65535, func(a *Agent) *int64 { return &a.ProxyPort }),
	seconds("pd_allocation_timeout_sec", "30", "longest wait for admission and for staging slots; inf: the request's own deadline", func(a *Agent) *kv.Duration { return &a.AllocTimeout }),
	seconds("pd_shutdown_timeout_sec", "5", "how long SIGTERM waits for what is live", func(a *Agent) *kv.Duration { return &a.ShutdownTimeout }),
	seconds("pd_condition_poll_interval_sec", "0.005", "not used: nothing is polled", func(a *Agent) *kv.Duration { return &a.PollInterval }),
	integer("pd_max_prefill_len", "0", "start fails if the pool holds fewer tokens; 0: not checked", 0, 1<<40, func(a *Agent) *int64 { return &a.MaxPrefillLen }),
	text("pd_backend_mode", "async", "sync is refused", func(a *Agent) *string { return &a.BackendMode }, "async", "sync"),
	boolean("pd_skip_proxy_notification", "false", "sender: tell no proxy; pd_proxy_host is not needed", func(a *Agent) *bool { return &a.SkipNotification }),
	text("transfer_channel", "", "LMCache's data path; nixl means links [nixl] and needs a build with it, unless links is set", func(a *Agent) *string { return &a.TransferChannel }, "nixl", "mock_memory"),
	texts("nixl_backends", "UCX", "NIXL's plug-ins, used by the nixl link only", func(a *Agent) *[]string { return &a.NixlBackends }),
	integer("chunk_size", "256", "tokens of a chunk", 1, 1<<20, func(a *Agent) *int64 { return &a.ChunkSize }),
	boolean("save_unfull_chunk", "true", "always true here", func(a *Agent) *bool { return &a.SaveUnfullChunk }),

	text("node", "", "name in logs, status and identities; default: the host's name and the role", func(a *Agent) *string { return &a.Node }),
	integer("rank", "0", "tensor-parallel rank: picks its element of each port list", 0, 4095, func(a *Agent) *int64 { return &a.Rank }),
	integer("tp_size", "1", "tensor-parallel ranks of the engine", 1, 4096, func(a *Agent) *int64 { return &a.TPSize }),
	texts("links", "shm,tcp", "data links, the preferred one first; nixl, in builds with it, also meets LMCache peers", func(a *Agent) *[]string { return &a.Links }, "shm", "tcp", "nixl"),
	text("bind_address", "", "address to bind; default: pd_peer_host if it is local", func(a *Agent) *string { return &a.BindAddress }),
	integer("tcp_port", "0", "receiver: port of the tcp link; 0: any", 0, 65535, func(a *Agent) *int64 { return &a.TCPPort }),
	integer("tcp_connections", "2", "sender: connections of the tcp link to each receiver", 1, 64, func(a *Agent) *int64 { return &a.TCPConnections }),
	text("nixl_lib", "", "path of libnixl_capi.so; default: BERTH_NIXL_LIB, else the Python environment that is active or on PATH", func(a *Agent) *string { return &a.NixlLib }),
	text("nixl_module", "", "sender: name of the Python module in page lists to LMCache receivers; default: that of nixl_lib", func(a *Agent) *string { return &a.NixlModule }, "", "nixl_cu13._bindings", "nixl_cu12._bindings", "nixl._bindings"),
	integer("nixl_port", "0", "receiver: port of the nixl link for Berth senders; 0: any", 0, 65535, func(a *Agent) *int64 { return &a.NixlPort }),
	text("http_addr", "127.0.0.1:9400", "/health, /ready, /metrics, /v1/status", func(a *Agent) *string { return &a.HTTPAddr }),
	text("local_socket", "", "unix socket of the local API; default: $XDG_RUNTIME_DIR/berth/<role>-<rank>.sock", func(a *Agent) *string { return &a.LocalSocket }),
	integers("kv_shape", "", "LMCache's five numbers: layers, 2 (1 for MLA), tokens, kv_heads, head_size", 1, 1<<30, func(a *Agent) *[]int64 { return &a.KVShape }),
	text("kv_dtype", "", "element type of the KV cache, by LMCache's wire name; with kv_shape", func(a *Agent) *string { return &a.KVDType }),
	integer("slot_bytes", "", "instead of kv_shape: bytes of one chunk", 1, maxBytes, func(a *Agent) *int64 { return &a.SlotBytes }),
	texts("peer_allow", "", "networks that may connect to any port; default: loopback and the hosts named here", func(a *Agent) *[]string { return &a.PeerAllow }),
	texts("receiver_allow", "", "sender: networks of the receivers that may be connected to; default: all", func(a *Agent) *[]string { return &a.ReceiverAllow }),
	text("peer_dialect", "auto", "sender: how receivers are spoken to", func(a *Agent) *string { return &a.PeerDialect }, "auto", "berth", "lmcache"),
	text("legacy_data", "nixl", "none: the control plane alone meets LMCache peers, for tests", func(a *Agent) *string { return &a.LegacyData }, "nixl", "none"),
	boolean("checksum", "false", "CRC32C of every chunk, verified before it counts", func(a *Agent) *bool { return &a.Checksum }),
	boolean("huge_pages", "false", "pools on the huge pages reserved by the operator; a warning and ordinary pages if there are too few", func(a *Agent) *bool { return &a.HugePages }),
	text("log_level", "info", "", func(a *Agent) *string { return &a.LogLevel }, "debug", "info", "warn", "error"),

	seconds("request_timeout_sec", "600", "deadline of a request that brings none", func(a *Agent) *kv.Duration { return &a.RequestTimeout }),
	seconds("lease_sec", "15", "how long a silent peer's reservations are kept", func(a *Agent) *kv.Duration { return &a.Lease }),
	seconds("unclaimed_ttl_sec", "300", "how long a request that is ready (of an LMCache sender: complete) waits for the decoder", func(a *Agent) *kv.Duration { return &a.UnclaimedTTL }),
	seconds("ending_ttl_sec", "120", "how long an ending is kept to be repeated", func(a *Agent) *kv.Duration { return &a.EndingTTL }),
	seconds("quarantine_sec", "30", "after which a peer or engine that cannot be asked or seen is trusted to be gone", func(a *Agent) *kv.Duration { return &a.Quarantine }),
	seconds("write_timeout_sec", "10", "sender: a write without progress for so long fails its request", func(a *Agent) *kv.Duration { return &a.WriteTimeout }),
	seconds("surplus_grace_sec", "5", "receiver: how long after its last batch an LMCache request's surplus is kept", func(a *Agent) *kv.Duration { return &a.SurplusGrace }),
	seconds("dial_timeout_sec", "5", "sender: bound of a connection attempt", func(a *Agent) *kv.Duration { return &a.DialTimeout }),
	integer("max_waiting", "100000", "requests that may wait, of one sender while fewer do than three times the places left; more are refused as busy", 1, 10_000_000, func(a *Agent) *int64 { return &a.MaxWaiting }),
	integer("admission_bypass_chunks", "0", "chunks that may overtake a waiting request; 0: one capacity", 0, 1<<40, func(a *Agent) *int64 { return &a.AdmissionBypass }),
	integer("window_bytes", "268435456", "sender: bytes of unanswered commits to one receiver", 1, maxBytes, func(a *Agent) *int64 { return &a.Window }),
}
