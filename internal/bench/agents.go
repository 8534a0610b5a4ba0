package bench

import (
	"encoding/json"
	"path/filepath"
	"strconv"

	"github.com/berthkv/berth"
	"github.com/berthkv/berth/internal/freeport"
)

// options of an agent.
type options map[string]string

// agentOptions are the options of every agent that a benchmark starts.
func (r *run) agentOptions(name string, slots int, slot int64) options {
	return options{
		"node": name, "http_addr": "127.0.0.1:0", "local_socket": filepath.Join(r.dir, name+".sock"), "log_level": "warn", "legacy_data": "none",
		"chunk_size": strconv.Itoa(chunkTokens), "slot_bytes": strconv.FormatInt(slot, 10), "pd_buffer_size": strconv.FormatInt(slot*int64(slots), 10),
		"pd_skip_proxy_notification": "true", "pd_role": "sender",
	}
}

// receiving makes them a receiver's.
func (o options) receiving() (alloc int, err error) {
	p, err := freeport.Take(2)
	if err != nil {
		return 0, err
	}
	o["pd_role"], o["pd_peer_host"] = "receiver", "127.0.0.1"
	o["pd_peer_alloc_port"], o["pd_peer_init_port"] = strconv.Itoa(p[0]), strconv.Itoa(p[1])
	return p[0], nil
}

// agent starts a process `berth agent`.
func (r *run) agent(name string, o options) (*child, berth.Addrs, error) {
	var addrs berth.Addrs
	args := []string{"agent", "--announce"}
	for k, v := range o {
		args = append(args, "--"+k+"="+v)
	}
	c, err := r.start(name+"-agent", &addrs, r.self, args...)
	return c, addrs, err
}

// engine starts an engine, with its agent inside or in a process beside it. It
// returns both, the engine first.
func (r *run) engine(name string, w Work, inside bool, o options) (kids []*child, err error) {
	if inside {
		w.Agent = o
	} else {
		c, addrs, err := r.agent(name, o)
		if err != nil {
			return nil, err
		}
		w.Socket, kids = addrs.Local, []*child{c}
	}
	c, err := r.worker(name, w)
	return append([]*child{c}, kids...), err
}

func (r *run) worker(name string, w Work) (*child, error) {
	spec, err := json.Marshal(w)
	if err != nil {
		return nil, err
	}
	var ready struct{ Ready bool }
	return r.start(name, &ready, r.self, "bench", "worker", string(spec))
}
