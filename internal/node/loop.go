package node

import (
	"context"
	"time"

	"github.com/berthkv/berth/internal/kv"
)

// loop is what both shells run in one goroutine: everything in the mailbox
// first, then the wake-ups that are due, then sleep until either.
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
}

// run returns when ctx ends.
func (l loop) run() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	var batch []any
	for {
		clear(batch)
		batch = l.mail.take(batch)
		for _, ev := range batch {
			l.dispatch(ev)
		}
		if len(batch) > 0 {
			l.woke(len(batch))
			continue // everything that waits before any timer
		}
		now := l.clock()
		if l.tick(now) {
			continue
		}
		pause := time.Hour
		if at := l.next(); at != kv.Never {
			pause = max(time.Duration(at.Sub(now)), 0)
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
