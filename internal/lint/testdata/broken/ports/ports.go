// Package ports gives ports.
package ports

import (
	_ "flag"
	_ "net"
	_ "unsafe"

	_ "example.org/broken/kv"
)
