package outbound

import (
	"fmt"
	"testing"

	"github.com/berthkv/berth/internal/kv"
)

// TestTransitions: every move of a request, legal and illegal.
func TestTransitions(t *testing.T) {
	want := map[[2]reqState]string{
		{queued, begun}:   "its Begin goes out",
		{queued, ended}:   "it ends before any receiver heard of it",
		{begun, queued}:   "busy: again, under another number",
		{begun, granted}:  "admitted",
		{begun, ending}:   "a cause of ours",
		{begun, ended}:    "refused, or its session is lost",
		{granted, ending}: "a cause of ours",
		{granted, ended}:  "ready, the receiver's word, or its session is lost",
		{ending, ended}:   "the receiver's word, or its session is lost",
		{ended, told}:     "none of its writes is in flight",
	}
	for from := range reqStates {
		for to := range reqStates {
			_, legal := want[[2]reqState{from, to}]
			t.Run(fmt.Sprintf("%s_to_%s", from, to), func(t *testing.T) {
				r := &request{id: "r", state: from}
				panicked := func() (p bool) {
					defer func() { p = recover() != nil }()
					r.become(to)
					return false
				}()
				if panicked == legal {
					t.Fatalf("refused: %v; legal: %v", panicked, legal)
				}
				if legal && r.state != to {
					t.Fatalf("it is %s", r.state)
				}
			})
		}
	}
}

// TestSlotTransitions: every move of a staging slot, legal and illegal.
func TestSlotTransitions(t *testing.T) {
	moves := []struct {
		name string
		from slotState
		to   slotState
		do   func(*pool, kv.SlotID)
	}{
		{"submitted", slotStaged, slotWriting, func(p *pool, id kv.SlotID) { p.submitted(id) }},
		{"quarantine", slotStaged, slotQuarantined, func(p *pool, id kv.SlotID) { p.quarantine(id) }},
		{"unstage", slotStaged, slotFree, func(p *pool, id kv.SlotID) { p.put(id, slotStaged) }},
		{"written", slotWriting, slotFree, func(p *pool, id kv.SlotID) { p.put(id, slotWriting) }},
		{"fenced", slotQuarantined, slotFree, func(p *pool, id kv.SlotID) { p.put(id, slotQuarantined) }},
	}
	into := map[slotState]func(*pool, *peer) kv.SlotID{
		slotFree:   func(p *pool, _ *peer) kv.SlotID { return p.free[len(p.free)-1] },
		slotStaged: func(p *pool, of *peer) kv.SlotID { return p.take(1, "r", of).Slot },
		slotWriting: func(p *pool, of *peer) kv.SlotID {
			id := p.take(1, "r", of).Slot
			p.submitted(id)
			return id
		},
		slotQuarantined: func(p *pool, of *peer) kv.SlotID {
			id := p.take(1, "r", of).Slot
			p.quarantine(id)
			return id
		},
	}
	for _, m := range moves {
		for from := range slotStates {
			p, of := newPool(3), &peer{}
			id := into[from](&p, of)
			gen := p.slots[id].gen
			panicked := func() (bad bool) {
				defer func() { bad = recover() != nil }()
				m.do(&p, id)
				return false
			}()
			switch {
			case panicked != (from != m.from):
				t.Errorf("%s of a slot in state %d: refused %v", m.name, from, panicked)
			case !panicked && p.slots[id].state != m.to:
				t.Errorf("%s of a slot in state %d leads to %d", m.name, from, p.slots[id].state)
			case p.slots[id].gen != gen:
				t.Errorf("%s changes the generation", m.name)
			}
			if n := p.status(); n.Free+n.Staged+n.Writing+n.Quarantined != n.Capacity {
				t.Errorf("%s of a slot in state %d: %+v", m.name, from, n)
			}
		}
	}
}

// TestShares: requests for one receiver may take slots if they then hold at most
// three times what is left free, or hold none and ask for one.
func TestShares(t *testing.T) {
	for capacity := 1; capacity <= 12; capacity++ {
		for held := 0; held <= capacity; held++ {
			for others := 0; held+others <= capacity; others++ {
				for n := 1; n <= capacity; n++ {
					c := &Core{pool: newPool(capacity)}
					p, q := &peer{}, &peer{}
					for range held {
						c.pool.take(1, "r", p)
					}
					for range others {
						c.pool.take(1, "r", q)
					}
					free := capacity - held - others
					want := n <= free && (held+n <= 3*(free-n) || (held == 0 && n == 1))
					if got := c.mayTake(p, n); got != want {
						t.Fatalf("%d slots, %d held, %d others': %d more: %v, want %v", capacity, held, others, n, got, want)
					}
				}
			}
		}
	}
}

// TestShareOfStopped: alone a receiver gets 3/4 of the pool; k stopped ones leave
// about 1/(1+3k) of it, and each of them got something.
func TestShareOfStopped(t *testing.T) {
	const capacity = 4096
	c := &Core{pool: newPool(capacity)}
	for k := 1; k <= 4; k++ {
		p := &peer{}
		for c.mayTake(p, 1) {
			c.pool.take(1, "r", p)
		}
		left := len(c.pool.free)
		// Each takes 3/4 of what it finds, so this is the order in which they stop.
		want := capacity
		for range k {
			want /= 4
		}
		if left < want || left > want+k {
			t.Errorf("%d stopped receivers leave %d of %d slots, not about %d", k, left, capacity, want)
		}
	}
	// Stopping together they take one by one, and leave 1/(1+3k).
	for k := 1; k <= 4; k++ {
		c := &Core{pool: newPool(capacity)}
		ps := make([]peer, k)
		for again := true; again; {
			again = false
			for i := range ps {
				if c.mayTake(&ps[i], 1) {
					c.pool.take(1, "r", &ps[i])
					again = true
				}
			}
		}
		if left, want := len(c.pool.free), capacity/(1+3*k); left < want-k || left > want+k {
			t.Errorf("%d receivers that stop together leave %d of %d slots, not about %d", k, left, capacity, want)
		}
	}
}

// TestEndingsKept: the youngest of a name counts, the oldest goes at the limit,
// and none outlives its time.
func TestEndingsKept(t *testing.T) {
	e := newEndings(3, 10*kv.Second)
	at := func(s int) kv.Instant { return kv.Instant(s) * kv.Instant(kv.Second) }
	for i := range 100 {
		name := fmt.Sprint("r", i%7)
		e.put(at(i), kept{Ending: Ending{ReqID: name, Text: fmt.Sprint(i)}})
		if got := e.get(at(i), name); got == nil || got.Text != fmt.Sprint(i) {
			t.Fatalf("after %d: %v", i, got)
		}
		if n := len(e.order) - e.head; n > 3 {
			t.Fatalf("%d are kept", n)
		}
		if i >= 3 && e.get(at(i), fmt.Sprint("r", (i-3)%7)) != nil {
			t.Fatalf("after %d the fourth oldest is kept", i)
		}
	}
	e.put(at(100), kept{Ending: Ending{ReqID: "again", Text: "old"}})
	e.put(at(101), kept{Ending: Ending{ReqID: "again", Text: "new"}})
	e.expire(at(110))
	if got := e.get(at(110), "again"); got == nil || got.Text != "new" {
		t.Fatalf("the younger went with the older: %v", got)
	}
	if e.get(at(111), "again") != nil {
		t.Fatal("it outlives its time")
	}
	e.expire(at(111))
	if len(e.byID) != 0 || e.next() != kv.Never {
		t.Fatalf("%d names are left", len(e.byID))
	}
}
