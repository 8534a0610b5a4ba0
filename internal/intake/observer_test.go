package intake

import (
	"fmt"
	"slices"
	"strings"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/slot"
)

// observer is the simple second opinion. It sees what a receiver's surroundings
// see, events and actions, keeps for each slot whose hand may be on it, and says
// what R4 to R9 and the promise of one answer to each request forbid.
type observer struct {
	cfg   Config
	now   kv.Instant
	seats [chaosCapacity]seat
	gens  map[kv.Generation]*grant
	holds map[legacyID]map[string]kv.SlotID // a legacy request's keys and slots
	lines map[kv.ConnID][]*msg.AllocRequest // unanswered LMCache messages; nil: another one
	who   map[kv.ConnID]string              // identities

	calls  map[kv.CallID]Event
	claims map[claimID]*claim

	cut      map[kv.ConnID]bool // superseded: nothing is read or said there
	asked    map[askID]*question
	epoch    map[kv.Incarnation]int    // sessions
	opener   map[kv.Incarnation]uint64 // seq of the Hello that opened the last one
	incs     map[kv.ConnID]kv.Incarnation
	verdicts map[beginID]string
	err      error
}

// seat is what is known of a slot.
type seat struct {
	gen    kv.Generation
	owner  legacyID   // instead of gen
	hand   bool       // the writer's, until
	until  kv.Instant // Never: until its fence
	landed bool
	reader kv.ConnID
}

// grant is what is known of a generation.
type grant struct {
	gen     kv.Generation
	owner   kv.Incarnation
	link    string
	begin   uint64
	slots   []kv.SlotID
	revoked map[kv.SlotID]bool
	fenced  map[kv.SlotID]bool
}

type legacyID struct{ identity, id string }

type claimID struct{ by, id string }

// claim is what a by may read.
type claim struct {
	conn   kv.ConnID
	chunks []ClaimedChunk
}

type askID struct {
	inc kv.Incarnation
	seq uint64
}

// question is a Berth request: how often it came, and was answered.
type question struct {
	conn          kv.ConnID // where it came last
	came, answers int
}

type beginID struct {
	inc   kv.Incarnation
	epoch int
	begin uint64
}

func newObserver(cfg Config) *observer {
	return &observer{
		cfg: cfg, gens: map[kv.Generation]*grant{}, holds: map[legacyID]map[string]kv.SlotID{},
		lines: map[kv.ConnID][]*msg.AllocRequest{}, who: map[kv.ConnID]string{}, calls: map[kv.CallID]Event{},
		claims: map[claimID]*claim{}, cut: map[kv.ConnID]bool{}, asked: map[askID]*question{},
		epoch: map[kv.Incarnation]int{}, opener: map[kv.Incarnation]uint64{}, incs: map[kv.ConnID]kv.Incarnation{}, verdicts: map[beginID]string{},
	}
}

func (o *observer) fail(format string, args ...any) {
	if o.err == nil {
		o.err = fmt.Errorf(format, args...)
	}
}

// ---- events ----

func (o *observer) event(e Event) {
	switch e := e.(type) {
	case Connected:
		o.who[e.Conn] = e.Identity
	case Disconnected:
		o.cut[e.Conn] = true
	case Received:
		o.heard(e)
	case Malformed:
		if e.Seq == 0 {
			o.lines[e.Conn] = append(o.lines[e.Conn], nil)
		} else {
			o.ask(e.Conn, e.Seq)
		}
	case Landed:
		if t := &o.seats[e.Slot]; t.gen == e.Generation && t.hand {
			t.landed = true
		}
	case Fenced:
		for _, s := range e.Slots {
			o.gens[e.Generation].fenced[s] = true
			o.handOff(s, e.Generation)
		}
	case PeerGone:
		for _, g := range o.gens {
			if g.owner == e.Owner && g.link == "nixl" {
				o.writesNoMore(g)
			}
		}
	case EngineLost:
		for id, c := range o.claims {
			if c.conn == e.Engine {
				delete(o.claims, id)
			}
		}
		for id, w := range o.calls {
			if w, ok := w.(Wait); ok && w.Engine == e.Engine {
				delete(o.calls, id) // nobody is there to be answered
			}
		}
	case EngineFenced:
		for i := range o.seats {
			if o.seats[i].reader == e.Engine {
				o.seats[i].reader = 0
			}
		}
	case Wait:
		o.calls[e.Call] = e
	case Find:
		o.calls[e.Call] = e
	case Claim:
		o.calls[e.Call] = e
	case Release:
		o.calls[e.Call] = e
	case CancelByName:
		o.calls[e.Call] = e
	}
}

func (o *observer) heard(e Received) {
	switch m := e.Msg.(type) {
	case *msg.AllocRequest:
		o.lines[e.Conn] = append(o.lines[e.Conn], m)
	case *msg.CancelNotif:
		o.lines[e.Conn] = append(o.lines[e.Conn], nil)
	case *msg.Hello:
		o.incs[e.Conn] = m.Incarnation
		o.ask(e.Conn, m.Seq)
	case *msg.Begin:
		o.ask(e.Conn, m.Seq)
	case *msg.Commit:
		o.ask(e.Conn, m.Seq)
		for _, g := range o.gens { // over a one-sided link the write was done before
			if g.link == "nixl" && g.owner == o.incs[e.Conn] && g.begin == m.Begin {
				for _, k := range m.Chunks {
					if k.Index < int64(len(g.slots)) && o.seats[g.slots[k.Index]].gen == g.gen {
						o.seats[g.slots[k.Index]].landed = true
					}
				}
			}
		}
	case *msg.Cancel:
		o.ask(e.Conn, m.Seq)
	case *msg.Watch:
		o.ask(e.Conn, m.Seq)
	case *msg.Ready:
		o.ask(e.Conn, m.Seq)
	case *msg.Heartbeat:
		o.ask(e.Conn, m.Seq)
	case *msg.Drained:
		for _, g := range o.gens {
			if g.owner == o.incs[e.Conn] && g.begin == m.Begin && g.link == "nixl" && len(g.revoked) == len(g.slots) {
				o.writesNoMore(g)
			}
		}
	}
}

func (o *observer) ask(c kv.ConnID, seq uint64) {
	if o.cut[c] {
		return
	}
	id := askID{o.incs[c], seq}
	if o.asked[id] == nil {
		o.asked[id] = &question{}
	}
	o.asked[id].conn = c
	o.asked[id].came++
}

func (o *observer) writesNoMore(g *grant) {
	for _, s := range g.slots {
		o.handOff(s, g.gen)
	}
}

func (o *observer) handOff(s kv.SlotID, gen kv.Generation) {
	if t := &o.seats[s]; t.gen == gen {
		t.hand = false
	}
}

// ---- actions ----

// actions takes what the core did in one step. goesOn says whether a generation
// is live, or was until it was ready.
func (o *observer) actions(all []Action, goesOn func(kv.Generation) bool) {
	for _, a := range all {
		switch a := a.(type) {
		case Wake:
			if a.At < o.now {
				o.fail("R10: a wake-up in the past: %d at %d", a.At, o.now)
			}
		case Open:
			o.opened(a)
		case Revoke:
			o.revokes(a, goesOn)
		case Close:
			o.cut[a.Conn] = true
		case Note:
			o.noted(a)
		case Answer:
			o.answer(a)
		case Send:
			o.sent(a)
		}
	}
}

func (o *observer) opened(a Open) {
	if o.gens[a.Generation] != nil || len(a.Slots) == 0 {
		o.fail("generation %d is given twice, or to nothing", a.Generation)
	}
	o.gens[a.Generation] = &grant{gen: a.Generation, owner: a.Owner, link: a.Link, slots: slices.Clone(a.Slots),
		revoked: map[kv.SlotID]bool{}, fenced: map[kv.SlotID]bool{}}
	for _, s := range a.Slots {
		o.handOut(s, seat{gen: a.Generation})
	}
}

// handOut: R6, nobody's hand is on a slot that is handed out.
func (o *observer) handOut(s kv.SlotID, to seat) {
	o.untouched(s, "handed out")
	to.hand, to.until = true, kv.Never
	o.seats[s] = to
}

func (o *observer) untouched(s kv.SlotID, what string) {
	t := &o.seats[s]
	if t.hand && t.until > o.now {
		o.fail("R6: slot %d is %s while generation %d, or %v, may still write it", s, what, t.gen, t.owner)
	}
	if t.reader != 0 {
		o.fail("R6: slot %d is %s while connection %d may still read it", s, what, t.reader)
	}
}

// revokes: over a one-sided link the slots are quarantined for a time, unless
// the request goes on (it is its surplus) or is ready: then its own Commit has
// said that it writes them no more.
func (o *observer) revokes(a Revoke, goesOn func(kv.Generation) bool) {
	g := o.gens[a.Generation]
	for _, s := range a.Slots {
		if g.revoked[s] || g.link != a.Link || o.seats[s].gen != g.gen {
			o.fail("slot %d of generation %d is revoked twice, or over another link", s, a.Generation)
		}
		g.revoked[s] = true
		if g.link == "nixl" {
			o.seats[s].until = o.now.Add(o.cfg.Quarantine)
			if goesOn(g.gen) {
				o.seats[s].hand = false
			}
		}
	}
}

// noted: what a Note tells of endings. The ready ones' senders write no more.
func (o *observer) noted(a Note) {
	id := legacyID{a.Owner, a.ReqID}
	if a.Kind == NoteAdmitted {
		delete(o.holds, id) // an id that was ready is free again
	}
	if a.Kind != NoteEnded {
		return
	}
	for _, s := range o.holds[id] {
		t := &o.seats[s]
		switch {
		case t.owner != id:
		case a.Ending == msg.EndReady:
			t.hand, t.landed = false, true
		case !o.cfg.LegacyData:
			t.hand = false
		default:
			t.until = o.now.Add(o.cfg.Quarantine)
		}
	}
	if a.Ending != msg.EndReady {
		delete(o.holds, id)
	}
}

// ---- the engine's side ----

func (o *observer) answer(a Answer) {
	e, ok := o.calls[a.Call]
	if !ok {
		o.fail("call %d is answered twice, or was never made", a.Call)
	}
	delete(o.calls, a.Call)
	switch e := e.(type) {
	case Claim:
		if a.Err == nil {
			o.claimed(e, a.Claim)
		}
	case Release:
		id := claimID{e.By, e.ReqID}
		if c := o.claims[id]; c != nil && a.Err == nil {
			o.released(id, c, e.Chunks)
		}
	}
}

// claimed: R7, whatever may be read has landed, in its own slot, and nobody else
// reads it.
func (o *observer) claimed(e Claim, r *ClaimReply) {
	id := claimID{e.By, e.ReqID}
	c := o.claims[id]
	if c == nil {
		c = &claim{conn: e.Engine}
		o.claims[id] = c
	}
	c.chunks = r.Chunks
	for _, k := range r.Chunks {
		t := &o.seats[k.Slot]
		if !t.landed {
			o.fail("R7: chunk %d of %q may be read in slot %d before it has landed", k.Index, e.ReqID, k.Slot)
		}
		if g := o.gens[t.gen]; g != nil && (g.slots[k.Index] != k.Slot || k.Key != fmt.Sprint("k", k.Index)) {
			o.fail("R7: chunk %d of %q is read as %q in slot %d", k.Index, e.ReqID, k.Key, k.Slot)
		}
		if t.reader != 0 && t.reader != c.conn {
			o.fail("slot %d has two readers", k.Slot)
		}
		t.reader = c.conn
	}
}

func (o *observer) released(id claimID, c *claim, indexes []int64) {
	var left []ClaimedChunk
	for _, k := range c.chunks {
		if indexes == nil || slices.Contains(indexes, k.Index) {
			o.seats[k.Slot].reader = 0
		} else {
			left = append(left, k)
		}
	}
	if c.chunks = left; left == nil {
		delete(o.claims, id)
	}
}

// ---- messages ----

func (o *observer) sent(a Send) {
	if o.cut[a.Conn] {
		o.fail("something is said on connection %d, which is gone or superseded", a.Conn)
	}
	inc := o.incs[a.Conn]
	switch m := a.Msg.(type) {
	case *msg.HelloReply:
		o.answered(inc, m.Re)
		if !m.Resumed {
			o.epoch[inc]++
			o.opener[inc] = m.Re
		}
	case *msg.Granted:
		o.answered(inc, m.Re)
		if m.Generation == 0 {
			o.fail("begin %d is granted under no generation", m.Begin)
		}
		if g := o.gens[m.Generation]; g != nil {
			g.begin = m.Begin
			if !slices.Equal(g.slots, m.Slots) {
				o.fail("R9: generation %d is granted as %v and as %v", m.Generation, g.slots, m.Slots)
			}
		}
	case *msg.CommitReply:
		o.answered(inc, m.Re)
		if m.Complete {
			o.verdict(inc, m.Begin, "ready")
		}
	case *msg.Ended:
		if m.Re != 0 {
			o.answered(inc, m.Re)
		}
		if m.Begin != 0 && m.Reason != "ended" {
			o.verdict(inc, m.Begin, strings.TrimSpace(fmt.Sprint(m.Ending, " ", m.Reason)))
		}
	case *msg.HeartbeatReply:
		o.answered(inc, m.Re)
	case *msg.Error:
		o.answered(inc, m.Re)
	case *msg.AllocResponse:
		o.allocated(a.Conn, m)
	}
}

func (o *observer) answered(inc kv.Incarnation, re uint64) {
	q := o.asked[askID{inc, re}]
	if q == nil {
		o.fail("seq %d of %s is answered and was never asked", re, inc)
		return
	}
	if q.answers++; q.answers > q.came {
		o.fail("seq %d of %s came %d times and is answered %d times", re, inc, q.came, q.answers)
	}
}

// verdict: R5, a request has one ending, whoever asks and when.
func (o *observer) verdict(inc kv.Incarnation, begin uint64, v string) {
	b := beginID{inc, o.epoch[inc], begin}
	if had := o.verdicts[b]; had != "" && had != v {
		o.fail("R5: begin %d of %s ended as %q and as %q", begin, inc, had, v)
	}
	o.verdicts[b] = v
}

// allocated: an LMCache message has one reply, in order; a key that a request
// holds keeps its slot.
func (o *observer) allocated(c kv.ConnID, m *msg.AllocResponse) {
	line := o.lines[c]
	if len(line) == 0 {
		o.fail("connection %d gets a reply to nothing", c)
		return
	}
	q := line[0]
	o.lines[c] = line[1:]
	if q == nil || slices.Contains(m.RemoteIndexes, -1) {
		return
	}
	if len(m.RemoteIndexes)+len(m.AlreadySent) != len(q.Keys) {
		o.fail("%d keys get %d slots and %d were sent", len(q.Keys), len(m.RemoteIndexes), len(m.AlreadySent))
		return
	}
	id := legacyID{o.who[c], q.ReqID}
	if o.holds[id] == nil {
		o.holds[id] = map[string]kv.SlotID{}
	}
	next := 0
	for i, k := range q.Keys {
		if slices.Contains(m.AlreadySent, int64(i)) {
			continue
		}
		s := kv.SlotID(m.RemoteIndexes[next])
		next++
		if had, ok := o.holds[id][k]; ok && o.seats[had].owner == id {
			if had != s {
				o.fail("R9: key %s of %v has slot %d and %d", k, id, had, s)
			}
			continue
		}
		o.handOut(s, seat{owner: id})
		o.holds[id][k] = s
		if q.ReqID == "" { // nothing tells which anonymous request it is
			o.seats[s] = seat{landed: true}
			delete(o.holds, id)
			return
		}
	}
}

// ---- predicates ----

// state: R6, no hand is on a free slot.
func (o *observer) state(p *slot.Pool) {
	for s := range kv.SlotID(chaosCapacity) {
		if p.Slot(s).State == slot.Free {
			o.untouched(s, "free")
		}
	}
}

// end: everything that was asked has its answer.
func (o *observer) end() {
	for id, q := range o.asked {
		if q.answers == 0 && !o.cut[q.conn] {
			o.fail("seq %d of %s was never answered", id.seq, id.inc)
		}
	}
	for id, e := range o.calls {
		o.fail("call %d was never answered: %T%+v", id, e, e)
	}
	for c, l := range o.lines {
		if len(l) > 0 && !o.cut[c] {
			o.fail("%d LMCache messages on connection %d were never answered", len(l), c)
		}
	}
}
