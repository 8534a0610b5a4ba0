// Package part is a part of an engine.
package part

import (
	_ "example.org/broken/kv"
	_ "example.org/broken/shell"
	_ "flag"
	_ "math/rand"
	_ "net"
	_ "os"
	_ "sync"
	_ "time"
	_ "unsafe"
)
