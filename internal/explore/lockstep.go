package explore

import (
	"fmt"
	"slices"

	"github.com/berthkv/berth/internal/intake"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// lockstep is the real receiver's core before senders of LMCache's, which are
// not ours: each has one connection, sends a request's chunks in batches of one,
// and says nothing, not even a cancel, while one of its AllocRequests is
// unanswered. It may begin a request before another is whole. No data moves;
// the decode engine finds what is complete, claims and releases it.
//
// What is looked for: nobody waits for ever (the rule of F, design 4.2), and R2:
// a batch of an admitted request is answered in the step that receives it.
type lockstep struct {
	lockstepConfig
	plant Plant
	m     *memo
	reqs  []lockRequest
}

type lockstepConfig struct {
	name     string
	capacity int
	senders  [][]int // chunks of each request of each
	budget   int
}

type lockRequest struct{ sender, total int }

var lockstepSystems = map[string]lockstepConfig{
	"lockstep/small": {name: "lockstep/small", capacity: 4, senders: [][]int{{2, 2}, {2}}},
	"lockstep":       {name: "lockstep", capacity: 4, senders: [][]int{{2, 2}, {2, 2}}},
	"lockstep/wide":  {name: "lockstep/wide", capacity: 4, senders: [][]int{{2, 2}, {2, 2}, {3}}},
}

// lockState is one state.
type lockState struct {
	place
	reqs    []lockAtt
	out     []uint8 // by sender: the request whose batch is unanswered, from 1
	crashed []bool
	spent   uint8
}

type lockAtt struct {
	sent     uint8 // batches
	answered uint8
	admitted bool
	over     bool // refused, cancelled, given up, or read
}

func newLockstep(c lockstepConfig, p Plant) *lockstep {
	x := &lockstep{lockstepConfig: c, plant: p, m: newMemo(p)}
	for s, totals := range c.senders {
		for _, n := range totals {
			x.reqs = append(x.reqs, lockRequest{s, n})
		}
	}
	return x
}

func (c *codec) lockState(s *lockState) {
	c.place(&s.place)
	list(c, &s.reqs, func(c *codec, a *lockAtt) {
		num(c, &a.sent)
		num(c, &a.answered)
		flags(c, &a.admitted, &a.over)
	})
	nums(c, &s.out)
	list(c, &s.crashed, func(c *codec, b *bool) { flags(c, b) })
	num(c, &s.spent)
}

func (x *lockstep) start() []byte {
	core := intake.New(intake.Config{
		Incarnation: recvIncarnation(0, 0), Facts: kv.Facts{SlotBytes: chunkBytes}, Capacity: x.capacity,
		AllocationTimeout: kv.Forever, RequestTimeout: longTime, Lease: lease, UnclaimedTTL: 20 * second, EndingTTL: longTime,
		Quarantine: 10 * second, SurplusGrace: 5 * second, MaxWaiting: 8, Bypass: int64(x.capacity), MaxEndings: 16, MaxConns: 16,
	}, 0)
	s := &lockState{place: place{core: x.m.keep(&coreState{recv: core, who: recvIncarnation(0, 0), wake: kv.Never})},
		reqs: make([]lockAtt, len(x.reqs)), out: make([]uint8, len(x.senders)), crashed: make([]bool, len(x.senders))}
	w := &lockWorld{x: x, s: s}
	w.step(ev(evAttach, 1), func() intake.Event { return intake.EngineAttached{Engine: 100, EngineID: "d"} })
	for n := range x.senders {
		conn := kv.ConnID(n + 1)
		w.step(ev(evConnected, uint64(n)), func() intake.Event {
			return intake.Connected{Conn: conn, Identity: fmt.Sprintf("m%d", n), Remote: "-"}
		})
	}
	return w.encode()
}

// Moves of the lock-step system; the second byte is of whom.
const (
	lockSend uint32 = iota
	lockRead
	lockTick
	lockTime
	lockCancel
	lockCrash
)

func (x *lockstep) faulty(m uint32) bool { return m&0xff >= lockCancel }

func (x *lockstep) text(_ []byte, m uint32) string {
	i := m >> 8
	switch m & 0xff {
	case lockSend:
		return fmt.Sprintf("send a batch of p%d", i)
	case lockRead:
		return fmt.Sprintf("read p%d", i)
	case lockTick:
		return "tick"
	case lockTime:
		return "time"
	case lockCancel:
		return fmt.Sprintf("cancel p%d", i)
	}
	return fmt.Sprintf("crash m%d", i)
}

// lockWorld is a state that is being changed.
type lockWorld struct {
	x   *lockstep
	s   *lockState
	bad string
	say func(string, ...any)
}

func (w *lockWorld) encode() []byte {
	c := codec{}
	c.lockState(w.s)
	return c.b
}

func (x *lockstep) decode(b []byte) *lockWorld {
	w := &lockWorld{x: x, s: new(lockState)}
	c := codec{b: b, reading: true}
	c.lockState(w.s)
	return w
}

func (x *lockstep) moves(state []byte) (out []uint32, goal bool, bad string) {
	w := x.decode(state)
	s := w.s
	for i, r := range x.reqs {
		a := &s.reqs[i]
		if s.crashed[r.sender] || a.over {
			continue
		}
		if s.out[r.sender] == 0 && int(a.sent) < r.total {
			out = append(out, lockSend|uint32(i)<<8)
		}
		if int(a.answered) == r.total {
			out = append(out, lockRead|uint32(i)<<8)
		}
	}
	if x.m.left(s.place) == 0 {
		out = append(out, lockTick)
	}
	progress := len(out) > 0
	if d := x.m.left(s.place); !progress && d > 0 && d < horizon {
		out = append(out, lockTime)
	}
	if !progress {
		rest := x.m.core(s.core).free == x.capacity
		for i := range s.reqs {
			rest = rest && (s.reqs[i].over || s.crashed[x.reqs[i].sender])
		}
		switch {
		case rest:
			return nil, true, ""
		case s.spent == 0 || len(out) == 0:
			return nil, false, "R10: senders in lock-step wait for each other (deadlock)"
		}
	}
	if int(s.spent) < x.budget {
		for i, r := range x.reqs {
			if a := &s.reqs[i]; !s.crashed[r.sender] && s.out[r.sender] == 0 && a.sent > 0 && !a.over {
				out = append(out, lockCancel|uint32(i)<<8)
			}
		}
		for n := range x.senders {
			if !s.crashed[n] {
				out = append(out, lockCrash|uint32(n)<<8)
			}
		}
	}
	return out, false, ""
}

func (x *lockstep) move(state []byte, m uint32, say func(string, ...any)) (next []byte, bad, excepted string) {
	w := x.decode(state)
	w.say = say
	if x.faulty(m) {
		w.s.spent++
	}
	i := int(m >> 8)
	switch m & 0xff {
	case lockSend:
		w.batch(i)
	case lockRead:
		w.read(i)
	case lockTick:
		w.step(ev(evTick), func() intake.Event { return intake.Tick{} })
	case lockTime:
		w.s.lag += x.m.left(w.s.place)
	case lockCancel:
		w.s.reqs[i].over = true
		w.receive(x.reqs[i].sender, &msg.CancelNotif{ReqID: fmt.Sprintf("p%d", i)})
	case lockCrash:
		w.s.crashed[i], w.s.out[i] = true, 0
		w.step(ev(evDisconnected, uint64(i)), func() intake.Event { return intake.Disconnected{Conn: kv.ConnID(i + 1)} })
	}
	return w.encode(), w.bad, ""
}

// batch sends the next chunk of a request.
func (w *lockWorld) batch(i int) {
	r, a := w.x.reqs[i], &w.s.reqs[i]
	key := fmt.Sprintf("k%d.%d", i, a.sent)
	a.sent++
	w.s.out[r.sender] = uint8(i + 1)
	was := a.admitted
	w.receive(r.sender, &msg.AllocRequest{Keys: []string{key}, Fmt: kv.Format2LTD, Shape: shape, DType: "bfloat16", LastChunkToks: 16,
		ReqID: fmt.Sprintf("p%d", i), IsLastBatch: int(a.sent) == r.total, TotalChunks: int64(r.total)})
	if was && w.s.out[r.sender] != 0 && w.bad == "" {
		w.bad = fmt.Sprintf("R2: p%d is admitted, and a batch of it is not answered at once", i)
	}
}

// read: the decode engine finds a request, claims it and releases it.
func (w *lockWorld) read(i int) {
	w.s.reqs[i].over = true
	by, id := "d"+itoa(i), fmt.Sprintf("p%d", i)
	w.step(ev(evWait, uint64(i)), func() intake.Event {
		return intake.Find{Engine: 100, Call: 1, By: by, Keys: []string{fmt.Sprintf("k%d.0", i)}}
	})
	w.step(ev(evClaim, uint64(i)), func() intake.Event { return intake.Claim{Engine: 100, Call: 1, By: by, ReqID: id} })
	w.step(ev(evRelease, uint64(i)), func() intake.Event { return intake.Release{Engine: 100, Call: 1, By: by, ReqID: id} })
}

func (w *lockWorld) receive(sender int, m msg.Message) {
	id := w.x.m.number(m)
	w.step(ev(evReceived, uint64(sender), uint64(id)), func() intake.Event {
		return intake.Received{Conn: kv.ConnID(sender + 1), Msg: w.x.m.message(id)}
	})
}

func (w *lockWorld) step(e event, make func() intake.Event) {
	s := w.x.m.stepRecv(w.s.place, e, make)
	if s.bad != "" {
		w.bad = "check: " + s.bad
		return
	}
	w.s.place = place{core: s.next}
	for i := range s.acts {
		a := &s.acts[i]
		if t := w.x.m.show(a); t != "" && w.say != nil {
			w.say("  the receiver %s", t)
		}
		switch a.do {
		case doSend:
			w.answered(int(a.conn)-1, w.x.m.message(a.msg).(*msg.AllocResponse))
		case doNote:
			w.noted(a)
		}
	}
}

// answered: a sender hears of its batch, or of a cancel.
func (w *lockWorld) answered(sender int, m *msg.AllocResponse) {
	i := int(w.s.out[sender]) - 1
	if i < 0 || w.s.crashed[sender] {
		return
	}
	w.s.out[sender] = 0
	if slices.Contains(m.RemoteIndexes, -1) {
		w.s.reqs[i].over = true
		return
	}
	w.s.reqs[i].answered++
}

func (w *lockWorld) noted(a *act) {
	for i := range w.x.reqs {
		if a.req != fmt.Sprintf("p%d", i) {
			continue
		}
		switch a.note {
		case intake.NoteAdmitted:
			w.s.reqs[i].admitted = true
		case intake.NoteEnded:
			if a.ending != msg.EndReady {
				w.s.reqs[i].over = true
			}
		}
	}
}
