package outbound

import (
	"fmt"
	"slices"
	"sort"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
)

// random does one thing that can happen, and reports whether there was one.
// When the world is quiet it does only what brings matters to an end.
func (w *world) random() bool {
	moves := []func() bool{w.legacyMoves, w.deliverToReceiver, w.deliverToSender, w.connect, w.link, w.moveData, w.sum, w.engine}
	if !w.quiet {
		moves = append(moves, w.engine, w.engine, w.engine, w.fault, w.time)
	}
	for _, i := range w.rnd.Perm(len(moves)) {
		if moves[i]() {
			return true
		}
	}
	return false
}

func (w *world) sortedConns() []*fakeConn {
	var ks []*fakeConn
	for _, k := range w.conns {
		ks = append(ks, k)
	}
	sort.Slice(ks, func(i, j int) bool { return ks[i].id < ks[j].id })
	return ks
}

func (w *world) sortedLinks() []*fakeLink {
	var ls []*fakeLink
	for _, l := range w.links {
		ls = append(ls, l)
	}
	sort.Slice(ls, func(i, j int) bool { return ls[i].id < ls[j].id })
	return ls
}

// connect finishes dials and reports connections that are gone.
func (w *world) connect() bool {
	for _, k := range w.sortedConns() {
		switch {
		case k.gone:
			delete(w.conns, k.id)
			w.step(Disconnected{Conn: k.id, Text: "gone"})
			return true
		case !k.up && !w.quiet && w.rnd.Intn(4) == 0:
			k.gone, w.lossy = true, true
			return true
		case !k.up:
			k.up = true
			w.step(Connected{Conn: k.id})
			return true
		}
	}
	return false
}

func (w *world) deliverToReceiver() bool {
	for _, k := range w.sortedConns() {
		if k.up && !k.gone && len(k.toR) > 0 {
			m := k.toR[0]
			k.toR = k.toR[1:]
			w.recvs[k.peer].receive(k, m)
			return true
		}
	}
	return false
}

func (w *world) deliverToSender() bool {
	for _, k := range w.sortedConns() {
		if k.up && !k.gone && len(k.toS) > 0 {
			m := k.toS[0]
			k.toS = k.toS[1:]
			w.step(Received{Conn: k.id, Msg: m})
			if !w.quiet && !w.legacy && w.rnd.Intn(16) == 0 { // R9: twice
				w.step(Received{Conn: k.id, Msg: m})
			}
			return true
		}
	}
	return false
}

// link makes links and ends those that are to be closed.
func (w *world) link() bool {
	for _, l := range w.sortedLinks() {
		switch {
		case l.closed:
			w.linkDown(l)
			return true
		case !l.up && !w.quiet && w.rnd.Intn(3) == 0:
			w.linkDown(l)
			return true
		case !l.up:
			l.up = true
			w.step(LinkUp{Link: l.id})
			return true
		}
	}
	return false
}

func (w *world) linkDown(l *fakeLink) {
	ids := slices.Clone(l.order)
	for _, id := range ids {
		w.letGo(l, id)
	}
	if len(ids) > 0 {
		w.step(Lost{Link: l.id, Writes: ids, Text: "closed"})
		for _, id := range slices.Clone(l.order) { // written again before we said so
			w.letGo(l, id)
		}
	}
	delete(w.links, l.id)
	w.step(LinkDown{Link: l.id, Text: "closed"})
}

// moveData lets one write get on: land, be sent, be given up.
func (w *world) moveData() bool {
	for _, l := range w.sortedLinks() {
		for _, id := range l.order {
			x := l.writes[id]
			switch {
			case x.aborted && !x.sent && w.rnd.Intn(2) == 0:
				w.letGo(l, id)
				w.step(Lost{Link: l.id, Writes: []uint64{id}, Text: "aborted"})
				return true
			case !x.landed && (l.def.OneSided == false || !x.sent):
				x.landed = true
				w.recvs[l.peer].landed(x.Generation, x.Dst)
				return true
			case !x.sent:
				x.sent = true
				w.step(Sent{Link: l.id, Writes: []uint64{id}})
				return true
			case !w.quiet && w.rnd.Intn(8) == 0 && !l.def.OneSided:
				w.letGo(l, id)
				w.step(Lost{Link: l.id, Writes: []uint64{id}, Text: "reset"})
				return true
			}
		}
	}
	return false
}

func (w *world) sum() bool {
	if len(w.sums) == 0 {
		return false
	}
	s := w.sums[0]
	w.sums = w.sums[1:]
	for _, it := range s.Items {
		w.slots[it.Slot].sum = false
	}
	w.step(Summed{Batch: s.Batch, Sums: make([]uint32, len(s.Items))})
	return true
}

// time lets a moment pass, now and then a long one.
func (w *world) time() bool {
	w.now = w.now.Add(kv.Duration(w.rnd.Int63n(int64(200 * kv.Millisecond))))
	if w.rnd.Intn(30) == 0 {
		w.now = w.now.Add(kv.Duration(w.rnd.Int63n(int64(20 * kv.Second))))
	}
	if w.now >= w.wake {
		w.step(Tick{})
	}
	return true
}

// fault breaks something.
func (w *world) fault() bool {
	switch w.rnd.Intn(12) {
	case 0:
		for _, k := range w.sortedConns() {
			if k.up && w.rnd.Intn(2) == 0 {
				k.gone, w.lossy = true, true
				return true
			}
		}
	case 1:
		for _, l := range w.sortedLinks() {
			if l.up && w.rnd.Intn(2) == 0 {
				w.linkDown(l)
				return true
			}
		}
	case 2:
		return !w.legacy && w.recvs[w.rnd.Intn(2)].endOne()
	case 3:
		w.recvs[w.rnd.Intn(2)].restart()
		w.lossy = true
		return true
	case 4:
		if len(w.engines) == 1 && w.rnd.Intn(3) != 0 {
			return false
		}
		i := w.rnd.Intn(len(w.engines))
		e := w.engines[i]
		w.engines = slices.Delete(w.engines, i, i+1)
		for _, r := range w.reqs {
			r.staged = slices.DeleteFunc(r.staged, func(s kv.SlotID) bool { return w.slots[s].engine == e })
		}
		for call, what := range w.waiting { // its calls are gone with it
			var by kv.ConnID
			var id string
			if n, _ := fmt.Sscanf(what, "stage %d %s", &by, &id); n == 2 && by == e {
				delete(w.waiting, call)
			}
		}
		w.lost = append(w.lost, e)
		w.step(EngineLost{Engine: e, Last: len(w.engines) == 0})
		if len(w.engines) == 0 {
			w.attach()
		}
		return true
	case 5:
		if len(w.lost) > 0 {
			e := w.lost[0]
			w.lost = w.lost[1:]
			w.fence(e)
			return true
		}
	case 6:
		w.attach()
		return true
	}
	return false
}

// engine lets an engine do something: begin, stage, submit, cancel.
func (w *world) engine() bool {
	e := w.engines[w.rnd.Intn(len(w.engines))]
	if w.quiet {
		return w.finishOne()
	}
	if n := w.rnd.Intn(10); n < 2 || len(w.names) == 0 {
		id := fmt.Sprintf("r%d", len(w.names))
		r := &obsRequest{id: id, total: int64(w.rnd.Intn(5)), peer: w.rnd.Intn(2), end: -1}
		w.reqs[id] = r
		before := w.c.live
		w.step(Begin{Engine: e, Call: w.newCall("begin"), ReqID: id, Total: r.total, Peer: w.peer(r), Deadline: kv.Forever, Stage: int64(w.rnd.Intn(3))})
		if w.c.live == before && w.c.reqs[id] == nil && r.ended == 0 {
			delete(w.reqs, id) // refused
			return true
		}
		w.names = append(w.names, id)
		return true
	}
	r := w.reqs[w.names[w.rnd.Intn(len(w.names))]]
	switch n := w.rnd.Intn(12); {
	case n < 4:
		w.step(Stage{Engine: e, Call: w.newCall(fmt.Sprintf("stage %d %s", e, r.id)), ReqID: r.id, N: 1 + w.rnd.Int63n(3), Deadline: kv.Forever,
			NonBlocking: w.rnd.Intn(2) == 0})
	case n < 9:
		w.submit(e, r)
	case n == 9:
		w.unstage(r, slices.Clone(r.staged))
	case n == 10:
		w.step(Cancel{Engine: e, Call: w.newCall("cancel"), ReqID: r.id, Reason: []fault.Code{"", fault.Deadline}[w.rnd.Intn(2)]})
	default: // a repeat
		w.step(Begin{Engine: e, Call: w.newCall("begin"), ReqID: r.id, Total: r.total, Peer: w.peer(r), Deadline: kv.Forever})
	}
	return true
}

func (w *world) peer(r *obsRequest) Peer {
	return Peer{Host: "d", AllocPort: 9000 + r.peer, InitPort: 8300 + r.peer}
}

// submit hands over what is staged, as the next chunks or as repeats.
func (w *world) submit(e kv.ConnID, r *obsRequest) {
	ev := Submit{Engine: e, ReqID: r.id}
	limit := r.total
	if r.end >= 0 {
		limit = r.end
	}
	used := map[int64]bool{}
	for _, s := range r.staged {
		i := r.next
		if i >= limit || w.rnd.Intn(5) == 0 { // again
			if limit == 0 {
				break
			}
			i = w.rnd.Int63n(limit)
		}
		if used[i] || i > r.next {
			continue
		}
		used[i] = true
		if i == r.next {
			r.next++
		}
		ev.Chunks = append(ev.Chunks, Chunk{Index: i, Key: fmt.Sprint(r.id, "/", i), Slot: s, Tokens: 16})
	}
	if r.end < 0 && w.rnd.Intn(6) == 0 {
		ev.HasEnd, ev.End = true, r.next
	}
	ev.Call = w.newCall("submit")
	free := map[kv.SlotID]bool{}
	for _, k := range ev.Chunks {
		free[k.Slot] = true
	}
	// If it is refused, the slots stay the engine's.
	ok := w.c.reqs[r.id] != nil && w.c.reqs[r.id].state == granted
	if ok {
		for s := range free {
			w.slots[s].engine = 0
		}
		r.staged = slices.DeleteFunc(r.staged, func(s kv.SlotID) bool { return free[s] })
		if ev.HasEnd {
			r.end = ev.End
		}
	}
	w.step(ev)
	if _, waits := w.waiting[ev.Call]; waits {
		w.failf("submit was not answered at once")
	}
}

// finishOne brings a granted request to its end by the engine's hand: with what
// it has, or by giving up.
func (w *world) finishOne() bool {
	for _, id := range w.names {
		r := w.reqs[id]
		q := w.c.reqs[id]
		if q == nil || q.state != granted || q.hasEnd {
			continue
		}
		w.unstage(r, slices.Clone(r.staged))
		if q.state == granted {
			r.end = q.highest() + 1
			r.next = r.end
			if q.submitted < r.end { // a chunk of an earlier batch is missing: it was refused
				w.step(Cancel{Engine: w.engines[0], Call: w.newCall("cancel"), ReqID: id})
				return true
			}
			w.step(Submit{Engine: w.engines[0], Call: w.newCall("submit"), ReqID: id, HasEnd: true, End: r.end})
		}
		return true
	}
	return false
}
