// Package bench measures Berth on the machine it runs on: `berth bench`. What is
// measured runs in processes of its own (this binary again), on loopback. With a
// reference (LMCache's PD backend) both sides take turns within one run, since a
// shared machine changes from minute to minute; ratios are of neighbouring turns.
//
// A latency under a given rate counts from the moment at which the request
// should have started, also when it started late (no coordinated omission).
// Without a rate a fixed number is in flight, and what is reported is the
// service time; the row's name says "closed".
package bench
