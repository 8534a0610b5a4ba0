package intake

import (
	"github.com/berthkv/berth/internal/kv"
)

// Config is what a receiver is told at start. All fields must be set; the
// surface fills defaults.
type Config struct {
	Incarnation kv.Incarnation
	Facts       kv.Facts
	Capacity    int    // slots of the receive pool
	Links       []Link // offered, in order of preference
	TokensKey   string // key of the fixed token list, "" until the engine has said

	AllocationTimeout kv.Duration // pd_allocation_timeout_sec; Forever: the request's own deadline
	RequestTimeout    kv.Duration // request_timeout_sec, where no deadline is given
	Lease             kv.Duration // lease_sec
	UnclaimedTTL      kv.Duration // unclaimed_ttl_sec
	EndingTTL         kv.Duration // ending_ttl_sec
	Quarantine        kv.Duration // quarantine_sec
	SurplusGrace      kv.Duration // surplus_grace_sec

	MaxWaiting int   // max_waiting: above it a Begin gets Busy
	Bypass     int64 // admission_bypass_chunks
	MaxEndings int   // endings kept, at least 1
	MaxConns   int   // control connections known

	// LegacyData says that an LMCache sender must have made its data handshake
	// before its AllocRequests count; false is for tests of the control plane
	// (legacy_data: none).
	LegacyData bool
}

// Link is a data link as the core sees it.
type Link struct {
	Name       string
	Addr       string
	Pull       bool // a Commit makes this end copy
	OneSided   bool // a Commit follows the completed write; nothing lands here
	ExactFence bool
}
