package intake

import (
	"strings"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// verdict is how a request ends; reason and text unless it is ready.
type verdict struct {
	ending msg.Ending
	reason fault.Code
	text   string
}

func failedBy(err *fault.Error) verdict { return verdict{msg.EndFailed, err.Code, err.Text} }

// asked is the verdict that a Cancel's reason asks for.
func asked(reason fault.Code, text string) verdict {
	if reason == "" || reason == fault.Cancelled {
		return verdict{msg.EndCancelled, fault.Cancelled, kept(text)}
	}
	return verdict{msg.EndFailed, reason, kept(text)}
}

// maxKeptText bounds what is kept of a text that a peer gave, for each of very
// many endings.
const maxKeptText = 256

// kept cuts a text at a character.
func kept(text string) string {
	if len(text) <= maxKeptText {
		return text
	}
	n := maxKeptText
	for n > 0 && text[n]&0xc0 == 0x80 {
		n--
	}
	return strings.Clone(text[:n])
}

// err is the verdict as the answer to a request that can no longer be served.
func (v verdict) err() *fault.Error { return &fault.Error{Code: v.reason, Text: v.text} }

func (v verdict) public(id string) *Ending {
	return &Ending{ReqID: id, Ending: v.ending, Reason: v.reason, Text: v.text}
}

var isReady = verdict{ending: msg.EndReady}

// ending is an ending that is kept to be repeated, for ending_ttl_sec or until
// there is no room.
type ending struct {
	verdict
	at    kv.Instant
	name  *name  // nil: nobody shall find it by name (busy is no ending)
	owner *peer  // whose repeats it answers; nil: nobody's
	key   reqKey // in the owner's terms
	gen   kv.Generation
	total int64
	empty bool   // ready without chunks: its claim has none
	mark  bool   // a proxy's cancel of a name that was not live: refuses what comes
	seq   uint64 // of the Ended that Drained has not answered, or 0

	byAge, byName links[ending]
}

// message is the ending as a word to its sender.
func (e *ending) message(seq uint64) *msg.Ended {
	return &msg.Ended{Seq: seq, Begin: e.key.begin, Ending: e.ending, Reason: e.reason, Text: e.text}
}

// cause says who ended a request.
type cause uint8

const (
	byReceiver cause = iota
	bySender
)

// end ends a request whose ending is open. R5: it is called once for a request,
// with the first cause; retire is the only other way, and only after ready.
func (c *Core) end(r *request, v verdict, by cause) {
	c.note(r, Note{Kind: NoteEnded, Ending: v.ending, Reason: v.reason, Text: v.text, Count: r.committed, Bytes: r.bytes,
		Wait: c.now.Sub(r.arrived)})
	granted := r.state == admitted
	if !granted {
		c.unqueue(r)
	}
	p, exact := r.owner, c.linkOf(r).ExactFence
	c.answerPending(r, v.err())
	e := c.retire(r, v)
	if granted && p.role != roleLegacy && !p.over && (by != bySender || !exact) {
		p.seq++
		e.seq = p.seq
		p.told[e.seq] = e
		c.send(p.conn, e.message(e.seq))
	}
}

// unqueue takes a waiting request out of the ledger.
func (c *Core) unqueue(r *request) {
	c.ledger.Remove(r.serial)
	delete(c.waiting, r.serial)
	c.unsettled = true
	if r.legacy != nil {
		c.firstAnswered(r)
	}
}

// answerPending answers what waits for the request: Begin and Commits, or the
// batches of a legacy one.
func (c *Core) answerPending(r *request, err *fault.Error) {
	if r.beginSeq != 0 {
		c.refuse(r.beginConn, r.beginSeq, err)
		r.beginSeq = 0
	}
	for _, m := range r.commits {
		c.refuse(m.conn, m.seq, err)
	}
	c.dropCommits(r)
	if r.legacy != nil {
		for _, b := range c.unpark(r) {
			c.answerBatch(b.reply, refusal(len(b.m.Keys)))
		}
	}
}

// retire takes a request that is over out of everything but the list of
// records, where it stays until its last slot is free (R12), and keeps its
// ending.
func (c *Core) retire(r *request, v verdict) *ending {
	n := r.name
	c.unoffer(r)
	c.unbind(r)
	if r.state == ready || r.state == claimed {
		n.readies--
	}
	n.requests.remove(r)
	delete(r.owner.live, r.key)
	e := c.spareEndings.take()
	*e = ending{verdict: v, name: n, key: r.key, gen: r.gen, total: r.total, empty: r.end == 0}
	if !r.owner.over {
		e.owner = r.owner
	}
	c.keep(e)
	c.revoke(r)
	r.state, r.name = draining, nil
	if r.held == 0 {
		c.discard(r)
	} else {
		c.arm(r)
	}
	c.tellName(n)
	return e
}

// keep remembers an ending. R11: at the limit the oldest goes, unless it is so
// young that its sender may not have heard; then crowded keeps new requests out.
func (c *Core) keep(e *ending) {
	evict := c.endings.n >= c.cfg.MaxEndings && !c.crowded()
	e.at = c.now
	c.endings.push(e)
	if n := e.name; n != nil {
		n.endings.push(e)
		if e.ending == msg.EndReady {
			n.readies++
		}
		if e.mark {
			n.marks++
		}
	}
	if e.owner != nil {
		e.owner.ended[e.key] = e
	}
	if evict {
		c.act(Note{Kind: NoteEndingEvicted, Ending: c.endings.first.ending, Reason: c.endings.first.reason, Count: 1})
		c.forget(c.endings.first)
	}
}

// crowded: there is no room for another ending.
func (c *Core) crowded() bool {
	return c.endings.n >= c.cfg.MaxEndings && c.endings.first.at.Add(kv.ShortTTL) >= c.now
}

// forget drops a kept ending.
func (c *Core) forget(e *ending) {
	c.endings.remove(e)
	if n := e.name; n != nil {
		n.endings.remove(e)
		if e.ending == msg.EndReady {
			n.readies--
		}
		if e.mark {
			n.marks--
		}
		c.dropName(n)
	}
	if p := e.owner; p != nil {
		delete(p.ended, e.key)
		delete(p.told, e.seq)
		c.reap(p)
	}
	c.spareEndings.give(e)
}

// drained: none of the sender's writes for an ended request is in flight. Where
// the link's fence is not exact, that is the fence.
func (c *Core) drained(p *peer, m *msg.Drained) {
	e := p.told[m.Re]
	if e == nil || e.key.begin != m.Begin {
		return
	}
	delete(p.told, m.Re)
	e.seq = 0
	if r := c.granted[e.gen]; r != nil && r.state == draining && !c.linkOf(r).ExactFence {
		c.writerGone(r)
	}
}

// ---- names ----

// name is what is known under one req_id, whoever its owners are.
type name struct {
	id       string
	requests list[request] // all but draining ones
	endings  list[ending]  // kept
	watches  list[watch]
	waits    list[wait]
	readies  int // requests and endings that are ready
	marks    int // endings that refuse what comes
}

func (c *Core) nameOf(id string) *name {
	if n := c.names[id]; n != nil {
		return n
	}
	n := c.spareNames.take()
	n.reset(id)
	c.names[id] = n
	return n
}

func (n *name) reset(id string) {
	*n = name{id: id}
	n.requests.at = func(r *request) *links[request] { return &r.byName }
	n.endings.at = func(e *ending) *links[ending] { return &e.byName }
	n.watches.at = func(w *watch) *links[watch] { return &w.byName }
	n.waits.at = func(w *wait) *links[wait] { return &w.byName }
}

// dropName forgets a name under which nothing is left.
func (c *Core) dropName(n *name) {
	if n.requests.n+n.endings.n+n.watches.n+n.waits.n == 0 && c.names[n.id] == n {
		delete(c.names, n.id)
		c.spareNames.give(n)
	}
}

// outcome is what whoever asks for the name is told: the first ready, or how
// the last one ended when none is live. ok is false while that is open.
func (n *name) outcome() (v verdict, ok bool) {
	switch {
	case n.readies > 0:
		return isReady, true
	case n.requests.n == 0 && n.endings.n > 0:
		return n.endings.last.verdict, true
	}
	return verdict{}, false
}

// tellName answers everybody who asked for a name whose outcome is now known,
// and forgets it if it is empty.
func (c *Core) tellName(n *name) {
	v, ok := n.outcome()
	for w := range n.watches.all {
		if ok {
			c.answerWatch(w, v)
		}
		c.dropIdle(w)
	}
	if ok {
		for w := range n.waits.all {
			c.act(Answer{Call: w.call, Ending: v.public(n.id)})
			c.dropWait(w)
		}
	}
	c.dropName(n)
}

// cancelName ends every unfinished request of a name and gives back what is
// ready and unclaimed; a deadline's cancel changes nothing after ready. It
// returns what stands then; what is not known counts as cancelled.
func (c *Core) cancelName(id string, v verdict) verdict {
	n := c.names[id]
	if n == nil {
		return verdict{msg.EndCancelled, fault.Cancelled, ""}
	}
	for r := range n.requests.all {
		switch {
		case r.unfinished():
			c.end(r, v, byReceiver)
		case r.state == ready && v.reason != fault.Deadline:
			c.giveBack(r)
		}
	}
	if v, ok := n.outcome(); ok {
		return v
	}
	return verdict{msg.EndCancelled, fault.Cancelled, ""}
}

// giveBack frees a ready request that nobody has claimed; its ending stays.
func (c *Core) giveBack(r *request) {
	c.retire(r, isReady)
}
