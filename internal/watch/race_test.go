//go:build race

package watch

// histories is the number of random histories of a test run; the race detector
// makes each of them many times slower, and one core has no goroutine.
const histories = 2_000
