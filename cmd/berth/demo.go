package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/berthkv/berth/examples"
	"github.com/berthkv/berth/internal/demo"
)

func demoCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Move real KV cache between real processes on this machine and compare every answer",
		Long: `Starts two prefill nodes and one decode node, each an agent and the built-in engine, and a proxy; asks the
prompts of a file, streamed and not, some at a time; and compares every answer by token ids with one undivided
engine's. Exit code 1 for any difference, failure or missing slot.`,
		Args: noArgs,
	}
	f := cmd.Flags()
	link := f.String("link", "", "data link: shm or tcp (default: shm, since both ends are on one host)")
	asJSON := f.Bool("json", false, "print the result as one JSON object")
	keep := f.Bool("keep", false, "leave everything running and say how to use it")
	chaos := f.Bool("chaos", false, "kill an agent, engines and the proxy and cut connections while it runs")
	prompts := f.String("prompts", "", "`file` of prompts, one JSON object a line (default: examples/prompts.jsonl, built in)")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if *link != "" && *link != "shm" && *link != "tcp" {
			return usageError{fmt.Errorf("--link is %q; it must be shm or tcp", *link)}
		}
		self, err := demo.Self()
		if err != nil {
			return err
		}
		o := demo.Options{Binary: self, Link: *link, Keep: *keep, Chaos: *chaos, Out: cmd.OutOrStdout()}
		if *asJSON {
			o.Out = cmd.ErrOrStderr()
		}
		var load io.ReadCloser
		if load, err = examples.Open(*prompts); err != nil {
			return usageError{err}
		}
		defer load.Close()
		o.Prompts = load
		rep, err := demo.Run(cmd.Context(), o)
		if errors.Is(err, context.Canceled) || rep == nil && cmd.Context().Err() != nil {
			return errors.New("interrupted; everything is stopped")
		}
		if errors.Is(err, demo.ErrPrompts) {
			return usageError{err}
		}
		if err != nil {
			return err
		}
		switch {
		case *asJSON:
			json.NewEncoder(cmd.OutOrStdout()).Encode(rep)
		case !*keep:
			rep.Print(cmd.OutOrStdout())
		}
		if !rep.OK() {
			return fmt.Errorf("not all is well: %d fault(s)", len(rep.Faults))
		}
		return nil
	}
	return cmd
}
