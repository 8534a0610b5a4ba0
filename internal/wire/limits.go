package wire

import "github.com/berthkv/berth/internal/kv"

// Limits of what a message may hold, inclusive. A decoder refuses more with an
// *Error, an encoder with an error that names the field and both numbers.
const (
	MaxMessage  = kv.MaxMessageBytes
	MaxReqID    = kv.MaxReqID
	MaxKey      = kv.MaxKey
	MaxKeys     = kv.MaxKeys  // keys, chunks or indexes in one message
	MaxSlots    = kv.MaxSlots // of one Granted
	MaxDims     = kv.MaxDims
	MaxNode     = kv.MaxNode
	MaxName     = 64      // codes, roles, links, dtypes: bytes
	MaxText     = 4 << 10 // bytes; encoders cut
	MaxLinks    = 8
	MaxAddr     = 512     // bytes of a link's address
	MaxMeta     = 1 << 20 // bytes of a NIXL agent's metadata
	MaxAgent    = 4 << 10 // bytes of a NIXL agent's name
	MaxURL      = 4 << 10 // bytes of local_id and peer_init_url
	pageBytes   = 24      // of a NIXL page list, for each slot
	pagesExtra  = 1 << 10
	MaxPageList = MaxSlots*pageBytes + pagesExtra
)

// pageListLimit returns the most bytes of a NIXL page list that describes a
// pool of that many slots.
func pageListLimit(slots int64) int {
	return int(min(max(slots, 0), MaxSlots))*pageBytes + pagesExtra
}
