package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/berthkv/berth/internal/bench"
)

func benchCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure Berth on this machine",
		Long: `Measures Berth on this machine, on loopback, in processes of its own. docs/performance.md says what each figure means and
what limits it.`,
		Args: noArgs,
	}
	cmd.AddCommand(benchTransfer(), benchWorker())
	return cmd
}

// measured makes a command of a benchmark: common options, and what becomes of
// the report.
func measured(use, short string, o *bench.Options, repeat int, run func(context.Context) (*bench.Report, error)) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Args: noArgs}
	f := cmd.Flags()
	f.IntVar(&o.Repeat, "repeat", repeat, "turns of each side, after a warm-up")
	f.BoolVar(&o.Anyway, "anyway", false, "measure also on a busy machine or with a -race build, and say so")
	asJSON := f.Bool("json", false, "print one JSON object")
	plot := f.String("plot", "", "write a self-contained HTML page with the rows and the latencies to this `file`")
	quiet := f.Bool("quiet", false, "no progress on standard error")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if !*quiet {
			o.Progress = cmd.ErrOrStderr()
		}
		r, err := run(cmd.Context())
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
	f.StringVar(&o.Python, "python", "", "Python with LMCache in it (default $BERTH_LMCACHE_PYTHON, then ~/.cache/berth/lmcache-1/bin/python)")
}

// loadFlags say how requests come.
func loadFlags(cmd *cobra.Command, l *bench.Load) {
	f := cmd.Flags()
	f.StringVar(&l.Pattern, "pattern", bench.Closed, "how requests come: "+strings.Join(bench.Patterns, ", ")+", or the path of a trace, seconds line by line")
	f.Float64Var(&l.Rate, "rate", 0, "requests a second of each sender or of all clients, for a pattern")
}

func benchTransfer() *cobra.Command {
	var b bench.Transfer
	cmd := measured("transfer", "Whole requests: begin to ready", &b.Options, 5, func(ctx context.Context) (*bench.Report, error) { return b.Run(ctx) })
	againstFlags(cmd, &b.Options)
	loadFlags(cmd, &b.Load)
	f := cmd.Flags()
	f.IntVar(&b.Chunks, "chunks", 8, "chunks of a request")
	f.Int64Var(&b.Slot, "slot-bytes", 256<<10, "bytes of a chunk")
	f.IntVar(&b.Slots, "slots", 160, "slots of each pool")
	f.IntVar(&b.Senders, "senders", 1, "sending agents")
	f.IntVar(&b.Inflight, "inflight", 1, "requests in flight of each sender; with a pattern, the most")
	f.IntVar(&b.Count, "count", 400, "requests of each sender in a turn")
	f.StringVar(&b.Link, "link", "shm", "data link: shm or tcp")
	f.BoolVar(&b.Inside, "inside", false, "engines inside their agents' processes (berth.Agent.Engine) instead of over the local API")
	f.BoolVar(&b.Checksum, "checksum", false, "CRC32C of every chunk")
	return cmd
}

// benchWorker is one process of a benchmark.
func benchWorker() *cobra.Command {
	return &cobra.Command{
		Use: "worker SPEC", Hidden: true, Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			var w bench.Work
			if err := json.Unmarshal([]byte(args[0]), &w); err != nil {
				return usageError{fmt.Errorf("worker: %w", err)}
			}
			return bench.RunWorker(cmd.Context(), w, cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
}
