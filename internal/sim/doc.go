// Package sim simulates whole nodes: the real shells (node.Node, node.Watcher)
// with the real cores inside, the real codec and the links' gate, N senders and
// proxies and M receivers, on virtual time, in one goroutine, without a socket
// or a clock. Everything follows from a Scenario: the same one gives the same
// trace, whatever the machine.
//
// What is not the product's is small: control connections that delay, break,
// lose and repeat (net.go), the network of the data links (package memlink,
// which passes the links' conformance suite), engines and what a proxy does
// around its watcher. Every message, byte of a slot and ending passes an
// observer, which knows the rules R1 to R12 and nothing of how they are kept.
//
//	scenario.go  what a run depends on: drawn from a seed, or read from a file
//	world.go     virtual time            host.go      a process: clock, stop, crash
//	net.go       control connections     local.go     an engine and its agent
//	sender.go    prefill side            receiver.go  decode side and its network
//	proxy.go     proxies                 fault.go     what goes wrong
//	observe.go   the rules               report.go    what is measured
//	minimise.go  a failing scenario made smaller
//	cmd          the command, which `make sim` runs
//
// It is test support: nothing of the product imports it.
package sim
