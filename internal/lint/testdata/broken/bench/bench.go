// Package bench measures.
package bench

import (
	_ "flag"
	_ "unsafe"

	_ "example.org/broken"
	_ "example.org/broken/core"
	_ "example.org/broken/shell"
	_ "example.org/broken/tcp"
)
