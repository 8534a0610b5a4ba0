package intake

import "github.com/berthkv/berth/internal/kv"

// Status is a snapshot for operators; R1 holds in it.
type Status struct {
	Pool     PoolStatus
	Waiting  int
	Sessions int
	Endings  int
	Draining bool
	Requests []RequestStatus // live ones, oldest first, at most MaxStatusRequests
}

// MaxStatusRequests bounds the requests listed in one Status.
const MaxStatusRequests = 1000

// PoolStatus counts slots by state; the terms after Capacity sum to it.
type PoolStatus struct {
	Capacity, Free, Reserved, Granted, Committed, Claimed, Quarantined int
}

// RequestStatus is one request. State is waiting, admitted, ready, claimed or
// draining (ended, its slots not yet free).
type RequestStatus struct {
	ID        string
	Owner     string
	State     string
	Total     int64
	Granted   int64
	Committed int64
	Age       kv.Duration
	Why       *Why // waiting ones
}

// Why is what a waiting request waits for: "room", "quarantine" ("blocked by
// quarantine") or "lockstep" ("blocked by lock-step senders").
type Why struct {
	For       string
	Need      int64
	Free      int64
	Earmarked bool
	Overtaken int64
	Deadline  kv.Duration // time left
}
