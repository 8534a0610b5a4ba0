package intake

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// history is one run of a core among chaos, watched by the observer.
type history struct {
	core    *Core
	chaos   *chaos
	o       *observer
	now     kv.Instant
	due     kv.Instant
	check   bool // Check after every step, else only at the end
	tracing bool
	trace   []string
}

func newHistory(p picker, legacyData bool) *history {
	cfg := chaosConfig(legacyData)
	o := newObserver(cfg)
	return &history{
		core: New(cfg, 0), o: o, due: kv.Never,
		chaos: &chaos{picker: p, cfg: cfg, o: o, seq: map[kv.Incarnation]uint64{}, begin: map[kv.Incarnation]uint64{}, said: map[kv.Incarnation][]msg.Message{}},
	}
}

// run makes n events happen, with the wake-ups between them, then lets
// everything end.
func (h *history) run(n int) error {
	for range n {
		h.pass(h.chaos.pass())
		e := h.chaos.next()
		h.step(e)
		if r, ok := e.(Received); ok && chance(h.chaos.picker, 5) {
			h.repeat(r)
		}
		if h.o.err != nil {
			return h.o.err
		}
	}
	h.wind()
	return h.o.err
}

// pass lets time go by as the shell does: a Tick at each wake-up.
func (h *history) pass(d kv.Duration) {
	to := h.now.Add(d)
	for h.due <= to && h.o.err == nil {
		h.now = max(h.now, h.due)
		h.step(Tick{})
	}
	h.now = to
}

func (h *history) step(e Event) {
	if h.o.err != nil {
		return
	}
	h.note(e)
	if _, ok := e.(Tick); ok {
		h.due = kv.Never
	}
	h.o.now = h.now
	h.o.event(e)
	actions := h.core.Step(h.now, e)
	for _, a := range actions {
		h.note(a)
		if w, ok := a.(Wake); ok {
			h.due = w.At
		}
		if s, ok := a.(Send); ok {
			if m, ok := s.Msg.(*msg.Ended); ok && m.Seq != 0 {
				h.chaos.told = append(h.chaos.told, told{h.o.incs[s.Conn], m.Seq, m.Begin})
			}
		}
	}
	h.o.actions(actions, func(g kv.Generation) bool {
		r := h.core.granted[g]
		return r != nil && r.state != draining || ended(actions, msg.EndReady)
	})
	h.o.state(h.core.pool)
	if h.check {
		h.verify()
	}
}

func ended(actions []Action, as msg.Ending) bool {
	return slices.ContainsFunc(actions, func(a Action) bool {
		n, ok := a.(Note)
		return ok && n.Kind == NoteEnded && n.Ending == as
	})
}

func (h *history) verify() {
	if err := h.core.Check(); err != nil {
		h.o.fail("%w", err)
	}
}

func (h *history) note(x any) {
	if h.tracing {
		h.trace = append(h.trace, fmt.Sprintf("%8.3f %s", kv.Duration(h.now).Seconds(), describe(x)))
	}
}

func describe(x any) string {
	switch x := x.(type) {
	case Received:
		return fmt.Sprintf("%d -> %s", x.Conn, show(x.Msg))
	case Send:
		return fmt.Sprintf("%d <- %s", x.Conn, show(x.Msg))
	}
	return show(x)
}

// repeat: R9, the same message once more changes nothing. It happens to a clone.
func (h *history) repeat(e Received) {
	switch e.Msg.(type) {
	case *msg.Hello, *msg.AllocRequest:
		return // a second Hello is refused; each AllocRequest has its own reply
	}
	if cn := h.core.conns[e.Conn]; cn != nil && len(cn.replies) > 0 {
		return // a CancelNotif's reply stands in line too
	}
	before := h.core.Encode(nil)
	twin := h.core.Clone()
	if !bytes.Equal(before, twin.Encode(nil)) {
		h.o.fail("a clone is encoded differently")
	}
	twin.Step(h.now, e)
	if err := twin.Check(); err != nil {
		h.o.fail("after a repeat: %w", err)
	}
	if !bytes.Equal(before, twin.Encode(nil)) {
		h.o.fail("R9: a repeat of %T%+v changed the state", e.Msg, e.Msg)
	}
	if !bytes.Equal(before, h.core.Encode(nil)) {
		h.o.fail("a clone is not independent")
	}
}

// wind ends the history: every fence is reported and every time runs out, then
// everybody goes. R12: nothing is left.
func (h *history) wind() {
	for _, id := range append(slices.Clone(h.chaos.engines), h.chaos.lost...) {
		h.step(EngineLost{Engine: id})
		h.step(EngineFenced{Engine: id})
	}
	for h.due != kv.Never && h.o.err == nil {
		for _, g := range h.chaos.grants() {
			for _, s := range g.slots {
				if g.link != "nixl" && g.revoked[s] && !g.fenced[s] {
					h.step(Fenced{Generation: g.gen, Slots: []kv.SlotID{s}})
				}
			}
		}
		h.pass(max(h.due.Sub(h.now), 0))
	}
	h.o.end()
	for _, c := range h.chaos.conns {
		h.step(Disconnected{Conn: c.id})
	}
	h.pass(1000 * kv.Second)
	h.verify()
	c := h.core
	if free := c.pool.Counts().Free; free != chaosCapacity {
		h.o.fail("R12: %d of %d slots are free in the end", free, chaosCapacity)
	}
	if n := c.requests.n + c.endings.n + len(c.names) + len(c.granted) + len(c.identities) + len(c.sessions) + len(c.waits) + c.watches +
		len(c.findable) + len(c.readers) + len(c.engines) + len(c.conns); n != 0 {
		h.o.fail("R12: left over: %d requests, %d endings, %d names, %d generations, %d identities, %d sessions, %d waits, %d watches, %d findable, "+
			"%d readers, %d engines, %d connections", c.requests.n, c.endings.n, len(c.names), len(c.granted), len(c.identities), len(c.sessions),
			len(c.waits), c.watches, len(c.findable), len(c.readers), len(c.engines), len(c.conns))
	}
}
