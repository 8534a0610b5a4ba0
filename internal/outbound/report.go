package outbound

import (
	"cmp"
	"slices"

	"github.com/berthkv/berth/internal/kv"
)

// Status returns a snapshot for operators.
func (c *Core) Status(now kv.Instant) Status {
	s := Status{Staging: c.pool.status(), Draining: c.draining}
	for _, p := range c.sortedPeers() {
		ps := PeerStatus{Addr: p.name, State: p.state(), Err: p.sess.Err(), Silent: p.sess.Silent(now)}
		if p.sess.Opened() {
			ps.Incarnation = p.sess.Receiver().Incarnation.String()
		}
		if p.link != nil && p.link.state == linkIsUp {
			ps.Link = p.link.def.Name
		}
		for r := p.reqs.first; r != nil; r = r.next {
			if r.live() {
				ps.Live++
				if r.state == queued || r.state == begun {
					s.Waiting++
				}
			}
		}
		s.Peers = append(s.Peers, ps)
	}
	for _, r := range c.oldest(MaxStatusRequests) {
		s.Requests = append(s.Requests, c.requestStatus(now, r))
	}
	return s
}

// state is one word for operators.
func (p *peer) state() string {
	switch {
	case p.dialect == speaksLMCache:
		return "lmcache"
	case p.sess.Up():
		return "up"
	case p.sess.Err() != "" || p.sess.Idle():
		return "down"
	}
	return "connecting"
}

// oldest returns the oldest requests that the engine does not know the end of.
func (c *Core) oldest(n int) []*request {
	var rs []*request
	for _, r := range c.reqs {
		rs = append(rs, r)
	}
	slices.SortFunc(rs, func(a, b *request) int { return cmp.Compare(a.n, b.n) })
	return rs[:min(n, len(rs))]
}

func (c *Core) requestStatus(now kv.Instant, r *request) RequestStatus {
	s := RequestStatus{ID: r.id, Peer: r.peer.name, Total: r.total, Committed: r.committed, Age: now.Sub(r.started), Deadline: r.left(now)}
	switch r.state {
	case queued:
		s.State, s.Why = "waiting", "peer_down"
		if r.retryAt != kv.Never || (r.peer.legacy.link != nil && r.peer.legacy.since == kv.Never) {
			s.Why = "room"
		}
	case begun:
		s.State, s.Why = "waiting", "room"
		if !r.peer.sess.Up() {
			s.Why = "peer_down"
		}
	case granted:
		s.State, s.Granted = "admitted", r.total
		for _, w := range c.waits {
			if w.req == r {
				s.Why = "staging"
			}
		}
	default:
		s.State, s.Deadline = "draining", 0
	}
	return s
}
