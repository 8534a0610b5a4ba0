package node

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/berthkv/berth/internal/intake"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/outbound"
)

// Status is the body of /v1/status, which is stable: scripts rely on its names.
// R1 holds in every answer, because the loop takes it between
// two steps.
type Status struct {
	Node        string          `json:"node"`
	Rank        int             `json:"rank"`
	Incarnation string          `json:"incarnation"`
	Draining    bool            `json:"draining"`
	Ready       bool            `json:"ready"`
	NotReady    string          `json:"not_ready,omitempty"` // the reason
	Engine      string          `json:"engine,omitempty"`    // engine_id that holds the agent
	Pool        *PoolStatus     `json:"pool,omitempty"`
	Staging     *StagingStatus  `json:"staging,omitempty"`
	Waiting     int             `json:"waiting"`
	Requests    []RequestStatus `json:"requests"`
	Peers       []PeerStatus    `json:"peers,omitempty"`
	Sessions    int             `json:"sessions"`
	Endings     int             `json:"endings"`
	// Totals and Timings are of what was received since the start.
	Totals  Totals  `json:"totals"`
	Timings Timings `json:"timings"`
	// MappedBytes is what the shm link maps of peers' staging pools; it counts
	// in the process's RSS without being its own.
	MappedBytes int64 `json:"mapped_bytes"`
}

// Totals count requests that became ready here.
type Totals struct {
	Ready  int64 `json:"ready"`
	Chunks int64 `json:"chunks"`
	Bytes  int64 `json:"bytes"`
}

// Timings are of requests at this receiver: first arrival to admission,
// admission to ready.
type Timings struct {
	AdmissionWait Timing `json:"admission_wait"`
	Transfer      Timing `json:"transfer"`
}

// PoolStatus is the receive pool in slots; the terms after Capacity sum to it.
type PoolStatus struct {
	Capacity    int `json:"capacity"`
	Free        int `json:"free"`
	Reserved    int `json:"reserved"`
	Granted     int `json:"granted"`
	Committed   int `json:"committed"`
	Claimed     int `json:"claimed"`
	Quarantined int `json:"quarantined"`
}

// StagingStatus is the staging pool in slots; the terms after Capacity sum to it.
type StagingStatus struct {
	Capacity    int `json:"capacity"`
	Free        int `json:"free"`
	Staged      int `json:"staged"`
	Writing     int `json:"writing"`
	Quarantined int `json:"quarantined"`
}

// RequestStatus is one live request; State is waiting, admitted, ready,
// claimed or draining.
type RequestStatus struct {
	ID         string  `json:"id"`
	Owner      string  `json:"owner"` // receiver: who sends; sender: the receiver's address
	Side       string  `json:"side"`  // "receive" or "send"
	State      string  `json:"state"`
	Total      int64   `json:"total"`
	Granted    int64   `json:"granted"`
	Committed  int64   `json:"committed"`
	AgeSeconds float64 `json:"age_seconds"`
	Why        *Why    `json:"why,omitempty"`
}

// Why says what a waiting request waits for: room, staging, quarantine,
// lock-step senders or peer_down.
type Why struct {
	For             string  `json:"for"`
	Need            int64   `json:"need"`
	Free            int64   `json:"free"`
	Earmarked       bool    `json:"earmarked"`
	Overtaken       int64   `json:"overtaken"`
	DeadlineSeconds float64 `json:"deadline_seconds"` // time left
}

// PeerStatus is one receiver that this sender knows.
type PeerStatus struct {
	Addr          string  `json:"addr"`
	State         string  `json:"state"`
	Incarnation   string  `json:"incarnation,omitempty"`
	Link          string  `json:"link,omitempty"`
	Live          int     `json:"live"`
	SilentSeconds float64 `json:"silent_seconds"`
	Error         string  `json:"error,omitempty"`
}

// Status takes a snapshot; it errs when ctx ends or the node is closed.
func (n *Node) Status(ctx context.Context) (Status, error) {
	c := statusCall{make(chan Status, 1)}
	if !n.mail.post(c) {
		return Status{}, fmt.Errorf("the agent is closed")
	}
	select {
	case s := <-c.reply:
		return s, nil
	case <-n.ctx.Done():
		return Status{}, fmt.Errorf("the agent is closed")
	case <-ctx.Done():
		return Status{}, ctx.Err()
	}
}

// Idle reports whether nothing is live: the end of a drain.
func (s Status) Idle() bool {
	if len(s.Requests) > 0 {
		return false
	}
	return s.Staging == nil || s.Staging.Writing == 0
}

func (n *Node) statusJSON(now kv.Instant) string {
	b, err := json.Marshal(n.status(now))
	if err != nil { // unreachable: plain fields
		return "{}"
	}
	return string(b)
}

func (n *Node) status(now kv.Instant) Status {
	s := Status{
		Node:     n.cfg.Name,
		Rank:     n.cfg.Rank,
		Draining: n.draining,
		Engine:   n.attach.Holder(),
		Requests: []RequestStatus{},
	}
	s.Incarnation = n.cfg.Incarnation.String()
	s.Totals, s.Timings = n.stats.summary()
	if n.deps.Mapped != nil {
		s.MappedBytes = n.deps.Mapped()
	}
	if n.intake != nil {
		n.addIntake(&s, n.intake.Status(now))
	}
	reachable := true
	if n.outbound != nil {
		reachable = n.addOutbound(&s, n.outbound.Status(now))
	}
	s.NotReady = notReady(s, reachable)
	s.Ready = s.NotReady == ""
	return s
}

func (n *Node) addIntake(s *Status, in intake.Status) {
	p := PoolStatus(in.Pool)
	s.Pool = &p
	s.Waiting += in.Waiting
	s.Sessions, s.Endings = in.Sessions, in.Endings
	for _, r := range in.Requests {
		row := RequestStatus{ID: r.ID, Owner: r.Owner, Side: "receive", State: r.State, Total: r.Total, Granted: r.Granted,
			Committed: r.Committed, AgeSeconds: r.Age.Seconds()}
		if w := r.Why; w != nil {
			row.Why = &Why{For: w.For, Need: w.Need, Free: w.Free, Earmarked: w.Earmarked, Overtaken: w.Overtaken,
				DeadlineSeconds: w.Deadline.Seconds()}
		}
		s.Requests = append(s.Requests, row)
	}
}

// addOutbound also reports whether a receiver is reachable, or none ever was.
func (n *Node) addOutbound(s *Status, out outbound.Status) bool {
	st := StagingStatus(out.Staging)
	s.Staging = &st
	s.Waiting += out.Waiting
	for _, r := range out.Requests {
		row := RequestStatus{ID: r.ID, Owner: r.Peer, Side: "send", State: r.State, Total: r.Total, Granted: r.Granted,
			Committed: r.Committed, AgeSeconds: r.Age.Seconds()}
		if r.Why != "" {
			row.Why = &Why{For: r.Why, Need: r.Total, Free: int64(st.Free), DeadlineSeconds: r.Deadline.Seconds()}
		}
		s.Requests = append(s.Requests, row)
	}
	up := false
	for _, p := range out.Peers {
		s.Peers = append(s.Peers, PeerStatus{Addr: p.Addr, State: p.State, Incarnation: p.Incarnation, Link: p.Link, Live: p.Live,
			SilentSeconds: p.Silent.Seconds(), Error: p.Err})
		if p.State == "up" || p.State == "lmcache" {
			up = true
		}
	}
	n.everUp = n.everUp || up
	return up || !n.everUp || len(out.Peers) == 0
}

// notReady is the reason why /ready is not 200, "" when it is: not draining, an
// engine there, the pool not lost to quarantine, a receiver reachable once one
// was.
func notReady(s Status, reachable bool) string {
	switch {
	case s.Draining:
		return "draining"
	case s.Engine == "":
		return "no engine is connected"
	case s.Pool != nil && s.Pool.Quarantined == s.Pool.Capacity:
		return fmt.Sprintf("all %d slots of the pool are quarantined", s.Pool.Capacity)
	case s.Staging != nil && s.Staging.Quarantined == s.Staging.Capacity:
		return fmt.Sprintf("all %d staging slots are quarantined", s.Staging.Capacity)
	case !reachable:
		return "no receiver is reachable"
	}
	return ""
}
