package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/berthkv/berth"
	"github.com/berthkv/berth/internal/config"
)

// configFlags adds --config and a flag for each option; load reads them all.
func configFlags(cmd *cobra.Command) (load func() (*berth.Config, error)) {
	file := cmd.Flags().String("config", "", "YAML `file` (default: $BERTH_CONFIG_FILE, then $LMCACHE_CONFIG_FILE)")
	cmd.Flags().SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		return pflag.NormalizedName(strings.ReplaceAll(name, "_", "-"))
	})
	for _, f := range config.Flags() {
		doc := f.Doc
		if f.Default != "" {
			doc += fmt.Sprintf(" (default %s)", f.Default)
		}
		cmd.Flags().String(f.Name, "", doc)
	}
	return func() (*berth.Config, error) {
		s := berth.Sources{File: *file, Env: os.Environ(), Flags: map[string]string{}}
		if s.File == "" {
			s.File = config.FileFromEnv()
		}
		for _, f := range config.Flags() {
			if fl := cmd.Flags().Lookup(f.Name); fl.Changed {
				s.Flags[f.Name] = fl.Value.String()
			}
		}
		cfg, err := berth.LoadConfig(s)
		if err != nil {
			return nil, usageError{err}
		}
		return cfg, nil
	}
}

func agentCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "agent",
		Short: "Run the agent of one rank of one engine",
		Args:  noArgs,
	}
	load := configFlags(cmd)
	announce := cmd.Flags().Bool("announce", false, "print one JSON line with the addresses once everything is served")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, err := load()
		if err != nil {
			return err
		}
		log := newLogger(os.Stderr, cfg.LogLevel).With("node", cfg.Node)
		for _, n := range cfg.Notes {
			log.Warn("config", "note", n)
		}
		a, err := berth.StartAgent(cmd.Context(), cfg, log)
		if err != nil {
			return err
		}
		log.Info("serving", "role", cfg.Role, "addrs", a.Addrs(), "version", berth.Version())
		if *announce {
			json.NewEncoder(cmd.OutOrStdout()).Encode(a.Addrs())
		}
		<-cmd.Context().Done()
		return shutDown(log, time.Duration(cfg.ShutdownTimeout), a.Drain, a.Close)
	}
	return cmd
}

// shutDown drains within the timeout and closes. What is live after it is
// reported and cut off; that is no failure of the command.
func shutDown(log *slog.Logger, timeout time.Duration, drain func(context.Context) error, close func() error) error {
	log.Info("draining", "timeout", timeout.String())
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	if err := drain(ctx); err != nil {
		log.Warn("not drained", "err", err)
	}
	err := close()
	log.Info("closed")
	return err
}

func newLogger(w io.Writer, level string) *slog.Logger {
	var l slog.Level
	l.UnmarshalText([]byte(level)) // a configuration has a known one
	return slog.New(slog.NewJSONHandler(w, &slog.HandlerOptions{Level: l}))
}

// levelFlag adds --log-level.
func levelFlag(f *pflag.FlagSet) *string {
	l := logLevel("info")
	f.Var(&l, "log-level", "debug, info, warn or error")
	return (*string)(&l)
}

type logLevel string

func (l *logLevel) String() string { return string(*l) }
func (l *logLevel) Type() string   { return "level" }
func (l *logLevel) Set(s string) error {
	if !slices.Contains([]string{"debug", "info", "warn", "error"}, s) {
		return errors.New("it must be debug, info, warn or error")
	}
	*l = logLevel(s)
	return nil
}

func configCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Print an agent's effective configuration and where each value came from",
		Args:  noArgs,
	}
	load := configFlags(cmd)
	asJSON := cmd.Flags().Bool("json", false, "as one JSON object")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, err := load()
		if err != nil {
			return err
		}
		out := cmd.OutOrStdout()
		if *asJSON {
			return json.NewEncoder(out).Encode(struct {
				Options  []config.Row
				Notes    []string
				Capacity int
			}{cfg.Rows(), cfg.Notes, cfg.Capacity})
		}
		t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
		fmt.Fprintln(t, "OPTION\tVALUE\tFROM\tMEANING")
		for _, r := range cfg.Rows() {
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", r.Name, r.Value, r.From, r.Doc)
		}
		t.Flush()
		fmt.Fprintf(out, "\neach pool: %d slots of %d bytes\n", cfg.Capacity, cfg.SlotBytes)
		for _, n := range cfg.Notes {
			fmt.Fprintln(out, "note:", n)
		}
		return nil
	}
	return cmd
}

func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  noArgs,
		Run:   func(cmd *cobra.Command, _ []string) { fmt.Fprintln(cmd.OutOrStdout(), "berth", berth.Version()) },
	}
}
