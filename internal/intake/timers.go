package intake

import "github.com/berthkv/berth/internal/kv"

// alarm is something that a time ends: a request, a peer's lease, a wait, a
// watch.
type alarm interface{ ring(c *Core) }

// timer is one alarm's time. Equal times ring in the order of their numbers, so
// the order does not depend on the heap's history.
type timer struct {
	at    kv.Instant
	order uint64
	alarm alarm
	pos   int // in the heap, from 1; 0: not armed
}

// timers is a binary heap by (at, order). heap[0] is unused.
type timers struct{ heap []*timer }

// next returns the time of the first alarm.
func (t *timers) next() kv.Instant {
	if len(t.heap) < 2 {
		return kv.Never
	}
	return t.heap[1].at
}

// set arms m for that time, or disarms it for Never.
func (t *timers) set(m *timer, at kv.Instant) {
	if m.pos != 0 && m.at == at {
		return
	}
	m.at = at
	switch {
	case at == kv.Never:
		if m.pos != 0 {
			t.drop(m)
		}
	case m.pos == 0:
		if len(t.heap) == 0 {
			t.heap = append(t.heap, nil)
		}
		t.heap = append(t.heap, m)
		m.pos = len(t.heap) - 1
		t.up(m.pos)
	default:
		t.up(m.pos)
		t.down(m.pos)
	}
}

func (t *timers) drop(m *timer) {
	i, end := m.pos, len(t.heap)-1
	m.pos = 0
	last := t.heap[end]
	t.heap[end] = nil
	t.heap = t.heap[:end]
	if i == end {
		return
	}
	t.heap[i] = last
	last.pos = i
	t.up(i)
	t.down(last.pos)
}

func (t *timers) less(i, j int) bool {
	a, b := t.heap[i], t.heap[j]
	return a.at < b.at || a.at == b.at && a.order < b.order
}

func (t *timers) swap(i, j int) {
	t.heap[i], t.heap[j] = t.heap[j], t.heap[i]
	t.heap[i].pos, t.heap[j].pos = i, j
}

func (t *timers) up(i int) {
	for i > 1 && t.less(i, i/2) {
		t.swap(i, i/2)
		i /= 2
	}
}

func (t *timers) down(i int) {
	for {
		j := 2 * i
		if j >= len(t.heap) {
			return
		}
		if j+1 < len(t.heap) && t.less(j+1, j) {
			j++
		}
		if !t.less(j, i) {
			return
		}
		t.swap(i, j)
		i = j
	}
}

// settleShare is the part of a lease for which timers are held after this
// process was stopped itself: long enough to read what peers had sent, short
// beside the lease.
const settleShare = 30

// stopped notices that this process was stopped: it holds leases, so it is woken
// every third of one, and the last step is more than two thirds ago. Then all
// leases start anew, and what peers had sent meanwhile is stepped before timers.
func (c *Core) stopped(now kv.Instant) {
	if c.leases == 0 || now.Sub(c.now) <= c.cfg.Lease/3*2 {
		return
	}
	for _, p := range c.sessions {
		p.lease = now.Add(c.cfg.Lease)
	}
	for _, p := range c.identities {
		if p.lease != kv.Never {
			p.lease = now.Add(c.cfg.Lease)
		}
	}
	c.hold = now.Add(c.cfg.Lease / settleShare)
}

// fire rings every alarm that is due and forgets endings that are old enough.
func (c *Core) fire() {
	if c.now < c.hold {
		return
	}
	for c.timers.next() <= c.now {
		m := c.timers.heap[1]
		c.timers.drop(m)
		m.alarm.ring(c)
	}
	for e := c.endings.first; e != nil && e.at.Add(c.cfg.EndingTTL) <= c.now; e = c.endings.first {
		c.forget(e)
	}
}

// wake asks to be stepped in time for the next alarm, and every third of a lease
// while one is held (R10). A wake-up asked for earlier stands if it is soon
// enough.
func (c *Core) wake() {
	at := c.timers.next()
	if e := c.endings.first; e != nil {
		at = min(at, e.at.Add(c.cfg.EndingTTL))
	}
	at = max(at, c.hold)
	if c.leases > 0 {
		at = min(at, max(c.now.Add(c.cfg.Lease/3), c.hold))
	}
	if c.woken > c.now && c.woken <= at || at == kv.Never {
		return
	}
	c.woken = at
	c.act(Wake{At: at})
}
