// Package shell is a shell.
package shell

import (
	_ "example.org/broken/core"
	_ "example.org/broken/tcp"
	_ "github.com/spf13/cobra"
	_ "net"
	_ "sync"
	_ "time"
	_ "unsafe"
)
