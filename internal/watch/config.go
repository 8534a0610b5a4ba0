package watch

import "github.com/berthkv/berth/internal/kv"

// Config is what a proxy's core is told at start. Identity must be set; where a
// limit or a time is 0 its default stands.
type Config struct {
	Node        string
	Incarnation kv.Incarnation
	Secret      kv.Secret

	// ConnectTimeout bounds the time without a session after which watches at a
	// receiver end as peer_lost, and the wait for the answer to Hello; 15 s.
	ConnectTimeout kv.Duration
	// Idle is how long the session with a receiver is kept after its last watch;
	// 60 s.
	Idle kv.Duration
	// Deadline is that of a watch that has none; 600 s.
	Deadline kv.Duration
	// EarlyTTL is how long a sender's word for a name that nobody watches yet is
	// kept; 10 s.
	EarlyTTL kv.Duration

	MaxWatches int // kept at once; above it Result says busy; 65,536
	MaxPeers   int // receivers known at once; 1024
	MaxEarly   int // names with early words; at the limit the oldest goes; 4096
}

// maxRanks bounds the receivers of one watch, and so the words that count for
// one name.
const maxRanks = 1024

func (c *Config) fillDefaults() {
	for _, d := range []struct {
		v *kv.Duration
		d kv.Duration
	}{
		{&c.ConnectTimeout, 15 * kv.Second},
		{&c.Idle, 60 * kv.Second},
		{&c.Deadline, 600 * kv.Second},
		{&c.EarlyTTL, 10 * kv.Second},
	} {
		if *d.v == 0 {
			*d.v = d.d
		}
	}
	for _, d := range []struct {
		v *int
		d int
	}{{&c.MaxWatches, 65536}, {&c.MaxPeers, 1024}, {&c.MaxEarly, 4096}} {
		if *d.v == 0 {
			*d.v = d.d
		}
	}
}
