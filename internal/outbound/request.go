package outbound

import (
	"fmt"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// reqState is where a request is.
//
//	queued ──► begun ──► granted ──► ended ──► told
//	  ▲ │ busy ◄─┘ └──► ending ◄─┘     ▲
//	  └─┼────────────────  └───────────┤
//	    └──────────────────────────────┘
type reqState uint8

const (
	queued  reqState = iota // accepted; its Begin is not out, or came back busy
	begun                   // its Begin is out
	granted                 // it has its slots at the receiver
	ending                  // we asked the receiver to end it
	ended                   // its ending is known; writes may be in flight
	told                    // the engine knows; the receiver still owes answers
	reqStates
)

func (s reqState) String() string {
	return [...]string{"queued", "begun", "granted", "ending", "ended", "told"}[s]
}

// moves are the legal transitions.
var moves = [reqStates][]reqState{
	queued:  {begun, ended},
	begun:   {queued, granted, ending, ended},
	granted: {ending, ended},
	ending:  {ended},
	ended:   {told},
}

func legal(from, to reqState) bool {
	for _, s := range moves[from] {
		if s == to {
			return true
		}
	}
	return false
}

// request is one attempt to transfer one prompt to one receiver. Requests are
// reused once no answer is owed to them.
type request struct {
	n     uint64 // in order of the engine's begins
	id    string
	state reqState
	peer  *peer

	engine     kv.ConnID // it began on, and whose it is
	engineID   string
	total      int64
	wanted     int // staging slots with Granted
	berthProxy bool
	tokensKey  string
	started    kv.Instant
	deadline   kv.Instant
	retryAt    kv.Instant // queued: not before; Never otherwise
	timer      timer

	begin     uint64 // its number at the receiver, 0: none yet
	link      *dataLink
	gen       kv.Generation
	slots     []kv.SlotID // at the receiver, by chunk
	chunks    []chunk     // by index
	submitted int64       // distinct chunks
	committed int64
	bytes     int64 // committed
	hasEnd    bool  // end is known
	endSaid   bool  // a commit has it
	end       int64
	repeats   []repeat // in order of submission
	commits   []*commit
	busy      int // writes that a link has not sent, and sums under way

	calls   int // requests to the receiver without an answer
	drain   uint64
	ending  Ending // from ended on
	ready   bool   // a CommitReply said complete
	overdue bool   // the CommitReply to tell so is not awaited any more
	callers []kv.CallID
	// unwanted: its engine cancelled it when it was ending already.
	unwanted bool
	touched  bool

	beginMsg  msg.Begin
	cancelMsg msg.Cancel
	drained   msg.Drained
	notif     msg.ProxyNotif

	legacy     legacyRequest
	prev, next *request // in peer.reqs
	qprev      *request // in peer.queue
	qnext      *request
	inQueue    bool
}

// chunk is what was submitted for one index.
type chunk struct {
	key    string
	tokens int64
	slot   kv.SlotID // waiting
	state  chunkState
}

type chunkState uint8

const (
	absent  chunkState = iota
	waiting            // for its turn, at an LMCache receiver
	moving             // in a commit without an answer
	done               // committed
)

// repeat is a chunk submitted again while the first is moving: its slot is
// free when that is done.
type repeat struct {
	index int64
	slot  kv.SlotID
}

// become is the only way to another state.
func (r *request) become(s reqState) {
	if !legal(r.state, s) {
		panic(fmt.Sprintf("outbound: %s from %s to %s", r.id, r.state, s))
	}
	r.state = s
}

// live reports whether its ending is still open.
func (r *request) live() bool { return r.state < ended }

// whole reports whether everything it will ever have was submitted.
func (r *request) whole() bool {
	if r.hasEnd {
		return r.submitted == r.end
	}
	return r.submitted == r.total
}

// notNow is the error for what needs a granted request.
func (r *request) notNow(code fault.Code) *fault.Error {
	switch r.state {
	case ended, told:
		return endedError(&r.ending)
	case ending:
		return fault.New(r.cancelMsg.Reason, "%q is ending: %s", r.id, r.cancelMsg.Text)
	}
	return fault.New(code, "%q is not granted", r.id)
}

// endedError is what a call for an ended request gets.
func endedError(e *Ending) *fault.Error {
	if e.Ending == msg.EndReady {
		return fault.New(fault.Ended, "%q has ended: ready", e.ReqID)
	}
	return fault.New(e.Reason, "%q has ended: %s", e.ReqID, e.Text)
}

// goneError is what a call for a request that is not there gets: its ending, if
// that is kept.
func (c *Core) goneError(now kv.Instant, id string, code fault.Code) *fault.Error {
	if e := c.endings.get(now, id); e != nil {
		return endedError(&e.Ending)
	}
	return fault.New(code, "no request %q was begun", id)
}

// newRequest takes a request out of the spares.
func (c *Core) newRequest() *request {
	c.live++
	c.lastReq++
	var r *request
	if n := len(c.spareReqs); n > 0 {
		r = c.spareReqs[n-1]
		c.spareReqs = c.spareReqs[:n-1]
		*r = request{slots: r.slots[:0], chunks: r.chunks[:0], repeats: r.repeats[:0], commits: r.commits[:0], callers: r.callers[:0]}
	} else {
		r = new(request)
	}
	r.n = c.lastReq
	r.retryAt = kv.Never
	r.timer = timer{kind: timeRequest, id: r.n, req: r}
	return r
}

// maxSpare bounds what is kept to be reused, and maxSpareChunks the size of
// what one of them keeps.
const (
	maxSpare       = 1024
	maxSpareChunks = 4096
)

func (c *Core) dropRequest(now kv.Instant, r *request) {
	p := r.peer
	p.reqs.remove(r)
	if r.begin != 0 {
		delete(p.byBegin, r.begin)
	}
	r.link = nil
	c.releaseConn(r)
	if r.legacy.on {
		p.legacy.running--
	}
	c.live--
	c.arm(&r.timer, kv.Never)
	clear(r.chunks[:cap(r.chunks)]) // keys
	if len(c.spareReqs) < maxSpare && cap(r.chunks) <= maxSpareChunks {
		c.spareReqs = append(c.spareReqs, r)
	}
	c.settleWant(now, p)
}

// reqList is the requests of a peer in order of begin.
type reqList struct {
	first, last *request
	n           int
}

func (l *reqList) add(r *request) {
	r.prev, r.next = l.last, nil
	if l.last == nil {
		l.first = r
	} else {
		l.last.next = r
	}
	l.last = r
	l.n++
}

func (l *reqList) remove(r *request) {
	if r.prev == nil {
		l.first = r.next
	} else {
		r.prev.next = r.next
	}
	if r.next == nil {
		l.last = r.prev
	} else {
		r.next.prev = r.prev
	}
	r.prev, r.next = nil, nil
	l.n--
}

// reqQueue is the queued requests of a peer, in order.
type reqQueue struct {
	first, last *request
	n           int
}

func (q *reqQueue) add(r *request) {
	r.qprev, r.qnext, r.inQueue = q.last, nil, true
	if q.last == nil {
		q.first = r
	} else {
		q.last.qnext = r
	}
	q.last = r
	q.n++
}

func (q *reqQueue) remove(r *request) {
	if !r.inQueue {
		return
	}
	if r.qprev == nil {
		q.first = r.qnext
	} else {
		r.qprev.qnext = r.qnext
	}
	if r.qnext == nil {
		q.last = r.qprev
	} else {
		r.qnext.qprev = r.qprev
	}
	r.qprev, r.qnext, r.inQueue = nil, nil, false
	q.n--
}
