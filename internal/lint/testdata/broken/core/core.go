// Package core is a core.
package core

import (
	_ "C"
	_ "context"
	_ "crypto/rand"
	_ "example.org/broken/kv"
	_ "example.org/broken/ledger"
	_ "github.com/spf13/pflag"
	_ "net/http"
	_ "sync/atomic"
)
