package bench

import (
	"context"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// timing is what came of a number of requests.
type timing struct {
	elapsed time.Duration
	begun   []time.Time // when each should have begun
	latency []time.Duration
}

func (t timing) perSecond() float64 { return float64(len(t.latency)) / t.elapsed.Seconds() }

// drive makes count requests with at most workers in flight, at the arrivals if
// there are any. do makes request i and returns when it was answered; what it
// does after that keeps the worker, and does not count. The first error stops
// all.
func drive(ctx context.Context, workers, count int, arrivals []time.Duration, do func(ctx context.Context, worker, i int) (time.Time, error)) (timing, error) {
	t := timing{begun: make([]time.Time, count), latency: make([]time.Duration, count)}
	var next atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	start := time.Now()
	for w := range workers {
		g.Go(func() error {
			for {
				i := int(next.Add(1)) - 1
				if i >= count {
					return nil
				}
				from := time.Now()
				if arrivals != nil {
					from = start.Add(arrivals[i])
				}
				if err := sleepUntil(ctx, from); err != nil {
					return err
				}
				answered, err := do(ctx, w, i)
				if err != nil {
					return err
				}
				t.begun[i], t.latency[i] = from, answered.Sub(from)
			}
		})
	}
	err := g.Wait()
	t.elapsed = time.Since(start)
	return t, err
}

// sleepUntil sleeps in the kernel: the runtime's timers may be 1 ms late in a
// process that is idle otherwise. It looks at ctx now and then.
func sleepUntil(ctx context.Context, at time.Time) error {
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		d := time.Until(at)
		if d <= 0 {
			return nil
		}
		ts := unix.NsecToTimespec(int64(min(d, 50*time.Millisecond)))
		unix.Nanosleep(&ts, nil) // a signal ends it early: the loop goes on
	}
}
