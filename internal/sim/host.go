package sim

import (
	"fmt"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/node"
)

// host is a process of a node: what it has in common with the others.
type host struct {
	w     *world
	id    int
	name  string
	life  int // counts its processes
	up    bool
	turn  func() kv.Instant // Node.Turn or Watcher.Turn
	check func() error
	took  func() // observes each turn; may be nil
	crash func() // ends what the process had
	start func() // starts the next process

	queued  bool // in world.ready
	wake    kv.Instant
	turns   int
	stopped int      // faults that hold it
	held    []func() // what came meanwhile
	slow    int      // faults that slow it down

	// Its clock: since it was started it runs a little fast or slow, and may have
	// jumped ahead.
	born kv.Instant
	ppm  int64
	jump kv.Duration

	stood kv.Duration // for how long it was stopped, clock jumps included
}

func (h *host) init(w *world, name string, n int) {
	h.w, h.id, h.name, h.wake = w, len(w.hosts), fmt.Sprint(name, n), never
	h.ppm = int64(w.random("clock", h.name).IntN(201) - 100)
	w.hosts = append(w.hosts, h)
}

// clock is what the process reads.
func (h *host) clock() kv.Instant {
	d := kv.Duration(h.w.now - h.born)
	return kv.Instant(d + d/1_000_000*kv.Duration(h.ppm) + h.jump)
}

// when is a time of its clock on the world's, a moment later rather than sooner.
func (h *host) when(at kv.Instant) kv.Instant {
	if at == never {
		return never
	}
	d := kv.Duration(at) - h.jump
	return h.born.Add(d - d/1_000_000*kv.Duration(h.ppm) + 1000 + d/50_000_000)
}

// drive lets the world run the node.
func (h *host) drive(r *stream, noted func(any)) *node.Drive {
	life := h.life
	return &node.Drive{
		Outside: func(work func()) {
			h.w.after(r.take(200_000), func() { h.deliver(life, work) })
		},
		Noted: noted,
	}
}

// deliver lets something happen to a process, unless that is gone: at once, or
// when it goes on.
func (h *host) deliver(life int, do func()) {
	switch {
	case h.life != life || !h.up:
	case h.stopped > 0:
		h.held = append(h.held, func() { h.deliver(life, do) })
	default:
		do()
		h.poke()
	}
}

// poke gives the host a turn.
func (h *host) poke() {
	if !h.queued && h.up && h.stopped == 0 {
		h.queued = true
		h.w.ready = append(h.w.ready, h)
	}
}

func (h *host) turnNow() {
	h.queued = false
	if !h.up || h.stopped > 0 {
		return
	}
	h.w.hash.add(uint64(h.w.now)<<12 ^ uint64(h.id))
	next := h.when(h.turn())
	if h.took != nil {
		h.took()
	}
	if next < h.wake {
		h.wake = next
		h.w.at(next, func() {
			if h.wake == next {
				h.wake = never
			}
			h.poke()
		})
	}
	if h.turns++; h.turns%h.w.run.CheckEvery == 0 {
		h.verify()
	}
}

// verify checks the cores' invariants.
func (h *host) verify() {
	if !h.up {
		return
	}
	if err := h.check(); err != nil {
		h.w.violate("check", "%s: %v", h.name, err)
	}
}

// stop stops the process; it goes on once nothing stops it any more: everything
// that came meanwhile is there first, in portions that its mailbox takes.
func (h *host) stop() { h.stopped++ }

// portion is what a mailbox takes at once, whoever it is from: a reader that finds
// it full waits for the loop, which here would be the same goroutine.
const portion = 24

func (h *host) goOn() {
	if h.stopped--; h.stopped > 0 {
		return
	}
	held := h.held
	h.held = nil
	for i, do := range held {
		do()
		if i%portion == portion-1 && h.up {
			h.turnNow()
		}
	}
	h.wake = never
	h.poke()
	h.w.kick()
}

func (h *host) kill() {
	if !h.up {
		return
	}
	h.w.say("%s dies", h.name)
	h.up, h.held, h.wake = false, nil, never
	h.crash()
}

func (h *host) boot() {
	if h.up {
		return
	}
	h.life++
	h.up, h.born, h.jump = true, h.w.now, 0
	if h.life > 1 {
		h.w.say("%s is started again", h.name)
	}
	h.start()
	h.poke()
}

// incarnation is that of a process.
func (h *host) incarnation() kv.Incarnation {
	var i kv.Incarnation
	copy(i[:], fmt.Sprintf("%s.%d", h.name, h.life))
	// Short names tell processes apart too.
	var x hash
	x.bytes(i[:])
	i[0], i[1], i[2], i[3] = byte(x), byte(x>>8), byte(x>>16), byte(x>>24)
	return i
}

func (h *host) secret() (s kv.Secret) {
	copy(s[:], "secret of "+h.name)
	return s
}
