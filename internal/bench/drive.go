package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
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
	g, ctx := errgroup.WithContext(ctx)
	due := make(chan int, count)
	start := time.Now()
	g.Go(func() error {
		defer close(due)
		return pace(ctx, start, count, arrivals, due)
	})
	for w := range workers {
		g.Go(func() error {
			for i := range due {
				if err := ctx.Err(); err != nil {
					return err
				}
				from := time.Now()
				if arrivals != nil {
					from = start.Add(arrivals[i])
				}
				answered, err := do(ctx, w, i)
				if err != nil {
					return err
				}
				t.begun[i], t.latency[i] = from, answered.Sub(from)
			}
			return nil
		})
	}
	err := g.Wait()
	t.elapsed = time.Since(start)
	return t, err
}

// pace says which request is due, each at its arrival. It waits for the kernel's
// timer where it waits for sockets: the runtime's own are up to 1 ms late in a
// process that is idle otherwise, and a thread that sleeps in the kernel holds one
// of the processors on which the runtime would run the answers' goroutines.
func pace(ctx context.Context, start time.Time, count int, arrivals []time.Duration, due chan<- int) error {
	if arrivals == nil {
		for i := range count {
			due <- i // which has room for all
		}
		return nil
	}
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("timerfd_create: %w", err)
	}
	timer := os.NewFile(uintptr(fd), "timer")
	defer timer.Close()
	defer context.AfterFunc(ctx, func() { timer.SetReadDeadline(time.Unix(1, 0)) })()
	for i := range count {
		if d := time.Until(start.Add(arrivals[i])); d > 0 {
			if err := unix.TimerfdSettime(fd, 0, &unix.ItimerSpec{Value: unix.NsecToTimespec(int64(d))}, nil); err != nil {
				return fmt.Errorf("timerfd_settime: %w", err)
			}
			if _, err := timer.Read(make([]byte, 8)); err != nil {
				return errors.Join(ctx.Err(), err)
			}
		}
		due <- i
	}
	return nil
}

// sleepUntil sleeps in the kernel, and looks at ctx now and then.
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
