// Package contract may name a context.
package contract

import (
	_ "context"
	_ "example.org/broken/core"
	_ "example.org/broken/kv"
	_ "flag"
	_ "math/rand"
	_ "os"
	_ "sync"
	_ "time"
	_ "unsafe"
)
