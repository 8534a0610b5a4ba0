package reserve

import (
	"fmt"
	"math/rand"
	"slices"
	"testing"
)

// model is the ledger once more, as its package comment says it and as slowly as
// it likes: plain lists, every count made at the moment it changes, every
// request looked at.
type model struct {
	cfg                         Config
	free, quarantined, lockStep int64

	waiting []*modelReq  // in order of arrival
	turns   []*modelLine // in order of turns
	fronts  []*modelLine // most overtaken first
}

type modelReq struct {
	id        uint64
	sender    Sender
	need      int64
	arrival   int
	overtaken int64
	strict    int64 // overtaken, counted only while it is not blocked
	alone     bool  // was first in its line when it came, and never blocked
	later     int64 // chunks of what arrived later and was admitted
}

// modelLine's missing are the rounds until its turn.
type modelLine struct {
	sender  Sender
	front   *modelReq
	missing int64
}

func (m *model) reach() int64 { return m.cfg.Capacity - m.quarantined - m.lockStep }

func (m *model) line(s Sender) *modelLine {
	for _, ln := range m.turns {
		if ln.sender == s {
			return ln
		}
	}
	return nil
}

// first returns the oldest waiting request of s that needs at most limit.
func (m *model) first(s Sender, limit int64) *modelReq {
	for _, r := range m.waiting {
		if r.sender == s && r.need <= limit {
			return r
		}
	}
	return nil
}

func (m *model) find(id uint64) *modelReq {
	for _, r := range m.waiting {
		if r.id == id {
			return r
		}
	}
	return nil
}

// place puts a line among turns after all that have as many rounds to go.
func (m *model) place(ln *modelLine, missing int64) {
	m.turns = slices.DeleteFunc(m.turns, func(o *modelLine) bool { return o == ln })
	ln.missing = missing
	at := slices.IndexFunc(m.turns, func(o *modelLine) bool { return o.missing > missing })
	if at < 0 {
		at = len(m.turns)
	}
	m.turns = slices.Insert(m.turns, at, ln)
}

// refresh gives lines the fronts that they should have.
func (m *model) refresh(saved map[Sender]int64) {
	for _, ln := range slices.Clone(m.turns) {
		should := m.first(ln.sender, m.reach())
		if m.first(ln.sender, m.cfg.Capacity) == nil {
			m.turns = slices.DeleteFunc(m.turns, func(o *modelLine) bool { return o == ln })
		}
		if should == ln.front {
			continue
		}
		if ln.front != nil {
			m.fronts = slices.DeleteFunc(m.fronts, func(o *modelLine) bool { return o == ln })
			if _, ok := saved[ln.sender]; !ok {
				saved[ln.sender] = ln.front.need - ln.missing
			}
		}
		ln.front = should
		if should == nil {
			continue
		}
		at := slices.IndexFunc(m.fronts, func(o *modelLine) bool { return o.front.overtaken < should.overtaken })
		if at < 0 {
			at = len(m.fronts)
		}
		m.fronts = slices.Insert(m.fronts, at, ln)
		m.place(ln, max(0, should.need-saved[ln.sender]))
	}
}

func (m *model) request(id uint64, s Sender, need int64, arrival int) (admitted bool, busy bool) {
	if need == 0 {
		return true, false
	}
	r := &modelReq{id: id, sender: s, need: need, arrival: arrival}
	r.alone = m.first(s, m.cfg.Capacity) == nil && need <= m.reach()
	m.waiting = append(m.waiting, r)
	if m.line(s) == nil {
		m.place(&modelLine{sender: s}, 0)
	}
	m.refresh(map[Sender]int64{})
	if m.pick() == r {
		m.admit(r)
		return true, false
	}
	mine := 0
	for _, o := range m.waiting {
		if o.sender == s && o != r {
			mine++
		}
	}
	if left := m.cfg.MaxWaiting - len(m.waiting) + 1; left < 1 || mine >= 3*left {
		m.remove(r)
		return false, true
	}
	return false, false
}

func (m *model) remove(r *modelReq) {
	m.waiting = slices.DeleteFunc(m.waiting, func(o *modelReq) bool { return o == r })
	m.refresh(map[Sender]int64{})
}

// behind says whether x is behind the front r of another line.
func (m *model) behind(x, r *modelReq) bool {
	xl, rl := m.line(x.sender), m.line(r.sender)
	return xl.front != x || slices.Index(m.fronts, xl) > slices.Index(m.fronts, rl)
}

// overtakenBy lists the requests that are overtaken when x is admitted; through
// are those blocked ones that stand before a front that is, in its line.
func (m *model) overtakenBy(x *modelReq) (direct, through []*modelReq) {
	for _, r := range m.waiting {
		front := m.line(r.sender).front
		switch {
		case r.sender == x.sender:
			if r.arrival < x.arrival {
				direct = append(direct, r)
			}
		case front == nil || !m.behind(x, front):
		case r == front:
			direct = append(direct, r)
		case r.arrival < front.arrival:
			through = append(through, r)
		}
	}
	return direct, through
}

// allowed says whether x may be admitted now: it fits, and takes nobody that is
// not blocked beyond Bypass.
func (m *model) allowed(x *modelReq) bool {
	if x.need > min(m.free, m.reach()) {
		return false
	}
	direct, _ := m.overtakenBy(x)
	for _, r := range direct {
		if r.need <= m.reach() && r.overtaken+x.need > m.cfg.Bypass {
			return false
		}
	}
	return true
}

// pick takes the first that fits in the order of turns; if that is not allowed,
// the guard; and else the first that is allowed.
func (m *model) pick() *modelReq {
	limit := min(m.free, m.reach())
	for _, ln := range m.turns {
		if r := m.first(ln.sender, limit); r != nil {
			if m.allowed(r) {
				return r
			}
			if guard := m.fronts[0].front; guard.need <= limit {
				return guard
			}
			break
		}
	}
	for _, ln := range m.turns {
		for _, r := range m.waiting {
			if r.sender == ln.sender && m.allowed(r) {
				return r
			}
		}
	}
	return nil
}

func (m *model) admit(x *modelReq) {
	direct, through := m.overtakenBy(x)
	for _, r := range append(direct, through...) {
		r.overtaken = min(r.overtaken+x.need, m.cfg.Bypass)
	}
	for _, r := range direct {
		if r.need <= m.reach() {
			r.strict += x.need
		}
	}
	for _, r := range m.waiting {
		if r.arrival < x.arrival {
			r.later += x.need
		}
	}
	m.free -= x.need
	ln := m.line(x.sender)
	passed := ln.missing
	for _, o := range m.turns {
		o.missing = max(0, o.missing-passed)
	}
	m.waiting = slices.DeleteFunc(m.waiting, func(o *modelReq) bool { return o == x })
	if ln.front == x {
		m.refresh(map[Sender]int64{x.sender: 0})
	} else {
		m.place(ln, x.need)
	}
}

func (m *model) setBlocked(q, f int64) {
	m.quarantined, m.lockStep = q, f
	for _, r := range m.waiting {
		if r.need > m.reach() {
			r.alone = false
		}
	}
	m.refresh(map[Sender]int64{})
}

func (m *model) why(id uint64) Why {
	r := m.find(id)
	w := Why{For: Turn, Need: r.need, Free: m.free, Overtaken: r.overtaken}
	if r.need > m.free {
		w.For = Room
	}
	if r.need > m.reach() {
		w.For = LockStep
	}
	if r.need > m.cfg.Capacity-m.quarantined {
		w.For = Quarantine
	}
	w.Earmarked = len(m.fronts) > 0 && m.fronts[0].front == r && w.Overtaken == m.cfg.Bypass
	return w
}

// bound returns an error if a request was overtaken further than R8 allows.
func (m *model) bound() error {
	for _, r := range m.waiting {
		if r.strict > m.cfg.Bypass {
			return fmt.Errorf("request %d was overtaken by %d chunks while it was not blocked, bypass is %d", r.id, r.strict, m.cfg.Bypass)
		}
		if r.alone && r.later > m.cfg.Bypass {
			return fmt.Errorf("request %d, alone in its line, saw %d chunks that came later admitted, bypass is %d", r.id, r.later, m.cfg.Bypass)
		}
	}
	return nil
}

// history runs one random history on a ledger and on the model.
type history struct {
	rng *rand.Rand
	l   *Ledger
	m   *model
	out []int64 // what was admitted and is not returned yet
	ids uint64
	// reached counts what happened, so that the test can tell whether histories
	// come near the interesting places.
	reached map[string]int
}

func newHistory(seed int64, reached map[string]int) *history {
	return historyOf(rand.New(rand.NewSource(seed)), reached)
}

func historyOf(rng *rand.Rand, reached map[string]int) *history {
	cfg := Config{Capacity: 1 + rng.Int63n(20), MaxWaiting: 1 + rng.Intn(12)}
	cfg.Bypass = rng.Int63n(2*cfg.Capacity + 1)
	return &history{
		rng: rng, l: New(cfg), reached: reached,
		m: &model{cfg: cfg, free: cfg.Capacity},
	}
}

func (h *history) step() error {
	switch n := h.rng.Intn(10); {
	case n < 5:
		return h.request()
	case n < 7:
		if len(h.out) > 0 {
			i := h.rng.Intn(len(h.out))
			n := h.out[i]
			h.out = slices.Delete(h.out, i, i+1)
			h.l.Return(n)
			h.m.free += n
			out := h.m.cfg.Capacity - h.m.free
			q := min(h.m.quarantined, out)
			h.setBlocked(q, min(h.m.lockStep, out-q))
		}
	case n < 8:
		if len(h.m.waiting) > 0 {
			r := h.m.waiting[h.rng.Intn(len(h.m.waiting))]
			if !h.l.Remove(r.id) || h.l.Remove(r.id) {
				return fmt.Errorf("Remove of request %d, which waits once", r.id)
			}
			h.m.remove(r)
		}
	default:
		room := h.m.cfg.Capacity - h.m.free + 1
		q := h.rng.Int63n(room)
		f := h.rng.Int63n(room - q)
		if h.rng.Intn(3) == 0 {
			q, f = 0, 0
		}
		h.setBlocked(q, f)
	}
	if h.rng.Intn(8) == 0 {
		return nil // a newcomer may find that others may go
	}
	return h.drain()
}

func (h *history) setBlocked(q, f int64) {
	h.l.SetBlocked(q, f)
	h.m.setBlocked(q, f)
}

func (h *history) request() error {
	h.ids++
	need := h.rng.Int63n(h.m.cfg.Capacity + 1)
	if h.rng.Intn(2) == 0 {
		need = min(need, 2)
	}
	s := Sender(h.rng.Intn(4))
	got, err := h.l.Request(h.ids, s, need)
	admitted, busy := h.m.request(h.ids, s, need, int(h.ids))
	if got != admitted || (err != nil) != busy {
		return fmt.Errorf("Request(%d, %d, %d) = %v, %w; should be %v, busy %v", h.ids, s, need, got, err, admitted, busy)
	}
	if got {
		h.out = append(h.out, need)
	}
	if !got && err == nil {
		h.reached["waits"]++
		if again, err := h.l.Request(h.ids, s, need); again || err != nil {
			return fmt.Errorf("repeated Request(%d) = %v, %w", h.ids, again, err)
		}
	}
	return nil
}

func (h *history) drain() error {
	for {
		id, ok := h.l.Next()
		r := h.m.pick()
		if ok != (r != nil) || ok && id != r.id {
			return fmt.Errorf("Next() = %d, %v; should be %+v", id, ok, r)
		}
		if !ok {
			return nil
		}
		if r != h.m.first(h.m.turns[0].sender, h.m.cfg.Capacity) {
			h.reached["first fit"]++
		}
		h.m.admit(r)
		h.out = append(h.out, r.need)
		h.reached["admitted"]++
	}
}

func (h *history) compare() error {
	if err := h.l.Check(); err != nil {
		return err
	}
	if h.l.Free() != h.m.free || h.l.Reach() != h.m.reach() || h.l.Waiting() != len(h.m.waiting) {
		return fmt.Errorf("free %d, reach %d, waiting %d; should be %d, %d, %d", h.l.Free(), h.l.Reach(), h.l.Waiting(),
			h.m.free, h.m.reach(), len(h.m.waiting))
	}
	for _, r := range h.m.waiting {
		got, ok := h.l.Why(r.id)
		want := h.m.why(r.id)
		if !ok || got != want || h.l.Overtaken(r.id) != want.Overtaken {
			return fmt.Errorf("Why(%d) = %+v, %v; should be %+v", r.id, got, ok, want)
		}
		h.reached["why "+got.For.String()]++
		if got.Earmarked {
			h.reached["earmark"]++
		}
	}
	i := 0
	for ln := range h.l.Lines {
		want := Line{Sender: h.m.turns[i].sender}
		for _, r := range h.m.waiting {
			if r.sender == want.Sender {
				if want.Waiting == 0 {
					want.Oldest = r.id
				}
				want.Waiting++
				want.Chunks += r.need
			}
		}
		if ln != want {
			return fmt.Errorf("line %d is %+v, should be %+v", i, ln, want)
		}
		i++
	}
	if i != len(h.m.turns) {
		return fmt.Errorf("%d lines, should be %d", i, len(h.m.turns))
	}
	return h.m.bound()
}

// TestAgainstModel compares the ledger with the model over random histories and
// asserts R8 and the invariants in each state. A failing seed is printed; run it
// alone by setting first.
func TestAgainstModel(t *testing.T) {
	const first = 0
	count := int64(50_000)
	if raced {
		count /= 5 // there is nothing to race: one goroutine
	}
	reached := map[string]int{}
	for seed := int64(first); seed < first+count; seed++ {
		h := newHistory(seed, reached)
		for step := range 5 + h.rng.Intn(35) {
			err := h.step()
			if err == nil {
				err = h.compare()
			}
			if err != nil {
				t.Fatalf("seed %d, step %d: %v", seed, step, err)
			}
		}
	}
	for _, what := range []string{"waits", "admitted", "first fit", "earmark", "why room", "why turn", "why quarantine", "why lockstep"} {
		if int64(reached[what]) < count/10 {
			t.Errorf("%q was reached only %d times in %d histories", what, reached[what], count)
		}
	}
}

// FuzzSteps lets a fuzzer choose the history; a copy goes along, which must be
// encoded alike.
func FuzzSteps(f *testing.F) {
	f.Add([]byte("first come, first served, within reason"))
	for seed := range int64(8) {
		b := make([]byte, 200)
		rand.New(rand.NewSource(seed)).Read(b)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		in := &bytesSource{b: b}
		h := historyOf(rand.New(in), map[string]int{})
		for step := 0; len(in.b) > 0 && step < 500; step++ {
			err := h.step()
			if err == nil {
				err = h.compare()
			}
			if err != nil {
				t.Fatalf("step %d: %v", step, err)
			}
			if clone := h.l.Clone(); string(clone.Encode(nil, nil, nil)) != string(h.l.Encode(nil, nil, nil)) {
				t.Fatalf("step %d: a clone is encoded differently", step)
			}
		}
	})
}

// bytesSource makes a fuzzer's bytes choices, one byte each.
type bytesSource struct{ b []byte }

func (s *bytesSource) Seed(int64) {}

func (s *bytesSource) Int63() int64 {
	if len(s.b) == 0 {
		return 0
	}
	x := int64(s.b[0])
	s.b = s.b[1:]
	return x<<32 | x // Intn looks at the high half, Int63n at the low one
}

// TestCloneAndEncode runs two copies of a ledger, one of which went through a
// longer history: they are encoded alike as long as they are treated alike, and
// a clone is not touched by what happens to the original.
func TestCloneAndEncode(t *testing.T) {
	encode := func(l *Ledger) string { return string(l.Encode(nil, nil, nil)) }
	for seed := int64(0); seed < 1_000; seed++ {
		fresh, used := newHistory(seed, map[string]int{}), newHistory(seed, map[string]int{})
		// A past that ends with nothing: other indices, arrivals and rounds.
		for i := range uint64(30) {
			if ok, err := used.l.Request(1_000_000+i, Sender(100+i%7), 1+int64(i)%used.m.cfg.Capacity); ok || err != nil {
				continue
			}
			used.l.Remove(1_000_000 + i/2)
		}
		for {
			if used.l.Return(used.m.cfg.Capacity - used.l.Free()); used.l.Waiting() == 0 {
				break
			}
			for _, ok := used.l.Next(); ok; _, ok = used.l.Next() {
			}
		}
		for step := range 40 {
			before, clone := encode(fresh.l), fresh.l.Clone()
			if err := fresh.step(); err != nil {
				t.Fatalf("seed %d, step %d: %v", seed, step, err)
			}
			if encode(clone) != before {
				t.Fatalf("seed %d, step %d: a clone has changed with the original", seed, step)
			}
			if err := clone.Check(); err != nil {
				t.Fatalf("seed %d, step %d: clone: %v", seed, step, err)
			}
			if err := used.step(); err != nil {
				t.Fatalf("seed %d, step %d: %v", seed, step, err)
			}
			if encode(fresh.l) != encode(used.l) {
				t.Fatalf("seed %d, step %d: equal states are encoded differently", seed, step)
			}
		}
	}
}
