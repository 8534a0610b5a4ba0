//go:build interop && nixl

package interop

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/berthkv/berth/client"
	"github.com/berthkv/berth/internal/zmtp"
)

// compareTimeout is each receiver's allocation timeout here; LMCache's default
// is infinite. patience is how long a scenario waits for what does not come.
const (
	compareTimeout = 4.0
	patience       = 8 * time.Second
	compareSlots   = 10
)

// side is a sender or a receiver of either system, as a scenario uses it.
type sideSender interface {
	batch(req string, keys []string, from, to, total int, last bool)
	cancelled(req string)
	die()
}

type sideReceiver interface {
	at() target
	free() int
	waiting() int                        // requests that wait for room
	read(req string, keys []string) bool // by the engine, when it is there
	restart()
}

// column is one pair.
type column struct {
	name string
	w    *words
	s    sideSender
	r    sideReceiver
}

// outcome of a scenario in one column; bad means what Berth must not show.
type outcome struct {
	text string
	bad  bool
	took time.Duration
}

// within waits for a condition, at most patience.
func within(ok func() bool) (time.Duration, bool) { return withinTime(patience, ok) }

func withinTime(most time.Duration, ok func() bool) (time.Duration, bool) {
	start := time.Now()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		if time.Since(start) > most {
			return most, false
		}
		<-tick.C
	}
	return time.Since(start), true
}

// scenarios are what measured faults of the reference look like.
var scenarios = []struct {
	name string
	run  func(c *column, id string) outcome
}{
	{"two requests of 8 chunks in turn, one sender, 10 slots", func(c *column, id string) outcome {
		a, b := id+"A", id+"B"
		ka, kb := plain.keys(8), plain.keys(8)
		c.s.batch(a, ka, 0, 4, 8, false)
		c.s.batch(b, kb, 0, 4, 8, false)
		c.s.batch(a, ka, 4, 8, 8, true)
		took, ok := within(func() bool { return c.w.count(a) > 0 })
		c.r.read(a, ka)
		c.s.batch(b, kb, 4, 8, 8, true)
		_, second := within(func() bool { return c.w.count(b) > 0 })
		c.r.read(b, kb)
		text := fmt.Sprintf("first %s, second %s", word(ok), word(second))
		return outcome{text, !ok || took > 3*time.Second, took}
	}},
	{"last-flagged batch first", func(c *column, id string) outcome {
		k := plain.keys(6)
		c.s.batch(id, k, 3, 6, 6, true)
		c.s.batch(id, k, 0, 3, 6, false)
		took, ok := within(func() bool { return c.w.count(id) > 0 })
		c.r.read(id, k)
		free, all := c.settle()
		return outcome{fmt.Sprintf("%s, %d of %d free", word(ok), free, compareSlots), !all, took}
	}},
	{"batch after its request's cancel", func(c *column, id string) outcome {
		k := plain.keys(6)
		c.s.batch(id, k, 0, 3, 6, false)
		within(func() bool { return c.r.free() < compareSlots })
		c.s.cancelled(id)
		within(func() bool { return c.r.free() == compareSlots })
		c.s.batch(id, k, 3, 6, 6, true)
		withinTime(2*time.Second, func() bool { return c.r.free() < compareSlots }) // it should stay so
		free, all := c.settle()
		return outcome{fmt.Sprintf("%d of %d free", free, compareSlots), !all, 0}
	}},
	{"cancel names another request's key", func(c *column, id string) outcome {
		k := plain.keys(2)
		c.s.batch(id+"C", k, 0, 2, 2, true)
		within(func() bool { return c.w.count(id+"C") > 0 })
		rawCancel(c.r.at(), id+"X", k)
		ok := c.r.read(id+"C", k)
		return outcome{map[bool]string{true: "chunks are there", false: "chunks are gone"}[ok], !ok, 0}
	}},
	{"cancel of a waiting request", func(c *column, id string) outcome {
		ka, kb := plain.keys(8), plain.keys(8)
		c.s.batch(id+"A", ka, 0, 8, 8, true)
		within(func() bool { return c.w.count(id+"A") > 0 })
		c.s.batch(id+"B", kb, 0, 8, 8, true)
		if _, waits := within(func() bool { return c.r.waiting() == 1 }); !waits {
			return outcome{"never waited", true, 0}
		}
		c.s.cancelled(id + "B")
		c.r.read(id+"A", ka)
		free, all := c.settle()
		return outcome{fmt.Sprintf("%d of %d free", free, compareSlots), !all, 0}
	}},
	{"dead sender", func(c *column, id string) outcome {
		c.s.batch(id, plain.keys(6), 0, 3, 6, false)
		if _, granted := within(func() bool { return c.r.free() < compareSlots }); !granted {
			return outcome{"never granted", true, 0}
		}
		c.s.die()
		took, all := within(func() bool { return c.r.free() == compareSlots })
		return outcome{fmt.Sprintf("%d of %d free", c.r.free(), compareSlots), !all, took}
	}},
	{"chunks that nobody reads", func(c *column, id string) outcome {
		c.s.batch(id, plain.keys(3), 0, 3, 3, true)
		within(func() bool { return c.w.count(id) > 0 })
		took, all := within(func() bool { return c.r.free() == compareSlots })
		return outcome{fmt.Sprintf("%d of %d free", c.r.free(), compareSlots), !all, took}
	}},
	{"garbage on both ports", func(c *column, id string) outcome {
		garbage(c.r.at())
		k := plain.keys(2)
		c.s.batch(id, k, 0, 2, 2, true)
		took, ok := within(func() bool { return c.w.count(id) > 0 })
		c.r.read(id, k)
		return outcome{"then " + word(ok), !ok, took}
	}},
	{"restarted receiver, same sender", func(c *column, id string) outcome {
		first := plain.keys(2)
		c.s.batch(id+"first", first, 0, 2, 2, true)
		within(func() bool { return c.w.count(id+"first") > 0 })
		c.r.read(id+"first", first)
		c.r.restart()
		took, ok := within(func() bool {
			k, req := plain.keys(2), fmt.Sprint(id, time.Now().UnixNano())
			c.s.batch(req, k, 0, 2, 2, true)
			_, ok := withinTime(time.Second, func() bool { return c.w.count(req) > 0 })
			return ok && c.r.read(req, k)
		})
		return outcome{"then " + word(ok), !ok, took}
	}},
}

func word(ok bool) string {
	if ok {
		return "ready"
	}
	return "never ready"
}

// settle waits until everything is free and stays so: what is cancelled while it
// waits may be granted later.
func (c *column) settle() (int, bool) {
	_, all := within(func() bool { return c.r.free() == compareSlots })
	_, gone := withinTime(time.Second, func() bool { return c.r.free() < compareSlots })
	return c.r.free(), all && !gone
}

// rawCancel says CancelNotif for a request that the keys do not belong to.
func rawCancel(to target, req string, keys []string) {
	ctx, cancel := contextFor(patience)
	defer cancel()
	c, err := zmtp.DialDealer(ctx, fmt.Sprint("127.0.0.1:", to.alloc), nil, zmtp.Options{Identity: []byte("other-to-x" + req)})
	if err != nil {
		return
	}
	defer c.Close()
	c.Send(nil, cancelNotif(req, keys))
	c.Recv(ctx)
}

func garbage(to target) {
	for _, port := range []int{to.alloc, to.init} {
		ctx, cancel := contextFor(time.Second)
		if c, err := zmtp.DialDealer(ctx, fmt.Sprint("127.0.0.1:", port), nil, zmtp.Options{Identity: []byte("garbage")}); err == nil {
			c.Send(nil, []byte("\xc1garbage"))
			c.Recv(ctx)
			c.Close()
		}
		cancel()
	}
}

// ---- the four kinds ----

type lmSender struct {
	*lmcacheSender
	to func() target
}

func (s *lmSender) batch(req string, keys []string, from, to, total int, last bool) {
	s.try(s.command(s.to(), req, keys[from:to], total, last, 0))
}
func (s *lmSender) cancelled(req string) { s.try(command{"op": "cancel", "at": s.at, "req": req}) }
func (s *lmSender) die()                 { s.kill() }

type lmReceiver struct {
	*lmcacheReceiver
	next func(target) *lmcacheReceiver
}

func (r *lmReceiver) at() target { return r.target }
func (r *lmReceiver) free() int {
	s := r.try(command{"op": "state", "at": r.lmcacheReceiver.at})
	return s.Free - max(0, s.Reserved-len(s.Keys))
}
func (r *lmReceiver) waiting() int {
	return r.try(command{"op": "state", "at": r.lmcacheReceiver.at}).Waiting
}
func (r *lmReceiver) read(_ string, keys []string) bool {
	return r.try(command{"op": "remove", "at": r.lmcacheReceiver.at, "keys": keys}).Removed == len(keys)
}
func (r *lmReceiver) restart() { r.kill(); r.lmcacheReceiver = r.next(r.target) }

type berthSender struct {
	t    *testing.T
	a    *agent
	w    *words
	to   func() target
	live map[string]*client.Transfer
	work sync.WaitGroup // batches that are being staged, in memory that closing unmaps
}

func (s *berthSender) batch(req string, keys []string, from, to, total int, last bool) {
	tr := s.live[req]
	if tr == nil {
		var err error
		if tr, err = s.a.tryBegin(s.to(), req, total); err != nil {
			return
		}
		s.live[req] = tr
	}
	a := s.a
	s.work.Go(func() { // as an engine does that goes on with others meanwhile
		select {
		case <-tr.Granted():
			end := client.NoEnd
			if last {
				end = total
			}
			a.submit(tr, from, keys[from:to], end, 0)
		case <-tr.Ended():
		case <-time.After(patience):
		}
	})
}
func (s *berthSender) cancelled(req string) {
	if tr := s.live[req]; tr != nil {
		tr.Cancel(ctxFor(s.t), "cancelled", "test")
	}
}

// die cuts the agent off; another takes its place.
func (s *berthSender) die() {
	s.work.Wait()
	s.a.engine.Close()
	s.a.Close()
	s.a = sending(s.t, plain, 24, s.w.port, nil)
	s.live = map[string]*client.Transfer{}
}

type berthReceiver struct {
	t *testing.T
	a *agent
}

func (r *berthReceiver) at() target   { return r.a.target() }
func (r *berthReceiver) free() int    { return int(r.a.status().Pool.Free) }
func (r *berthReceiver) waiting() int { return r.a.status().Waiting }
func (r *berthReceiver) read(req string, keys []string) bool {
	got, n, err := r.a.engine.Find(ctxFor(r.t), req, keys)
	if err != nil || got != req || n != len(keys) {
		return false
	}
	if _, err := r.a.engine.Claim(ctxFor(r.t), req, req); err != nil {
		return false
	}
	return r.a.engine.Release(ctxFor(r.t), req, req) == nil
}
func (r *berthReceiver) restart() {
	to := r.a.target()
	r.a.engine.Close()
	r.a.Close()
	r.a = compareReceiver(r.t, to)
}

func compareReceiver(t *testing.T, to target) *agent {
	return receiving(t, plain, compareSlots, settings{"pd_peer_init_port": fmt.Sprint(to.init), "pd_peer_alloc_port": fmt.Sprint(to.alloc),
		"pd_allocation_timeout_sec": fmt.Sprint(compareTimeout), "unclaimed_ttl_sec": "2", "request_timeout_sec": "5",
		"surplus_grace_sec": "2", "lease_sec": "1", "quarantine_sec": "1"})
}

// TestCompare runs every scenario in every column and prints a table. Only
// Berth's columns are asserted.
func TestCompare(t *testing.T) {
	part(t, "7 side by side")
	columns := []string{"LMCache->LMCache", "LMCache->Berth", "Berth->Berth"}
	started := startPeers(t, 2)
	procs := &processes{t: t, recv: started[0], send: started[1]}
	table := &strings.Builder{}
	out := tabwriter.NewWriter(table, 0, 0, 2, ' ', 0)
	fmt.Fprintf(out, "SCENARIO\t%s\n", strings.Join(columns, "\t"))
	for i, sc := range scenarios {
		row := []string{sc.name}
		for j, name := range columns {
			t.Run(fmt.Sprintf("%d %s", i, name), func(t *testing.T) {
				c := makeColumn(t, procs, j)
				o := sc.run(c, fmt.Sprintf("q%d%d", i, j))
				cell := o.text
				if o.took > 0 {
					cell += fmt.Sprintf(" (%.1f s)", o.took.Seconds())
				}
				if o.bad {
					cell = "! " + cell
				}
				row = append(row, cell)
				if o.bad && slices.Contains(sticky, sc.name) { // what is stuck in LMCache must not spoil the next cell
					procs.recv.kill()
					procs.send.kill()
				}
				expected := j == 1 && slices.Contains(lmcacheSendersOwn, sc.name)
				if o.bad && j > 0 && !expected {
					t.Errorf("%s: %s", sc.name, o.text)
				}
			})
		}
		fmt.Fprintln(out, strings.Join(row, "\t"))
	}
	out.Flush()
	fmt.Fprintf(os.Stdout, "\n%s\n! what should not be. Allocation timeout %.0f s (LMCache's default: none); waited %.0f s for what does not come.\n",
		table, compareTimeout, patience.Seconds())
}

// sticky are scenarios after which an LMCache process may be good for nothing.
var sticky = []string{scenarios[0].name, "garbage on both ports", "restarted receiver, same sender"}

// lmcacheSendersOwn are scenarios that an LMCache sender loses by itself,
// whatever the receiver does: it never repeats its handshake.
var lmcacheSendersOwn = []string{"restarted receiver, same sender"}

// processes are the two LMCache processes that all cells share; one that a
// scenario kills is replaced.
type processes struct {
	t          *testing.T
	recv, send *peerProcess
	cells      int
}

// open opens a backend in one of the two processes, in a new one if it has died.
func (p *processes) open(at **peerProcess, c command) {
	p.cells++
	c["at"] = fmt.Sprint("b", p.cells)
	if !(*at).dead && (*at).try(c).Error == "" {
		return
	}
	(*at).kill()
	*at = startPeers(p.t, 1)[0]
	(*at).do(c)
}

func (p *processes) receiver(to target) *lmcacheReceiver {
	c := open(plain, "", "receiver", compareSlots, compareTimeout)
	c["host"], c["init"], c["alloc"] = "127.0.0.1", to.init, to.alloc
	p.open(&p.recv, c)
	return &lmcacheReceiver{p.recv, to, c["at"].(string)}
}

func (p *processes) sender(notify int) *lmcacheSender {
	c := open(plain, "", "sender", 24, 20)
	c["proxy"] = notify
	p.open(&p.send, c)
	return &lmcacheSender{p.send, c["at"].(string), plain}
}

// makeColumn makes a pair.
func makeColumn(t *testing.T, p *processes, kind int) *column {
	t.Helper()
	c := &column{w: listenWords(t)}
	to := newTarget(t)
	if kind == 0 {
		c.r = &lmReceiver{p.receiver(to), p.receiver}
	} else {
		c.r = &berthReceiver{t, compareReceiver(t, to)}
	}
	if kind < 2 {
		c.s = &lmSender{p.sender(c.w.port), c.r.at}
	} else {
		s := &berthSender{t: t, a: sending(t, plain, 24, c.w.port, nil), w: c.w, to: c.r.at, live: map[string]*client.Transfer{}}
		t.Cleanup(s.work.Wait)
		c.s = s
	}
	return c
}
