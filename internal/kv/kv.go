// Package kv is the vocabulary that every other package shares: names for
// time, memory and peers, and the arithmetic of a KV chunk's size. It decides
// nothing and imports nothing of ours.
package kv

import (
	"encoding/hex"
	"math"
)

// Instant is a point in time: nanoseconds since the process started. Cores are
// handed an Instant and never read a clock.
type Instant int64

// Never is later than every other Instant: "no deadline", "no wake-up".
const Never Instant = math.MaxInt64

// Add returns the instant d later, or earlier if d is negative; Never and Forever
// absorb.
func (t Instant) Add(d Duration) Instant {
	if t == Never || d == Forever || d > 0 && int64(t) > math.MaxInt64-int64(d) {
		return Never
	}
	return t + Instant(d)
}

// Sub returns the time from u to t.
func (t Instant) Sub(u Instant) Duration { return Duration(t - u) }

// Duration is a length of time in nanoseconds, like time.Duration, which cores
// must not import.
type Duration int64

const (
	Millisecond Duration = 1e6
	Second      Duration = 1e9
	// Forever is an unlimited duration.
	Forever Duration = math.MaxInt64
)

// Millis returns d in whole milliseconds, rounded up, as the wire carries it;
// Forever is 0, "none given".
func (d Duration) Millis() int64 {
	if d == Forever {
		return 0
	}
	return (int64(d) + 999_999) / 1_000_000
}

// FromMillis is the inverse of Millis: 0 is Forever. Values that do not fit
// saturate at Forever.
func FromMillis(ms int64) Duration {
	if ms <= 0 || ms > int64(Forever)/1e6 {
		return Forever
	}
	return Duration(ms) * Millisecond
}

// Seconds returns d as a float, for reports.
func (d Duration) Seconds() float64 { return float64(d) / 1e9 }

// SlotID numbers a slot of a pool, from 0. On the wire it is NIXL's page index.
type SlotID uint32

// Generation distinguishes the successive users of a slot. In the receive pool
// it is one number for each request, unique in the receiver's incarnation; in
// the staging pool one for each hand-out of a slot. 0 is "none".
type Generation uint64

// Incarnation is 128 random bits that a node picks at start. A restarted peer
// has another one and is a new peer.
type Incarnation [16]byte

func (i Incarnation) String() string { return hex.EncodeToString(i[:]) }

// Short is the prefix used in identities and logs.
func (i Incarnation) Short() string { return hex.EncodeToString(i[:4]) }

// IsZero reports whether i was never set.
func (i Incarnation) IsZero() bool { return i == Incarnation{} }

// Secret proves that a connection comes from the incarnation it names. It
// never appears in a log, a metric or a status, so it prints as a blank.
type Secret [16]byte

func (Secret) String() string   { return "(secret)" }
func (Secret) GoString() string { return "(secret)" }

// ConnID names one connection for the life of the process, never reused. The
// shell numbers the connections it accepts, a core those it asks for.
type ConnID uint64

// CallID names one call of an engine or tool that waits for its answer, unique
// in the process.
type CallID uint64

// Limits of design section 10, in one place.
const (
	MaxReqID        = 512        // bytes of a req_id
	MaxKey          = 4 << 10    // bytes of a key
	MaxKeys         = 16_384     // keys, or chunks of a Commit, in one message
	MaxEndings      = 65_536     // endings kept to be repeated
	MaxCommitBytes  = 8 << 20    // encoded size at which a sender splits a Commit
	MaxMessageBytes = 16 << 20   // one control message
	MaxSlots        = 1 << 20    // capacity of a pool
	MaxBy           = MaxReqID   // bytes of the name by which an engine claims
	MaxEngineID     = 256        // bytes of an engine_id
	MaxNode         = 256        // bytes of a node name
	MinLease        = Second / 5 // two thirds of it are more than cores hold their timers after a stop
	ShortTTL        = 1 * Second // an ending younger than this is not evicted
)
