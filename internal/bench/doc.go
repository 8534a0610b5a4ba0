// Package bench measures Berth on the machine it runs on: `berth bench`. What is
// measured runs in processes of its own (this binary again), on loopback, but for
// the ledger and the raw copies. What is compared takes turns within one run,
// since a shared machine changes from minute to minute: a ratio is of
// neighbouring turns.
//
// Where requests come at a rate, a latency counts from the moment at which the
// request should have started, also when it started late (no coordinated
// omission); it contains the generator's own wake-up, some 60 µs. Without a rate a fixed
// number is in flight, and what is reported is the service time: the row's name
// says "closed".
//
// Goroutines: the generator's workers, which end with their turn (the control
// benchmark's generator, a swarm, has none); one reader of each child; one thread
// that starts them.
package bench
