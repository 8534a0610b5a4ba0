package explore

import "fmt"

// systems are what is explored, by name. Links are tcp (a stream), shm (pull)
// and nixl (one-sided).
var systems = func() map[string]config {
	m := map[string]config{}
	add := func(c config) { m[c.name] = c }
	for _, link := range []string{"tcp", "shm", "nixl"} {
		// One sender, one prompt: the deepest budget.
		add(config{name: "one/" + link, link: link, capacity: 2, staging: 2, maxStage: 1, ranks: 1, engines: [][]prompt{{{total: 2}}},
			bypass: 2, eager: true, warm: true, faults: faultAll})
		// One sender, two prompts, one slot: the second waits for the first.
		add(config{name: "queue/" + link, link: link, capacity: 1, staging: 2, maxStage: 1, ranks: 1, engines: [][]prompt{{{total: 1}, {total: 1}}},
			bypass: 1, eager: true, warm: true, faults: faultAll})
		// Two senders, one slot for two prompts.
		add(config{name: "pair/" + link, link: link, capacity: 1, staging: 2, maxStage: 1, ranks: 1, engines: [][]prompt{{{total: 1}}, {{total: 1}}},
			bypass: 1, eager: true, warm: true, alike: true, faults: faultAll})
		// Two senders, two slots, prompts of two chunks and one.
		add(config{name: "uneven/" + link, link: link, capacity: 2, staging: 2, maxStage: 1, ranks: 1, engines: [][]prompt{{{total: 2}}, {{total: 1}}},
			bypass: 2, eager: true, warm: true, faults: faultAll})
		// Two senders, four slots, prompts of two chunks and three, staging less
		// than a prompt.
		add(config{name: "wide/" + link, link: link, capacity: 4, staging: 2, maxStage: 1, ranks: 1, engines: [][]prompt{{{total: 2}}, {{total: 3}}},
			bypass: 4, eager: true, warm: true, faults: faultAll})
		// Three prompts of two senders, four slots. One declares more than it
		// has, one gets staging with its grant.
		add(config{name: "three/" + link, link: link, capacity: 4, staging: 2, maxStage: 1, ranks: 1,
			engines: [][]prompt{{{total: 2, stage: 1}, {total: 2, end: 1}}, {{total: 3}}}, bypass: 4, eager: true, warm: true, faults: faultAll})
		// Three prompts of two senders, one slot.
		add(config{name: "trio/" + link, link: link, capacity: 1, staging: 2, maxStage: 1, ranks: 1, engines: [][]prompt{{{total: 1}, {total: 1}}, {{total: 1}}},
			bypass: 1, eager: true, warm: true, faults: faultAll})
		// Nothing is up yet, and the engine takes its time to submit.
		add(config{name: "cold/" + link, link: link, capacity: 2, staging: 2, maxStage: 1, ranks: 1, engines: [][]prompt{{{total: 2}}},
			bypass: 2, faults: faultAll})
		// A deadline of 1 s, which is due before anything else; one prompt that
		// can never be served.
		add(config{name: "hasty/" + link, link: link, capacity: 2, staging: 2, maxStage: 1, ranks: 1,
			engines: [][]prompt{{{total: 2, short: true}}, {{total: 2}, {total: 3}}}, bypass: 2, eager: true, warm: true, faults: faultLate | faultCancel | faultBreak})
		// Two engines of two ranks, a prompt each, room for one.
		add(config{name: "ranks/" + link, link: link, capacity: 3, staging: 2, maxStage: 1, ranks: 2, engines: [][]prompt{{{total: 2}}, {{total: 2}}},
			bypass: 3, eager: true, warm: true, alike: true, faults: faultAll})
		// One engine of two ranks, two prompts, room for one.
		add(config{name: "ranksqueue/" + link, link: link, capacity: 3, staging: 2, maxStage: 1, ranks: 2, engines: [][]prompt{{{total: 2, stage: 1}, {total: 2}}},
			bypass: 3, eager: true, warm: true, faults: faultAll})
	}
	// Two prompts in the receiver's room and a third that waits; staging for two
	// chunks.
	add(config{name: "starved", link: "tcp", capacity: 2, staging: 2, maxStage: 1, ranks: 1, engines: [][]prompt{{{total: 2}, {total: 1}, {total: 1}}},
		bypass: 2, eager: true, warm: true, faults: faultCancel | faultBreak})
	// Two prompts of one engine share one staging slot.
	add(config{name: "reuse", link: "shm", capacity: 2, staging: 1, maxStage: 1, ranks: 1, engines: [][]prompt{{{total: 1}, {total: 1}}},
		bypass: 2, eager: true, warm: true, faults: faultCancel | faultBreak | faultLate | faultCrashS | faultReader})
	// Strictly in order: nobody may be overtaken.
	add(config{name: "order", link: "tcp", capacity: 3, staging: 2, maxStage: 1, ranks: 1, engines: [][]prompt{{{total: 2}, {total: 1}}, {{total: 3}}},
		bypass: 0, eager: true, warm: true, faults: faultCancel | faultBreak})
	// One may wait.
	add(config{name: "limits", link: "tcp", capacity: 1, staging: 2, maxStage: 1, ranks: 1, engines: [][]prompt{{{total: 1}, {total: 1}}, {{total: 1}}},
		bypass: 1, maxWaiting: 1, eager: true, warm: true, faults: faultCancel | faultBreak})
	return m
}()

// build makes a system ready: one of the above, or the one of LMCache's senders.
func build(name string, budget int, p Plant, blind string) (model, error) {
	if c, ok := lockstepSystems[name]; ok {
		c.budget = budget
		return newLockstep(c, p), nil
	}
	c, ok := systems[name]
	if !ok {
		return nil, fmt.Errorf("no system %q", name)
	}
	c.budget, c.blind = budget, blind
	return newSystem(c, p), nil
}
