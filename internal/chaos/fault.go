package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// blow is one kind of fault. do inflicts it on somebody, for a while, mends it,
// and says to whom; an error is what must not be, also under faults.
type blow struct {
	name   string
	gentle bool // ends no agent and no proxy: a soak may have it
	onWire bool // hurts no process: it may come together with one that does
	do     func(ctx context.Context, r *run, rng *rand.Rand) (what string, err error)
}

var kinds = []string{"sender agent", "receiver agent", "prefill engine", "decode engine", "proxy"}

// blows returns every kind of fault.
func blows() []blow {
	var out []blow
	for _, k := range kinds {
		engine := strings.HasSuffix(k, "engine")
		out = append(out,
			blow{"kill -9 " + k, engine, false, func(ctx context.Context, r *run, rng *rand.Rand) (string, error) { return kill(ctx, r, rng, k) }},
			blow{"stop " + k, true, false, func(ctx context.Context, r *run, rng *rand.Rand) (string, error) { return stop(ctx, r, rng, k) }})
	}
	for _, what := range []traffic{control, data, every} {
		for _, way := range []string{"both ways", "to receiver", "from receiver"} {
			name := string(what)
			if what == every {
				name = "all traffic"
			}
			out = append(out, blow{"cut " + name + " " + way, true, true, func(ctx context.Context, r *run, rng *rand.Rand) (string, error) {
				return cut(ctx, r, rng, what, way)
			}})
		}
	}
	return append(out,
		blow{"isolate node", true, true, isolate},
		blow{"delay", true, true, func(ctx context.Context, r *run, rng *rand.Rand) (string, error) {
			return worse(ctx, r, rng, rule{delay: time.Duration(20+rng.IntN(200)) * time.Millisecond})
		}},
		blow{"loss", true, true, func(ctx context.Context, r *run, rng *rand.Rand) (string, error) {
			return worse(ctx, r, rng, rule{loss: 0.01 + 0.2*rng.Float64()})
		}},
		blow{"full disk for logs", false, false, fullDisk},
		blow{"disk full while it runs", true, false, diskFills},
		blow{"no file descriptors", true, false, noFDs},
		blow{"no memory", false, false, noMemory},
		blow{"out of memory", false, false, outOfMemory})
}

func choose[T any](rng *rand.Rand, from []T) T { return from[rng.IntN(len(from))] }

// between is a while, from a third of a lease to more than two.
func between(rng *rand.Rand) time.Duration {
	return lease/3 + time.Duration(rng.Int64N(int64(2*lease)))
}

// kill kills a process and starts it again, at once or when the others have
// given it up.
func kill(ctx context.Context, r *run, rng *rand.Rand, kind string) (string, error) {
	p := choose(rng, r.fleet.byKind(kind))
	gap := time.Duration(0)
	if rng.IntN(2) == 0 {
		gap = between(rng)
	}
	r.killed(p)
	p.kill()
	pause(ctx, gap)
	return fmt.Sprintf("%s, back after %v", p.name, gap.Round(time.Millisecond)), p.start(ctx)
}

// stop stops a process for longer than the lease.
func stop(ctx context.Context, r *run, rng *rand.Rand, kind string) (string, error) {
	p := choose(rng, r.fleet.byKind(kind))
	d := lease + lease/4 + time.Duration(rng.Int64N(int64(lease)))
	p.signal(syscall.SIGSTOP)
	pause(ctx, d)
	p.signal(syscall.SIGCONT)
	return fmt.Sprintf("%s for %v", p.name, d.Round(time.Millisecond)), nil
}

// pair chooses whose traffic is hurt: that of one sender and one receiver where
// the network tells senders apart, else all of one receiver.
func pair(r *run, rng *rand.Rand) (s, d netip.Addr, what string) {
	to := choose(rng, r.fleet.receivers)
	from := choose(rng, r.fleet.senders)
	if !r.fleet.net.perSender() {
		return netip.Addr{}, to.place.ip, to.name
	}
	return from.place.ip, to.place.ip, from.name + " and " + to.name
}

func cut(ctx context.Context, r *run, rng *rand.Rand, what traffic, way string) (string, error) {
	s, d, who := pair(r, rng)
	var rules []rule
	if way != "from receiver" {
		rules = append(rules, rule{from: s, to: d, what: what, drop: true})
	}
	if way != "to receiver" {
		rules = append(rules, rule{from: d, to: s, what: what, drop: true})
	}
	t := between(rng)
	heal := r.wire.add(rules...)
	pause(ctx, t)
	heal()
	return fmt.Sprintf("%s for %v", who, t.Round(time.Millisecond)), nil
}

// isolate cuts a node off from all others.
func isolate(ctx context.Context, r *run, rng *rand.Rand) (string, error) {
	n := choose(rng, r.fleet.nodes())
	t := between(rng)
	heal := r.wire.add(rule{from: n.place.ip, drop: true}, rule{to: n.place.ip, drop: true})
	pause(ctx, t)
	heal()
	return fmt.Sprintf("%s for %v", n.name, t.Round(time.Millisecond)), nil
}

// worse makes the network of one pair worse, in both directions.
func worse(ctx context.Context, r *run, rng *rand.Rand, how rule) (string, error) {
	s, d, who := pair(r, rng)
	there, back := how, how
	there.from, there.to, back.from, back.to = s, d, d, s
	t := between(rng)
	heal := r.wire.add(there, back)
	pause(ctx, t)
	heal()
	return fmt.Sprintf("%s for %v: %.0f %% lost, %v later", who, t.Round(time.Millisecond), how.loss*100, how.delay), nil
}

// fullDisk restarts an agent or the proxy so that no line of its log can be
// written, and a while later as it was.
func fullDisk(ctx context.Context, r *run, rng *rand.Rand) (string, error) {
	p := choose(rng, r.fleet.byKind(choose(rng, []string{"sender agent", "receiver agent", "proxy"})))
	restart := func(full bool) error {
		r.killed(p)
		p.kill()
		p.mu.Lock()
		p.logFull = full
		p.mu.Unlock()
		return p.start(ctx)
	}
	t := between(rng)
	if err := restart(true); err != nil {
		return p.name, err
	}
	pause(ctx, t)
	if s := p.surprise(); s != "" {
		return p.name, fmt.Errorf("with a full disk for its log: %s", s)
	}
	return fmt.Sprintf("%s for %v", p.name, t.Round(time.Millisecond)), restart(false)
}

// diskFills lets an agent or the proxy write no more to its log while it serves.
func diskFills(ctx context.Context, r *run, rng *rand.Rand) (string, error) {
	p := choose(rng, r.fleet.byKind(choose(rng, []string{"sender agent", "receiver agent", "proxy"})))
	heal, err := p.limit(unix.RLIMIT_FSIZE, 1)
	if err != nil {
		return p.name, err
	}
	defer heal()
	t := between(rng)
	pause(ctx, t)
	if code, body, err := r.fleet.get(ctx, p.place, httpPort, "/health"); ctx.Err() == nil && (err != nil || code != http.StatusOK) {
		return p.name, fmt.Errorf("while its log cannot be written: %d %s %w", code, body, err)
	}
	return fmt.Sprintf("%s for %v", p.name, t.Round(time.Millisecond)), nil
}

// outOfMemory restarts an agent or the proxy in a control group that has less
// memory than it may need, where the kernel may kill it, alone; and a while later
// as it was. Where no such group can be made, its data segment is limited.
func outOfMemory(ctx context.Context, r *run, rng *rand.Rand) (string, error) {
	p := choose(rng, r.fleet.byKind(choose(rng, []string{"sender agent", "receiver agent", "proxy"})))
	limit := int64(5+rng.IntN(8)) << 19 // idle it takes 2.4 MiB besides what it maps
	how := "a group"
	g, err := newMemoryGroup(limit)
	again := func(g *memoryGroup) error {
		r.killed(p)
		p.kill()
		p.mu.Lock()
		p.memory = g
		p.mu.Unlock()
		return p.start(ctx)
	}
	var died error
	if err != nil {
		how = "its data segment"
		heal, err := p.limit(unix.RLIMIT_DATA, uint64(statusField(p.pid(), "VmData")))
		if err != nil {
			return p.name, err
		}
		defer heal()
		p.want(false)
	} else {
		died = again(g)
	}
	t := between(rng)
	pause(ctx, t)
	what := "survived"
	if died != nil {
		what = "did not start"
	} else if !p.running() {
		what = "was killed"
	}
	err = again(nil)
	if g != nil {
		err = errors.Join(err, g.remove())
	}
	return fmt.Sprintf("%s with %.1f MiB for %s for %v: %s", p.name, float64(limit)/(1<<20), how, t.Round(time.Millisecond), what), err
}

// noFDs lets an agent or the proxy open nothing more, while its connections
// break and others come.
func noFDs(ctx context.Context, r *run, rng *rand.Rand) (string, error) {
	p := choose(rng, r.fleet.byKind(choose(rng, []string{"sender agent", "receiver agent", "proxy"})))
	limit := openFDs(p.pid())
	heal, err := p.limit(unix.RLIMIT_NOFILE, uint64(limit))
	if err != nil {
		return p.name, err
	}
	defer heal()
	t := between(rng)
	lossy := r.wire.add(rule{to: p.place.ip, drop: true}) // what breaks must be opened anew
	pause(ctx, t/2)
	lossy()
	for range 4 {
		r.fleet.get(ctx, p.place, httpPort, "/health") // it may fail, and must not hurt
	}
	pause(ctx, t/2)
	if s := p.surprise(); s != "" {
		return p.name, fmt.Errorf("without file descriptors: %s", s)
	}
	return fmt.Sprintf("%s at %d for %v", p.name, limit, t.Round(time.Millisecond)), nil
}

// noMemory lets the receiver over shm map nothing more while a sender comes back
// whose memory it has to map. It may die of that, and is started again then;
// nobody else may be hurt.
func noMemory(ctx context.Context, r *run, rng *rand.Rand) (string, error) {
	i := slices.IndexFunc(r.fleet.receivers, func(n *node) bool { return n.name == "decode-shm" })
	p, s := r.fleet.receivers[i].agent, choose(rng, r.fleet.senders).agent
	heal, err := p.limit(unix.RLIMIT_AS, vmSize(p.pid()))
	if err != nil {
		return p.name, err
	}
	p.want(false)
	r.killed(s)
	s.kill()
	if err := s.start(ctx); err != nil {
		heal()
		return p.name, err
	}
	t := between(rng)
	pause(ctx, t)
	heal()
	how := "survived"
	if p.running() {
		p.want(true)
	} else {
		how = "died of it"
		err = p.start(ctx)
	}
	return fmt.Sprintf("%s for %v: %s", p.name, t.Round(time.Millisecond), how), err
}
