package chaos

import (
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"
)

// traffic is what a packet or connection carries, as its port says.
type traffic string

const (
	control traffic = "control" // alloc, init and notify ports
	data    traffic = "data"    // the tcp link
	web     traffic = "web"     // the engines' HTTP
	every   traffic = ""        // in a rule: all of these
)

// The ports of every node; each has addresses of its own.
const (
	allocPort  = 7001
	initPort   = 7002
	notifyPort = 7003
	dataPort   = 7010
	webPort    = 8000
	proxyPort  = 8001
	httpPort   = 9400
)

func trafficOf(port uint16) (traffic, bool) {
	switch port {
	case allocPort, initPort, notifyPort:
		return control, true
	case dataPort:
		return data, true
	case webPort:
		return web, true
	}
	return every, false
}

// rule is what happens on the way from one address to another; a zero address
// is every one.
type rule struct {
	from, to netip.Addr
	what     traffic
	drop     bool
	loss     float64 // of packets; over a relay, of its reads, and then the connection breaks
	delay    time.Duration
}

func (r rule) applies(from, to netip.Addr, what traffic) bool {
	return (!r.from.IsValid() || r.from == from) && (!r.to.IsValid() || r.to == to) && (r.what == every || r.what == what)
}

// wire is what all traffic between nodes goes over: rules that come and go.
type wire struct {
	mu      sync.Mutex
	rules   map[int]rule
	next    int
	rng     *rand.Rand
	changed chan struct{} // closed and made anew with each change

	passed, dropped int
}

func newWire(seed uint64) *wire {
	return &wire{rules: map[int]rule{}, rng: rand.New(rand.NewPCG(seed, 1)), changed: make(chan struct{})}
}

// add puts a rule in force until the function that it returns is called.
func (w *wire) add(rules ...rule) (heal func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var ids []int
	for _, r := range rules {
		w.next++
		w.rules[w.next] = r
		ids = append(ids, w.next)
	}
	w.changedLocked()
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		for _, id := range ids {
			delete(w.rules, id)
		}
		w.changedLocked()
	}
}

func (w *wire) changedLocked() {
	close(w.changed)
	w.changed = make(chan struct{})
}

// verdict says what becomes of a packet (or of a read of a relay): whether it is
// dropped by a cut, lost by chance, and how long it is under way. changed is
// closed when the rules are no longer these.
func (w *wire) verdict(from, to netip.Addr, what traffic) (cut, lost bool, delay time.Duration, changed <-chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, r := range w.rules {
		if r.applies(from, to, what) {
			cut = cut || r.drop
			lost = lost || r.loss > 0 && w.rng.Float64() < r.loss
			delay += r.delay
		}
	}
	if cut || lost {
		w.dropped++
	} else {
		w.passed++
	}
	return cut, lost, delay, w.changed
}

// counts says how many packets (or reads) passed and how many did not.
func (w *wire) counts() (passed, dropped int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.passed, w.dropped
}
