package outbound

import "github.com/berthkv/berth/internal/kv"

// Config is what a sender is told at start. All fields must be set; the
// surface fills defaults.
type Config struct {
	Node        string
	Incarnation kv.Incarnation
	Secret      kv.Secret
	Facts       kv.Facts
	Shape       []int64 // of a full chunk
	Staging     int     // slots of the staging pool
	MaxStage    int     // slots of one stage; at most half of Staging
	Rank        int64

	Links    []Link  // in order of preference
	Dialect  Dialect // peer_dialect
	Checksum bool

	RequestTimeout    kv.Duration // request_timeout_sec
	AllocationTimeout kv.Duration // pd_allocation_timeout_sec: bounds staging waits here
	WriteTimeout      kv.Duration // write_timeout_sec
	EndingTTL         kv.Duration // ending_ttl_sec
	// ConnectTimeout bounds the time without a session, or with one and without a
	// data link, after which begins to a receiver end as peer_lost; and the wait
	// for the answer to Hello or Cancel. 0: 15 s, the default lease.
	ConnectTimeout kv.Duration

	SkipNotify bool  // pd_skip_proxy_notification, or no proxy address
	Window     int64 // bytes of unanswered Commits for each peer
	MaxWaiting int   // live requests; above it Begin gets Busy
	MaxPeers   int   // receivers known at once
	MaxEndings int

	// ReceiverAllow, when not nil, says which receiver hosts may be connected
	// to (receiver_allow).
	ReceiverAllow func(host string) bool

	// LegacyConns bounds the connections to one LMCache receiver.
	LegacyConns int
	// LegacyLink is the data link to LMCache receivers ("nixl"), "" when there
	// is none: then begins to them fail, unless LegacyNoData
	// (legacy_data: none: the control plane alone, for tests).
	LegacyLink   string
	LegacyNoData bool
}

// Link is a data link as the core sees it.
type Link struct {
	Name       string
	Pull       bool
	OneSided   bool
	ExactFence bool
}

// Dialect is how receivers are spoken to.
type Dialect string

const (
	DialectAuto    Dialect = "auto" // ask with Hello
	DialectBerth   Dialect = "berth"
	DialectLMCache Dialect = "lmcache"
)
