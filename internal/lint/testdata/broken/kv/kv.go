// Package kv is vocabulary. TODO: more of it. (FIXMEs is no marker.)
package kv

import (
	_ "example.org/broken/core"
	_ "flag"
	_ "math/rand"
	_ "net"
	_ "os"
	_ "sync"
	_ "time"
	_ "unsafe"
)
