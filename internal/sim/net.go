package sim

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/berthkv/berth/internal/explore"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/node"
	"github.com/berthkv/berth/internal/wire"
)

// stream is a source of times.
type stream struct{ *rand.Rand }

func (s stream) take(mean kv.Duration) kv.Duration { return expo(s.Rand, mean) }

type pairID struct{ from, to int }

// pair is a sender or proxy and a receiver, and what ails the way between them.
type pair struct {
	pipes []*pipe
	// How many faults of each kind last.
	blocked, twice, slow int
}

func (w *world) pair(from *host, to *receiver) *pair {
	id := pairID{from.id, to.id}
	p := w.pairs[id]
	if p == nil {
		p = &pair{}
		w.pairs[id] = p
	}
	return p
}

// pipe is a control connection: FIFO in each direction.
type pipe struct {
	w        *world
	pair     *pair
	from     *host
	to       *receiver
	fromLife int
	toLife   int
	id       kv.ConnID // the receiver's number
	ev       node.DialEvents
	r        stream
	toR, toS direction
	ended    int // of its ends, who know that it is over
}

// direction is one way of a pipe.
type direction struct {
	toReceiver bool
	last       kv.Instant // no message arrives before it
	sent, got  int
	limit      int      // what is numbered from here on is lost
	stalled    [][]byte // waits for the way to be free
	over       bool     // its end is on its way, or was told
	silent     bool
}

var errGone = errors.New("the connection is gone")

// dial connects a host to a receiver. It is called outside the host's loop, when
// the time that a dial takes has passed.
func (w *world) dial(from *host, to *receiver, n uint64, ev node.DialEvents) (node.ControlConn, error) {
	p := w.pair(from, to)
	switch {
	case !to.up:
		return nil, fmt.Errorf("%s is not there", to.name)
	case p.blocked > 0:
		return nil, fmt.Errorf("%s cannot be reached", to.name)
	}
	to.lastConn++
	k := &pipe{w: w, pair: p, from: from, to: to, fromLife: from.life, toLife: to.life, id: to.lastConn, ev: ev,
		r:   stream{w.random("pipe", from.name, to.name, fmt.Sprint(from.life, n))},
		toR: direction{toReceiver: true, limit: math.MaxInt}, toS: direction{limit: math.MaxInt}}
	p.pipes = append(p.pipes, k)
	to.conns[k.id] = k
	identity := fmt.Sprintf("%s/%d-to-%s#%d", from.name, from.life, to.name, n)
	k.arrives(&k.toR, func() { to.node.RouterEvents().Connected(k.id, identity, from.name) })
	return k, nil
}

// takes is how long a message needs.
func (k *pipe) takes() kv.Duration {
	d := k.r.take(150_000)
	if k.pair.slow > 0 {
		d += k.r.take(k.w.sc.Lease / 8)
	}
	if k.from.slow+k.to.slow > 0 {
		d *= 50
	}
	return d
}

// arrives schedules something behind what is on its way.
func (k *pipe) arrives(d *direction, do func()) {
	d.last = max(d.last+1, k.w.now.Add(k.takes()))
	k.w.at(d.last, func() { k.deliver(d, do) })
}

func (k *pipe) deliver(d *direction, do func()) {
	if d.toReceiver {
		k.to.deliver(k.toLife, do)
	} else {
		k.from.deliver(k.fromLife, do)
	}
}

// say sends a message in a direction.
func (k *pipe) say(d *direction, b []byte) error {
	if d.over {
		return errGone
	}
	b = append([]byte(nil), b...)
	if k.pair.blocked > 0 && !d.silent {
		if len(d.stalled) == 0 {
			k.lose(k.w.sc.Lease / 2)
		}
		d.stalled = append(d.stalled, b)
		return nil
	}
	k.carry(d, b)
	return nil
}

func (k *pipe) carry(d *direction, b []byte) {
	n := d.sent
	d.sent++
	k.arrives(d, func() { k.read(d, n, b) })
	if k.pair.twice > 0 && k.r.IntN(3) == 0 {
		// The copy comes after the original, and maybe after much else.
		k.w.at(d.last.Add(k.takes()+k.r.take(k.w.sc.Lease/30)), func() {
			k.deliver(d, func() {
				if n < d.limit && !d.over {
					k.w.report.Faults.Duplicates++
					k.read(d, n, b)
				}
			})
		})
	}
}

// read is the message at its other end.
func (k *pipe) read(d *direction, n int, b []byte) {
	if n >= d.limit {
		k.w.report.Faults.Lost++
		return
	}
	d.got = max(d.got, n+1)
	k.w.hash.bytes(b)
	if k.w.tracing() {
		k.trace(d, b)
	}
	if !d.toReceiver {
		k.ev.Message(b)
		return
	}
	k.to.node.RouterEvents().Message(k.id, k.to.repeated(d, n, b))
}

func (k *pipe) trace(d *direction, b []byte) {
	text := "something that cannot be read"
	if m, err := wire.Decode(b); err == nil {
		text = explore.ShowMsg(m)
	}
	from, to := k.from.name, k.to.name
	if !d.toReceiver {
		from, to = to, from
	}
	k.w.say("%s -> %s  %s", from, to, text)
}

// lose breaks the connection after a time, if what stalled has not gone on.
func (k *pipe) lose(after kv.Duration) {
	k.w.after(after, func() {
		if len(k.toR.stalled)+len(k.toS.stalled) > 0 || k.toR.silent || k.toS.silent {
			k.cut()
		}
	})
}

// flow lets go on what stalled.
func (k *pipe) flow() {
	for _, d := range []*direction{&k.toR, &k.toS} {
		stalled := d.stalled
		d.stalled = nil
		for _, b := range stalled {
			k.carry(d, b)
		}
	}
}

// cut breaks the connection: in each direction a prefix of what is under way
// still arrives. Each end hears of it in its own time.
func (k *pipe) cut() {
	for _, d := range []*direction{&k.toR, &k.toS} {
		if d.limit == math.MaxInt {
			d.limit = d.got + k.r.IntN(d.sent-d.got+1)
		}
		d.stalled = nil
		k.end(d, k.r.take(k.w.sc.Lease/60))
	}
}

// end tells an end that the connection is over, behind what still arrives there.
func (k *pipe) end(d *direction, after kv.Duration) {
	if d.over {
		return
	}
	d.over = true
	d.last = max(d.last+1, k.w.now.Add(after))
	k.w.at(d.last, func() {
		k.ended++
		if d.toReceiver {
			k.deliver(d, func() {
				delete(k.to.conns, k.id)
				k.to.node.RouterEvents().Disconnected(k.id)
			})
		} else {
			k.deliver(d, func() { k.ev.Closed(errGone) })
		}
		if k.ended == 2 {
			k.forget()
		}
	})
}

func (k *pipe) forget() {
	for i, o := range k.pair.pipes {
		if o == k {
			last := len(k.pair.pipes) - 1
			k.pair.pipes[i] = k.pair.pipes[last]
			k.pair.pipes[last] = nil
			k.pair.pipes = k.pair.pipes[:last]
			return
		}
	}
}

// Send and Close make a pipe the dialler's node.ControlConn.
func (k *pipe) Send(b []byte) error { return k.say(&k.toR, b) }

// Close ends the connection behind what was said.
func (k *pipe) Close() {
	if k.toS.limit == math.MaxInt {
		k.toS.limit = k.toS.got // nobody reads any more
	}
	k.end(&k.toS, 0)
	k.end(&k.toR, k.takes())
}

// died: one end's process is gone. What it had said may still come; the other
// end hears of it.
func (k *pipe) died(receiver bool) {
	mine, theirs := &k.toS, &k.toR // what is said to the process that died, and by it
	if receiver {
		mine, theirs = &k.toR, &k.toS
	}
	mine.limit = mine.got
	if !mine.over {
		mine.over = true
		k.ended++
	}
	theirs.limit = min(theirs.limit, theirs.got+k.r.IntN(theirs.sent-theirs.got+1))
	theirs.stalled, mine.stalled = nil, nil
	k.end(theirs, k.r.take(k.w.sc.Lease/60))
	if k.ended == 2 {
		k.forget()
	}
}

// dialer makes a host's connections.
type dialer struct{ h *host }

func (d dialer) Dial(ctx context.Context, host string, port int, n uint64, ev node.DialEvents) (node.ControlConn, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	to := d.h.w.receivers[port-1]
	return d.h.w.dial(d.h, to, n, ev)
}
