// Package tcp is an adapter.
package tcp

import (
	_ "example.org/broken/contract"
	_ "example.org/broken/kv"
	_ "example.org/broken/shm"
	_ "flag"
	_ "net"
	_ "os"
	_ "sync"
	_ "unsafe"
)
