package core

import "testing"

func TestParallel(t *testing.T) {
	t.Parallel()
	go step()
}
