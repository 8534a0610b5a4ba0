package engine

import (
	"context"
	"sync"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
)

// turnstile keeps the rule of one agent that nobody waits for staging slots
// while this engine holds some. Prompts are staged side by side, so that one
// whose receiver is slow does not delay the others; each holds what it staged
// only while it copies. Who asks meanwhile, and would have to wait, is refused
// with fault.Holding, and asks again as soon as something held is handed in:
// what the agent saw held when it refused is handed in after that.
type turnstile struct {
	mu   sync.Mutex
	next chan struct{} // closed and replaced at each handIn; nil until somebody asks
}

// stage stages up to n slots of t, as many as there are, and waits for one if
// there is none: to wait for more could mean to wait for those that a stopped
// receiver keeps. On nil error the caller owns the slots, and calls handIn after
// it has submitted or unstaged them.
func (s *turnstile) stage(ctx context.Context, t Transfer, n int) ([]kv.SlotID, error) {
	for {
		next := s.ask()
		for m := n; m > 1; m /= 2 {
			if slots, err := t.Stage(ctx, m, false); fault.CodeOf(err) != fault.Busy {
				return slots, err
			}
		}
		slots, err := t.Stage(ctx, 1, true)
		if fault.CodeOf(err) != fault.Holding {
			return slots, err
		}
		select {
		case <-next:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

func (s *turnstile) ask() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.next == nil {
		s.next = make(chan struct{})
	}
	return s.next
}

// handIn says that staged slots are the agent's again: after a Submit or an
// Unstage, and after a Cancel, before whose answer slots that came too late for
// whoever had given up waiting for them were returned.
func (s *turnstile) handIn() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.next != nil {
		close(s.next)
		s.next = nil
	}
}
