// Package broken is the root.
package broken

import (
	_ "flag"
	_ "unsafe"

	_ "example.org/broken/cmd"
	_ "example.org/broken/tcp"
)
