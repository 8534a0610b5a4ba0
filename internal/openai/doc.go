// Package openai is the part of the OpenAI-compatible API that the proxy
// touches: which fields of a request it reads, how a request becomes a prefill
// and a decode request, and how their two answers become one. It edits raw
// JSON: what it does not name passes through byte for byte, and no number
// becomes a float on the way. It decides with values only: no socket, no clock,
// no goroutine.
//
// A request goes two ways. Most are cut in two legs: the prompt's token ids go
// to a prefill engine for one token, the ids and that token to a decode engine
// for the rest, both over /v1/completions; Splice joins the legs again. What
// cannot be cut rightly (Request.Whole names why) goes to a decode engine as it
// came.
package openai
