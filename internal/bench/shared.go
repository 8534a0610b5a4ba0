package bench

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"
)

// The case of two senders at one receiver: A's request and B's, in chunks.
const (
	sharedA    = 24
	sharedB    = 16
	sharedAll  = sharedA + sharedB // slots of the receiver
	sharedSlot = 2 << 20           // bytes, unless a smaller size is the largest wanted
	sharedPart = 8                 // each sender gets 1/8 of what the link can do
)

// pairOf is a receiver, the senders of A and of B, and one whose request waits.
type pairOf struct {
	decoder *child
	port    int
	senders [3]*child
	next    int
}

// shared measures two senders whose links are slow: together they take as long as
// the longer alone, and a request that waits for room costs them nothing.
func (t Transfer) shared(r *run) error {
	slot := min(slices.Max(t.Sizes), sharedSlot)
	rate, err := linkRate(r, slot)
	if err != nil {
		return err
	}
	limit := int64(rate / sharedPart)
	r.say("the tcp link moves %s GB/s: each sender may pass %s GB/s", figure(rate/1e9), figure(float64(limit)/1e9))
	p, err := newPair(r, slot, limit)
	if err != nil {
		return err
	}
	alone := func() (sample, error) {
		a, err := p.ready(sharedA, 0, 0)
		if err != nil {
			return sample{}, err
		}
		b, err := p.ready(0, sharedB, 0)
		return sample{figures: []float64{max(a, b)}}, err
	}
	for _, waits := range []int{0, sharedAll} {
		what := "together"
		if waits > 0 {
			what += " while a request waits for all of the pool"
		}
		both := func() (sample, error) {
			ms, err := p.ready(sharedA, sharedB, waits)
			return sample{figures: []float64{ms}}, err
		}
		what = fmt.Sprintf("2 senders, %d and %d x %d KiB, tcp at 1/%d of its rate each, %s", sharedA, sharedB, slot>>10, sharedPart, what)
		if _, err := r.compare(what, "generations and fences on, checksums off", []metric{{"until both are ready", "ms"}},
			side{"berth", nil, both}, side{"the longer alone", nil, alone}); err != nil {
			return err
		}
	}
	return nil
}

func newPair(r *run, slot, limit int64) (p *pairOf, err error) {
	p = &pairOf{}
	o := r.agentOptions("receiver-shared", sharedAll, slot)
	o["links"] = "tcp"
	if p.port, err = o.receiving(); err != nil {
		return nil, err
	}
	kids, err := r.engine(o["node"], Work{What: "receive", Slot: slot}, true, o)
	if err != nil {
		return nil, err
	}
	p.decoder = kids[0]
	for i := range p.senders {
		o := r.agentOptions("sender-shared-"+strconv.Itoa(i), 2*sharedAll, slot)
		o["links"] = "tcp"
		kids, err := r.engine(o["node"], Work{What: "send", Slot: slot, ID: i, Limit: limit}, true, o)
		if err != nil {
			return nil, err
		}
		p.senders[i] = kids[0]
	}
	return p, nil
}

// ready has the senders send a request each, of so many chunks if any, and
// returns the milliseconds until A and B are ready. The one that waits comes when
// they are granted.
func (p *pairOf) ready(a, b, waits int) (ms float64, err error) {
	o := order{First: p.next, Count: 1, Inflight: 1, Receiver: p.port, Announce: true}
	p.next++
	chunks := [3]int{a, b, waits}
	for i, n := range chunks {
		if n > 0 {
			o.Senders = append(o.Senders, i)
		}
	}
	if err := p.decoder.tell(o); err != nil {
		return 0, err
	}
	tell := func(i int) error {
		o.Chunks = chunks[i]
		return p.senders[i].tell(o)
	}
	grant := func(i int) error {
		var granted struct{ Granted bool }
		return p.senders[i].answer(&granted, turnTimeout)
	}
	for _, do := range []func(int) error{tell, grant} {
		for _, i := range o.Senders {
			if i < 2 {
				err = errors.Join(err, do(i))
			}
		}
	}
	if err == nil && waits > 0 {
		err = tell(2)
	}
	if err != nil {
		return 0, err
	}
	var answers [3]answer
	for _, i := range o.Senders {
		if i == 2 {
			err = grant(i)
		}
		if err = errors.Join(err, p.senders[i].answer(&answers[i], turnTimeout)); err != nil {
			return 0, err
		}
	}
	var read answer
	if err := p.decoder.answer(&read, turnTimeout); err != nil {
		return 0, err
	}
	var begun, last int64
	for k, i := range o.Senders {
		at := read.Ready[k][0]
		switch {
		case i < 2:
			last = max(last, at)
			if begun == 0 || answers[i].Begun[0] < begun {
				begun = answers[i].Begun[0]
			}
		case at < last || answers[i].Begun[0] > last:
			return 0, errors.New("the request that should wait for all of the pool did not wait: the machine is too busy")
		}
	}
	return float64(last-begun) / 1e6, nil
}

// linkRate is what the tcp link can do with such chunks, in bytes a second.
func linkRate(r *run, slot int64) (float64, error) {
	m, err := newMemory(r.dir, writeInflight*slot)
	if err != nil {
		return 0, err
	}
	defer m.Close()
	c, err := m.link("tcp", slot)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	const n = 8 * writeInflight
	if err := c.move(n); err != nil {
		return 0, err
	}
	start := time.Now()
	err = c.move(n)
	return float64(n*slot) / time.Since(start).Seconds(), err
}
