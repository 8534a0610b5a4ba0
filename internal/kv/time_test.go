package kv

import (
	"math"
	"testing"
)

func TestInstantAdd(t *testing.T) {
	for _, row := range []struct {
		at   Instant
		d    Duration
		want Instant
	}{
		{5, 3, 8},
		{5, -3, 2},
		{5, -8, -3},
		{Never, -3, Never},
		{5, Forever, Never},
		{math.MaxInt64 - 2, 1, math.MaxInt64 - 1},
		{math.MaxInt64 - 2, 5, Never},
	} {
		if got := row.at.Add(row.d); got != row.want {
			t.Errorf("%d.Add(%d) = %d, want %d", row.at, row.d, got, row.want)
		}
	}
}
