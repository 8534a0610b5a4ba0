//go:build !race

package e2e

const shadow = 1
