package node

import (
	"sync"

	"github.com/berthkv/berth/internal/kv"
)

// Limits of what peers have in the mailbox. One connection's share is small, so that a
// peer that floods us delays the others by no more than that.
const (
	perConn  = 32       // messages of one connection; each 8 KiB count as one more
	maxBytes = 32 << 20 // of all messages
)

// mailbox carries events from the sockets', links' and engines' goroutines to
// the one loop. Everything that is in it when the loop looks is stepped before
// any timer: a process that was stopped reads its peers' heartbeats before it
// judges them.
//
// A goroutine that puts what peers and engines send steps it at once, if nobody
// steps: between the socket and the core there is then no other goroutine to
// wake. Whoever steps does so alone (stepping) and owns all that the loop owns.
//
// It is bounded for what peers may send at will (put and putFrom block the reader,
// and TCP slows the peer down). What the loop itself has asked for (post) is bounded by
// what was asked: a slot, a dial, a call has one outcome.
type mailbox struct {
	ready chan struct{} // holds a token when the loop's goroutine has something to look at
	limit int

	mu       sync.Mutex
	room     *sync.Cond
	queue    []any
	from     map[kv.ConnID]int // messages in queue, by connection, large ones as several
	bytes    int               // of messages in queue
	waits    bool              // somebody waits for room
	closed   bool
	step     func() // steps in the goroutine that puts; nil: only the loop's own does
	stepping bool   // somebody steps, and looks here again before he ends
	wanted   bool   // the loop's goroutine wants to, next
}

func newMailbox(limit int) *mailbox {
	m := &mailbox{ready: make(chan struct{}, 1), limit: limit, from: map[kv.ConnID]int{}}
	m.room = sync.NewCond(&m.mu)
	return m
}

// put adds an event of a peer; it waits while the mailbox is full. It reports
// false once the mailbox is closed.
func (m *mailbox) put(ev any) bool {
	m.mu.Lock()
	m.await()
	return m.add(ev, false)
}

// putCall is put for what an engine or a proxy asks; the caller may have to step.
func (m *mailbox) putCall(ev any) bool {
	m.mu.Lock()
	m.await()
	return m.add(ev, true)
}

// await waits for room. It needs mu, and gives it up meanwhile.
func (m *mailbox) await() {
	for len(m.queue) >= m.limit && !m.closed {
		m.waits = true
		m.room.Wait()
	}
}

// putFrom is putCall for a message of that many bytes on a connection.
func (m *mailbox) putFrom(conn kv.ConnID, bytes int, ev any) bool {
	m.mu.Lock()
	for (len(m.queue) >= m.limit || m.from[conn] >= perConn || m.bytes > 0 && m.bytes+bytes > maxBytes) && !m.closed {
		m.waits = true
		m.room.Wait()
	}
	m.from[conn] += 1 + bytes>>13
	m.bytes += bytes
	return m.add(ev, true)
}

// post adds an event without ever waiting, or stepping.
func (m *mailbox) post(ev any) bool {
	m.mu.Lock()
	return m.add(ev, false)
}

// postCall is post, but the caller may have to step.
func (m *mailbox) postCall(ev any) {
	m.mu.Lock()
	m.add(ev, true)
}

// add needs mu and gives it back. With lend the caller's goroutine steps, if
// nobody does.
func (m *mailbox) add(ev any, lend bool) bool {
	if m.closed {
		m.mu.Unlock()
		return false
	}
	m.queue = append(m.queue, ev)
	lend = lend && !m.stepping && m.step != nil
	wake := !m.stepping && !lend && len(m.queue) == 1
	if lend {
		m.stepping = true
	}
	m.mu.Unlock()
	switch {
	case lend:
		m.step()
	case wake:
		m.signal()
	}
	return true
}

func (m *mailbox) signal() {
	select {
	case m.ready <- struct{}{}:
	default:
	}
}

// begin makes the loop's goroutine the one that steps. False: somebody does, and
// will signal when he ends.
func (m *mailbox) begin() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.wanted = m.stepping
	if m.stepping {
		return false
	}
	m.stepping = true
	return true
}

// end ends stepping, and with early signals the loop's goroutine. False: there is
// more to step.
func (m *mailbox) end(early bool) bool {
	m.mu.Lock()
	if len(m.queue) > 0 {
		m.mu.Unlock()
		return false
	}
	m.leave(early)
	return true
}

// handOver ends stepping; the loop's goroutine goes on.
func (m *mailbox) handOver() {
	m.mu.Lock()
	m.leave(true)
}

// leave needs mu and gives it back.
func (m *mailbox) leave(signal bool) {
	signal = signal || m.wanted
	m.stepping, m.wanted = false, false
	m.mu.Unlock()
	if signal {
		m.signal()
	}
}

// take returns everything that is queued and lends spare as the next queue.
func (m *mailbox) take(spare []any) []any {
	m.mu.Lock()
	defer m.mu.Unlock()
	got := m.queue
	m.queue = spare[:0]
	clear(m.from)
	m.bytes = 0
	if m.waits {
		m.waits = false
		m.room.Broadcast()
	}
	return got
}

// close refuses all further events and wakes those that wait to put one.
func (m *mailbox) close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed = true
	m.room.Broadcast()
}
