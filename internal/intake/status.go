package intake

import (
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/reserve"
)

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

// Pool counts the slots.
func (c *Core) Pool() PoolStatus {
	n := c.pool.Counts()
	return PoolStatus{Capacity: c.cfg.Capacity, Free: n.Free, Reserved: n.Reserved, Granted: n.Granted,
		Committed: n.Committed, Claimed: n.Claimed, Quarantined: n.Quarantined}
}

// Status returns a snapshot. Times in it count from now.
func (c *Core) Status(now kv.Instant) Status {
	s := Status{
		Pool:     c.Pool(),
		Waiting:  c.ledger.Waiting(),
		Sessions: len(c.sessions),
		Endings:  c.endings.n,
		Draining: c.draining,
	}
	now = max(now, c.now)
	for r := range c.requests.all {
		if len(s.Requests) == MaxStatusRequests {
			break
		}
		q := RequestStatus{ID: r.id, Owner: r.owner.label, State: r.state.String(), Total: r.total,
			Granted: int64(len(r.slots)), Committed: r.committed, Age: now.Sub(r.arrived)}
		if w, ok := c.ledger.Why(r.serial); ok && r.state == waiting {
			q.Why = &Why{For: whyFor(w.For), Need: w.Need, Free: w.Free, Earmarked: w.Earmarked, Overtaken: w.Overtaken,
				Deadline: max(min(r.deadline, r.admitBy).Sub(now), 0)}
		}
		s.Requests = append(s.Requests, q)
	}
	return s
}

func whyFor(r reserve.Reason) string {
	switch r {
	case reserve.Quarantine:
		return "quarantine"
	case reserve.LockStep:
		return "lockstep"
	}
	return "room"
}
