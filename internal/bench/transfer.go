package bench

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/berthkv/berth/internal/freeport"
)

// Transfer is `berth bench transfer`: whole requests, raw copies beside the
// links, and two senders at one receiver.
type Transfer struct {
	Options
	Load     Load
	Parts    []string // of TransferParts
	Chunks   int      // of a request
	Slot     int64    // bytes of a chunk
	Slots    int      // of each pool
	Senders  int
	Inflight int // requests of each sender; where they come at a rate, the most
	Count    int // requests of each sender in a turn
	Link     string
	Checksum bool
	Sizes    []int64 // bytes of chunks for the raw copies: powers of two
	Volume   int64   // bytes that a turn of them moves
}

// TransferParts are what Transfer can measure.
var TransferParts = []string{"inside", "local", "write", "shared"}

// Bounds of options.
const (
	maxSlots   = 1 << 16
	maxSlot    = 64 << 20
	maxSenders = 64
	maxVolume  = 1 << 40
)

// referenceChunk is one layer of the reference's chunks: K and V, two bytes of
// bfloat16, 64 of them a token.
const referenceChunk = 2 * 2 * chunkTokens * 64

// Run measures.
func (t Transfer) Run(ctx context.Context) (*Report, error) {
	if err := check([]bound{{"chunks", int64(t.Chunks), maxSlots}, {"slot-bytes", t.Slot, maxSlot}, {"slots", int64(t.Slots), maxSlots}, {"senders", int64(t.Senders), maxSenders},
		{"inflight", int64(t.Inflight), maxSlots}, {"count", int64(t.Count), maxCount}, {"volume", t.Volume, maxVolume}}); err != nil {
		return nil, err
	}
	for _, p := range t.Parts {
		if !slices.Contains(TransferParts, p) {
			return nil, refuse("--parts has %q; it may have %s", p, strings.Join(TransferParts, ", "))
		}
	}
	for _, size := range t.Sizes {
		if size < 1 || size > maxSlot || size&(size-1) != 0 {
			return nil, refuse("--sizes has %d bytes; it may have powers of two up to %d", size, maxSlot)
		}
	}
	switch {
	case len(t.Parts) == 0:
		return nil, refuse("--parts is empty; it may have %s", strings.Join(TransferParts, ", "))
	case t.Link != "shm" && t.Link != "tcp":
		return nil, refuse("--link is %q; it must be shm or tcp", t.Link)
	case t.Slot%chunkTokens != 0:
		return nil, refuse("--slot-bytes is %d; it must be a multiple of the %d tokens of a chunk", t.Slot, chunkTokens)
	case t.Chunks > t.Slots/2:
		return nil, refuse("--chunks is %d and --slots %d; an engine stages at most half of its pool at once", t.Chunks, t.Slots)
	case t.Against != "" && t.Slot%referenceChunk != 0:
		return nil, refuse("--slot-bytes is %d; against LMCache it must be a multiple of %d", t.Slot, referenceChunk)
	}
	arrivals, err := t.Load.arrivals(t.Count)
	if err != nil {
		return nil, err
	}
	r, err := t.begin(ctx, "transfer")
	if err != nil {
		return nil, err
	}
	var at []float64
	for _, a := range arrivals {
		at = append(at, a.Seconds())
	}
	return r.end(t.measure(r, at))
}

func (t Transfer) measure(r *run, at []float64) error {
	var theirs *system
	for _, part := range t.Parts {
		var err error
		switch part {
		case "inside", "local":
			if t.Against != "" && theirs == nil {
				if theirs, err = t.reference(r, at); err != nil {
					return err
				}
			}
			err = t.requests(r, part == "inside", at, theirs)
		case "write":
			err = t.writes(r)
		case "shared":
			err = t.shared(r)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// whole are the metrics of whole requests.
var whole = []metric{{"rate", "requests/s"}, {"bytes", "GB/s"}, {"begin to ready, p50", "µs"}, {"begin to ready, p99", "µs"},
	{"begin to ending, p50", "µs"}, {"begin to ending, p99", "µs"}, {"CPU a request", "µs"}, {"wake-ups a request", "switches"}}

// requests measures whole requests of ours, and theirs beside them if there are
// any.
func (t Transfer) requests(r *run, inside bool, at []float64, theirs *system) error {
	ours, err := t.berth(r, inside, at)
	if err != nil {
		return err
	}
	sides := []side{{"berth", nil, func() (sample, error) { return ours.turn(t) }}}
	if theirs != nil {
		sides = append(sides, side{theirs.name, theirs.kids, func() (sample, error) { return theirs.turn(t) }})
	}
	api := "local API"
	if inside {
		api = "in-process API"
	}
	checks := "generations and fences on, checksums off"
	if t.Checksum {
		checks = "generations, fences and checksums (CRC32C, at both ends) on"
	}
	_, err = r.compare(fmt.Sprintf("%s, %s, %s, %d senders x %d in flight, %d x %d KiB", api, t.Link, t.Load, t.Senders, t.Inflight, t.Chunks, t.Slot>>10),
		checks, whole, sides...)
	for _, k := range ours.kids {
		k.end()
	}
	return err
}

// system is a receiver and its senders, of either kind.
type system struct {
	name    string
	kids    []*child // all its processes
	senders []*child
	decoder *child // reads what comes and says when; nil: the senders hear when it is ready
	order   order
}

// berth starts Berth's.
func (t Transfer) berth(r *run, inside bool, at []float64) (*system, error) {
	place := "beside"
	if inside {
		place = "inside"
	}
	r.say("starting Berth's receiver and %d senders, engines %s their agents", t.Senders, place)
	common := func(name string) options {
		o := r.agentOptions(name+"-"+place, t.Slots, t.Slot)
		o["links"], o["checksum"] = t.Link, strconv.FormatBool(t.Checksum)
		return o
	}
	o := common("receiver")
	port, err := o.receiving()
	if err != nil {
		return nil, err
	}
	s := &system{name: "berth", order: t.order(at)}
	s.order.Receiver = port
	if s.kids, err = r.engine(o["node"], Work{What: "receive", Slot: t.Slot}, inside, o); err != nil {
		return nil, err
	}
	s.decoder = s.kids[0]
	for i := range t.Senders {
		o := common("sender-" + strconv.Itoa(i))
		kids, err := r.engine(o["node"], Work{What: "send", Slot: t.Slot, ID: i}, inside, o)
		if err != nil {
			return nil, err
		}
		s.senders, s.order.Senders, s.kids = append(s.senders, kids[0]), append(s.order.Senders, i), append(s.kids, kids...)
	}
	return s, nil
}

// reference starts LMCache's: engine and backend are one process, and NIXL moves
// the bytes.
func (t Transfer) reference(r *run, at []float64) (*system, error) {
	p, err := freeport.Take(3 + t.Senders)
	if err != nil {
		return nil, err
	}
	common := []string{"--init", strconv.Itoa(p[0]), "--alloc", strconv.Itoa(p[1]), "--drain", strconv.Itoa(p[2]), "--slots", strconv.Itoa(t.Slots),
		"--shape", fmt.Sprintf("2,%d,%d,64", t.Slot/referenceChunk, chunkTokens)}
	s := &system{name: Lmcache, order: t.order(at)}
	k, err := r.python("lmcache-receiver", append([]string{"receive"}, common...)...)
	if err != nil {
		return nil, err
	}
	s.kids = append(s.kids, k)
	for i := range t.Senders {
		k, err := r.python("lmcache-sender-"+strconv.Itoa(i), append([]string{"send", "--id", strconv.Itoa(i), "--proxy", strconv.Itoa(p[3+i])}, common...)...)
		if err != nil {
			return nil, err
		}
		s.kids, s.senders = append(s.kids, k), append(s.senders, k)
	}
	return s, nil
}

func (t Transfer) order(at []float64) order {
	return order{Count: t.Count, Chunks: t.Chunks, Inflight: t.Inflight, Arrivals: at}
}

// turn has the system make its requests.
func (s *system) turn(t Transfer) (out sample, err error) {
	before, err := used(s.kids)
	if err != nil {
		return out, err
	}
	told := s.senders
	if s.decoder != nil {
		told = append([]*child{s.decoder}, told...)
	}
	answers, err := askAll(told, s.order)
	if err != nil {
		return out, err
	}
	after, err := used(s.kids)
	if err != nil {
		return out, err
	}
	s.order.First += s.order.Count
	var decoder answer
	if s.decoder != nil {
		decoder, answers = answers[0], answers[1:]
	}
	var ready, ended []time.Duration
	rate, n := 0.0, float64(len(answers)*t.Count)
	for i, a := range answers {
		lat := a.timing().latency
		rate, ended = rate+float64(t.Count)/a.Seconds, append(ended, lat...)
		if s.decoder == nil {
			ready = append(ready, lat...)
			continue
		}
		for j, at := range decoder.Ready[i] {
			ready = append(ready, time.Duration(at-a.Begun[j]))
		}
	}
	r, e := histogram(ready), histogram(ended)
	gb := float64(t.Chunks) * float64(t.Slot) / 1e9
	return sample{[]float64{rate, rate * gb, quantile(r, 50), quantile(r, 99), quantile(e, 50), quantile(e, 99),
		(after.cpu - before.cpu).Seconds() * 1e6 / n, float64(after.wakes(before)) / n}, e}, nil
}

// askAll gives all the same order at once and collects the answers. It returns
// with the first error: others may wait for the one that failed.
func askAll(kids []*child, o order) ([]answer, error) {
	out, errs := make([]answer, len(kids)), make(chan error, len(kids))
	for _, k := range kids {
		if err := k.tell(o); err != nil {
			return nil, err
		}
	}
	for i, k := range kids {
		go func() { errs <- k.answer(&out[i], turnTimeout) }() // ends with the child at the latest
	}
	for range kids {
		if err := <-errs; err != nil {
			return nil, err
		}
	}
	return out, nil
}
