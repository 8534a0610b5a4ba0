package outbound

import "github.com/berthkv/berth/internal/kv"

// kept is an ending that is kept to be repeated.
type kept struct {
	Ending
	peer  Peer   // zero: cancelled before any begin
	total int64  // what was begun
	begin uint64 // its number at the receiver, 0: the receiver never heard of it
	until kv.Instant
}

// endings are the endings kept, oldest first, by req_id. The youngest of a
// name counts. At the limit the oldest goes.
type endings struct {
	max   int
	ttl   kv.Duration
	byID  map[string]uint64 // number of the youngest
	order []kept            // a queue from head on, numbered from base
	head  int
	base  uint64 // number of order[0]
}

func newEndings(max int, ttl kv.Duration) endings {
	return endings{max: max, ttl: ttl, byID: map[string]uint64{}}
}

// get returns the ending of a name, nil when none is kept. It is valid until
// the next change.
func (e *endings) get(now kv.Instant, id string) *kept {
	n, ok := e.byID[id]
	if !ok {
		return nil
	}
	if k := &e.order[n-e.base]; k.until > now {
		return k
	}
	return nil
}

func (e *endings) put(now kv.Instant, k kept) {
	if e.max < 1 {
		return
	}
	for len(e.order)-e.head >= e.max {
		e.pop()
	}
	k.until = now.Add(e.ttl)
	e.byID[k.ReqID] = e.base + uint64(len(e.order))
	e.order = append(e.order, k)
}

// forget drops the ending of a name: it is begun anew.
func (e *endings) forget(id string) { delete(e.byID, id) }

func (e *endings) pop() {
	k := &e.order[e.head]
	if e.byID[k.ReqID] == e.base+uint64(e.head) {
		delete(e.byID, k.ReqID)
	}
	*k = kept{}
	e.head++
	if e.head*2 >= len(e.order) {
		n := copy(e.order, e.order[e.head:])
		clear(e.order[n:])
		e.base += uint64(e.head)
		e.order, e.head = e.order[:n], 0
	}
}

// next is when the oldest expires.
func (e *endings) next() kv.Instant {
	if e.head == len(e.order) {
		return kv.Never
	}
	return e.order[e.head].until
}

func (e *endings) expire(now kv.Instant) {
	for e.next() <= now {
		e.pop()
	}
}
