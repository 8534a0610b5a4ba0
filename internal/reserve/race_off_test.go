//go:build !race

package reserve

const raced = false
