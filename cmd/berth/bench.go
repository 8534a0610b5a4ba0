package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/berthkv/berth/internal/bench"
)

func benchCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure Berth on this machine",
		Long: `Measures Berth on this machine, on loopback, in processes of its own. What is compared takes turns within one run: read
ratios, not figures. Latencies at a rate count from when a request should have begun. Each row says which checks were on. docs/performance.md
has figures, and what limits each.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cmd.SetOut(cmd.ErrOrStderr())
			cmd.Help()
			return usageError{errors.New("a benchmark is wanted")}
		},
	}
	cmd.AddCommand(benchControl(), benchTransfer(), benchLedger(), benchProxy(), benchAgent(), benchWorker())
	return cmd
}

// benchmark is what Run does.
type benchmark func(context.Context) (*bench.Report, error)

// measured makes a command of a benchmark: common options, and what becomes of
// the report.
func measured(use, short string, o *bench.Options, run benchmark) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Args: noArgs}
	f := cmd.Flags()
	f.IntVar(&o.Repeat, "repeat", 5, "turns of each side, after a warm-up")
	f.BoolVar(&o.Anyway, "anyway", false, "measure also on a busy machine or with a -race build, and say so")
	asJSON := f.Bool("json", false, "print one JSON object")
	plot := f.String("plot", "", "write a self-contained HTML page with the rows and the latencies to this `file`")
	quiet := f.Bool("quiet", false, "no progress on standard error")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if !*quiet {
			o.Progress = cmd.ErrOrStderr()
		}
		r, err := run(cmd.Context())
		var bad bench.UsageError
		if errors.As(err, &bad) {
			return usageError{err}
		}
		if err != nil {
			return err
		}
		if *plot != "" {
			if err := writePlot(*plot, r); err != nil {
				return err
			}
		}
		if *asJSON {
			return r.WriteJSON(cmd.OutOrStdout())
		}
		return r.WriteText(cmd.OutOrStdout())
	}
	return cmd
}

func writePlot(path string, r *bench.Report) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	if err := r.WritePlot(f); err != nil {
		f.Close()
		return err
	}
	return f.Close()
}

// againstFlags are for the benchmarks that have a reference.
func againstFlags(cmd *cobra.Command, o *bench.Options) {
	f := cmd.Flags()
	f.StringVar(&o.Against, "against", "", "lmcache: measure LMCache's PD backend in turn")
	f.StringVar(&o.Python, "python", "", "Python with LMCache in it, or for control with pyzmq and msgspec (default $BERTH_LMCACHE_PYTHON, then ~/.cache/berth/lmcache-1/bin/python)")
}

// loadFlags say how requests come.
func loadFlags(cmd *cobra.Command, l *bench.Load, pattern string, perSecond float64, rate string) {
	f := cmd.Flags()
	f.StringVar(&l.Pattern, "pattern", pattern, "how requests come: "+strings.Join(bench.Patterns, ", ")+", or the path of a trace: seconds from the start, line by line")
	f.Float64Var(&l.Rate, "rate", perSecond, rate)
}

func benchControl() *cobra.Command {
	var b bench.Control
	cmd := measured("control", "AllocRequest and AllocResponse in LMCache's dialect", &b.Options, func(ctx context.Context) (*bench.Report, error) { return b.Run(ctx) })
	againstFlags(cmd, &b.Options)
	loadFlags(cmd, &b.Load, bench.Poisson, 0, "pairs a second (default half of what the slower side takes without a pause)")
	f := cmd.Flags()
	f.IntVar(&b.Clients, "clients", 16, "connections")
	f.IntVar(&b.Keys, "keys", 8, "keys of a request")
	f.IntVar(&b.Count, "count", 2000, "pairs in a turn")
	return cmd
}

func benchTransfer() *cobra.Command {
	var b bench.Transfer
	var sizes []int
	cmd := measured("transfer", "Whole requests from begin to ready, raw copies, two senders at one receiver", &b.Options, func(ctx context.Context) (*bench.Report, error) {
		for _, kib := range sizes {
			b.Sizes = append(b.Sizes, int64(kib)<<10)
		}
		b.Volume <<= 20
		return b.Run(ctx)
	})
	againstFlags(cmd, &b.Options)
	loadFlags(cmd, &b.Load, bench.Closed, 0, "requests a second of each sender, for a pattern")
	f := cmd.Flags()
	f.StringSliceVar(&b.Parts, "parts", bench.TransferParts, "what to measure: requests by the in-process and by the local API, links beside raw copies, senders that share")
	f.IntVar(&b.Chunks, "chunks", 8, "chunks of a request")
	f.Int64Var(&b.Slot, "slot-bytes", 256<<10, "bytes of a chunk")
	f.IntVar(&b.Slots, "slots", 160, "slots of each pool")
	f.IntVar(&b.Senders, "senders", 1, "sending agents")
	f.IntVar(&b.Inflight, "inflight", 1, "requests in flight of each sender; with a pattern, the most")
	f.IntVar(&b.Count, "count", 400, "requests of each sender in a turn")
	f.StringVar(&b.Link, "link", "shm", "data link of the requests: shm or tcp")
	f.BoolVar(&b.Checksum, "checksum", false, "CRC32C of every chunk of the requests")
	f.IntSliceVar(&sizes, "sizes", []int{64, 1024, 4096, 16384}, "KiB of a chunk, for the raw copies: powers of two")
	f.Int64Var(&b.Volume, "volume", 1024, "MiB that a turn of the raw copies moves")
	return cmd
}

func benchLedger() *cobra.Command {
	var b bench.Ledger
	cmd := measured("ledger", "Admission decisions while many requests wait", &b.Options, func(ctx context.Context) (*bench.Report, error) { return b.Run(ctx) })
	f := cmd.Flags()
	f.IntSliceVar(&b.Waiting, "waiting", []int{1_000, 10_000, 100_000, 1_000_000}, "how many wait; ratios are to the first")
	f.IntVar(&b.Senders, "senders", 16, "in whose lines they stand")
	f.DurationVar(&b.Time, "time", 100*time.Millisecond, "of each measurement")
	return cmd
}

func benchProxy() *cobra.Command {
	var b bench.Proxy
	cmd := measured("proxy", "Streamed answers of engines that answer at once", &b.Options, func(ctx context.Context) (*bench.Report, error) { return b.Run(ctx) })
	loadFlags(cmd, &b.Load, bench.Poisson, 200, "requests a second, for a pattern")
	f := cmd.Flags()
	f.IntVar(&b.Count, "count", 1000, "requests in a turn")
	f.IntVar(&b.Prompt, "prompt", 1000, "bytes of the prompt, a token each")
	f.IntVar(&b.Tokens, "tokens", 16, "tokens of an answer")
	f.IntVar(&b.Workers, "inflight", 64, "requests in flight; with a pattern, the most")
	return cmd
}

func benchAgent() *cobra.Command {
	var b bench.Agent
	cmd := measured("agent", "Start, idling, and growth with senders and slots", &b.Options, func(ctx context.Context) (*bench.Report, error) {
		b.Pool <<= 20
		return b.Run(ctx)
	})
	f := cmd.Flags()
	f.Int64Var(&b.Pool, "pool", 256, "MiB of the pool of an agent that starts or idles")
	f.DurationVar(&b.Idle, "idle", 3*time.Second, "for which wake-ups are counted, each time")
	f.IntSliceVar(&b.Senders, "senders", []int{1, 10, 100, 1000}, "connected senders; ratios are to the first")
	f.IntSliceVar(&b.Slots, "slots", []int{10, 1000, 100_000}, "slots of the pool; likewise")
	f.IntVar(&b.Count, "count", 1000, "admissions in a turn, for the growth")
	return cmd
}

// benchWorker is one process of a benchmark.
func benchWorker() *cobra.Command {
	return &cobra.Command{
		Use: "worker SPEC", Short: "One process of a benchmark", Hidden: true, Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			var w bench.Work
			if err := json.Unmarshal([]byte(args[0]), &w); err != nil {
				return usageError{fmt.Errorf("worker: %w", err)}
			}
			return bench.RunWorker(cmd.Context(), w, cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
}
