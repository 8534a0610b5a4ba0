// Package surface is what users touch.
package surface

import (
	_ "example.org/broken/shell"
	_ "example.org/broken/tcp"
	_ "flag"
	_ "github.com/prometheus/client_golang/prometheus"
	_ "unsafe"
)
