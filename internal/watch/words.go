package watch

import (
	"fmt"
	"slices"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// spoken reports whether the senders of all ranks have said ProxyNotif.
func (w *watched) spoken() bool { return len(w.words) >= len(w.ranks) }

// word counts a ProxyNotif: one for a name from each connection.
func (c *Core) word(w *watched, conn kv.ConnID) {
	if !w.spoken() && !slices.Contains(w.words, conn) {
		w.words = append(w.words, conn)
		c.advance(w)
	}
}

// notified takes what a sender pushed.
func (c *Core) notified(now kv.Instant, ev Notified) {
	switch m := ev.Msg.(type) {
	case *msg.ProxyNotif:
		if w := c.byName[m.ReqID]; w != nil {
			c.word(w, ev.Conn)
		} else if e := c.early.of(now, m.ReqID); e != nil && len(e.conns) < maxRanks && !slices.Contains(e.conns, ev.Conn) {
			e.conns = append(e.conns, ev.Conn)
		}
	case *msg.EndingNotice:
		if w := c.byName[m.ReqID]; w != nil {
			c.believe(w, m)
		} else if e := c.early.of(now, m.ReqID); e != nil && e.notice == nil {
			e.notice = m
		}
	}
}

// believe takes a sender's word that its rank has ended badly. The receiver's
// own word, where there is one, stands against it.
func (c *Core) believe(w *watched, m *msg.EndingNotice) {
	if m.Ending == msg.EndReady || m.Rank < 0 || m.Rank >= int64(len(w.ranks)) || w.ranks[m.Rank].state == rankReady {
		return
	}
	c.result(w, Result{Ending: m.Ending, Reason: m.Reason, Text: m.Text, Rank: int(m.Rank)})
}

// takeEarly applies what came before the watch.
func (c *Core) takeEarly(w *watched, e *earlyWord) {
	for _, conn := range e.conns {
		c.word(w, conn)
	}
	if e.notice != nil {
		c.believe(w, e.notice)
	}
}

// early keeps senders' words for names that nobody watches yet, for a while.
// At the limit the oldest goes.
type early struct {
	max    int
	ttl    kv.Duration
	byName map[string]*earlyWord
	order  []*earlyWord // oldest first; those replayed are no longer in byName
}

type earlyWord struct {
	name   string
	conns  []kv.ConnID
	notice *msg.EndingNotice
	until  kv.Instant
}

// of returns the entry of a name, made if need be; nil for a name that is none.
func (e *early) of(now kv.Instant, name string) *earlyWord {
	if name == "" || len(name) > kv.MaxReqID || e.max < 1 {
		return nil
	}
	if w := e.byName[name]; w != nil {
		return w
	}
	if len(e.order) >= e.max {
		e.pop()
	}
	w := &earlyWord{name: name, until: now.Add(e.ttl)}
	e.byName[name] = w
	e.order = append(e.order, w)
	return w
}

// replay hands an entry over and drops it.
func (e *early) replay(name string, use func(*earlyWord)) {
	if w := e.byName[name]; w != nil {
		delete(e.byName, name)
		use(w)
	}
}

func (e *early) pop() {
	w := e.order[0]
	e.order[0] = nil
	e.order = e.order[1:]
	if e.byName[w.name] == w {
		delete(e.byName, w.name)
	}
}

func (e *early) next() kv.Instant {
	if len(e.order) == 0 {
		return kv.Never
	}
	return e.order[0].until
}

func (e *early) expire(now kv.Instant) {
	for e.next() <= now {
		e.pop()
	}
}

// String is for logs and tests.
func (r Result) String() string {
	if r.Ending == msg.EndReady {
		return string(r.Ending)
	}
	return fmt.Sprintf("%s %s %q at rank %d", r.Ending, r.Reason, r.Text, r.Rank)
}
