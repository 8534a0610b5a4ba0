package faultlink

import (
	"sync"
	"time"
)

// hold keeps things back until their time and passes them on in order, from
// one goroutine.
type hold[T any] struct {
	plan Plan
	pass func(T)
	wake chan struct{} // something was added, or the end
	done chan struct{}

	mu      sync.Mutex
	closed  bool
	queue   []entry[T]
	free    time.Time // when the limit of bytes lets the next one go
	current *T        // being passed on
	after   []func()  // what came for current meanwhile
}

type entry[T any] struct {
	v     T
	bytes int64
	due   time.Time
}

func newHold[T any](p Plan, pass func(T)) *hold[T] {
	h := &hold[T]{plan: p, pass: pass, wake: make(chan struct{}, 1), done: make(chan struct{})}
	go h.run()
	return h
}

func (h *hold[T]) add(v T, bytes int64) {
	h.mu.Lock()
	h.queue = append(h.queue, entry[T]{v, bytes, time.Now().Add(h.plan.Delay)})
	h.mu.Unlock()
	h.poke()
}

func (h *hold[T]) poke() {
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

// remove takes out what matches and has not been passed on. If what is just
// being passed on matches, then is called afterwards.
func (h *hold[T]) remove(match func(T) bool, then func()) (out []T) {
	h.mu.Lock()
	defer h.mu.Unlock()
	kept := h.queue[:0]
	for _, e := range h.queue {
		if match(e.v) {
			out = append(out, e.v)
		} else {
			kept = append(kept, e)
		}
	}
	h.queue = kept
	if h.current != nil && then != nil && match(*h.current) {
		h.after = append(h.after, then)
	}
	return out
}

// close passes nothing on any more and returns what is left.
func (h *hold[T]) close() (left []T) {
	h.mu.Lock()
	h.closed = true
	h.mu.Unlock()
	h.poke()
	<-h.done
	return h.remove(func(T) bool { return true }, nil)
}

func (h *hold[T]) run() {
	defer close(h.done)
	for {
		v, wait, ok := h.next()
		switch {
		case !ok:
			return
		case v != nil:
			h.pass(*v)
			h.mu.Lock()
			after := h.after
			h.current, h.after = nil, nil
			h.mu.Unlock()
			for _, f := range after {
				f()
			}
		case wait == 0:
			<-h.wake
		default:
			t := time.NewTimer(wait)
			select {
			case <-t.C:
			case <-h.wake:
				t.Stop()
			}
		}
	}
}

// next returns what is to be passed on now, or how long that takes: 0 until
// something is added. It is false at the end.
func (h *hold[T]) next() (v *T, wait time.Duration, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, 0, false
	}
	if len(h.queue) == 0 {
		return nil, 0, true
	}
	e, now := h.queue[0], time.Now()
	at := e.due
	if h.free.After(at) {
		at = h.free
	}
	if at.After(now) {
		return nil, at.Sub(now), true
	}
	h.queue = h.queue[1:]
	if h.plan.BytesPerSecond > 0 {
		h.free = at.Add(time.Duration(float64(e.bytes) / float64(h.plan.BytesPerSecond) * float64(time.Second)))
		if h.free.Before(now) {
			h.free = now // idle time is not saved up
		}
	}
	h.current = &e.v
	return &e.v, 0, true
}
