// Package composed composes.
package composed

import (
	_ "example.org/broken/codec"
	_ "example.org/broken/core"
	_ "github.com/prometheus/client_golang/prometheus"
	_ "golang.org/x/sync/errgroup"
	_ "golang.org/x/time/rate"
	_ "log/slog"
	_ "math/rand/v2"
	_ "unsafe"
)
