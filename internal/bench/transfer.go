package bench

import (
	"context"
	"fmt"
	"math"
	"path/filepath"
	"strconv"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/berthkv/berth"
)

// Transfer is `berth bench transfer`: whole requests, from begin to their ending
// at the sender's engine, on one host.
type Transfer struct {
	Options
	Load     Load
	Chunks   int   // of a request
	Slot     int64 // bytes of a chunk
	Slots    int   // of each pool
	Senders  int
	Inflight int // of each sender; without a closed load, the most
	Count    int // requests of each sender in a turn
	Link     string
	Inside   bool // engines in their agents' processes; else beside them, over the local API
	Checksum bool
}

// side is one of the systems that a benchmark compares.
type side struct {
	name string
	kids []*child
	// turn makes requests [first, first+count) of each sender.
	turn func(first, count int, arrivals []float64) ([]answer, error)
}

// Run measures.
func (t Transfer) Run(ctx context.Context) (*Report, error) {
	if t.Chunks < 1 || t.Chunks > t.Slots || t.Senders < 1 || t.Inflight < 1 || t.Count < 1 || t.Slot < chunkTokens || t.Slot%chunkTokens != 0 {
		return nil, fmt.Errorf("a request of %d chunks in pools of %d slots of %d bytes, %d senders, %d in flight, %d requests: all above 0, a request within a pool, slots in whole multiples of %d bytes",
			t.Chunks, t.Slots, t.Slot, t.Senders, t.Inflight, t.Count, chunkTokens)
	}
	arrivals, err := t.Load.arrivals(t.Count)
	if err != nil {
		return nil, err
	}
	r, s, err := t.begin(ctx, "transfer")
	if err != nil {
		return nil, err
	}
	defer s.close()
	ours, err := t.berth(s)
	if err != nil {
		return nil, err
	}
	sides := []side{ours}
	if t.Against != "" {
		theirs, err := t.reference(s)
		if err != nil {
			return nil, err
		}
		sides = append(sides, theirs)
	}
	var at []float64
	for _, a := range arrivals {
		at = append(at, a.Seconds())
	}
	rates, p50, p99 := make([][]float64, 2), make([][]float64, 2), make([][]float64, 2)
	cpu := make([][]float64, 2)
	all := []*hdrhistogram.Histogram{newHistogram(), newHistogram()}
	next := make([]int, 2)
	for turn := range t.Repeat + 1 { // the first is the warm-up
		for i, side := range sides {
			count, when := t.Count, at
			if turn == 0 {
				count, when = max(t.Count/4, 2*t.Inflight), nil
			}
			for _, k := range side.kids {
				k.resume()
			}
			answers, err := side.turn(next[i], count, when)
			if err != nil {
				return nil, err
			}
			if i > 0 {
				for _, k := range side.kids {
					k.pause()
				}
			}
			next[i] += count
			if turn == 0 {
				continue
			}
			h, rate, used := newHistogram(), 0.0, 0.0
			for _, a := range answers {
				for _, l := range a.Latencies {
					h.RecordValue(int64(l * 1e9))
				}
				rate += float64(count) / a.Seconds
				used += a.CPU
			}
			all[i].Merge(h)
			rates[i], p50[i], p99[i] = append(rates[i], rate), append(p50[i], quantile(h, 50)), append(p99[i], quantile(h, 99))
			cpu[i] = append(cpu[i], used)
			s.say("turn %d/%d %s: %.0f requests/s, %.2f GB/s, p50 %.0f µs, p99 %.0f µs", turn, t.Repeat, side.name, rate, rate*t.gb(), p50[i][turn-1], p99[i][turn-1])
		}
	}
	kind := t.Load.Pattern + " arrivals"
	if arrivals == nil {
		kind = Closed + ", " + strconv.Itoa(t.Inflight) + " in flight"
	}
	r.add(fmt.Sprintf("requests (%s, %d senders, %d x %d KiB)", kind, t.Senders, t.Chunks, t.Slot>>10), "requests/s", rates[0], rates[1])
	r.add("bytes", "GB/s", scale(rates[0], t.gb()), scale(rates[1], t.gb()))
	r.add("begin to ready, p50 ("+kind+")", "µs", p50[0], p50[1])
	r.add("begin to ready, p99 ("+kind+")", "µs", p99[0], p99[1])
	for i, side := range sides {
		r.curves = append(r.curves, curve{side.name, all[i]})
	}
	api := "over the local API (four kinds of process)"
	if t.Inside {
		api = "engines inside their agents' processes"
	}
	sums := "no checksum, as the reference has none"
	if t.Checksum {
		sums = "CRC32C of every chunk at both ends"
	}
	r.note("link %s, %s; generations, fences and admission on; %s; %d turns of %d requests a sender after a warm-up, sides in turn",
		t.Link, api, sums, t.Repeat, t.Count)
	if t.Against != "" {
		r.note("the reference has its engine and backend in one process and NIXL over UCX; what is not measured is stopped (SIGSTOP)")
	}
	return r, nil
}

func (t Transfer) gb() float64 { return float64(t.Chunks) * float64(t.Slot) / 1e9 }

func scale(v []float64, by float64) (out []float64) {
	for _, x := range v {
		out = append(out, x*by)
	}
	return out
}

// agentOptions are the options of every agent that a benchmark starts.
func agentOptions(dir, name string, slots int, slot int64, more map[string]string) map[string]string {
	o := map[string]string{
		"node": name, "http_addr": "127.0.0.1:0", "local_socket": filepath.Join(dir, name+".sock"), "log_level": "warn", "legacy_data": "none",
		"chunk_size": strconv.Itoa(chunkTokens), "slot_bytes": strconv.FormatInt(slot, 10), "pd_buffer_size": strconv.FormatInt(slot*int64(slots), 10),
		"pd_skip_proxy_notification": "true", "pd_role": "sender",
	}
	for k, v := range more {
		o[k] = v
	}
	return o
}

func receiverOptions(alloc int, more map[string]string) map[string]string {
	o := map[string]string{"pd_role": "receiver", "pd_peer_host": "127.0.0.1", "pd_peer_alloc_port": strconv.Itoa(alloc)}
	for k, v := range more {
		o[k] = v
	}
	return o
}

// agent starts a process `berth agent`.
func (s *stage) agent(name string, o map[string]string) (*child, berth.Addrs, error) {
	var addrs berth.Addrs
	args := []string{"agent", "--announce"}
	for k, v := range o {
		args = append(args, "--"+k+"="+v)
	}
	c, err := s.berth(name+"-agent", &addrs, args...)
	return c, addrs, err
}

// worker starts an engine, with its agent inside or in a process beside it.
func (s *stage) worker(name string, w Work, inside bool, o map[string]string) (*child, error) {
	if inside {
		w.Agent = o
	} else {
		_, addrs, err := s.agent(name, o)
		if err != nil {
			return nil, err
		}
		w.Socket = addrs.Local
	}
	return s.startWorker(name, w)
}

func (s *stage) startWorker(name string, w Work) (*child, error) {
	spec, err := jsonText(w)
	if err != nil {
		return nil, err
	}
	var ready struct{ Ready bool }
	return s.berth(name, &ready, "bench", "worker", spec)
}

func (t Transfer) berth(s *stage) (side, error) {
	out := side{name: "berth"}
	p, err := ports(2)
	if err != nil {
		return out, err
	}
	common := map[string]string{"links": t.Link, "checksum": strconv.FormatBool(t.Checksum)}
	opts := receiverOptions(p[0], common)
	opts["pd_peer_init_port"] = strconv.Itoa(p[1])
	s.say("starting Berth's receiver and %d senders", t.Senders)
	receiver, err := s.worker("receiver", Work{What: "receive", Slot: t.Slot}, t.Inside, agentOptions(s.dir, "receiver", t.Slots, t.Slot, opts))
	if err != nil {
		return out, err
	}
	var senders []*child
	for i := range t.Senders {
		name := "sender-" + strconv.Itoa(i)
		c, err := s.worker(name, Work{What: "send", Slot: t.Slot, ID: i}, t.Inside, agentOptions(s.dir, name, t.Slots, t.Slot, common))
		if err != nil {
			return out, err
		}
		senders = append(senders, c)
	}
	out.turn = func(first, count int, arrivals []float64) ([]answer, error) {
		for i := range senders {
			if err := receiver.tell(order{First: first, Count: count, Inflight: min(t.Inflight, 64), Sender: i}); err != nil {
				return nil, receiver.failed(err)
			}
		}
		return askAll(s, senders, order{First: first, Count: count, Chunks: t.Chunks, Inflight: t.Inflight, Arrivals: arrivals, Receiver: p[0]})
	}
	return out, nil
}

// askAll gives all the same order at once and collects the answers.
func askAll(s *stage, kids []*child, o order) ([]answer, error) {
	for _, k := range kids {
		if err := k.tell(o); err != nil {
			return nil, k.failed(err)
		}
	}
	out := make([]answer, len(kids))
	for i, k := range kids {
		if err := k.answer(s.ctx, &out[i], turnTimeout); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// reference starts the same with LMCache.
func (t Transfer) reference(s *stage) (side, error) {
	out := side{name: Lmcache}
	python, script, err := t.lmcache(s)
	if err != nil {
		return out, err
	}
	p, err := ports(3 + t.Senders)
	if err != nil {
		return out, err
	}
	layers := int64(math.Max(1, float64(t.Slot/(2*2*chunkTokens*64))))
	common := []string{"--init", strconv.Itoa(p[0]), "--alloc", strconv.Itoa(p[1]), "--drain", strconv.Itoa(p[2]), "--slots", strconv.Itoa(t.Slots),
		"--shape", fmt.Sprintf("2,%d,%d,64", layers, chunkTokens)}
	if got := layers * 2 * 2 * chunkTokens * 64; got != t.Slot {
		return out, fmt.Errorf("--slot-bytes is %d; against LMCache it must be a multiple of %d", t.Slot, 2*2*chunkTokens*64)
	}
	s.say("starting LMCache's receiver and %d senders", t.Senders)
	var ready struct{ Ready bool }
	r, err := s.start("lmcache-receiver", &ready, python, append([]string{script, "receive"}, common...)...)
	if err != nil {
		return out, err
	}
	var senders []*child
	for i := range t.Senders {
		c, err := s.start("lmcache-sender-"+strconv.Itoa(i), &ready, python,
			append([]string{script, "send", "--id", strconv.Itoa(i), "--proxy", strconv.Itoa(p[3+i])}, common...)...)
		if err != nil {
			return out, err
		}
		senders = append(senders, c)
	}
	out.kids = append([]*child{r}, senders...)
	out.turn = func(first, count int, arrivals []float64) ([]answer, error) {
		return askAll(s, senders, order{First: first, Count: count, Chunks: t.Chunks, Inflight: t.Inflight, Arrivals: arrivals})
	}
	return out, nil
}
