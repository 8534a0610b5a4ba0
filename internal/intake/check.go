package intake

import (
	"fmt"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/slot"
)

// Check verifies the invariants that Core numbers and returns the first that
// does not hold.
func (c *Core) Check() error {
	for i, check := range []func() error{c.checkSlots, c.checkLedger, c.checkWaiting, c.checkStates, c.checkFindable, c.checkLimits, c.checkLinks} {
		if err := check(); err != nil {
			return fmt.Errorf("invariant %d: %w", i+1, err)
		}
	}
	return nil
}

// checkSlots: R1, R6.
func (c *Core) checkSlots() error {
	if err := c.pool.Check(); err != nil {
		return err
	}
	used := 0
	for r := range c.requests.all {
		held := int64(0)
		for i, s := range r.slots {
			if !c.holds(r, s) {
				continue
			}
			held++
			if at := c.pool.Slot(s).Chunk; at != uint32(i) {
				return fmt.Errorf("%s: slot %d is of chunk %d, not %d", r, s, at, i)
			}
		}
		if held != r.held {
			return fmt.Errorf("%s: holds %d slots, counted %d", r, held, r.held)
		}
		used += int(held)
	}
	n := c.pool.Counts()
	if free := n.Free + n.Reserved; used != c.pool.Capacity()-free {
		return fmt.Errorf("%d slots are held, %d of %d are not free", used, c.pool.Capacity()-free, c.pool.Capacity())
	}
	return nil
}

// checkLedger: the ledger and this core agree.
func (c *Core) checkLedger() error {
	if err := c.ledger.Check(); err != nil {
		return err
	}
	n := c.pool.Counts()
	if c.ledger.Free() != int64(n.Free) {
		return fmt.Errorf("%d slots are free, %d in the ledger", n.Free, c.ledger.Free())
	}
	if c.ledger.Waiting() != len(c.waiting) {
		return fmt.Errorf("%d requests wait, %d in the ledger", len(c.waiting), c.ledger.Waiting())
	}
	first, incomplete := map[*peer]int{}, map[*peer]int64{}
	var reserved int64
	for r := range c.requests.all {
		if (r.state == waiting) != (c.waiting[r.serial] == r) {
			return fmt.Errorf("%s: waiting in the ledger: %t", r, c.waiting[r.serial] == r)
		}
		if l := r.legacy; l != nil {
			if l.first {
				first[r.owner]++
			}
			if r.state == admitted && !l.complete {
				incomplete[r.owner] += r.total
			}
			reserved += l.reserved
		}
	}
	if reserved != int64(n.Reserved) {
		return fmt.Errorf("%d slots are reserved for requests, %d in the pool", reserved, n.Reserved)
	}
	b := blocked{lasting: c.quarantinedForLong()}
	for p := range first {
		b.lockStep += incomplete[p]
	}
	if b != c.blocked || b.lasting != c.lasting || b.lockStep != c.lockStep {
		return fmt.Errorf("blocked are %+v; counted %d and %d, told %+v", b, c.lasting, c.lockStep, c.blocked)
	}
	return nil
}

// quarantinedForLong counts the slots that wait for more than their link's word.
func (c *Core) quarantinedForLong() (n int64) {
	for r := range c.requests.all {
		for _, s := range r.slots {
			e := c.pool.Slot(s)
			if c.holds(r, s) && e.State == slot.Quarantined && (e.Hands != slot.Writer || !c.linkOf(r).ExactFence) {
				n++
			}
		}
	}
	return n
}

// checkWaiting: R3.
func (c *Core) checkWaiting() error {
	for r := range c.requests.all {
		if r.state == waiting && (len(r.slots)+len(r.chunks)+len(r.commits) > 0 || r.held != 0 || r.gen != 0) {
			return fmt.Errorf("%s waits and holds something", r)
		}
	}
	return nil
}

// checkStates: what a request's slots are, by its state.
func (c *Core) checkStates() error {
	for r := range c.requests.all {
		var in [slot.Quarantined + 1]int64
		for _, s := range r.slots {
			if c.holds(r, s) {
				in[c.pool.Slot(s).State]++
			}
		}
		g, k, cl, q := in[slot.Granted], in[slot.Committed], in[slot.Claimed], in[slot.Quarantined]
		ok := false
		switch r.state {
		case waiting:
			ok = r.held == 0
		case admitted:
			if ok = cl == 0 && k == r.committed && k < r.goal(); r.legacy != nil {
				ok = ok && k == 0 && g == int64(len(r.slots)) && (r.legacy.complete || g+r.legacy.reserved == r.total)
			} else {
				ok = ok && g+k == r.goal()
			}
		case ready:
			ok = k == r.end && r.end > 0 && g == 0 && cl == 0 && r.reader == nil
		case claimed:
			ok = cl == r.unread && r.unread > 0 && g == 0 && k == 0 && r.reader != nil && !r.reader.gone
		case draining:
			ok = q == r.held && q > 0 && r.name == nil
		}
		if !ok {
			return fmt.Errorf("%s: %d granted, %d committed (%d), %d claimed (%d), %d quarantined of %d", r, g, k, r.committed, cl, r.unread, q, r.goal())
		}
	}
	return nil
}

// checkFindable: R7.
func (c *Core) checkFindable() error {
	n := 0
	for key, l := range c.findable {
		for r := range l.all {
			n++
			complete := r.legacy != nil && r.vouchable()
			if !r.offered || r.state != ready && !complete || r.chunks[0].key != key {
				return fmt.Errorf("find offers %s", r)
			}
		}
	}
	for r := range c.requests.all {
		if r.offered {
			n--
		}
		if r.state == ready && !r.offered {
			return fmt.Errorf("find does not offer %s", r)
		}
	}
	if n != 0 {
		return fmt.Errorf("find offers %d requests that do not know it", n)
	}
	return nil
}

// checkLimits: R11.
func (c *Core) checkLimits() error {
	for _, l := range []struct {
		what    string
		n, most int
	}{
		{"connections", len(c.conns), c.cfg.MaxConns},
		{"sessions", len(c.sessions), c.cfg.MaxConns},
		{"handshakes", len(c.handshakes.at), c.cfg.MaxConns},
		{"waiting", len(c.waiting), c.cfg.MaxWaiting},
		{"waits", len(c.waits), c.cfg.MaxWaiting},
		{"watches", c.watches, c.cfg.MaxWaiting + c.cfg.Capacity},
		{"requests", c.requests.n, c.cfg.MaxWaiting + c.cfg.Capacity},
		// At the limit nothing new begins, but what is live still ends.
		{"endings", c.endings.n, c.cfg.MaxEndings + c.cfg.MaxWaiting + c.cfg.Capacity},
		{"names", len(c.names), c.endings.n + c.requests.n + len(c.waits) + c.watches},
		{"identities", len(c.identities), c.endings.n + c.requests.n + len(c.conns)},
	} {
		if l.n > l.most {
			return fmt.Errorf("%d %s, at most %d", l.n, l.what, l.most)
		}
	}
	for _, cn := range c.conns {
		if len(cn.replies) > maxReplies {
			return fmt.Errorf("%d replies stand in line on connection %d", len(cn.replies), cn.id)
		}
	}
	parked := int64(0)
	for r := range c.requests.all {
		if int64(len(r.commits)) > r.total+1 {
			return fmt.Errorf("%s: %d commits", r, len(r.commits))
		}
		if r.legacy != nil {
			for _, b := range r.legacy.batches {
				parked += keyBytes(b.m)
			}
		}
	}
	if parked != c.parked || parked > maxParked {
		return fmt.Errorf("%d bytes of keys wait, counted %d, at most %d", parked, c.parked, maxParked)
	}
	return nil
}

// checkLinks: lists, indexes and timers.
func (c *Core) checkLinks() error {
	live, watches, armed := map[*name]int{}, 0, 0
	for r := range c.requests.all {
		if r.live() {
			live[r.name]++
			if c.names[r.id] != r.name || r.owner.live[r.key] != r {
				return fmt.Errorf("%s is not known by its name or to its owner", r)
			}
		}
		if r.gen != 0 && c.granted[r.gen] != r {
			return fmt.Errorf("%s is not known by its generation", r)
		}
		if r.timer.pos != 0 {
			armed++
		}
		if r.unfinished() && r.timer.pos == 0 {
			return fmt.Errorf("R10: %s waits without a deadline", r)
		}
	}
	if len(c.granted) > c.requests.n {
		return fmt.Errorf("%d generations of %d requests", len(c.granted), c.requests.n)
	}
	for id, n := range c.names {
		readies := 0
		for r := range n.requests.all {
			live[n]--
			if r.state == ready || r.state == claimed {
				readies++
			}
		}
		for e := range n.endings.all {
			if e.ending == msg.EndReady {
				readies++
			}
		}
		for w := range n.watches.all {
			watches++
			if w.timer.pos != 0 {
				armed++
			}
			if (w.timer.pos != 0) != (len(w.asks) > 0) {
				return fmt.Errorf("R10: a watch of %q with %d questions has no deadline", id, len(w.asks))
			}
			if len(w.asks) == 0 && n.requests.n == 0 {
				return fmt.Errorf("an idle watch of %q", id)
			}
		}
		if live[n] != 0 || readies != n.readies {
			return fmt.Errorf("name %q: %d live requests not listed, %d ready, counted %d", id, live[n], readies, n.readies)
		}
		if _, ok := n.outcome(); ok && n.waits.n > 0 {
			return fmt.Errorf("R10: %d calls wait for %q, whose outcome is known", n.waits.n, id)
		}
		if n.requests.n+n.endings.n+n.watches.n+n.waits.n == 0 {
			return fmt.Errorf("name %q is empty", id)
		}
	}
	if watches != c.watches {
		return fmt.Errorf("%d watches, counted %d", watches, c.watches)
	}
	leases := 0
	for _, p := range c.sessions {
		leases++
		armed++
		if p.over || p.timer.pos == 0 {
			return fmt.Errorf("R10: the session of %s has no lease", p.label)
		}
	}
	for _, p := range c.identities {
		if p.lease != kv.Never {
			leases++
			armed++
		}
	}
	armed += len(c.waits)
	if leases != c.leases {
		return fmt.Errorf("%d leases, counted %d", leases, c.leases)
	}
	if n := max(len(c.timers.heap)-1, 0); n != armed {
		return fmt.Errorf("%d timers are armed, %d in the heap", armed, n)
	}
	for i := 1; i < len(c.timers.heap); i++ {
		if c.timers.heap[i].pos != i || i > 1 && c.timers.less(i, i/2) {
			return fmt.Errorf("timer %d is out of order", i)
		}
	}
	return nil
}

func (r *request) String() string {
	return fmt.Sprintf("%s request %q of %s (%d)", r.state, r.id, r.owner.label, r.serial)
}
