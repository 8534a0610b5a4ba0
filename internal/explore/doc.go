// Package explore proves by exhaustion: it composes the real cores, intake and
// outbound, with a small world around them (control connections that break,
// lose and repeat; data links with every write in flight; engines; crashes; a
// clock) and visits every state that world can reach within a budget of faults.
//
// What makes that cheap is that a core's step depends on its own state and the
// event alone. So each core state is kept once, by its canonical encoding, and
// each (state, event) is stepped once (memo.go); a state of the world is a few
// hundred bytes of numbers that name core states, messages in flight and what
// the observer remembers (world.go). The product is searched breadth-first
// (search.go), so that the first trace to a violation is a shortest one.
//
//	memo.go     core states, messages and steps, each once; act.go their actions
//	world.go    a state: what it holds, its encoding (codec.go)
//	move.go     what can happen next
//	net.go      control connections        data.go    links, slots, staging
//	engine.go   who begins and who reads   observe.go the rules about histories
//	search.go   the search                 graph.go   what can be reached from where
//	system.go   a system made ready        systems.go the systems explored
//	script.go   traces as scripts          expand.go  a system as a model to search
//	lockstep.go LMCache's senders, which are not ours: the other model
//	plant.go    faults planted on purpose: that each is found is tested
//
// It is test support: nothing of the product imports it.
package explore
