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
// It is bounded for what peers may send at will (put and putFrom block the reader,
// and TCP slows the peer down). What the loop itself has asked for (post) is bounded by
// what was asked: a slot, a dial, a call has one outcome.
type mailbox struct {
	ready chan struct{} // holds a token when queue may be non-empty
	limit int

	mu     sync.Mutex
	room   *sync.Cond
	queue  []any
	from   map[kv.ConnID]int // messages in queue, by connection, large ones as several
	bytes  int               // of messages in queue
	waits  bool              // somebody waits for room
	closed bool
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
	for len(m.queue) >= m.limit && !m.closed {
		m.waits = true
		m.room.Wait()
	}
	return m.add(ev)
}

// putFrom is put for a message of that many bytes on a connection.
func (m *mailbox) putFrom(conn kv.ConnID, bytes int, ev any) bool {
	m.mu.Lock()
	for (len(m.queue) >= m.limit || m.from[conn] >= perConn || m.bytes > 0 && m.bytes+bytes > maxBytes) && !m.closed {
		m.waits = true
		m.room.Wait()
	}
	m.from[conn] += 1 + bytes>>13
	m.bytes += bytes
	return m.add(ev)
}

// post adds an event without ever waiting.
func (m *mailbox) post(ev any) bool {
	m.mu.Lock()
	return m.add(ev)
}

// add needs mu and gives it back.
func (m *mailbox) add(ev any) bool {
	if m.closed {
		m.mu.Unlock()
		return false
	}
	m.queue = append(m.queue, ev)
	first := len(m.queue) == 1
	m.mu.Unlock()
	if first {
		select {
		case m.ready <- struct{}{}:
		default:
		}
	}
	return true
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
