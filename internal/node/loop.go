package node

import (
	"context"
	"time"

	"github.com/berthkv/berth/internal/kv"
)

// loop is what both shells run in one goroutine: everything in the mailbox
// first, then the wake-ups that are due, then sleep until either. A simulator
// takes its turns itself.
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

	batch []any // what is being dispatched
}

// turn steps everything that waits, or else, when nothing does, what is due. It
// reports whether there was any.
func (l *loop) turn() bool {
	clear(l.batch)
	l.batch = l.mail.take(l.batch)
	for _, ev := range l.batch {
		l.dispatch(ev)
	}
	if len(l.batch) > 0 {
		l.woke(len(l.batch))
		return true
	}
	return l.tick(l.clock())
}

// turns is turn until there is nothing more; it returns the next wake-up.
func (l *loop) turns() kv.Instant {
	for l.turn() {
	}
	return l.next()
}

// run returns when ctx ends.
func (l *loop) run() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		if l.turn() {
			continue
		}
		pause := time.Hour
		if at := l.next(); at != kv.Never {
			pause = max(time.Duration(at.Sub(l.clock())), 0)
		}
		timer.Reset(pause)
		select {
		case <-l.mail.ready:
		case <-timer.C:
		case <-l.ctx.Done():
			return
		}
	}
}
