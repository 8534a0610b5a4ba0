package proxy

import "sync"

const (
	rolePrefill = "prefill"
	roleDecode  = "decode"
)

// node is one engine.
type node struct {
	name      string // host:port, unique within its role
	role      string
	receivers []Receiver

	// Guarded by the pool's mu.
	inFlight int
	served   uint64 // requests ever taken
	drained  bool   // takes no new requests
}

// nodes are the engines of one role.
type nodes struct {
	all []*node

	mu struct {
		sync.Mutex
		next int // where the round robin goes on
	}
}

// take picks a node for a request: the one with the fewest in flight if
// leastLoaded, and of equals the next in turn. nil when all are drained. The
// caller gives it back with done.
func (ns *nodes) take(leastLoaded bool) *node {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	var best *node
	bestAt := 0
	for i := range ns.all {
		at := (ns.mu.next + i) % len(ns.all)
		n := ns.all[at]
		if n.drained || best != nil && (!leastLoaded || n.inFlight >= best.inFlight) {
			continue
		}
		best, bestAt = n, at
	}
	if best == nil {
		return nil
	}
	ns.mu.next = bestAt + 1
	best.inFlight++
	best.served++
	return best
}

func (ns *nodes) done(n *node) {
	ns.mu.Lock()
	n.inFlight--
	ns.mu.Unlock()
}

// drain stops or resumes new requests for the node of that name; false if there
// is none.
func (ns *nodes) drain(name string, drained bool) bool {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	for _, n := range ns.all {
		if n.name == name {
			n.drained = drained
			return true
		}
	}
	return false
}

// taking returns the nodes that take requests.
func (ns *nodes) taking() []*node {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	var out []*node
	for _, n := range ns.all {
		if !n.drained {
			out = append(out, n)
		}
	}
	return out
}

// NodeStats is one engine as the proxy sees it.
type NodeStats struct {
	Node     string `json:"node"`
	Role     string `json:"role"`
	InFlight int    `json:"in_flight"`
	Served   uint64 `json:"served"`
	Drained  bool   `json:"drained"`
}

func (ns *nodes) stats() []NodeStats {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	out := make([]NodeStats, len(ns.all))
	for i, n := range ns.all {
		out[i] = NodeStats{n.name, n.role, n.inFlight, n.served, n.drained}
	}
	return out
}
