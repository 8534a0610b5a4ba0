//go:build race

package e2e

// shadow is how many times the memory of the heap the race detector takes.
const shadow = 8
