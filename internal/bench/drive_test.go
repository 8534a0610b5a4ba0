package bench

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Each request is made once, with no more in flight than workers.
func TestDrive(t *testing.T) {
	const workers, count = 3, 100
	var made [count]atomic.Int64
	var inflight atomic.Int64
	end := time.Now().Add(time.Hour)
	got, err := drive(t.Context(), workers, count, nil, func(_ context.Context, w, i int) (time.Time, error) {
		if n := inflight.Add(1); n > workers || w >= workers {
			t.Errorf("%d in flight, worker %d", n, w)
		}
		made[i].Add(1)
		inflight.Add(-1)
		return end, nil
	})
	if err != nil || len(got.latency) != count || got.perSecond() <= 0 {
		t.Fatal(got, err)
	}
	for i := range made {
		if made[i].Load() != 1 || !got.begun[i].Add(got.latency[i]).Equal(end) {
			t.Errorf("request %d was made %d times, from %v for %v", i, made[i].Load(), got.begun[i], got.latency[i])
		}
	}
}

// A request that starts late because the one before took long counts from when it
// should have started.
func TestDriveOmitsNothing(t *testing.T) {
	at := []time.Duration{0, time.Millisecond, 2 * time.Millisecond}
	got, err := drive(t.Context(), 1, 3, at, func(_ context.Context, _, i int) (time.Time, error) {
		return time.Now().Add(time.Duration(1-min(i, 1)) * time.Hour), nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for i := range at {
		if d := got.begun[i].Sub(got.begun[0]); d != at[i] {
			t.Errorf("request %d counts from %v, want %v", i, d, at[i])
		}
	}
	if got.latency[0] < time.Hour || got.latency[2] < 0 {
		t.Error(got.latency)
	}
}

// The first error ends all, and so does the context, also while a request is far
// away.
func TestDriveStops(t *testing.T) {
	broken := errors.New("broken")
	_, err := drive(t.Context(), 2, 1000, nil, func(_ context.Context, _, i int) (time.Time, error) {
		if i == 10 {
			return time.Time{}, broken
		}
		return time.Now(), nil
	})
	if err != broken {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var once sync.Once
	_, err = drive(ctx, 2, 3, []time.Duration{0, time.Hour, time.Hour}, func(context.Context, int, int) (time.Time, error) {
		once.Do(cancel)
		return time.Now(), nil
	})
	if !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
