// It has a comment that go doc cannot use.
package ledger

import (
	_ "example.org/broken/kv"
	_ "fmt"
)
