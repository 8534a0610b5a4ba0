package intake

import (
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/slot"
)

// engine is who reads: an engine_id that has a connection. What is claimed
// belongs to it; any of its connections may release it.
type engine struct {
	id    string
	conns int
	found map[string]*request // by the engine's name of its own request
}

// reader is one connection of an engine, until nobody can read through it.
type reader struct {
	engine *engine
	gone   bool          // the connection is lost
	claims list[request] // claimed through it
	lost   list[request] // quarantined because it was lost
}

// wait is a call that waits for the ending of a name.
type wait struct {
	call   kv.CallID
	engine kv.ConnID
	name   *name
	timer  timer
	byName links[wait]
}

func (w *wait) ring(c *Core) {
	c.act(Answer{Call: w.call, Err: fault.New(fault.Deadline, "%q has not ended in time", w.name.id)})
	c.dropWait(w)
	c.dropName(w.name)
}

func (c *Core) engineAttached(e EngineAttached) {
	if e.TokensKey != "" {
		c.tokensKey = e.TokensKey
	}
	if c.readers[e.Engine] != nil {
		return
	}
	g := c.engines[e.EngineID]
	if g == nil {
		g = &engine{id: e.EngineID, found: map[string]*request{}}
		c.engines[e.EngineID] = g
	}
	g.conns++
	c.readers[e.Engine] = newReader(g)
}

func newReader(g *engine) *reader {
	rd := &reader{engine: g}
	rd.claims.at = func(r *request) *links[request] { return &r.byEngine }
	rd.lost.at = rd.claims.at
	return rd
}

// engineLost quarantines what was claimed through the connection.
func (c *Core) engineLost(id kv.ConnID) {
	rd := c.readers[id]
	if rd == nil || rd.gone {
		return
	}
	rd.gone = true
	for _, w := range c.waits {
		if w.engine == id { // nobody is there to be answered
			c.dropWait(w)
			c.dropName(w.name)
		}
	}
	for r := range rd.claims.all {
		c.note(r, Note{Kind: NoteQuarantined, Count: r.unread, Reason: fault.PeerLost, Text: "its reader's connection is lost"})
		c.retire(r, isReady)
		c.lasting += r.unread
		r.reader = rd
		rd.lost.push(r)
	}
	g := rd.engine
	if g.conns--; g.conns == 0 {
		for _, r := range g.found { // another engine may find them
			r.engine, r.by = nil, ""
		}
		delete(c.engines, g.id)
	}
	if rd.lost.n == 0 {
		delete(c.readers, id)
	}
}

// engineFenced: nobody can read any more through a connection that was lost.
func (c *Core) engineFenced(e EngineFenced) {
	rd := c.readers[e.Engine]
	if rd == nil || !rd.gone {
		return
	}
	delete(c.readers, e.Engine)
	for r := range rd.lost.all {
		if e.Trusted {
			c.note(r, Note{Kind: NoteTrusted, Count: r.held, Reason: fault.PeerLost, Wait: c.cfg.Quarantine,
				Text: "its reader is trusted to be gone after quarantine_sec"})
		}
		for _, s := range r.slots {
			if c.holds(r, s) && c.pool.Slot(s).Hands&slot.Reader != 0 {
				c.letGo(r, s, slot.Reader)
				c.lasting--
			}
		}
		rd.lost.remove(r)
		r.reader = nil
		c.over(r)
	}
}

// caller returns the engine behind a call, or answers with an error.
func (c *Core) caller(id kv.ConnID, call kv.CallID, by string) *reader {
	rd := c.readers[id]
	if rd == nil || rd.gone {
		c.act(Answer{Call: call, Err: fault.New(fault.HelloRequired, "no engine is attached on this connection")})
		return nil
	}
	if by == "" || len(by) > kv.MaxBy {
		c.act(Answer{Call: call, Err: fault.New(fault.BadRequest, "by has %d bytes; 1 to %d are allowed", len(by), kv.MaxBy)})
		return nil
	}
	return rd
}

// wait answers with the first ready of that name, or how it ended when one has
// and none is live. It never commits anything.
func (c *Core) wait(e Wait) {
	if e.ReqID == "" || len(e.ReqID) > kv.MaxReqID {
		c.act(Answer{Call: e.Call, Err: errReqID(e.ReqID)})
		return
	}
	n := c.nameOf(e.ReqID)
	if v, ok := n.outcome(); ok {
		c.act(Answer{Call: e.Call, Ending: v.public(n.id)})
		return
	}
	if len(c.waits) >= c.cfg.MaxWaiting { // R11
		c.act(Answer{Call: e.Call, Err: busy("%d calls wait, at most %d may", len(c.waits), c.cfg.MaxWaiting)})
		c.dropName(n)
		return
	}
	d := e.Deadline
	if d == kv.Forever {
		d = c.cfg.RequestTimeout
	}
	w := &wait{call: e.Call, engine: e.Engine, name: n}
	w.timer = timer{order: c.number(), alarm: w}
	c.waits[e.Call] = w
	n.waits.push(w)
	c.timers.set(&w.timer, c.now.Add(max(d, 0)))
}

func errReqID(id string) *fault.Error {
	return fault.New(fault.BadRequest, "req_id has %d bytes; 1 to %d are allowed", len(id), kv.MaxReqID)
}

func (c *Core) dropWait(w *wait) {
	c.timers.set(&w.timer, kv.Never)
	w.name.waits.remove(w)
	delete(c.waits, w.call)
}

func (c *Core) hangup(call kv.CallID) {
	w := c.waits[call]
	if w == nil {
		return
	}
	c.act(Answer{Call: call, Err: fault.New(fault.Cancelled, "the caller has hung up")})
	c.dropWait(w)
	c.dropName(w.name)
}

func (c *Core) cancelByName(e CancelByName) {
	if e.ReqID == "" || len(e.ReqID) > kv.MaxReqID {
		c.act(Answer{Call: e.Call, Err: errReqID(e.ReqID)})
		return
	}
	stands := c.cancelName(e.ReqID, asked(e.Reason, e.Text))
	c.act(Answer{Call: e.Call, Ending: stands.public(e.ReqID)})
}

// ---- find ----

// offer lets find see a request: a ready one (R7), or a complete legacy one that
// nobody watches, for which the caller of find vouches.
func (c *Core) offer(r *request) {
	if r.offered {
		return
	}
	key := r.chunks[0].key
	l := c.findable[key]
	if l == nil {
		l = newFindable()
		c.findable[key] = l
	}
	l.push(r)
	r.offered = true
}

func newFindable() *list[request] {
	return &list[request]{at: func(r *request) *links[request] { return &r.byKey }}
}

func (c *Core) unoffer(r *request) {
	if !r.offered {
		return
	}
	key := r.chunks[0].key
	l := c.findable[key]
	l.remove(r)
	r.offered = false
	if l.n == 0 {
		delete(c.findable, key)
	}
}

// matched is how many of keys a request holds, from the first on.
func (r *request) matched(keys []string) int64 {
	n := min(int64(len(keys)), r.end)
	for i := range n {
		if r.chunks[i].key != keys[i] {
			return i
		}
	}
	return n
}

func (r *request) of(g *engine, by string) bool { return r.engine == g && r.by == by }

// find gives by the unclaimed request that holds the longest prefix of keys:
// among equal ones that which it has already, else the oldest. No other by gets
// it then.
func (c *Core) find(e Find) {
	rd := c.caller(e.Engine, e.Call, e.By)
	if rd == nil {
		return
	}
	if len(e.Keys) > kv.MaxKeys {
		c.act(Answer{Call: e.Call, Err: fault.New(fault.BadRequest, "%d keys, at most %d", len(e.Keys), kv.MaxKeys)})
		return
	}
	had := rd.engine.found[e.By]
	var best *request
	var most int64
	if had != nil {
		if m := had.matched(e.Keys); m > 0 {
			best, most = had, m
		}
	}
	if l := c.first(e.Keys); l != nil && (had == nil || had.state != claimed) {
		for r := range l.all {
			if r.engine == nil || r == had {
				if m := r.matched(e.Keys); m > most {
					best, most = r, m
				}
			}
		}
	}
	if best == nil {
		c.act(Answer{Call: e.Call, Found: &Found{}})
		return
	}
	if best != had {
		if had != nil {
			c.unbind(had)
		}
		c.bind(best, rd.engine, e.By)
		if best.state == admitted {
			c.commitLegacy(best)
		}
	}
	c.act(Answer{Call: e.Call, Found: &Found{ReqID: best.id, Matched: most}})
}

func (c *Core) first(keys []string) *list[request] {
	if len(keys) == 0 {
		return nil
	}
	return c.findable[keys[0]]
}

func (c *Core) bind(r *request, g *engine, by string) {
	r.engine, r.by = g, by
	if g.found[by] == nil {
		g.found[by] = r
	}
}

// unbind takes a request away from the by that has it.
func (c *Core) unbind(r *request) {
	if r.engine != nil && r.engine.found[r.by] == r {
		delete(r.engine.found, r.by)
	}
	r.engine, r.by = nil, ""
	if r.reader != nil {
		r.reader.claims.remove(r)
		r.reader = nil
	}
}

// ---- claim and release ----

// pick returns the request of a name that by has claimed or may claim, or why
// there is none.
func (n *name) pick(g *engine, by string) (*request, *fault.Error) {
	var own, open *request
	var taken, unready bool
	for r := range n.requests.all {
		switch {
		case r.unfinished():
			unready = true
		case r.of(g, by):
			if own == nil || own.state != claimed && r.state == claimed {
				own = r
			}
		case r.engine != nil:
			taken = true
		case open == nil:
			open = r
		}
	}
	switch {
	case own != nil:
		return own, nil
	case open != nil:
		return open, nil
	case taken:
		return nil, fault.New(fault.NotOwner, "%q was given to another request of the engine", n.id)
	case unready:
		return nil, fault.New(fault.NotGranted, "%q is not ready", n.id)
	}
	return nil, errGone(n.id)
}

func errGone(id string) *fault.Error {
	return fault.New(fault.Ended, "there is nothing of %q to be read", id)
}

func (c *Core) claim(e Claim) {
	rd := c.caller(e.Engine, e.Call, e.By)
	if rd == nil {
		return
	}
	n := c.names[e.ReqID]
	if n == nil {
		c.act(Answer{Call: e.Call, Err: errGone(e.ReqID)})
		return
	}
	r, err := n.pick(rd.engine, e.By)
	switch {
	case err != nil && err.Code == fault.Ended && n.readyEmpty():
		c.act(Answer{Call: e.Call, Claim: &ClaimReply{Fmt: c.cfg.Facts.Format, DType: c.cfg.Facts.DType}})
		return
	case err != nil:
		c.act(Answer{Call: e.Call, Err: err})
		return
	}
	c.take(r, rd, e.By)
	c.act(Answer{Call: e.Call, Claim: r.reply()})
}

// readyEmpty: a request of the name was ready and had no chunks.
func (n *name) readyEmpty() bool {
	for e := range n.endings.all {
		if e.empty {
			return true
		}
	}
	return false
}

// take claims a ready request, whole and for one by alone.
func (c *Core) take(r *request, rd *reader, by string) {
	if r.state == claimed {
		return
	}
	for _, s := range r.slots[:r.end] {
		must(c.pool.Claim(s, r.gen))
	}
	c.unoffer(r)
	if r.engine == nil {
		c.bind(r, rd.engine, by)
	}
	r.state, r.unread, r.reader = claimed, r.end, rd
	rd.claims.push(r)
	c.arm(r)
}

// reply names what is claimed and not released yet.
func (r *request) reply() *ClaimReply {
	a := &ClaimReply{Fmt: r.format, DType: r.dtype, Shape: r.shape, Chunks: make([]ClaimedChunk, 0, r.unread)}
	for i := range r.chunks[:r.end] {
		if ch := &r.chunks[i]; !ch.released {
			a.Chunks = append(a.Chunks, ClaimedChunk{Index: int64(i), Key: ch.key, Slot: r.slots[i], Tokens: ch.tokens, Bytes: ch.bytes})
		}
	}
	return a
}

// release gives back chunks that have been read, or that the engine had already
// (then it may not have claimed them).
func (c *Core) release(e Release) {
	rd := c.caller(e.Engine, e.Call, e.By)
	if rd == nil {
		return
	}
	n := c.names[e.ReqID]
	if n == nil {
		c.act(Answer{Call: e.Call, Err: errGone(e.ReqID)})
		return
	}
	r, err := n.pick(rd.engine, e.By)
	if err != nil {
		if err.Code == fault.Ended && n.readies > 0 {
			err = nil // a repeat
		}
		c.act(Answer{Call: e.Call, Err: err})
		return
	}
	for _, i := range e.Chunks {
		if i < 0 || i >= r.end {
			c.act(Answer{Call: e.Call, Err: fault.New(fault.BadRequest, "chunk %d of %q, which has %d", i, e.ReqID, r.end)})
			return
		}
	}
	c.take(r, rd, e.By)
	if e.Chunks == nil {
		for i := range r.end {
			c.releaseChunk(r, i)
		}
	}
	for _, i := range e.Chunks {
		c.releaseChunk(r, i)
	}
	c.act(Answer{Call: e.Call})
	if r.unread == 0 {
		c.note(r, Note{Kind: NoteReleased, Count: r.end, Bytes: r.bytes})
		c.retire(r, isReady)
	}
}

func (c *Core) releaseChunk(r *request, i int64) {
	if r.chunks[i].released {
		return
	}
	r.chunks[i].released = true
	r.unread--
	must(c.pool.Release(r.slots[i], r.gen))
	c.came(r, r.slots[i])
}
