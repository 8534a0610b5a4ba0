// Package shm is an adapter, too, and may use unsafe.
package shm

import (
	_ "example.org/broken/contract"
	_ "unsafe"
)
