// Package client is the Go client of an agent's local API: what an engine uses
// to send and receive KV, and a tool to look at its agent and steer it.
// PROTOCOL.md section 4 has the rules that an engine must keep.
//
// Errors that the agent answers are *Error and carry a Code; errors.Is(err,
// &Error{Code: Busy}) asks for the code alone. When a call's context ends
// first, the call returns its error, and whatever a late answer brings is given
// back: the caller owns nothing then.
package client

import (
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/localapi"
	"github.com/berthkv/berth/internal/msg"
)

// Names of the local API's vocabulary.
type (
	// Error is an error with a code.
	Error = fault.Error
	// Code is an error's kind.
	Code = fault.Code
	// Slot numbers a slot of a pool, from 0.
	Slot = kv.SlotID
	// Layout is the facts on which an engine and its agent must agree.
	Layout = kv.Facts
	// Part says what a connection is.
	Part = localapi.Part
	// Staged is a chunk in a staging slot.
	Staged = localapi.Staged
	// Chunk is a claimed chunk in a receive slot: its first Bytes bytes.
	Chunk = localapi.Chunk
	// Claimed has the chunks of a request by ascending index, and the format,
	// element type and shape of a full one.
	Claimed = localapi.Claimed
)

// Parts.
const (
	Scheduler = localapi.Scheduler
	Worker    = localapi.Worker
	Tool      = localapi.Tool
)

// Codes that callers are likely to ask for.
const (
	Busy       = fault.Busy
	TooLarge   = fault.TooLarge
	BadRequest = fault.BadRequest
	Deadline   = fault.Deadline
	EndedCode  = fault.Ended
	NotGranted = fault.NotGranted
	NotOwner   = fault.NotOwner
	Holding    = fault.Holding
	PeerLost   = fault.PeerLost
	Cancelled  = fault.Cancelled
)

// Ending is how a request ended.
type Ending struct {
	Ending string // "ready", "failed" or "cancelled"
	Reason Code   // unless ready
	Text   string
}

// Err returns nil for ready, else an *Error with the reason.
func (e Ending) Err() error {
	if e.Ending == string(msg.EndReady) {
		return nil
	}
	code := e.Reason
	if code == "" {
		code = fault.Internal
		if e.Ending == string(msg.EndCancelled) {
			code = fault.Cancelled
		}
	}
	return &Error{Code: code, Text: e.Text}
}
