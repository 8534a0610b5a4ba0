// Package stray is in no layer.
package stray

import (
	_ "time"
)
