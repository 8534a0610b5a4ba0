package zmtp

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// limitedLog writes at most one line a second for each message text; the next one says how many it stands for. Texts are
// constants, so the map is small.
type limitedLog struct {
	log *slog.Logger

	mu   sync.Mutex // guards last
	last map[string]*logCount
}

type logCount struct {
	at         time.Time
	suppressed int
}

func newLimitedLog(log *slog.Logger) *limitedLog {
	return &limitedLog{log: log, last: make(map[string]*logCount)}
}

func (l *limitedLog) warn(text string, args ...any) {
	now := time.Now()
	l.mu.Lock()
	c := l.last[text]
	if c == nil {
		c = &logCount{}
		l.last[text] = c
	}
	if now.Sub(c.at) < time.Second {
		c.suppressed++
		l.mu.Unlock()
		return
	}
	suppressed := c.suppressed
	c.at, c.suppressed = now, 0
	l.mu.Unlock()
	if suppressed > 0 {
		args = append(args, "suppressed", suppressed)
	}
	l.log.Warn("zmtp: "+text, args...)
}

// sleep waits for d and is false if ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
