//go:build !nixl || !cgo

package nixllink

// Built says whether this build can load the library.
const Built = false

func open(location) (library, error) { return nil, ErrNotBuilt }
