package outbound

import (
	"slices"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// legacyReceiver behaves as LMCache's: it answers each message when it is done,
// in any order, admits a cancelled request all the same, rolls back after a -1,
// and frees what a cancel names at once.
type legacyReceiver struct {
	reqs    map[string]*legacyHeld
	waiting []legacyAsk // for admission
	later   []legacyAsk // done, the answer not sent
	taken   map[kv.SlotID]string
}

// legacyHeld is what it holds for a request.
type legacyHeld struct {
	total     int64
	left      int64 // reserved and not handed out
	keys      map[string]kv.SlotID
	shared    map[string]bool // already sent by others, and counted for this one too
	seen      map[string]bool // keys ever named
	last      bool
	tracked   bool // it can be rolled back
	cancelled bool // by a CancelNotif
	unclean   bool // a connection was lost too early or late, or it misbehaved: it may hold some for ever
	landed    map[kv.SlotID]bool
	expected  int // chunks to be written
}

type legacyAsk struct {
	k      *fakeConn
	m      *msg.AllocRequest
	answer *msg.AllocResponse
}

func newLegacyReceiver() *legacyReceiver {
	return &legacyReceiver{reqs: map[string]*legacyHeld{}, taken: map[kv.SlotID]string{}}
}

func (l *legacyReceiver) free() int64 {
	n := int64(6)
	for _, h := range l.reqs {
		n -= h.left + int64(len(h.keys))
	}
	return n
}

func (f *fakeReceiver) receiveLegacy(k *fakeConn, m msg.Message) {
	l := f.legacy
	switch m := m.(type) {
	case *msg.Hello:
		k.toS = append(k.toS, &msg.AllocResponse{RemoteIndexes: []int64{-1}})
	case *msg.CancelNotif:
		f.cancelLegacy(m)
		k.toS = append(k.toS, &msg.AllocResponse{})
	case *msg.AllocRequest:
		if m.TotalChunks == 0 { // a violation
			if h := l.reqs[m.ReqID]; h != nil && h.tracked {
				f.drained(m.ReqID, h)
				f.rollBack(m.ReqID)
			}
			k.toS = append(k.toS, &msg.AllocResponse{RemoteIndexes: []int64{-1}})
			return
		}
		for _, a := range append(slices.Clone(l.waiting), l.later...) {
			if a.k == k {
				f.w.failf("%s: a second message on a connection with one unanswered", m.ReqID)
			}
		}
		if len(k.toS) > 0 {
			f.w.failf("%s: a message before the answer was read", m.ReqID)
		}
		h := l.reqs[m.ReqID]
		if h == nil || (h.left == 0 && len(h.keys) == 0 && len(m.Keys) == 0 && !m.IsLastBatch) {
			if len(m.Keys) > 0 {
				f.w.failf("%s: the first batch has keys", m.ReqID)
			}
			l.waiting = append(l.waiting, legacyAsk{k: k, m: m})
			return
		}
		f.grantLegacy(k, m, h)
	}
}

func (f *fakeReceiver) grantLegacy(k *fakeConn, m *msg.AllocRequest, h *legacyHeld) {
	l, a := f.legacy, &msg.AllocResponse{}
	if h.last {
		f.w.failf("%s: a batch after the last flag", m.ReqID)
	}
	h.tracked = true
	for i, key := range m.Keys {
		if h.seen[key] {
			f.w.failf("%s: key %s twice", m.ReqID, key)
		}
		h.seen[key] = true
		if f.w.rnd.Intn(8) == 0 {
			a.AlreadySent = append(a.AlreadySent, int64(i))
			h.shared[key] = true
			continue
		}
		slot := kv.SlotID(0)
		for l.taken[slot] != "" {
			slot++
		}
		l.taken[slot] = m.ReqID
		h.keys[key] = slot
		h.left--
		h.expected++
		a.RemoteIndexes = append(a.RemoteIndexes, int64(slot))
	}
	if m.IsLastBatch {
		if len(m.Keys) > 0 {
			f.w.failf("%s: the last flag has keys", m.ReqID)
		}
		h.last, h.tracked = true, false
		h.left = 0
	}
	switch {
	case f.w.quiet:
	case f.w.rnd.Intn(20) == 0: // it fails: everything is rolled back
		f.rollBack(m.ReqID)
		h.unclean = true // a cancel that is on its way may name what it held
		a = &msg.AllocResponse{RemoteIndexes: []int64{-1}}
	case f.w.rnd.Intn(40) == 0:
		h.unclean = true
		a.RemoteIndexes = append(a.RemoteIndexes, 77)
	}
	l.later = append(l.later, legacyAsk{k: k, m: m, answer: a})
}

func (f *fakeReceiver) rollBack(id string) {
	h := f.legacy.reqs[id]
	for _, s := range h.keys {
		delete(f.legacy.taken, s)
	}
	h.keys, h.left, h.tracked = map[string]kv.SlotID{}, 0, false
	clear(h.shared)
}

// drained: what is freed is not being written.
func (f *fakeReceiver) drained(id string, h *legacyHeld) {
	for _, s := range h.keys {
		for _, l := range f.w.links {
			for _, x := range l.writes {
				if l.peer == f.n && x.Dst == s && !x.sent {
					f.w.failf("%s: cancelled with write %d in flight", id, x.ID)
				}
			}
		}
	}
}

// cancelLegacy frees what a cancel names. A write to it that is still in flight
// would hit the next user.
func (f *fakeReceiver) cancelLegacy(m *msg.CancelNotif) {
	h := f.legacy.reqs[m.ReqID]
	if h == nil {
		return
	}
	for _, key := range m.Keys {
		s, ok := h.keys[key]
		if h.shared[key] {
			delete(h.shared, key)
			continue
		}
		if !ok {
			if !h.unclean {
				f.w.failf("%s: a cancel of %s, which it does not hold", m.ReqID, key)
			}
			continue
		}
		f.drained(m.ReqID, &legacyHeld{keys: map[string]kv.SlotID{key: s}})
		delete(h.keys, key)
		delete(f.legacy.taken, s)
	}
	h.left, h.tracked, h.cancelled = 0, false, true
}

func (f *fakeReceiver) landedLegacy(dst kv.SlotID) {
	if id := f.legacy.taken[dst]; id != "" {
		h := f.legacy.reqs[id]
		h.landed[dst] = true
		if h.last && len(h.landed) == h.expected {
			f.was[id] = true
		}
	}
}

// legacyMoves lets the receivers get on: admit, answer, be read.
func (w *world) legacyMoves() bool {
	if !w.legacy {
		return false
	}
	for _, f := range w.recvs {
		l := f.legacy
		for _, id := range w.names { // the decoder reads what its proxy was told of
			if h := l.reqs[id]; h != nil && w.reqs[id].notified > 0 && len(h.keys)+len(h.shared) > 0 {
				f.rollBack(id)
				return true
			}
		}
		for i, a := range l.waiting {
			if a.m.TotalChunks <= l.free() {
				l.waiting = slices.Delete(l.waiting, i, i+1)
				l.reqs[a.m.ReqID] = &legacyHeld{total: a.m.TotalChunks, left: a.m.TotalChunks, keys: map[string]kv.SlotID{}, shared: map[string]bool{}, tracked: true, unclean: w.conns[a.k.id] != a.k, seen: map[string]bool{}, landed: map[kv.SlotID]bool{}}
				l.later = append(l.later, legacyAsk{k: a.k, m: a.m, answer: &msg.AllocResponse{}})
				return true
			}
		}
		if len(l.later) > 0 {
			i := w.rnd.Intn(len(l.later))
			a := l.later[i]
			l.later = slices.Delete(l.later, i, i+1)
			if a.k.gone || w.conns[a.k.id] != a.k {
				if h := l.reqs[a.m.ReqID]; h != nil && h.cancelled {
					h.unclean = true // the cancel did not name what was granted before
				}
			} else {
				a.k.toS = append(a.k.toS, a.answer)
				if h := l.reqs[a.m.ReqID]; h != nil && h.last && len(h.landed) == h.expected {
					f.was[a.m.ReqID] = true
				}
			}
			return true
		}
	}
	return false
}

// checkLegacyRest: what has ended badly holds nothing at its receiver, but where
// a connection was lost or the receiver itself was wrong.
func (w *world) checkLegacyRest() {
	for _, f := range w.recvs {
		for id, h := range f.legacy.reqs {
			if !h.unclean && !f.was[id] && !w.lossy && (h.left > 0 || len(h.keys)+len(h.shared) > 0) {
				w.failf("%s has ended as %s; its receiver holds %d reserved and %d keys", id, w.reqs[id].ending.Ending, h.left, len(h.keys))
			}
		}
	}
}
