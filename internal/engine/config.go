package engine

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/berthkv/berth/internal/engine/kvcache"
	"github.com/berthkv/berth/internal/engine/model"
	"github.com/berthkv/berth/internal/engine/sched"
	"github.com/berthkv/berth/internal/kv"
)

// Role says what an engine does with kv_transfer_params.
type Role string

const (
	Undivided Role = "undivided" // computes everything itself
	Prefill   Role = "prefill"   // sends the KV of prompts away
	Decode    Role = "decode"    // takes the KV of prompts from its agents
	Both      Role = "both"      // either, as each request says
)

func (r Role) sends() bool    { return r == Prefill || r == Both }
func (r Role) receives() bool { return r == Decode || r == Both }

// Config describes an engine. A zero field means its default.
type Config struct {
	Role      Role         // default Undivided
	Name      string       // of the model, in answers and keys; default "berth-demo"
	Model     model.Config // default model.Default
	DType     kv.DType     // of the stored KV: kvcache.BFloat16 (default) or kvcache.Float32
	ChunkSize int          // tokens; default 16 (LMCache's own default is 256)
	Agents    []Dialer     // one for each rank, ascending; none only when undivided

	TokenBudget int // tokens computed in a step; default 128
	Seats       int // requests computed at once, besides those being sent; default 32
	Begun       int // prompts begun at one receiver and not yet sent; default 4
	Sending     int // prompts begun at all receivers and not yet sent; default 32
	Queue       int // requests that wait for their turn; default 1024
	Threads     int // that compute a step; default 1

	RequestTimeout  time.Duration // a request's whole life, and its transfer's; default 10 min
	TransferWait    time.Duration // how long decode waits for KV to be ready; default 30 s
	ShutdownTimeout time.Duration // for goodbyes: cancels and releases on the way out; default 5 s
	WriteTimeout    time.Duration // for a client to take what is written to it; default 30 s
	MaxBody         int64         // bytes of an HTTP request; default 1 MiB

	// FailOnTransfer answers a request whose transfer failed with an error.
	// Otherwise this engine computes what did not arrive: on the prefill side
	// only the first token, so that the decode side can do the same.
	FailOnTransfer bool

	Log *slog.Logger // default: none
}

// maxRanks bounds the simulated tensor parallelism.
const maxRanks = 64

// withDefaults fills the zero fields and reports all faults at once.
func (c Config) withDefaults() (Config, error) {
	def(&c.Role, Undivided)
	def(&c.Name, "berth-demo")
	def(&c.Model, model.Default)
	def(&c.DType, kvcache.BFloat16)
	def(&c.ChunkSize, 16)
	def(&c.TokenBudget, 128)
	def(&c.Seats, 32)
	def(&c.Begun, 4)
	def(&c.Sending, 32)
	def(&c.Queue, 1024)
	def(&c.Threads, 1)
	def(&c.RequestTimeout, 10*time.Minute)
	def(&c.TransferWait, 30*time.Second)
	def(&c.ShutdownTimeout, 5*time.Second)
	def(&c.WriteTimeout, 30*time.Second)
	def(&c.MaxBody, 1<<20)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}

	var errs []error
	switch c.Role {
	case Undivided:
		if len(c.Agents) > 0 {
			errs = append(errs, fmt.Errorf("role %q takes no agents, %d are given", c.Role, len(c.Agents)))
		}
	case Prefill, Decode, Both:
		if len(c.Agents) < 1 || len(c.Agents) > maxRanks {
			errs = append(errs, fmt.Errorf("role %q needs 1 to %d agents, %d are given", c.Role, maxRanks, len(c.Agents)))
		}
	default:
		errs = append(errs, fmt.Errorf("role %q is none of undivided, prefill, decode, both", c.Role))
	}
	if c.ChunkSize < 1 {
		errs = append(errs, fmt.Errorf("chunk size is %d, must be at least 1", c.ChunkSize))
	}
	if c.Threads < 1 {
		errs = append(errs, fmt.Errorf("threads is %d, must be at least 1", c.Threads))
	}
	for _, d := range []struct {
		name string
		v    time.Duration
	}{{"request timeout", c.RequestTimeout}, {"transfer wait", c.TransferWait}, {"shutdown timeout", c.ShutdownTimeout}, {"write timeout", c.WriteTimeout}} {
		if d.v < 0 {
			errs = append(errs, fmt.Errorf("%s is %v, must not be negative", d.name, d.v))
		}
	}
	if c.MaxBody < 1 {
		errs = append(errs, fmt.Errorf("max body is %d, must be at least 1", c.MaxBody))
	}
	errs = append(errs, c.sched().Validate(), c.layout().Validate())
	return c, errors.Join(errs...)
}

func def[T comparable](field *T, value T) {
	if *field == *new(T) {
		*field = value
	}
}

func (c Config) ranks() int { return max(len(c.Agents), 1) }

func (c Config) layout() kvcache.Layout { return c.Model.Layout(c.DType, c.ranks()) }

func (c Config) keyer() keyer {
	return keyer{model: c.Name, ranks: c.ranks(), dtype: string(c.DType), chunk: c.ChunkSize}
}

func (c Config) sched() sched.Config {
	return sched.Config{Budget: c.TokenBudget, Quantum: c.ChunkSize, Seats: c.Seats, Begun: c.Begun, Sending: c.Sending, Queue: c.Queue}
}

// Hello is what a rank's connection tells its agent at first: the facts on
// which both ends of a transfer must agree.
type Hello struct {
	Facts    kv.Facts // SlotBytes is the size of one full chunk
	Shape    []int64  // of a full chunk
	TokenKey string   // the key of the fixed token list 0, 1, 2, ... of one full chunk
}

// Hello returns what rank `rank` of an engine with this config and `ranks`
// ranks says. It errs when the config is faulty.
func (c Config) Hello(rank, ranks int) (Hello, error) {
	c.Agents = make([]Dialer, ranks)
	c, err := c.withDefaults()
	if err != nil {
		return Hello{}, err
	}
	list := make([]int, c.ChunkSize)
	for i := range list {
		list[i] = i
	}
	l := c.layout()
	return Hello{
		Facts: kv.Facts{
			SlotBytes: int64(l.ChunkBytes(c.ChunkSize)), Format: kv.Format2LTD, DType: c.DType,
			ChunkTokens: int64(c.ChunkSize), TPSize: int64(ranks), TPRank: int64(rank),
		},
		Shape:    l.Shape(c.ChunkSize),
		TokenKey: c.keyer().keys(rank, list)[0],
	}, nil
}
