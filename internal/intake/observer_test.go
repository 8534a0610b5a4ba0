package intake

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/slot"
)

// observer is the simple second opinion: it sees only events and actions, as a
// receiver's surroundings do, and says what the rules R1 to R12 forbid. Where a
// rule is a predicate of the state, it also asks Check.
type observer struct {
	core    *Core
	chaos   *chaos
	now     kv.Instant
	due     kv.Instant
	tracing bool
	trace   []string

	gens    map[kv.Generation]*grant
	legacy  map[legacyReq]*grant // slots of legacy requests, which have no Open
	readers map[kv.SlotID]kv.ConnID
	landed  map[kv.SlotID]kv.Generation
	byName  map[string]kv.ConnID // by+name → the connection that claimed it
	claims  map[string][]ClaimedChunk

	asked    map[asked2]int // copies of a request that came
	answered map[asked2]int
	verdicts map[beginOf]string
	calls    map[kv.CallID]bool // open ones
	ready    []string           // names that became ready in this step
	session  map[kv.ConnID]kv.Incarnation
	epoch    map[kv.Incarnation]int
	err      error
}

type legacyReq struct{ owner, id string }

type asked2 struct {
	inc   kv.Incarnation
	epoch int
	seq   uint64
}

type beginOf struct {
	inc   kv.Incarnation
	epoch int
	begin uint64
}

func newObserver(p picker, legacyData bool) *observer {
	cfg := chaosConfig(legacyData)
	return &observer{
		core:  New(cfg, 0),
		chaos: &chaos{picker: p, cfg: cfg, seq: map[kv.Incarnation]uint64{}, begin: map[kv.Incarnation]uint64{}, said: map[kv.Incarnation][]msg.Message{}},
		due:   kv.Never,
		gens:  map[kv.Generation]*grant{}, legacy: map[legacyReq]*grant{}, readers: map[kv.SlotID]kv.ConnID{},
		landed: map[kv.SlotID]kv.Generation{}, byName: map[string]kv.ConnID{}, claims: map[string][]ClaimedChunk{},
		asked: map[asked2]int{}, answered: map[asked2]int{}, verdicts: map[beginOf]string{}, calls: map[kv.CallID]bool{},
		session: map[kv.ConnID]kv.Incarnation{}, epoch: map[kv.Incarnation]int{},
	}
}

func (o *observer) fail(format string, args ...any) {
	if o.err == nil {
		o.err = fmt.Errorf(format, args...)
	}
}

// run makes n events happen, with the wake-ups between them, then lets
// everything end.
func (o *observer) run(n int) error {
	for range n {
		o.pass(o.chaos.pass())
		e := o.chaos.next()
		if r, ok := e.(Received); ok && chance(o.chaos.picker, 25) {
			o.step(e)
			o.repeat(r)
		} else {
			o.step(e)
		}
		if o.err != nil {
			return o.err
		}
	}
	o.wind()
	return o.err
}

// pass lets time go by as the shell does: a Tick at each wake-up.
func (o *observer) pass(d kv.Duration) {
	to := o.now.Add(d)
	for o.due <= to && o.err == nil {
		o.now = max(o.now, o.due)
		o.step(Tick{})
	}
	o.now = to
}

func (o *observer) step(e Event) {
	o.note(e)
	o.before(e)
	if _, ok := e.(Tick); ok {
		o.due = kv.Never
	}
	actions := o.core.Step(o.now, e)
	o.ready = o.ready[:0]
	for _, a := range actions {
		if n, ok := a.(Note); ok && n.Kind == NoteEnded && n.Ending == msg.EndReady {
			o.ready = append(o.ready, n.ReqID)
		}
	}
	for _, a := range actions {
		o.note(a)
		o.action(a)
	}
	o.after(e)
	if err := o.core.Check(); err != nil {
		o.fail("%w", err)
	}
	o.hands()
}

func (o *observer) note(x any) {
	if o.tracing {
		o.trace = append(o.trace, fmt.Sprintf("%8.3f %s", kv.Duration(o.now).Seconds(), describe(x)))
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

// before takes what an event tells.
func (o *observer) before(e Event) {
	switch e := e.(type) {
	case Received:
		if seq := seqOf(e.Msg); seq != 0 {
			if inc, ok := o.session[e.Conn]; ok {
				o.asked[asked2{inc, o.epoch[inc], seq}]++
			}
		}
		if m, ok := e.Msg.(*msg.Drained); ok {
			inc := o.session[e.Conn]
			for _, g := range o.gens { // the sender's word for a request that has ended
				if g.owner == inc && g.begin == m.Begin && g.link == "nixl" {
					for s := range g.revoked {
						g.fenced[s] = true
					}
				}
			}
		}
	case Malformed:
		if inc, ok := o.session[e.Conn]; ok {
			o.asked[asked2{inc, o.epoch[inc], e.Seq}]++
		}
	case Fenced:
		for _, s := range e.Slots {
			o.gens[e.Generation].fenced[s] = true
		}
	case PeerGone:
		for _, g := range o.gens {
			if g.owner == e.Owner && g.link == "nixl" {
				for _, s := range g.slots {
					g.fenced[s] = true
				}
			}
		}
	case EngineFenced:
		for s, c := range o.readers {
			if c == e.Engine {
				delete(o.readers, s)
			}
		}
	case Wait:
		o.calls[e.Call] = true
	case Find:
		o.calls[e.Call] = true
	case Claim:
		o.calls[e.Call] = true
	case Release:
		o.calls[e.Call] = true
	case CancelByName:
		o.calls[e.Call] = true
	}
}

func seqOf(m msg.Message) uint64 {
	switch m := m.(type) {
	case *msg.Hello:
		return m.Seq
	case *msg.Begin:
		return m.Seq
	case *msg.Commit:
		return m.Seq
	case *msg.Cancel:
		return m.Seq
	case *msg.Watch:
		return m.Seq
	case *msg.Ready:
		return m.Seq
	case *msg.Heartbeat:
		return m.Seq
	}
	return 0
}

// action takes what the core does.
func (o *observer) action(a Action) {
	switch a := a.(type) {
	case Wake:
		if a.At < o.now {
			o.fail("R10: a wake-up in the past: %d at %d", a.At, o.now)
		}
		o.due = a.At
	case Open:
		g := &grant{gen: a.Generation, owner: a.Owner, link: a.Link, slots: slices.Clone(a.Slots), revoked: map[kv.SlotID]kv.Instant{}, fenced: map[kv.SlotID]bool{}}
		if r := o.core.granted[a.Generation]; r != nil {
			g.name = r.id
		}
		for _, s := range a.Slots {
			o.fresh(s)
		}
		if o.gens[a.Generation] != nil {
			o.fail("generation %d is given twice", a.Generation)
		}
		o.gens[a.Generation] = g
		o.chaos.grants = append(o.chaos.grants, g)
	case Revoke:
		g := o.gens[a.Generation]
		for _, s := range a.Slots {
			if _, ok := g.revoked[s]; ok || g.link != a.Link {
				o.fail("slot %d of generation %d is revoked twice, or over another link", s, a.Generation)
			}
			g.revoked[s] = o.now
			if o.word(g) {
				g.fenced[s] = true
			}
		}
	case Answer:
		if !o.calls[a.Call] {
			o.fail("call %d is answered twice, or was never made", a.Call)
		}
		delete(o.calls, a.Call)
	case Send:
		o.sent(a)
	}
}

// fresh: R6, nobody's hand is on a slot that is handed out.
func (o *observer) fresh(s kv.SlotID) {
	if g := o.writer(s); g != nil {
		o.fail("R6: slot %d is handed out while generation %d may still write it", s, g.gen)
	}
	if c, ok := o.readers[s]; ok {
		o.fail("R6: slot %d is handed out while connection %d may still read it", s, c)
	}
	delete(o.landed, s)
}

// writer returns the grant whose sender may still write a slot.
func (o *observer) writer(s kv.SlotID) *grant {
	for _, g := range o.gens {
		if !slices.Contains(g.slots, s) || g.fenced[s] {
			continue
		}
		at, revoked := g.revoked[s]
		if g.link == "nixl" && revoked && at.Add(o.core.cfg.Quarantine) <= o.now {
			continue
		}
		return g
	}
	return nil
}

// word: what is revoked of a one-sided request while it goes on (its surplus), or
// because it is ready, its own sender has said it writes no more.
func (o *observer) word(g *grant) bool {
	r := o.core.granted[g.gen]
	return g.link == "nixl" && (r != nil && r.state != draining || slices.Contains(o.ready, g.name))
}

// hands: R6 as a predicate, and R1 in the status.
func (o *observer) hands() {
	for s := range kv.SlotID(chaosCapacity) {
		free := o.core.pool.Slot(s).State == slot.Free
		if g := o.writer(s); free && g != nil {
			o.fail("R6: slot %d is free while generation %d may still write it", s, g.gen)
		}
		if c, ok := o.readers[s]; free && ok {
			o.fail("R6: slot %d is free while connection %d may still read it", s, c)
		}
	}
	p := o.core.Status(o.now).Pool
	if p.Free+p.Reserved+p.Granted+p.Committed+p.Claimed+p.Quarantined != p.Capacity || min(p.Free, p.Reserved, p.Granted, p.Committed, p.Claimed, p.Quarantined) < 0 {
		o.fail("R1: %+v", p)
	}
}

func (o *observer) sent(a Send) {
	var re uint64
	inc, ok := o.session[a.Conn]
	switch m := a.Msg.(type) {
	case *msg.HelloReply:
		return
	case *msg.Granted:
		re = m.Re
		if g := o.gens[m.Generation]; g != nil {
			g.begin = m.Begin
			if !slices.Equal(g.slots, m.Slots) {
				o.fail("R9: generation %d is granted as %v and as %v", m.Generation, g.slots, m.Slots)
			}
		}
	case *msg.CommitReply:
		re = m.Re
		if m.Complete {
			o.verdict(inc, m.Begin, "ready")
		}
	case *msg.Ended:
		re = m.Re
		if m.Begin != 0 && m.Reason != "ended" {
			o.verdict(inc, m.Begin, string(m.Ending)+" "+string(m.Reason))
		}
		if m.Seq != 0 {
			o.chaos.told = append(o.chaos.told, told{inc, m.Seq, m.Begin})
		}
	case *msg.HeartbeatReply:
		re = m.Re
	case *msg.Error:
		re = m.Re
	default:
		return
	}
	if ok && re != 0 {
		o.answered[asked2{inc, o.epoch[inc], re}]++
	}
}

// verdict: R5, a request has one ending, whoever asks and when.
func (o *observer) verdict(inc kv.Incarnation, begin uint64, v string) {
	b := beginOf{inc, o.epoch[inc], begin}
	v = strings.TrimSpace(v)
	if had := o.verdicts[b]; had != "" && had != v {
		o.fail("R5: begin %d ended as %q and as %q", begin, had, v)
	}
	o.verdicts[b] = v
}

// after compares what the event did with what it may do.
func (o *observer) after(e Event) {
	switch e := e.(type) {
	case Received:
		if m, ok := e.Msg.(*msg.Hello); ok {
			o.helloed(e.Conn, m)
		}
	case Landed:
		g := o.gens[e.Generation]
		if _, had := o.landed[e.Slot]; !had && !g.fenced[e.Slot] {
			o.landed[e.Slot] = e.Generation
		}
	}
}

// helloed notes whose connection it is now, and whether a new session began.
func (o *observer) helloed(id kv.ConnID, m *msg.Hello) {
	cn := o.core.conns[id]
	if cn == nil || cn.session == nil || cn.session.incarnation != m.Incarnation {
		return
	}
	if _, ok := o.session[id]; ok {
		return
	}
	o.session[id] = m.Incarnation
	if int(cn.session.serial) != o.epoch[m.Incarnation] {
		o.epoch[m.Incarnation] = int(cn.session.serial)
		o.chaos.told = slices.DeleteFunc(o.chaos.told, func(t told) bool { return t.inc == m.Incarnation })
	}
}

// repeat: R9, the same message once more changes nothing, and what was answered
// at once is answered alike. It happens to a clone.
func (o *observer) repeat(e Received) {
	switch e.Msg.(type) {
	case *msg.Hello, *msg.AllocRequest:
		return // each has its own rule: a second Hello is refused, each AllocRequest has an answer
	}
	if cn := o.core.conns[e.Conn]; cn != nil && len(cn.replies) > 0 {
		return // a CancelNotif's answer stands in line too
	}
	before := o.core.Encode(nil)
	twin := o.core.Clone()
	if !bytes.Equal(before, twin.Encode(nil)) {
		o.fail("a clone is encoded differently")
	}
	twin.Step(o.now, e)
	if err := twin.Check(); err != nil {
		o.fail("after a repeat: %w", err)
	}
	if !bytes.Equal(before, twin.Encode(nil)) {
		o.fail("R9: a repeat of %T%+v changed the state", e.Msg, e.Msg)
	}
	if !bytes.Equal(before, o.core.Encode(nil)) {
		o.fail("a clone is not independent")
	}
}

// wind ends the history: everybody goes, every fence is reported, every time
// runs out. R12: nothing is left.
func (o *observer) wind() {
	for _, id := range append(slices.Clone(o.chaos.engines), o.chaos.lost...) {
		o.step(EngineLost{Engine: id})
		o.step(EngineFenced{Engine: id})
	}
	for range 400 {
		if o.err != nil {
			return
		}
		for _, g := range o.chaos.grants {
			for s := range g.revoked {
				if g.link != "nixl" && !g.fenced[s] {
					o.step(Fenced{Generation: g.gen, Slots: []kv.SlotID{s}})
				}
			}
		}
		if o.due == kv.Never {
			break
		}
		o.pass(max(o.due.Sub(o.now), 0))
	}
	for k, n := range o.asked {
		if k.epoch == o.epoch[k.inc] && o.answered[k] > n {
			o.fail("seq %d of %s was asked %d times and answered %d times", k.seq, k.inc, n, o.answered[k])
		}
	}
	for _, c := range slices.Clone(o.chaos.conns) {
		o.step(Disconnected{Conn: c.id})
	}
	o.pass(1000 * kv.Second)
	c := o.core
	if free := c.pool.Counts().Free; free != chaosCapacity {
		o.fail("R12: %d of %d slots are free in the end", free, chaosCapacity)
	}
	if n := c.requests.n + c.endings.n + len(c.names) + len(c.granted) + len(c.identities) + len(c.sessions) + len(c.waits) + c.watches + len(c.findable) + len(c.readers); n != 0 {
		o.fail("R12: left over: %d requests, %d endings, %d names, %d generations, %d identities, %d sessions, %d waits, %d watches, %d findable, %d readers",
			c.requests.n, c.endings.n, len(c.names), len(c.granted), len(c.identities), len(c.sessions), len(c.waits), c.watches, len(c.findable), len(c.readers))
	}
}
