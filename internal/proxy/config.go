package proxy

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"reflect"
	"strconv"
	"time"

	"github.com/berthkv/berth/internal/kv"
)

// Policy is what becomes of a request whose KV cannot be moved.
type Policy string

const (
	// Recompute lets the decode engine compute the prompt itself. As long as the
	// client has seen nothing, this covers a failed prefill engine too.
	Recompute Policy = "recompute"
	// Fail ends the request: 502 before the first byte, an error event after it.
	Fail Policy = "error"
)

// Addr is where an engine serves HTTP.
type Addr struct {
	Host string
	Port int
}

func (a Addr) String() string { return net.JoinHostPort(a.Host, strconv.Itoa(a.Port)) }

// Decoder is a decode engine and the receivers beside it, one for each rank in
// ascending order.
type Decoder struct {
	Addr
	Receivers []Receiver
}

// Timeouts bound each step of a request. Zero means the default.
type Timeouts struct {
	Body        time.Duration // reading the client's body (30 s)
	Tokenize    time.Duration // POST /tokenize, and GET /v1/models (10 s)
	Watch       time.Duration // until every receiver has the watch (5 s)
	Prefill     time.Duration // the prefill engine's answer, its queue included (300 s)
	Transfer    time.Duration // from the first token until every rank is ready (60 s)
	DecodeStart time.Duration // until the decode engine's first event (120 s)
	DecodeIdle  time.Duration // between two events (60 s)
	Request     time.Duration // all of it (3600 s)
	Write       time.Duration // one write to a client that does not read (30 s)
	Probe       time.Duration // one engine's answer to /ready's question (1 s)
	Shutdown    time.Duration // requests in flight when the server stops (5 s)
}

// Config is what a proxy is made of. Zero values mean the defaults given here.
type Config struct {
	Prefillers  []Addr
	Decoders    []Decoder
	Policy      Policy         // Recompute
	Timeouts    Timeouts       // see there
	MaxInFlight int            // requests at one time; more are refused with 503 (4096)
	MaxConns    int            // client connections at one time (16,384); for one more, the one longest without a request goes
	MaxBody     int64          // bytes of a request (16 MiB)
	MaxBodies   int64          // bytes of the bodies of all requests in flight; for more, the one read longest is refused with 503 (512 MiB)
	MaxAnswer   int64          // bytes of an engine's answer that is not streamed (64 MiB)
	MaxEvent    int            // bytes of one streamed event (1 MiB)
	ShowNodes   bool           // tell clients the engines' addresses, in headers (no)
	Incarnation kv.Incarnation // required: makes req_ids unique across proxies and restarts
	Log         *slog.Logger   // none
}

var defaults = Config{
	Policy:      Recompute,
	MaxInFlight: 4096,
	MaxConns:    16_384,
	MaxBody:     16 << 20,
	MaxBodies:   512 << 20,
	MaxAnswer:   64 << 20,
	MaxEvent:    1 << 20,
	Timeouts: Timeouts{
		Body:        30 * time.Second,
		Tokenize:    10 * time.Second,
		Watch:       5 * time.Second,
		Prefill:     300 * time.Second,
		Transfer:    60 * time.Second,
		DecodeStart: 120 * time.Second,
		DecodeIdle:  60 * time.Second,
		Request:     3600 * time.Second,
		Write:       30 * time.Second,
		Probe:       time.Second,
		Shutdown:    5 * time.Second,
	},
}

// withDefaults returns c with every zero filled in.
func (c Config) withDefaults() Config {
	fill(reflect.ValueOf(&c).Elem(), reflect.ValueOf(defaults))
	fill(reflect.ValueOf(&c.Timeouts).Elem(), reflect.ValueOf(defaults.Timeouts))
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

func fill(dst, from reflect.Value) {
	for i := range dst.NumField() {
		if dst.Field(i).IsZero() {
			dst.Field(i).Set(from.Field(i))
		}
	}
}

// validate reports all faults at once.
func (c Config) validate() error {
	var faults []error
	bad := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	if len(c.Prefillers) == 0 {
		bad("no prefill engine is configured")
	}
	if len(c.Decoders) == 0 {
		bad("no decode engine is configured")
	}
	for _, d := range c.Decoders {
		if len(d.Receivers) == 0 {
			bad("the decode engine %s has no receiver", d)
		}
	}
	if c.Policy != Recompute && c.Policy != Fail {
		bad("the policy for failed transfers is %q; it must be %q or %q", c.Policy, Recompute, Fail)
	}
	if c.Incarnation.IsZero() {
		bad("no incarnation is given")
	}
	for name, n := range map[string]int64{"MaxInFlight": int64(c.MaxInFlight), "MaxConns": int64(c.MaxConns),
		"MaxBody": c.MaxBody, "MaxBodies": c.MaxBodies, "MaxAnswer": c.MaxAnswer, "MaxEvent": int64(c.MaxEvent)} {
		if n < 0 {
			bad("%s is %d; it must be at least 1", name, n)
		}
	}
	t := reflect.ValueOf(c.Timeouts)
	for i := range t.NumField() {
		if d := t.Field(i).Int(); d < 0 {
			bad("the timeout %s is %v; it must be above 0", t.Type().Field(i).Name, time.Duration(d))
		}
	}
	return errors.Join(faults...)
}
