//go:build nixl && cgo

package config

// hasNixl says whether this build has the nixl link.
const hasNixl = true
