package node

import (
	"context"
	"time"

	"github.com/berthkv/berth/internal/kv"
)

// loop is what both shells run, in one goroutine at a time: everything in the
// mailbox first, then the wake-ups that are due. Its own goroutine sleeps until
// either; one that puts a message lends itself (lent). A simulator takes its
// turns itself.
type loop struct {
	ctx   context.Context
	clock func() kv.Instant
	mail  *mailbox
	// dispatch steps the core that an event is for.
	dispatch func(ev any)
	// tick steps the cores whose wake-up has come and reports whether any had;
	// next is the earliest wake-up.
	tick func(now kv.Instant) bool
	next func() kv.Instant
	// woke is told how many events each waking brought.
	woke func(events int)

	// Owned by who steps.
	batch []any      // what is being dispatched
	armed kv.Instant // when the loop's goroutine looks by itself
}

// lentEvents is how many events a goroutine steps that has put one: then the
// loop's own goes on, since its connection is not read meanwhile.
const lentEvents = 64

// turn steps everything that waits, or else, when nothing does, what is due. It
// reports whether there was any.
func (l *loop) turn() bool { return l.drain() || l.tick(l.clock()) }

// drain steps everything that waits, and reports whether anything did.
func (l *loop) drain() bool {
	clear(l.batch)
	l.batch = l.mail.take(l.batch)
	for _, ev := range l.batch {
		l.dispatch(ev)
	}
	if len(l.batch) > 0 {
		l.woke(len(l.batch))
	}
	return len(l.batch) > 0
}

// turns is turn until there is nothing more; it returns the next wake-up.
func (l *loop) turns() kv.Instant {
	for l.turn() {
	}
	return l.next()
}

// lent steps in a goroutine that has put an event. Wake-ups are the loop's own
// goroutine's: other messages may be about to be put, and come first.
func (l *loop) lent() {
	for events := 0; events < lentEvents; {
		if l.drain() {
			events += len(l.batch)
		} else if l.mail.end(l.next() < l.armed) {
			return
		}
	}
	l.mail.handOver()
}

// run returns when ctx ends; nobody steps from then on.
func (l *loop) run() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		pause := time.Hour // while somebody else steps, who signals
		if l.mail.begin() {
			pause = l.own()
		}
		timer.Reset(pause)
		select {
		case <-l.mail.ready:
		case <-timer.C:
		case <-l.ctx.Done():
			for !l.mail.begin() {
				<-l.mail.ready
			}
			return
		}
	}
}

// own steps all that there is and returns how long the loop's goroutine may sleep.
func (l *loop) own() time.Duration {
	for {
		l.armed = l.turns()
		pause := time.Hour
		if l.armed != kv.Never {
			pause = max(time.Duration(l.armed.Sub(l.clock())), 0)
		}
		if l.mail.end(false) {
			return pause
		}
	}
}
