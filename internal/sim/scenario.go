package sim

import (
	"bufio"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"

	"github.com/berthkv/berth/internal/explore"
	"github.com/berthkv/berth/internal/kv"
)

// Scenario is all that a run depends on. It is written as text (Write), read
// again (Read), and made smaller when its run fails (Minimise).
type Scenario struct {
	Seed                        uint64 // of what is not said below: how long each thing takes, what a fault hits
	Senders, Receivers, Proxies int
	Capacity, Staging           int      // slots of each receive pool and each staging pool
	Bypass                      int64    // admission_bypass_chunks
	MaxWaiting                  int      // max_waiting
	Links                       []string // that of receiver i is Links[i % len]
	Lease                       kv.Duration
	Plant                       explore.Plant // a fault planted in what surrounds the nodes, for tests
	Requests                    []Request     // by time
	Faults                      []Fault       // by time
}

// Request is one prompt.
type Request struct {
	ID       int
	At       kv.Duration
	Sender   int
	Receiver int
	Chunks   int // declared
	End      int // that it has, at most Chunks
	Tokens   int // of its last chunk, 1 to 16
	Deadline kv.Duration
	Leaves   kv.Duration // the client leaves so long after At; 0: it does not
	Unread   bool        // the decode engine never asks for it
}

// Name is the request's req_id.
func (q *Request) Name() string { return "q" + strconv.Itoa(q.ID) }

// Kind is what a fault does.
type Kind string

const (
	// Of a sender or proxy (Host) and a receiver (Peer):
	Break     Kind = "break"      // their control connections break, with a suffix lost each way
	OneWay    Kind = "one-way"    // one direction of them goes silent, and neither end notices for a while
	Twice     Kind = "twice"      // what they say comes twice, the second time later
	Delay     Kind = "delay"      // what they say takes long
	Partition Kind = "partition"  // nothing gets through, control or data
	CutData   Kind = "cut-data"   // data connections break
	LoseLink  Kind = "lose-link"  // the data link is gone
	LoseData  Kind = "lose-data"  // chunks are lost on the way
	Reorder   Kind = "reorder"    // of a receiver: chunks come in any order
	Crash     Kind = "crash"      // of any node: it dies, and is started again after For
	Stop      Kind = "stop"       // of any node: its process stands still
	Slow      Kind = "slow"       // of any node: it moves data, or answers, at a fiftieth of its speed
	ClockJump Kind = "clock-jump" // of any node: its clock jumps ahead
	Engine    Kind = "engine"     // of a sender or receiver: its engine dies and another takes its place
)

// Kinds lists every kind of fault.
var Kinds = []Kind{Break, OneWay, Twice, Delay, Partition, CutData, LoseLink, LoseData, Reorder, Crash, Stop, Slow, ClockJump, Engine}

// pair reports whether a kind of fault is between two nodes.
func (k Kind) pair() bool { return slices.Index(Kinds, k) < slices.Index(Kinds, LoseData) }

// Fault is one fault.
type Fault struct {
	At, For kv.Duration
	Kind    Kind
	Host    string // s0, r0, p0
	Peer    string // "" unless the kind has one
}

// Load names a pattern of arrivals.
type Load string

const (
	Poisson Load = "poisson"
	Bursts  Load = "bursts" // now and then many at once from one sender
	Tails   Load = "tails"  // a few prompts are as large as the pool
	Hot     Load = "hot"    // half of all go to one receiver
	Mixed   Load = "mixed"  // all of these
	Small   Load = "small"  // prompts of 1 to 3 chunks
)

const (
	fanout   = 8  // receivers that one sender sends to
	shape    = 16 // tokens of a chunk
	perChunk = 64 // bytes of a chunk
	busy     = 50 // ms for which a request holds its slots, about
)

// Loads lists every pattern.
var Loads = []Load{Poisson, Bursts, Tails, Hot, Mixed, Small}

// Options are the knobs of Random; what is 0 or empty is drawn from the seed.
type Options struct {
	Seed               uint64
	Requests           int
	Senders, Receivers int
	Capacity, Staging  int
	Load               Load
	Rate               float64 // of what a receiver can take at most, 0.1 to 2
	Faults             []Kind  // nil: a few kinds; empty: none
	Every              float64 // requests between two faults, about
	Links              []string
	Lease              kv.Duration
}

// Random makes a scenario out of a seed.
func Random(o Options) *Scenario {
	r := rand.New(rand.NewPCG(o.Seed, 0x5ce0))
	sc := &Scenario{Seed: o.Seed}
	pick := func(given, drawn int) int {
		if given != 0 {
			return given
		}
		return drawn
	}
	sc.Senders = pick(o.Senders, 1+r.IntN(8))
	sc.Receivers = pick(o.Receivers, 1+r.IntN(4))
	sc.Proxies = (sc.Senders + 7) / 8
	sc.Capacity = pick(o.Capacity, []int{6, 16, 48, 64}[r.IntN(4)])
	sc.Staging = pick(o.Staging, []int{4, 16, 64}[r.IntN(3)])
	sc.Bypass = int64(sc.Capacity)
	if r.IntN(4) == 0 {
		sc.Bypass = int64(r.IntN(2 * sc.Capacity))
	}
	sc.MaxWaiting = 100_000
	if r.IntN(4) == 0 {
		sc.MaxWaiting = 1 + r.IntN(20)
	}
	if sc.Links = o.Links; sc.Links == nil {
		sc.Links = [][]string{{"tcp"}, {"shm"}, {"nixl"}, {"tcp", "shm", "nixl"}}[r.IntN(4)]
	}
	if sc.Lease = o.Lease; sc.Lease == 0 {
		sc.Lease = []kv.Duration{15 * kv.Second, 3 * kv.Second}[r.IntN(2)]
	}
	load, rate := o.Load, o.Rate
	if load == "" {
		load = Loads[r.IntN(len(Loads))]
	}
	if rate == 0 {
		rate = 0.3 + 1.1*r.Float64()
	}
	sc.requests(r, o.Requests, load, rate)
	kinds := o.Faults
	if kinds == nil {
		for range 1 + r.IntN(4) {
			kinds = append(kinds, Kinds[r.IntN(len(Kinds))])
		}
	}
	if o.Every == 0 {
		o.Every = 50 * math.Pow(20, r.Float64()) // 50 to 1000
	}
	if len(kinds) > 0 {
		sc.faults(r, kinds, int(float64(o.Requests)/o.Every)+1)
	}
	return sc
}

func (sc *Scenario) requests(r *rand.Rand, n int, load Load, rate float64) {
	has := func(l Load) bool { return load == l || load == Mixed }
	mean := 4.0
	if load == Small {
		mean = 2
	}
	mean = min(mean, float64(sc.Capacity)/3)
	perSecond := rate * float64(sc.Receivers) * float64(sc.Capacity) / mean * 1000 / busy
	at := 0.0
	sc.Requests = make([]Request, 0, n)
	for len(sc.Requests) < n {
		at += r.ExpFloat64() / perSecond
		s := r.IntN(sc.Senders)
		count := 1
		if has(Bursts) && r.IntN(60) == 0 {
			count = 5 + r.IntN(40)
			at += float64(count) / perSecond
		}
		for range min(count, n-len(sc.Requests)) {
			q := Request{ID: len(sc.Requests), At: kv.Duration(at*1e9) + kv.Duration(r.IntN(1000)), Sender: s, Receiver: (s*7 + r.IntN(min(fanout, sc.Receivers))) % sc.Receivers}
			if has(Hot) && r.IntN(2) == 0 {
				q.Receiver = s % min(max(sc.Receivers/fanout, 1), sc.Receivers) * min(fanout, sc.Receivers) % sc.Receivers
			}
			q.Chunks = 1 + int(r.ExpFloat64()*(mean-1))
			if load == Small {
				q.Chunks = 1 + r.IntN(3)
			}
			if has(Tails) && r.IntN(20) == 0 { // Pareto
				q.Chunks = int(mean / math.Pow(1-r.Float64(), 1/1.1))
			}
			if q.Chunks = min(q.Chunks, sc.Capacity); r.IntN(2000) == 0 {
				q.Chunks = sc.Capacity + 1 + r.IntN(3) // it can never be served
			}
			q.End, q.Tokens = q.Chunks, shape
			if r.IntN(4) == 0 {
				q.Tokens = 1 + r.IntN(shape)
			}
			if r.IntN(10) == 0 {
				q.End = r.IntN(q.Chunks + 1) // fewer than it declared
			}
			q.Deadline = kv.Duration(float64(sc.Lease) * (1 + 3*r.Float64()))
			if r.IntN(100) == 0 {
				q.Deadline = kv.Duration(r.IntN(50)+1) * kv.Millisecond
			}
			if r.IntN(50) == 0 {
				q.Leaves = kv.Duration(1 + r.ExpFloat64()*busy*1e6)
			}
			q.Unread = r.IntN(1000) == 0
			sc.Requests = append(sc.Requests, q)
		}
	}
	slices.SortStableFunc(sc.Requests, func(a, b Request) int { return int(a.At - b.At) })
}

func (sc *Scenario) faults(r *rand.Rand, kinds []Kind, n int) {
	until := float64(sc.Requests[len(sc.Requests)-1].At)
	for range n {
		f := Fault{At: kv.Duration(until * r.Float64()), Kind: kinds[r.IntN(len(kinds))]}
		length := math.Pow(r.Float64(), 3) * 2.5 // in leases; most are short
		f.For = kv.Duration(length * float64(sc.Lease))
		d := r.IntN(sc.Senders + sc.Proxies)
		switch {
		case d < sc.Senders:
			f.Host = fmt.Sprint("s", d)
		default:
			f.Host = fmt.Sprint("p", d-sc.Senders)
		}
		peer := fmt.Sprint("r", r.IntN(sc.Receivers))
		switch {
		case f.Kind.pair():
			f.Peer = peer
		case f.Kind == Reorder || f.Kind == LoseData || r.IntN(2) == 0 || f.Kind == Engine && f.Host[0] == 'p':
			f.Host = peer
		}
		sc.Faults = append(sc.Faults, f)
	}
	slices.SortStableFunc(sc.Faults, func(a, b Fault) int { return int(a.At - b.At) })
}

// Write writes the scenario, a line each for the world, its requests and its
// faults.
func (sc *Scenario) Write(w io.Writer) error {
	b := bufio.NewWriter(w)
	fmt.Fprintf(b, "world seed=%d senders=%d receivers=%d proxies=%d capacity=%d staging=%d bypass=%d waiting=%d links=%s lease=%d",
		sc.Seed, sc.Senders, sc.Receivers, sc.Proxies, sc.Capacity, sc.Staging, sc.Bypass, sc.MaxWaiting, strings.Join(sc.Links, ","), sc.Lease)
	if sc.Plant != "" {
		fmt.Fprintf(b, " plant=%s", sc.Plant)
	}
	fmt.Fprintln(b)
	for _, q := range sc.Requests {
		fmt.Fprintf(b, "request %d at=%d s%d r%d chunks=%d end=%d tokens=%d deadline=%d", q.ID, q.At, q.Sender, q.Receiver, q.Chunks, q.End, q.Tokens, q.Deadline)
		if q.Leaves != 0 {
			fmt.Fprintf(b, " leaves=%d", q.Leaves)
		}
		if q.Unread {
			fmt.Fprint(b, " unread")
		}
		fmt.Fprintln(b)
	}
	for _, f := range sc.Faults {
		fmt.Fprintf(b, "fault %s at=%d for=%d %s", f.Kind, f.At, f.For, f.Host)
		if f.Peer != "" {
			fmt.Fprintf(b, " %s", f.Peer)
		}
		fmt.Fprintln(b)
	}
	return b.Flush()
}

// Read reads what Write has written. Lines that begin with # say nothing.
func Read(r io.Reader) (*Scenario, error) {
	sc := &Scenario{}
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for n := 1; lines.Scan(); n++ {
		words := strings.Fields(lines.Text())
		if len(words) == 0 || words[0][0] == '#' {
			continue
		}
		if err := sc.line(words); err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
	}
	if sc.Receivers == 0 || sc.Senders == 0 || sc.Proxies == 0 || len(sc.Links) == 0 {
		return nil, fmt.Errorf("the world line is missing, or lacks senders, receivers, proxies or links")
	}
	return sc, lines.Err()
}

func (sc *Scenario) line(words []string) (err error) {
	kind, words := words[0], words[1:]
	number := func(s string) int64 {
		n, e := strconv.ParseInt(s, 10, 64)
		if e != nil && err == nil {
			err = fmt.Errorf("%q is no number", s)
		}
		return n
	}
	switch kind {
	case "world":
		for _, w := range words {
			k, v, _ := strings.Cut(w, "=")
			switch k {
			case "seed":
				sc.Seed, err = strconv.ParseUint(v, 10, 64)
			case "senders":
				sc.Senders = int(number(v))
			case "receivers":
				sc.Receivers = int(number(v))
			case "proxies":
				sc.Proxies = int(number(v))
			case "capacity":
				sc.Capacity = int(number(v))
			case "staging":
				sc.Staging = int(number(v))
			case "bypass":
				sc.Bypass = number(v)
			case "waiting":
				sc.MaxWaiting = int(number(v))
			case "links":
				sc.Links = strings.Split(v, ",")
			case "lease":
				sc.Lease = kv.Duration(number(v))
			case "plant":
				sc.Plant = explore.Plant(v)
			default:
				return fmt.Errorf("world has no %q", k)
			}
		}
	case "request":
		var q Request
		if len(words) == 0 {
			return fmt.Errorf("a request has a number")
		}
		q.ID = int(number(words[0]))
		for _, w := range words[1:] {
			k, v, ok := strings.Cut(w, "=")
			switch {
			case k == "at":
				q.At = kv.Duration(number(v))
			case k == "chunks":
				q.Chunks = int(number(v))
			case k == "end":
				q.End = int(number(v))
			case k == "tokens":
				q.Tokens = int(number(v))
			case k == "deadline":
				q.Deadline = kv.Duration(number(v))
			case k == "leaves":
				q.Leaves = kv.Duration(number(v))
			case k == "unread":
				q.Unread = true
			case !ok && k[0] == 's':
				q.Sender = int(number(k[1:]))
			case !ok && k[0] == 'r':
				q.Receiver = int(number(k[1:]))
			default:
				return fmt.Errorf("a request has no %q", w)
			}
		}
		sc.Requests = append(sc.Requests, q)
	case "fault":
		if len(words) < 4 {
			return fmt.Errorf("a fault has a kind, a time, a length and a node")
		}
		f := Fault{Kind: Kind(words[0])}
		if !slices.Contains(Kinds, f.Kind) {
			return fmt.Errorf("no fault %q", f.Kind)
		}
		for _, w := range words[1:] {
			k, v, ok := strings.Cut(w, "=")
			switch {
			case k == "at":
				f.At = kv.Duration(number(v))
			case k == "for":
				f.For = kv.Duration(number(v))
			case !ok && f.Host == "":
				f.Host = w
			case !ok:
				f.Peer = w
			default:
				return fmt.Errorf("a fault has no %q", w)
			}
		}
		sc.Faults = append(sc.Faults, f)
	default:
		return fmt.Errorf("no line begins with %q", kind)
	}
	return err
}

// String is the options as flags of the command.
func (o Options) String() string {
	s := fmt.Sprintf("-seed %d -requests %d", o.Seed, o.Requests)
	if o.Senders != 0 {
		s += fmt.Sprintf(" -senders %d", o.Senders)
	}
	if o.Receivers != 0 {
		s += fmt.Sprintf(" -receivers %d", o.Receivers)
	}
	if o.Capacity != 0 {
		s += fmt.Sprintf(" -capacity %d", o.Capacity)
	}
	if o.Staging != 0 {
		s += fmt.Sprintf(" -staging %d", o.Staging)
	}
	if o.Load != "" {
		s += fmt.Sprintf(" -load %s", o.Load)
	}
	if o.Rate != 0 {
		s += fmt.Sprintf(" -rate %g", o.Rate)
	}
	if o.Faults != nil {
		var kinds []string
		for _, k := range o.Faults {
			kinds = append(kinds, string(k))
		}
		if s += " -faults none"; len(kinds) > 0 {
			s = strings.TrimSuffix(s, "none") + strings.Join(kinds, ",")
		}
	}
	if o.Every != 0 {
		s += fmt.Sprintf(" -every %g", o.Every)
	}
	if len(o.Links) > 0 {
		s += " -links " + strings.Join(o.Links, ",")
	}
	if o.Lease != 0 {
		s += fmt.Sprintf(" -lease %g", o.Lease.Seconds())
	}
	return s
}

// Again is the command that runs a scenario of Random again.
func Again(o Options) string { return "go run ./internal/sim/cmd " + o.String() }
