package shmlink

import (
	"sync"
	"testing"

	"github.com/berthkv/berth/internal/link/linktest"
)

func BenchmarkWrite(b *testing.B) { linktest.Bench(b, "shm", harness, "memcpy", memcpy) }

// memcpy copies with as many threads as the link.
func memcpy(_ *testing.B, dst, src [][]byte) func(n int) {
	return func(n int) {
		var wg sync.WaitGroup
		for c := range harnessCopiers {
			wg.Go(func() {
				for i := c; i < n; i += harnessCopiers {
					copy(dst[i%len(dst)], src[i%len(src)])
				}
			})
		}
		wg.Wait()
	}
}
