package proxy

import (
	"log/slog"
	"sync"

	"golang.org/x/time/rate"
)

// Log lines per second and burst of each event; what is left out is counted in
// the next line that is not.
const (
	logRate  = 10
	logBurst = 50
)

// limitedLog is a logger whose lines are limited by event.
type limitedLog struct {
	to *slog.Logger

	mu struct {
		sync.Mutex
		events map[string]*limitedEvent // by the names in our source: bounded
	}
}

type limitedEvent struct {
	limit   *rate.Limiter
	leftOut int
}

func newLimitedLog(to *slog.Logger) *limitedLog {
	l := &limitedLog{to: to}
	l.mu.events = map[string]*limitedEvent{}
	return l
}

func (l *limitedLog) warn(event, text string, attrs ...any) {
	l.mu.Lock()
	e := l.mu.events[event]
	if e == nil {
		e = &limitedEvent{limit: rate.NewLimiter(logRate, logBurst)}
		l.mu.events[event] = e
	}
	if !e.limit.Allow() {
		e.leftOut++
		l.mu.Unlock()
		return
	}
	leftOut := e.leftOut
	e.leftOut = 0
	l.mu.Unlock()
	attrs = append([]any{"event", event}, attrs...)
	if leftOut > 0 {
		attrs = append(attrs, "left_out", leftOut)
	}
	l.to.Warn(text, attrs...)
}
