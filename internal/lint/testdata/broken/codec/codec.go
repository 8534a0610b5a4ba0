package codec

import (
	_ "crypto/rand"
	_ "flag"
	_ "io/fs"
	_ "sync"
	_ "time"
	_ "unsafe"

	_ "example.org/broken/core"
	_ "example.org/broken/kv"
)
