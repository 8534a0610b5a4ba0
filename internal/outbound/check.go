package outbound

import (
	"fmt"

	"github.com/berthkv/berth/internal/kv"
)

// Check verifies the invariants that are predicates of a state; nil when all
// hold. It is for tests and costs as much as the state is large.
func (c *Core) Check() error {
	for _, f := range []func() error{c.checkPool, c.checkPeers, c.checkRequests, c.checkTimers, c.checkLimits} {
		if err := f(); err != nil {
			return err
		}
	}
	return nil
}

// checkPool: the pool's own invariants, and who has what.
func (c *Core) checkPool() error {
	var n [slotStates]int
	staged := map[kv.ConnID]int{}
	held := map[*peer]int{}
	free := map[kv.SlotID]bool{}
	for _, id := range c.pool.free {
		if free[id] || c.pool.slots[id].state != slotFree {
			return fmt.Errorf("slot %d is on the free list twice, or not free", id)
		}
		free[id] = true
	}
	for id := range c.pool.slots {
		s := &c.pool.slots[id]
		n[s.state]++
		switch s.state {
		case slotStaged:
			staged[s.engine]++
			if c.engines[s.engine] == nil {
				return fmt.Errorf("slot %d is staged by a connection that is gone", id)
			}
		case slotQuarantined:
			if c.engines[s.engine] != nil {
				return fmt.Errorf("slot %d is quarantined for a connection that is there", id)
			}
		}
		if s.peer != nil {
			held[s.peer]++
		}
	}
	if n != c.pool.n || n[slotFree] != len(c.pool.free) {
		return fmt.Errorf("staging counts are %v with %d free; the slots say %v", c.pool.n, len(c.pool.free), n)
	}
	for id, e := range c.engines {
		if e.staged != staged[id] {
			return fmt.Errorf("connection %d has %d staged, counted %d", id, staged[id], e.staged)
		}
	}
	for _, p := range c.byID {
		if p.held != held[p] {
			return fmt.Errorf("%s holds %d slots, counted %d", p.name, held[p], p.held)
		}
	}
	// R6: a slot that is written from is held by one item or repeat; it is not
	// free while a link or a checksum has it.
	holders := map[kv.SlotID]int{}
	for _, p := range c.byID {
		for r := p.reqs.first; r != nil; r = r.next {
			for _, k := range r.commits {
				for i := range k.items {
					it := &k.items[i]
					if !it.freed {
						holders[it.src]++
					} else if it.write != 0 || k.sum != 0 {
						return fmt.Errorf("slot %d of %s is free while it is read", it.src, r.id)
					}
				}
			}
			for i := range r.chunks {
				if r.chunks[i].state == waiting {
					holders[r.chunks[i].slot]++
				}
			}
			for _, x := range r.repeats {
				holders[x.slot]++
			}
		}
	}
	for id := range c.pool.slots {
		writing := c.pool.slots[id].state == slotWriting
		if n := holders[kv.SlotID(id)]; (writing && n != 1) || (!writing && n != 0) {
			return fmt.Errorf("slot %d is in state %d and has %d holders", id, c.pool.slots[id].state, n)
		}
	}
	return nil
}

// checkPeers: what is counted by receiver and by link.
func (c *Core) checkPeers() error {
	type count struct{ commits, unsent int }
	links := map[*dataLink]count{}
	nlinks := map[*peer]int{}
	for _, l := range c.links {
		nlinks[l.p]++
	}
	for _, p := range c.byID {
		if err := p.sess.Check(); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		var bytes int64
		lost, window, queue := 0, 0, 0
		for r := p.reqs.first; r != nil; r = r.next {
			if r.inQueue {
				queue++
			}
			if r.inQueue != (r.state == queued) {
				return fmt.Errorf("%s is %s and in the queue: %v", r.id, r.state, r.inQueue)
			}
			if r.begin != 0 && p.byBegin[r.begin] != r {
				return fmt.Errorf("begin %d does not lead to %s", r.begin, r.id)
			}
			for _, k := range r.commits {
				n := links[r.link]
				switch k.phase {
				case windowed:
					window++
				case writing, asked:
					bytes += k.bytes
					n.commits++
				}
				lost += k.lost
				n.unsent += k.unsent
				links[r.link] = n
			}
		}
		if p.unanswered != bytes || p.lost != lost || p.window.n != window || p.queue.n != queue || p.links != nlinks[p] {
			return fmt.Errorf("%s: %d bytes unanswered (counted %d), %d lost (%d), %d in the window (%d), %d queued (%d), %d links (%d)", p.name,
				bytes, p.unanswered, lost, p.lost, window, p.window.n, queue, p.queue.n, nlinks[p], p.links)
		}
		if len(p.byBegin) > p.reqs.n {
			return fmt.Errorf("%s: %d begins for %d requests", p.name, len(p.byBegin), p.reqs.n)
		}
	}
	for _, l := range c.links {
		if n := links[l]; n.commits != l.commits || n.unsent != l.unsent {
			return fmt.Errorf("link %d: %d commits (counted %d), %d writes not sent (%d)", l.id, n.commits, l.commits, n.unsent, l.unsent)
		}
	}
	return nil
}

// checkRequests: what is counted by request, and at most one write a chunk.
func (c *Core) checkRequests() error {
	live := 0
	for _, p := range c.byID {
		for r := p.reqs.first; r != nil; r = r.next {
			live++
			if (c.reqs[r.id] == r) != (r.state != told) {
				return fmt.Errorf("%s is %s; known by name: %v", r.id, r.state, c.reqs[r.id] == r)
			}
			if r.state == told && (r.busy > 0 || (r.calls == 0 && !r.legacy.owes())) {
				return fmt.Errorf("%s is told, with %d writes in flight and %d answers owed", r.id, r.busy, r.calls)
			}
			if err := c.checkRequest(r); err != nil {
				return err
			}
		}
	}
	if live != c.live {
		return fmt.Errorf("%d requests, counted %d", live, c.live)
	}
	return nil
}

func (c *Core) checkRequest(r *request) error {
	busy, owed := 0, 0
	inCommit := map[int64]int{}
	for _, k := range r.commits {
		if k.idle() {
			return fmt.Errorf("%s keeps a commit that is done", r.id)
		}
		if k.sum != 0 {
			busy++
		}
		if k.owed {
			owed++
		}
		unsent := 0
		for i := range k.items {
			it := &k.items[i]
			if it.write != 0 {
				if ref := c.writes[it.write]; ref.k != k || ref.i != i {
					return fmt.Errorf("write %d does not lead to its chunk", it.write)
				}
				if !it.sent {
					unsent++
				}
			}
			if k.phase != over || it.write != 0 {
				inCommit[k.msg.Chunks[i].Index]++
			}
		}
		if unsent != k.unsent {
			return fmt.Errorf("%s: %d writes not sent, counted %d", r.id, unsent, k.unsent)
		}
		busy += unsent
	}
	for i, n := range inCommit {
		if n > 1 {
			return fmt.Errorf("chunk %d of %s has %d writes", i, r.id, n)
		}
	}
	if busy != r.busy {
		return fmt.Errorf("%s: %d writes in flight, counted %d", r.id, busy, r.busy)
	}
	if owed > r.calls && !r.legacy.on {
		return fmt.Errorf("%s: %d commits without an answer, %d calls", r.id, owed, r.calls)
	}
	var submitted, committed int64
	for i := range r.chunks {
		switch r.chunks[i].state {
		case waiting, moving:
			submitted++
		case done:
			submitted++
			committed++
		}
	}
	if submitted != r.submitted || committed != r.committed {
		return fmt.Errorf("%s: %d submitted (counted %d), %d committed (%d)", r.id, submitted, r.submitted, committed, r.committed)
	}
	return nil
}

// checkTimers: the heap is one, and what is timed is there.
func (c *Core) checkTimers() error {
	for i, t := range c.timers {
		if t.pos != i+1 {
			return fmt.Errorf("timer %d thinks it is at %d", i+1, t.pos)
		}
		if i > 0 && c.timers.less(i, (i-1)/2) {
			return fmt.Errorf("timer %d is before its parent", i+1)
		}
	}
	for _, w := range c.waits {
		if w.req.state != granted {
			return fmt.Errorf("a stage waits for %s, which is %s", w.req.id, w.req.state)
		}
	}
	return nil
}

// checkLimits: R11.
func (c *Core) checkLimits() error {
	for _, l := range []struct {
		what   string
		n, max int
	}{
		{"requests", c.live, c.cfg.MaxWaiting},
		{"receivers", len(c.peers), c.cfg.MaxPeers},
		{"endings", len(c.endings.order) - c.endings.head, c.cfg.MaxEndings},
		{"stages that wait", len(c.waits), maxStageWaits},
	} {
		if l.n > l.max {
			return fmt.Errorf("%d %s; the limit is %d", l.n, l.what, l.max)
		}
	}
	for _, w := range c.seen {
		if w != 0 {
			return fmt.Errorf("the scratch bitmap is not clean")
		}
	}
	return nil
}
