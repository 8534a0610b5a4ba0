// Package proxy is the HTTP front door: an OpenAI-compatible server that has each
// prompt computed by a prefill engine, waits until its KV cache is at a decode
// engine, and lets that engine write the answer.
//
// One request, in order: the prompt is tokenized, and every rank's receiver of
// the chosen decode engine asked meanwhile to watch the transfer; once all watch,
// the prefill engine computes the prompt and one token, which goes to the client;
// when every rank is ready, the decode engine writes the rest, and package openai
// splices the two into one answer. What two legs cannot answer rightly goes whole
// to a decode engine.
//
// The package decides what is asked of whom and when, and who hears what of a
// failure. It knows receivers only through Watcher. Every step has a deadline;
// everything ends when the client goes; what a request began it cancels unless
// it ended well.
//
// Locks: nodes.mu, registry.mu and counters.mu are leaves: nothing is called and
// no other lock is taken under them.
package proxy
