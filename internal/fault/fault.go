// Package fault gives errors a kind that survives the wire: the append-only
// codes of the protocol, and Error, which carries one with its text.
package fault

import (
	"errors"
	"fmt"

	"github.com/berthkv/berth/internal/kv"
)

// Code is an error's kind, the same in every dialect of ours. The list is
// append-only: codes cross the network between versions.
type Code string

const (
	Busy            Code = "busy"             // a queue is full; the only code that may be tried again
	TooLarge        Code = "too_large"        // can never fit
	Overflow        Code = "overflow"         // more chunks than declared
	BadRequest      Code = "bad_request"      // malformed, or out of order
	Deadline        Code = "deadline"         // its time ran out
	Ended           Code = "ended"            // ended before, and the ending is no longer kept
	StaleGeneration Code = "stale_generation" // names a former use of a slot
	NotOwner        Code = "not_owner"        // somebody else's request
	NotGranted      Code = "not_granted"      // staging for a request that is not granted
	Holding         Code = "holding"          // a blocking stage while staged slots are held
	HelloRequired   Code = "hello_required"   // no session, or its lease ran out
	UnknownMessage  Code = "unknown_message"
	Unsupported     Code = "unsupported"
	LayoutMismatch  Code = "layout_mismatch"
	PeerLost        Code = "peer_lost"
	Cancelled       Code = "cancelled"
	Internal        Code = "internal"
)

// Codes lists every code, in the order they were added.
var Codes = []Code{Busy, TooLarge, Overflow, BadRequest, Deadline, Ended, StaleGeneration, NotOwner, NotGranted, Holding,
	HelloRequired, UnknownMessage, Unsupported, LayoutMismatch, PeerLost, Cancelled, Internal}

// Known reports whether c is in Codes. A peer's unknown code is kept as it is
// and treated like Internal.
func (c Code) Known() bool {
	for _, k := range Codes {
		if k == c {
			return true
		}
	}
	return false
}

// Error is an error with a code. Its text names the option or field and both
// numbers and may be shown to a peer.
type Error struct {
	Code  Code
	Text  string
	Retry kv.Duration // with Busy: when to try again; else 0
}

func (e *Error) Error() string {
	if e.Text == "" {
		return string(e.Code)
	}
	return string(e.Code) + ": " + e.Text
}

// Is reports whether target is an *Error of the same code, so that
// errors.Is(err, fault.New(fault.Busy, "")) asks for the kind alone.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Code == e.Code
}

// New returns an Error with a formatted text.
func New(c Code, format string, args ...any) *Error {
	return &Error{Code: c, Text: fmt.Sprintf(format, args...)}
}

// CodeOf returns the code that err carries, "" for nil and Internal for an
// error without one.
func CodeOf(err error) Code {
	if err == nil {
		return ""
	}
	var e *Error
	if errors.As(err, &e) {
		return e.Code
	}
	return Internal
}

// HTTPStatus maps a code to the status a front door answers with.
func (c Code) HTTPStatus() int {
	switch c {
	case Busy:
		return 503
	case TooLarge:
		return 413
	case BadRequest, Overflow, UnknownMessage, Unsupported, LayoutMismatch:
		return 400
	case Deadline:
		return 504
	case NotOwner:
		return 403
	case Ended:
		return 404
	case NotGranted, Holding, StaleGeneration, HelloRequired:
		return 409
	case Cancelled:
		return 499
	}
	return 502
}
