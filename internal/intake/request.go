package intake

import (
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
)

// state of a request; see the package comment.
type state uint8

const (
	waiting  state = iota // for admission; holds nothing (R3)
	admitted              // holds a slot, or a reservation, for each chunk
	ready                 // every chunk is committed; the ending is ready
	claimed               // an engine reads it
	draining              // over; its slots are not yet free
)

var stateNames = [...]string{"waiting", "admitted", "ready", "claimed", "draining"}

func (s state) String() string { return stateNames[s] }

// reqKey names a request in its owner's terms: a Berth sender's begin, or a
// legacy sender's req_id.
type reqKey struct {
	begin uint64
	name  string
}

// request is one request, from its first message until its last slot is free.
type request struct {
	serial   uint64 // by arrival; the ledger's id while it waits
	gen      kv.Generation
	name     *name
	id       string // the name's, which is gone before a draining record
	owner    *peer
	key      reqKey
	link     int // index in Config.Links; noLink: a legacy sender's
	state    state
	total    int64 // chunks declared
	end      int64 // final number of chunks; -1 until it is known
	top      int64 // highest index named, -1: none
	arrived  kv.Instant
	admitAt  kv.Instant // when it was admitted
	deadline kv.Instant // to be ready
	admitBy  kv.Instant // to be admitted
	goneAt   kv.Instant // ready, or legacy and complete: unclaimed_ttl; draining: quarantine
	timer    timer

	slots     []kv.SlotID // of chunk 0, 1, ...
	chunks    []chunk
	committed int64
	held      int64 // slots that are not free yet
	unread    int64 // claimed: chunks not released yet
	bytes     int64 // committed
	revoked   bool  // the link has been told to close the slots

	format kv.Format // of all chunks, once named
	dtype  kv.DType
	shape  []int64 // of a full chunk
	full   int64   // its bytes

	// A Berth sender's: what waits for an answer.
	beginConn kv.ConnID
	beginSeq  uint64 // 0: answered
	commits   []*commit

	legacy *legacy // a legacy sender's, else nil

	// The reader's side.
	by     string
	engine *engine // whom find or claim gave it to
	reader *reader // which connection claimed it

	byArrival, byOwner, byName, byEngine, byKey links[request]
	offered                                     bool // by find
}

// noLink is the link of a legacy request: its sender writes by itself, by NIXL.
const noLink = -1

// chunk is one chunk of an admitted request.
type chunk struct {
	key      string
	parked   *commit // those that wait for this chunk
	bytes    int64   // named: that must land; landed: that have
	tokens   int64
	sum      uint32
	hasSum   bool
	named    bool
	released bool // by its reader
}

// goal is the number of chunks that make the request ready.
func (r *request) goal() int64 {
	if r.end >= 0 {
		return r.end
	}
	return r.total
}

// live: it may still become, or is, ready to be read.
func (r *request) live() bool { return r.state != draining }

// unfinished: its ending is open.
func (r *request) unfinished() bool { return r.state == waiting || r.state == admitted }

func (r *request) ring(c *Core) { c.expire(r) }

// linkOf returns the link of a request; the zero Link for a legacy one.
func (c *Core) linkOf(r *request) Link {
	if r.link == noLink {
		return Link{}
	}
	return c.cfg.Links[r.link]
}

// newRequest makes the record of a request that has passed its checks.
func (c *Core) newRequest(p *peer, key reqKey, id string, total int64) *request {
	r := c.spareRequests.take()
	*r = request{
		serial: c.number(), id: id, name: c.nameOf(id), owner: p, key: key, link: noLink, total: total, end: -1, top: -1,
		arrived: c.now, deadline: kv.Never, admitBy: kv.Never, goneAt: kv.Never,
		slots: r.slots[:0], chunks: r.chunks[:0], shape: r.shape[:0], commits: r.commits[:0],
	}
	r.timer = timer{order: r.serial, alarm: r}
	c.requests.push(r)
	p.requests.push(r)
	p.live[key] = r
	r.name.requests.push(r)
	return r
}

// discard removes a record that holds nothing. It must have left its name and
// its owner's live requests before.
func (c *Core) discard(r *request) {
	c.timers.set(&r.timer, kv.Never)
	c.requests.remove(r)
	r.owner.requests.remove(r)
	if r.gen != 0 {
		delete(c.granted, r.gen)
	}
	c.reap(r.owner)
	if r.reader != nil {
		r.reader.lost.remove(r)
	}
	clear(r.chunks)
	clear(r.commits)
	if cap(r.chunks) <= maxSpareChunks {
		c.spareRequests.give(r)
	}
}

// maxSpareChunks bounds what a record that is kept to be used again holds on to.
const maxSpareChunks = 4096

// arm sets the request's timer to the next thing that time does to it.
func (c *Core) arm(r *request) {
	at := kv.Never
	switch r.state {
	case waiting:
		at = min(r.deadline, r.admitBy)
	case admitted:
		at = r.deadline
		switch l := r.legacy; {
		case l == nil:
		case !l.complete:
			at = min(at, l.graceAt)
		case !l.watched: // it waits for the decoder, as one that is ready does
			at = min(at, r.goneAt)
		}
	case ready, draining:
		at = r.goneAt
	}
	c.timers.set(&r.timer, at)
}

// expire does what the request's time says.
func (c *Core) expire(r *request) {
	switch r.state {
	case waiting:
		c.end(r, c.lateVerdict(r), byReceiver)
	case admitted:
		switch {
		case r.deadline <= c.now:
			c.end(r, c.lateVerdict(r), byReceiver)
		case !r.legacy.complete: // surplus_grace_sec is over
			c.complete(r)
		case r.legacy.watched: // meanwhile: its proxy will say
			c.arm(r)
		default:
			c.end(r, failedBy(fault.New(fault.Deadline, "it was complete, and no decoder asked for it within unclaimed_ttl_sec %g",
				c.cfg.UnclaimedTTL.Seconds())), byReceiver)
		}
	case ready:
		c.note(r, Note{Kind: NoteUnclaimed, Count: r.held, Wait: c.cfg.UnclaimedTTL,
			Text: "nobody has claimed it for unclaimed_ttl_sec"})
		c.giveBack(r)
	case draining:
		c.trust(r)
	}
}

// note fills in whose request it is and reports.
func (c *Core) note(r *request, n Note) {
	n.Owner, n.ReqID, n.Link = r.owner.label, r.id, c.linkOf(r).Name
	c.act(n)
}
