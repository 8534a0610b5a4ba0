// The command.
package main

import (
	_ "flag"
	_ "unsafe"

	_ "example.org/broken"
	_ "example.org/broken/tcp"
)
