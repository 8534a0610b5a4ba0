// Package helper helps tests.
package helper

import (
	_ "example.org/broken/cmd"
	_ "example.org/broken/tcp"
	_ "testing"
	"time"
)

func wait() { time.Sleep(1) }
