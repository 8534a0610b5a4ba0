// Package session is the client half of a Berth session with one receiver:
// hello, sequence numbers, what is unanswered and is resent after a reconnect,
// heartbeats, and the verdict that the peer is lost. It is pure, and is
// composed by outbound (senders) and watch (proxies).
package session
