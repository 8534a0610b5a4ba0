// Package invariant holds assertions that run only in builds with the tag
// invariants; otherwise they compile to nothing. A failed one panics: it is a
// fault of ours, never of a peer. What must be refused in production is no
// assertion.
package invariant

import "fmt"

// Check panics with the error that check returns, if any. Pass the Check method
// of a core.
func Check(check func() error) {
	if Enabled {
		if err := check(); err != nil {
			panic(fmt.Sprintf("invariant: %v", err))
		}
	}
}

// Assert panics unless ok. The arguments are evaluated in every build: keep them
// cheap, or ask Enabled first.
func Assert(ok bool, format string, args ...any) {
	if Enabled && !ok {
		panic("invariant: " + fmt.Sprintf(format, args...))
	}
}
