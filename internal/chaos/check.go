package chaos

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// The model that a history is checked against: each slot of a pool, in the life
// of one agent, is a register that one holder at a time has, and what a reader
// finds in it while it holds it is what the one attempt wrote that the claim is
// of. In rules:
//
//	H1 bytes      every byte that is read is of one attempt, at the index that was claimed
//	H2 owner      that attempt was begun under the name that was claimed, for that receiver
//	H3 submitted  its engine had submitted that chunk before the read returned
//	H4 whole      a claim has all chunks of the attempt, each once
//	H5 register   nobody else holds a slot between the return of a claim and the call of its release;
//	              likewise a staging slot, between the return of stage and the call of submit or unstage
//	H6 once       what has been released is not claimed again
//	H7 ending     who sends hears ready only of what was submitted whole; what the sender heard to have failed,
//	              but for the loss of its peer or agent, nobody claims; where the sender heard ready, the receiver says so too
//	H8 answered   every begin that was accepted has one ending
type checker struct {
	history  []Event
	faults   []string
	attempts map[uint64]*attempt
	claims   map[orderKey]*claim
	died     map[string]int64 // engine process: when
}

type orderKey struct {
	engine string
	order  uint64
}

// attempt is what a sending engine's events say about one begin.
type attempt struct {
	id        uint64
	req       string
	receiver  string // its name
	engine    string
	total     int
	accepted  bool
	submitted map[int]int64 // chunk: when submit was called
	endings   int
	ending    Event
	released  []*claim
}

// claim is what a receiving engine's events say about one order.
type claim struct {
	key       orderKey
	req       string
	agent     string
	call, ret int64
	slots     []uint32
	index     []int
	attempt   uint64 // of the bytes; 0: nothing was read
	release   int64  // call, 0: none
	released  int64  // return without an error, 0: none
	wait      Event
}

// hold is the time in which a slot is surely somebody's.
type hold struct {
	from, to int64
	who      string
}

// maxFaults bounds what is told about one history.
const maxFaults = 20

// check returns what is wrong with a history that is complete: nobody has
// anything under way any more.
func check(history []Event) []string {
	c := &checker{history: slices.Clone(history), attempts: map[uint64]*attempt{}, claims: map[orderKey]*claim{}, died: map[string]int64{}}
	slices.SortStableFunc(c.history, func(a, b Event) int { return cmp.Compare(a.T, b.T) })
	c.collect()
	c.reads()
	c.once()
	c.endings()
	c.registers()
	if len(c.faults) > maxFaults {
		c.faults = append(c.faults[:maxFaults], fmt.Sprintf("and %d more", len(c.faults)-maxFaults))
	}
	return c.faults
}

func (c *checker) bad(rule, format string, args ...any) {
	c.faults = append(c.faults, rule+": "+fmt.Sprintf(format, args...))
}

// collect groups the events.
func (c *checker) collect() {
	for _, e := range c.history {
		k := orderKey{e.Engine, e.Order}
		switch e.Op {
		case opDied:
			c.died[e.Engine] = e.T
		case opBegin:
			if !e.Ret {
				c.attempts[e.Attempt] = &attempt{id: e.Attempt, req: e.Req, receiver: e.Text, engine: e.Engine, total: e.Total, submitted: map[int]int64{}}
			} else if a := c.attempts[e.Attempt]; a != nil && e.Reason == "" {
				a.accepted = true
			}
		case opSubmit:
			if a := c.attempts[e.Attempt]; a != nil {
				for _, i := range e.Index {
					if _, ok := a.submitted[i]; !ok {
						a.submitted[i] = e.T
					}
				}
			}
		case opEnded:
			if a := c.attempts[e.Attempt]; a != nil {
				a.endings++
				a.ending = e
			}
		case opWait, opClaim, opRead, opRelease:
			c.receiving(k, e)
		}
	}
}

func (c *checker) receiving(k orderKey, e Event) {
	cl := c.claims[k]
	if cl == nil {
		cl = &claim{key: k, req: e.Req}
		c.claims[k] = cl
	}
	switch {
	case e.Op == opWait:
		cl.wait = e
	case e.Op == opClaim && !e.Ret:
		cl.call = e.T
	case e.Op == opClaim && e.Reason == "":
		cl.ret, cl.agent, cl.slots, cl.index = e.T, e.Agent, e.Slots, e.Index
	case e.Op == opRelease && !e.Ret && cl.release == 0:
		cl.release = e.T
	case e.Op == opRelease && e.Ret && e.Reason == "":
		cl.released = e.T
	}
}

// nodeOf is the node of an engine process: "decode-tcp/engine#2" is of decode-tcp.
func nodeOf(process string) string {
	n, _, _ := strings.Cut(process, "/")
	return n
}

// reads checks H1 to H4.
func (c *checker) reads() {
	for _, e := range c.history {
		if e.Op != opRead || e.Lost {
			continue
		}
		cl := c.claims[orderKey{e.Engine, e.Order}]
		for _, r := range e.Reads {
			who := fmt.Sprintf("%s read chunk %d of %q in slot %d", e.Engine, r.Index, e.Req, r.Slot)
			if r.Err != "" {
				c.bad("H1", "%s: %s", who, r.Err)
				continue
			}
			if r.Of != r.Index || r.Key != chunkKey(r.Attempt, r.Index) {
				c.bad("H1", "%s (key %s): the bytes are chunk %d of attempt %d", who, r.Key, r.Of, r.Attempt)
				continue
			}
			a := c.attempts[r.Attempt]
			if a == nil || a.req != e.Req || a.receiver != nodeOf(e.Engine) {
				c.bad("H2", "%s: the bytes are of attempt %d: %s", who, r.Attempt, a)
				continue
			}
			if at, ok := a.submitted[r.Index]; !ok || at > e.T {
				c.bad("H3", "%s at %d, submitted at %d", who, e.T, at)
			}
			if cl.attempt != 0 && cl.attempt != r.Attempt {
				c.bad("H4", "%s: bytes of attempts %d and %d in one claim", who, cl.attempt, r.Attempt)
			}
			cl.attempt = r.Attempt
		}
		if a := c.attempts[cl.attempt]; a != nil {
			want := make([]int, a.total)
			for i := range want {
				want[i] = i
			}
			if !slices.Equal(cl.index, want) {
				c.bad("H4", "%s claimed chunks %v of %q, of which there are %d", e.Engine, cl.index, e.Req, a.total)
			}
		}
	}
}

func (a *attempt) String() string {
	if a == nil {
		return "nobody's"
	}
	return fmt.Sprintf("%q for %s, by %s", a.req, a.receiver, a.engine)
}

func chunkKey(attempt uint64, index int) string {
	return strconv.FormatUint(attempt, 36) + "/" + strconv.Itoa(index)
}

// once checks H6.
func (c *checker) once() {
	for _, k := range c.orders() {
		if cl := c.claims[k]; cl.released > 0 && cl.attempt != 0 {
			a := c.attempts[cl.attempt]
			if a != nil {
				a.released = append(a.released, cl)
			}
		}
	}
	for _, k := range c.orders() {
		cl := c.claims[k]
		a := c.attempts[cl.attempt]
		if cl.attempt == 0 || a == nil {
			continue
		}
		for _, other := range a.released {
			if other != cl && other.released < cl.call {
				c.bad("H6", "%s claimed attempt %d of %q, which %s had released before", cl.key.engine, a.id, a.req, other.key.engine)
			}
		}
	}
}

func (c *checker) orders() []orderKey {
	return slices.SortedFunc(maps.Keys(c.claims), func(a, b orderKey) int {
		return cmp.Or(cmp.Compare(a.engine, b.engine), cmp.Compare(a.order, b.order))
	})
}

// endings checks H7 and H8.
func (c *checker) endings() {
	claimed := map[uint64]*claim{}
	for _, k := range c.orders() {
		cl := c.claims[k]
		if cl.attempt != 0 {
			claimed[cl.attempt] = cl
		}
	}
	names := map[string]int{} // how many attempts have that name
	for _, a := range c.attempts {
		names[a.req]++
	}
	told := map[string]Event{} // an unambiguous name: what the receiving engine heard of it
	for _, k := range c.orders() {
		if w := c.claims[k].wait; w.Op != "" && w.Ending != "" && names[w.Req] == 1 {
			told[w.Req] = w
		}
	}
	for _, id := range slices.Sorted(maps.Keys(c.attempts)) {
		a := c.attempts[id]
		_, dead := c.died[a.engine]
		switch {
		case a.endings > 1:
			c.bad("H8", "attempt %d of %s has %d endings", id, a, a.endings)
		case a.accepted && a.endings == 0 && !dead:
			c.bad("H8", "attempt %d of %s has no ending", id, a)
		}
		if a.endings != 1 {
			continue
		}
		e := a.ending
		w, heard := told[a.req]
		switch {
		case e.Ending == "ready" && len(a.submitted) != a.total:
			c.bad("H7", "attempt %d of %s is ready; submitted were %d of %d chunks", id, a, len(a.submitted), a.total)
		case e.Ending == "ready" && heard && w.Ending != "ready":
			c.bad("H7", "attempt %d of %s is ready, and the receiver says %s(%s) %s", id, a, w.Ending, w.Reason, w.Text)
		case e.Ending != "ready" && e.Reason != "peer_lost" && claimed[id] != nil:
			c.bad("H7", "attempt %d of %s ended %s(%s), and %s claimed it", id, a, e.Ending, e.Reason, claimed[id].key.engine)
		}
	}
}

// registers checks H5.
func (c *checker) registers() {
	holds := map[string][]hold{} // by agent, pool and slot
	end := func(engine string, at int64) int64 {
		if d, ok := c.died[engine]; ok && (at == 0 || d < at) {
			return d
		}
		if at == 0 {
			return 1<<63 - 1
		}
		return at
	}
	lost := map[orderKey]int64{}
	for _, e := range c.history {
		if e.Lost {
			if _, ok := lost[orderKey{e.Engine, e.Order}]; !ok {
				lost[orderKey{e.Engine, e.Order}] = e.T
			}
		}
	}
	for _, k := range c.orders() {
		cl := c.claims[k]
		if cl.ret == 0 {
			continue
		}
		to := cl.release
		if _, ok := lost[k]; ok {
			to = cl.ret // its agent was gone: since when is not known
		}
		for _, s := range cl.slots {
			key := fmt.Sprintf("receive slot %d of agent %.8s", s, cl.agent)
			holds[key] = append(holds[key], hold{cl.ret, end(k.engine, to), fmt.Sprintf("order %d of %s (%q)", k.order, k.engine, cl.req)})
		}
	}
	open := map[string]*hold{} // by engine process, order and slot
	for _, e := range c.history {
		for _, s := range e.Slots {
			mine := fmt.Sprintf("%s/%d/%d", e.Engine, e.Order, s)
			switch e.Op {
			case opStage:
				open[mine] = &hold{e.T, 0, fmt.Sprintf("order %d of %s (%q)", e.Order, e.Engine, e.Req)}
			case opGive:
				if h := open[mine]; h != nil {
					key := fmt.Sprintf("staging slot %d of agent %.8s", s, e.Agent)
					to := e.T
					if e.Lost {
						to = h.from
					}
					holds[key] = append(holds[key], hold{h.from, end(e.Engine, to), h.who})
					delete(open, mine)
				}
			}
		}
	}
	for _, key := range slices.Sorted(maps.Keys(holds)) {
		hs := holds[key]
		slices.SortFunc(hs, func(a, b hold) int { return cmp.Compare(a.from, b.from) })
		for i := 1; i < len(hs); i++ {
			if hs[i].from < hs[i-1].to {
				c.bad("H5", "%s is held by %s until %d and by %s from %d", key, hs[i-1].who, hs[i-1].to, hs[i].who, hs[i].from)
			}
			hs[i].to = max(hs[i].to, hs[i-1].to)
		}
	}
}
