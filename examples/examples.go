// Package examples has the load of the demo.
package examples

import (
	_ "embed"
	"io"
	"os"
	"strings"
)

//go:embed prompts.jsonl
var prompts string

// Open opens a file of prompts; "" is the built-in one.
func Open(path string) (io.ReadCloser, error) {
	if path == "" {
		return io.NopCloser(strings.NewReader(prompts)), nil
	}
	return os.Open(path)
}
