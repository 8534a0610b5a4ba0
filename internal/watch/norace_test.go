//go:build !race

package watch

// histories is the number of random histories of a test run.
const histories = 10_000
