//go:build !race

package outbound

// histories is the number of random histories of a test run.
const histories = 50_000
