package engine

import (
	"context"
	"sync"

	"github.com/berthkv/berth/internal/engine/kvcache"
	"github.com/berthkv/berth/internal/engine/sched"
)

// request is one prompt and its answer on their way through the engine.
type request struct {
	// Constant.
	id     sched.ID
	name   string // unique; by it the decode side claims
	prompt []int
	send   *sendSpec               // where the prompt's KV goes, or nil
	load   string                  // the transfer that it comes from, or ""
	ctx    context.Context         // ends with the request, its transfer included; set by submit
	stop   context.CancelCauseFunc // ends ctx

	// Owned by the engine's loop once running.
	seq    *kvcache.Sequence
	tokens []int // prompt and answer
	done   int   // positions whose KV is stored
	answer answer

	// Guarded by the engine's mutex.
	over    bool  // the answer has ended
	busy    bool  // a goroutine of its own uses its memory: it is being loaded, or copied to be sent
	sending bool  // its transfer has not ended
	notSent error // why its KV will not come, as far as that is known

	computed watermark // prompt positions whose KV may be sent
	out      output
}

// piece is what one token adds to an answer.
type piece struct {
	token  int
	text   string
	finish finish // of the last piece
	stop   string // the stop string that ended the answer
}

// output carries an answer from the engine's loop to whoever waits for it. It
// never blocks the loop; an answer has at most max_tokens pieces.
type output struct {
	mu     sync.Mutex
	pieces []piece
	err    error
	ended  bool
	wake   chan struct{} // holds one token while there is something to take
}

func newOutput() output { return output{wake: make(chan struct{}, 1)} }

func (o *output) put(p piece) {
	o.change(func() { o.pieces = append(o.pieces, p); o.ended = p.finish != "" })
}

// fail ends the answer with an error, unless it has ended.
func (o *output) fail(err error) {
	o.change(func() {
		if !o.ended {
			o.err, o.ended = err, true
		}
	})
}

func (o *output) change(f func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	f()
	o.wakeLocked()
}

func (o *output) wakeLocked() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// take waits for pieces and returns all that are there. After the piece with a
// finish, or after an error, it must not be called again. There is one reader.
func (o *output) take(ctx context.Context) ([]piece, error) {
	for {
		select {
		case <-o.wake:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
		o.mu.Lock()
		pieces, err := o.pieces, o.err
		o.pieces = nil
		if err != nil && len(pieces) > 0 {
			err = nil
			o.wakeLocked() // the error comes with the next call
		}
		o.mu.Unlock()
		if len(pieces) > 0 || err != nil {
			return pieces, err
		}
	}
}

// watermark is a number that only rises, and that many may wait for.
type watermark struct {
	mu    sync.Mutex
	level int
	rose  chan struct{} // closed and replaced at each rise; nil until somebody waits
}

func (w *watermark) raise(level int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.level = level
	if w.rose != nil {
		close(w.rose)
		w.rose = nil
	}
}

// reach waits until the level is at least min and returns it.
func (w *watermark) reach(ctx context.Context, min int) (int, error) {
	for {
		w.mu.Lock()
		level := w.level
		if w.rose == nil {
			w.rose = make(chan struct{})
		}
		rose := w.rose
		w.mu.Unlock()
		if level >= min {
			return level, nil
		}
		select {
		case <-rose:
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
	}
}
