package engine

import (
	"sync"
	"sync/atomic"

	"github.com/berthkv/berth/internal/engine/model"
)

// item is a request's share of a step.
type item struct {
	r    *request
	n    int // tokens to compute
	next int // the token that follows them, by the model's choice
}

// loop computes step after step until the engine closes.
func (e *Engine) loop() {
	workers := make([]*model.Worker, e.cfg.Threads)
	for i := range workers {
		workers[i] = e.model.NewWorker()
	}
	for e.ctx.Err() == nil {
		batch := e.plan()
		if len(batch) == 0 {
			select {
			case <-e.wake:
			case <-e.ctx.Done():
			}
			continue
		}
		compute(workers, batch)
		e.report(batch)
	}
}

// plan starts what may start and returns the next step.
func (e *Engine) plan() []item {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, id := range e.mu.sched.Start() {
		e.startLocked(e.mu.requests[id])
	}
	var batch []item
	for _, w := range e.mu.sched.Step() {
		if r := e.mu.requests[w.ID]; !r.over {
			batch = append(batch, item{r: r, n: w.Tokens})
		}
	}
	return batch
}

// compute does a step, each item on one thread.
func compute(workers []*model.Worker, batch []item) {
	var at atomic.Int64
	var wg sync.WaitGroup
	for _, w := range workers[:min(len(workers), len(batch))] {
		wg.Go(func() {
			for i := at.Add(1) - 1; int(i) < len(batch); i = at.Add(1) - 1 {
				it := &batch[i]
				it.next = w.Extend(it.r.seq, it.r.done, it.r.tokens[it.r.done:it.r.done+it.n])
			}
		})
	}
	wg.Wait()
}

// report tells what a step has brought: KV to be sent, tokens of answers.
func (e *Engine) report(batch []item) {
	e.stats.steps.Add(1)
	for _, it := range batch {
		r := it.r
		prompt := len(r.prompt)
		e.stats.tokensComputed.Add(uint64(min(r.done+it.n, prompt) - min(r.done, prompt)))
		r.done += it.n
		r.computed.raise(min(r.done, prompt))
		if r.done < len(r.tokens) {
			continue
		}
		e.stats.tokensGenerated.Add(1)
		text, why, by := r.answer.push(it.next)
		r.tokens = append(r.tokens, it.next)
		e.mu.Lock()
		if !r.over {
			r.out.put(piece{token: it.next, text: text, finish: why, stop: by})
			if why == "" {
				e.mu.sched.More(r.id)
			} else {
				e.overLocked(r, nil)
			}
		}
		e.mu.Unlock()
	}
}
