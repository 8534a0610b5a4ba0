package bench

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/berthkv/berth/internal/arena"
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/wire"
	"github.com/berthkv/berth/internal/zmtp"
)

// Agent is `berth bench agent`: what an agent costs that does nothing, how it
// starts, and how memory and admission grow with senders and slots.
type Agent struct {
	Options
	Pool    int64         // bytes
	Idle    time.Duration // for which wake-ups are counted
	Senders []int         // connected; ratios are to the first
	Slots   []int         // of the pool; likewise
	Count   int           // admissions in a turn
}

const (
	agentSlot   = 256 << 10
	growthSlot  = 512  // bytes: the pool's own memory is not what grows here
	growthSlots = 1000 // where senders grow
	growthKeys  = 8    // chunks of a request
	agentChecks = "generations and fences on; no bytes move"
	mib         = 1 << 20
)

// Run measures.
func (a Agent) Run(ctx context.Context) (*Report, error) {
	bounds := []bound{{"pool", a.Pool / mib, 1 << 20}, {"idle", int64(a.Idle), int64(time.Minute)}, {"count", int64(a.Count), maxCount}}
	for _, n := range a.Senders {
		bounds = append(bounds, bound{"senders", int64(n), 4000})
	}
	for _, n := range a.Slots {
		bounds = append(bounds, bound{"slots", int64(n), kv.MaxSlots})
		if n > 0 && n < growthKeys {
			return nil, refuse("--slots has %d; a request has %d chunks", n, growthKeys)
		}
	}
	if err := check(bounds); err != nil {
		return nil, err
	}
	r, err := a.begin(ctx, "agent")
	if err != nil {
		return nil, err
	}
	return r.end(a.measure(r))
}

func (a Agent) measure(r *run) error {
	for _, part := range []func(*run) error{a.starts, a.pages, a.idle, a.senders, a.slots} {
		if err := part(r); err != nil {
			return err
		}
	}
	return nil
}

// grown are the metrics of something that grows.
var grown = []metric{{"process to /ready, with an engine", "ms"}, {"memory besides pools", "MB"}, {"begin to granted, closed, p50", "µs"}, {"begin to granted, closed, p99", "µs"}}

// series adds rows for each size, compared with the first. The figures are by
// size and metric.
func (r *run) series(what string, sizes []int, thing string, metrics []metric, figures [][][]float64) {
	for i, n := range sizes {
		for m, metric := range metrics {
			name, against, first := fmt.Sprintf("%s, %d %s: %s", what, n, thing, metric.name), "", []float64(nil)
			if i > 0 {
				against, first = fmt.Sprintf("%d %s", sizes[0], thing), figures[0][m]
			}
			r.add(name, metric.unit, agentChecks, against, figures[i][m], first)
			r.say("%s %s %s", name, figure(mean(figures[i][m])), metric.unit)
		}
	}
}

// receiver starts a receiver and waits until it is ready, which it is once an
// engine is there: this process is one for that moment.
func (a Agent) receiver(r *run, name string, slots int, slot int64) (k *child, addr string, start time.Duration, err error) {
	o := r.agentOptions(name, slots, slot)
	o["lease_sec"], o["links"] = "300", "tcp"
	port, err := o.receiving()
	if err != nil {
		return nil, "", 0, err
	}
	begun := time.Now()
	k, addrs, err := r.agent(name, o)
	if err != nil {
		return nil, "", 0, err
	}
	ctx, cancel := context.WithTimeout(r.ctx, startTimeout)
	defer cancel()
	_, leave, err := Work{Socket: addrs.Local, Slot: slot}.engine(ctx)
	if err != nil {
		return nil, "", 0, k.failed(err)
	}
	defer leave()
	for ready := false; !ready; {
		if ready, err = get(ctx, "http://"+addrs.HTTP+"/ready"); err == nil && !ready {
			err = sleepUntil(ctx, time.Now().Add(time.Millisecond))
		}
		if err != nil {
			return nil, "", 0, k.failed(err)
		}
	}
	return k, net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), time.Since(begun), nil
}

func get(ctx context.Context, url string) (ok bool, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return false, err
	}
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := c.Do(req)
	if err != nil {
		return false, err
	}
	return resp.StatusCode == http.StatusOK, resp.Body.Close()
}

func (a Agent) starts(r *run) error {
	var ms []float64
	for i := range r.Repeat + 1 {
		k, _, d, err := a.receiver(r, "start-"+strconv.Itoa(i), int(max(a.Pool/agentSlot, 1)), agentSlot)
		if err != nil {
			return err
		}
		k.end()
		if i > 0 {
			ms = append(ms, d.Seconds()*1e3)
		}
	}
	r.add(fmt.Sprintf("start, pool of %d MiB: process to /ready, with an engine", a.Pool/mib), "ms", agentChecks, "", ms, nil)
	return nil
}

// pages measures what touching pages costs, and what a transfer pays that comes
// before: slots are touched lowest first, and these are filled from the highest.
func (a Agent) pages(r *run) error {
	slots := int(max(a.Pool/agentSlot, 2))
	src := make([]byte, agentSlot)
	var perGB, fresh, warm []float64
	for range r.Repeat {
		start := time.Now()
		p, touched, err := newTouched(slots)
		if err != nil {
			return err
		}
		err = <-touched
		perGB = append(perGB, time.Since(start).Seconds()/(float64(slots)*agentSlot/1e9))
		if err = errors.Join(err, p.Close()); err != nil {
			return err
		}
		if p, touched, err = newTouched(slots); err != nil {
			return err
		}
		copyUpper := func() float64 {
			start, m := time.Now(), p.Bytes()
			for s := slots - 1; s >= slots/2; s-- {
				copy(m[s*agentSlot:(s+1)*agentSlot], src)
			}
			return float64((slots-slots/2)*agentSlot) / 1e9 / time.Since(start).Seconds()
		}
		fresh = append(fresh, copyUpper())
		err = <-touched
		warm = append(warm, copyUpper())
		if err = errors.Join(err, p.Close()); err != nil {
			return err
		}
	}
	const what = "pages of a pool"
	r.add(what+": touching them", "s/GB", agentChecks, "", perGB, nil)
	r.add(what+": copies into slots before they are touched", "GB/s", agentChecks, "touched ones", fresh, warm)
	return nil
}

// newTouched makes a pool; the channel tells when all its pages are touched.
func newTouched(slots int) (*arena.Pool, chan error, error) {
	touched := make(chan error, 1)
	p, err := arena.New(arena.Config{Name: "benchmark pool", Slots: slots, SlotBytes: agentSlot, Progress: func(n int, err error) {
		if n == slots || err != nil {
			select {
			case touched <- err:
			default:
			}
		}
	}})
	return p, touched, err
}

// idle counts the wake-ups of agents, alone and with a session and engines.
func (a Agent) idle(r *run) error {
	slots := int(max(a.Pool/agentSlot, 2*growthKeys))
	alone, _, _, err := a.receiver(r, "idle-alone", slots, agentSlot)
	if err != nil {
		return err
	}
	o := r.agentOptions("idle-receiver", slots, agentSlot)
	port, err := o.receiving()
	if err != nil {
		return err
	}
	receiver, err := r.engine("idle-receiver", Work{What: "receive", Slot: agentSlot}, false, o)
	if err != nil {
		return err
	}
	sender, err := r.engine("idle-sender", Work{What: "send", Slot: agentSlot}, false, r.agentOptions("idle-sender", slots, agentSlot))
	if err != nil {
		return err
	}
	work := order{Count: 8, Chunks: growthKeys, Inflight: 1, Receiver: port, Senders: []int{0}}
	if _, err := askAll([]*child{receiver[0], sender[0]}, work); err != nil {
		return err
	}
	for _, who := range []struct {
		name string
		k    *child
	}{{"idle receiver, no peer", alone}, {"idle receiver, after transfers, a session and an engine", receiver[1]}, {"idle sender, after transfers, a session and an engine", sender[1]}} {
		var wakes, own, cpu []float64
		for turn := range r.Repeat + 1 {
			before, err := usageOf(who.k.pid())
			if err != nil {
				return err
			}
			if err := sleepUntil(r.ctx, time.Now().Add(a.Idle)); err != nil {
				return err
			}
			after, err := usageOf(who.k.pid())
			if err != nil {
				return err
			}
			if turn == 0 { // pages may still be touched
				continue
			}
			wakes = append(wakes, float64(after.wakes(before))/a.Idle.Seconds())
			cpu = append(cpu, (after.cpu-before.cpu).Seconds()*1e3/a.Idle.Seconds())
			own = append(own, float64(after.own)/1e6)
		}
		r.say("%s: %s wake-ups a second, %s MB", who.name, figure(mean(wakes)), figure(mean(own)))
		r.add(who.name+": wake-ups", "per second", agentChecks, "", wakes, nil)
		r.add(who.name+": CPU", "ms/s", agentChecks, "", cpu, nil)
		r.add(who.name+": memory besides pools", "MB", agentChecks, "", own, nil)
	}
	for _, k := range append(append([]*child{alone}, receiver...), sender...) {
		k.end()
	}
	return nil
}

// senders has more and more sessions at one receiver.
func (a Agent) senders(r *run) error {
	k, addr, _, err := a.receiver(r, "growth-senders", growthSlots, growthSlot)
	if err != nil {
		return err
	}
	defer k.end()
	var all []*session
	defer func() {
		for _, s := range all {
			s.conn.Close()
		}
	}()
	var figures [][][]float64
	for _, n := range a.Senders {
		for len(all) < n {
			s, err := openSession(r.ctx, addr)
			if err != nil {
				return err
			}
			all = append(all, s)
		}
		f, err := a.admissions(r, k, all[n-1])
		if err != nil {
			return err
		}
		figures = append(figures, f)
	}
	r.series("one receiver", a.Senders, "senders", grown[1:], figures)
	return nil
}

// slots starts receivers of larger and larger pools.
func (a Agent) slots(r *run) error {
	var figures [][][]float64
	for _, n := range a.Slots {
		k, addr, start, err := a.receiver(r, "growth-slots-"+strconv.Itoa(n), n, growthSlot)
		if err != nil {
			return err
		}
		s, err := openSession(r.ctx, addr)
		if err != nil {
			return err
		}
		f, err := a.admissions(r, k, s)
		s.conn.Close()
		k.end()
		if err != nil {
			return err
		}
		figures = append(figures, append([][]float64{{start.Seconds() * 1e3}}, f...))
	}
	r.series("one sender", a.Slots, "slots", grown, figures)
	return nil
}

// admissions has a session admit and cancel requests, and returns the receiver's
// memory and the latencies' quantiles, one of each for each turn.
func (a Agent) admissions(r *run, k *child, s *session) ([][]float64, error) {
	out := make([][]float64, 3)
	for turn := range r.Repeat + 1 {
		t, err := drive(r.ctx, 1, a.Count, nil, func(ctx context.Context, _, _ int) (time.Time, error) { return s.admit(ctx) })
		if err != nil {
			return nil, err
		}
		u, err := usageOf(k.pid())
		if err != nil {
			return nil, err
		}
		h := histogram(t.latency)
		for i, v := range []float64{float64(u.own) / 1e6, quantile(h, 50), quantile(h, 99)} {
			if turn > 0 { // the first is the warm-up
				out[i] = append(out[i], v)
			}
		}
	}
	return out, nil
}

// session is a sender's, spoken by hand: it moves nothing.
type session struct {
	conn       *zmtp.Conn
	seq, begin uint64
}

func openSession(ctx context.Context, addr string) (*session, error) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	h := &msg.Hello{Min: msg.Version, Max: msg.Version, Role: msg.RoleSender, Node: "bench",
		Facts: &kv.Facts{SlotBytes: growthSlot, Format: kv.Format2TD, DType: "uint8", ChunkTokens: chunkTokens, TPSize: 1}}
	rand.Read(h.Incarnation[:])
	rand.Read(h.Secret[:])
	conn, err := zmtp.DialDealer(ctx, addr, nil, zmtp.Options{Identity: []byte("bench/" + h.Incarnation.Short() + "-to-" + addr + "#1")})
	if err != nil {
		return nil, err
	}
	s := &session{conn: conn, seq: 1}
	h.Seq = s.seq
	if _, err := ask[*msg.HelloReply](ctx, s, h); err != nil {
		conn.Close()
		return nil, err
	}
	return s, nil
}

// ask sends a request and returns its reply.
func ask[R msg.Message](ctx context.Context, s *session, m msg.Message) (reply R, err error) {
	b, err := wire.Append(nil, m)
	if err != nil {
		return reply, err
	}
	if err := s.conn.SendWait(ctx, nil, b); err != nil {
		return reply, err
	}
	frames, err := s.conn.Recv(ctx)
	if err != nil {
		return reply, err
	}
	got, err := wire.Decode(frames[len(frames)-1])
	if err != nil {
		return reply, err
	}
	reply, ok := got.(R)
	if !ok {
		return reply, fmt.Errorf("the receiver answers a %T with %+v", m, got)
	}
	return reply, nil
}

// admit has one request admitted and cancels it.
func (s *session) admit(ctx context.Context) (granted time.Time, err error) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	s.begin++
	s.seq++
	if _, err := ask[*msg.Granted](ctx, s, &msg.Begin{Seq: s.seq, Begin: s.begin, ReqID: "r" + strconv.FormatUint(s.begin, 10), Link: "tcp", TotalChunks: growthKeys}); err != nil {
		return granted, err
	}
	granted = time.Now()
	s.seq++
	_, err = ask[*msg.Ended](ctx, s, &msg.Cancel{Seq: s.seq, Begin: s.begin, Reason: fault.Cancelled})
	return granted, err
}
