package outbound

import "github.com/berthkv/berth/internal/kv"

// timer is something that is due at a time. It is part of what it is for.
type timer struct {
	at   kv.Instant
	pos  int // in timers, from 1; 0: not armed
	kind timeKind
	id   uint64 // orders equal times
	peer *peer
	req  *request
	wait *stageWait
	link *dataLink
}

type timeKind uint8

const (
	timePeer timeKind = iota
	timeRequest
	timeStage
	timeLink
)

// timers is a binary heap of armed timers, earliest first; equal times by kind,
// then by number, so that the order does not depend on history.
type timers []*timer

func (h timers) first() *timer {
	if len(h) == 0 {
		return nil
	}
	return h[0]
}

func (h timers) less(i, j int) bool {
	a, b := h[i], h[j]
	switch {
	case a.at != b.at:
		return a.at < b.at
	case a.kind != b.kind:
		return a.kind < b.kind
	}
	return a.id < b.id
}

func (h timers) swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].pos, h[j].pos = i+1, j+1
}

func (h timers) up(i int) {
	for i > 0 && h.less(i, (i-1)/2) {
		h.swap(i, (i-1)/2)
		i = (i - 1) / 2
	}
}

func (h timers) down(i int) {
	for {
		k := 2*i + 1
		if k >= len(h) {
			return
		}
		if k+1 < len(h) && h.less(k+1, k) {
			k++
		}
		if !h.less(k, i) {
			return
		}
		h.swap(k, i)
		i = k
	}
}

// arm sets when t is due; Never disarms it.
func (c *Core) arm(t *timer, at kv.Instant) {
	switch {
	case t.pos == 0 && at == kv.Never:
	case t.pos == 0:
		t.at = at
		c.timers = append(c.timers, t)
		t.pos = len(c.timers)
		c.timers.up(t.pos - 1)
	case at == kv.Never:
		i, last := t.pos-1, len(c.timers)-1
		c.timers.swap(i, last)
		c.timers[last] = nil
		c.timers = c.timers[:last]
		t.pos = 0
		if i < last {
			c.timers.down(i)
			c.timers.up(i)
		}
	case t.at != at:
		t.at = at
		i := t.pos - 1
		c.timers.down(i)
		c.timers.up(i)
	}
}
