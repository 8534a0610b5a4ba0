package outbound

import "github.com/berthkv/berth/internal/kv"

// Status is a snapshot for operators.
type Status struct {
	Staging  StagingStatus
	Waiting  int // begun, not granted
	Draining bool
	Peers    []PeerStatus
	Requests []RequestStatus // oldest first, at most MaxStatusRequests
}

// MaxStatusRequests bounds the requests listed in one Status.
const MaxStatusRequests = 1000

// StagingStatus counts staging slots by state; the terms after Capacity sum to it.
type StagingStatus struct {
	Capacity, Free, Staged, Writing, Quarantined int
}

// PeerStatus is one receiver.
type PeerStatus struct {
	Addr        string
	State       string // connecting, up, down, lmcache
	Incarnation string
	Link        string
	Live        int         // requests not ended
	Silent      kv.Duration // since it was heard last
	Err         string      // why it is down
}

// RequestStatus is one request. State is waiting, admitted or draining.
type RequestStatus struct {
	ID        string
	Peer      string
	State     string
	Total     int64
	Granted   int64
	Committed int64
	Age       kv.Duration
	Why       string // waiting ones: "room" (at the receiver), "staging", "peer_down"
	Deadline  kv.Duration
}
