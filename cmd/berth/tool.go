package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/berthkv/berth"
	"github.com/berthkv/berth/client"
)

// toolTimeout bounds a tool's call.
const toolTimeout = 30 * time.Second

// toolSocket adds --socket; dial connects to the agent behind it.
func toolSocket(cmd *cobra.Command) (dial func(context.Context) (*client.Client, error)) {
	path := cmd.Flags().String("socket", "", "the agent's local `socket` (default: the only one in $XDG_RUNTIME_DIR/berth)")
	return func(ctx context.Context) (*client.Client, error) {
		p := *path
		if p == "" {
			var err error
			if p, err = onlySocket(); err != nil {
				return nil, usageError{err}
			}
		}
		return client.Dial(ctx, p, client.Hello{Part: client.Tool})
	}
}

// onlySocket finds the agent's socket where there is just one.
func onlySocket() (string, error) {
	dir := os.Getenv("XDG_RUNTIME_DIR")
	if dir == "" {
		dir = filepath.Join(os.TempDir(), fmt.Sprintf("berth-%d", os.Getuid()))
	}
	found, err := filepath.Glob(filepath.Join(dir, "berth", "*.sock"))
	sort.Strings(found)
	switch {
	case err != nil:
		return "", err
	case len(found) == 1:
		return found[0], nil
	case len(found) == 0:
		return "", fmt.Errorf("no agent's socket in %s; say --socket", filepath.Join(dir, "berth"))
	}
	return "", fmt.Errorf("%d agents' sockets: %s; say --socket", len(found), strings.Join(found, ", "))
}

// tool makes a command that calls the agent.
func tool(use, short string, args cobra.PositionalArgs, f func(ctx context.Context, cmd *cobra.Command, c *client.Client, args []string) error) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Args: args}
	dial := toolSocket(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ctx, cancel := context.WithTimeout(cmd.Context(), toolTimeout)
		defer cancel()
		c, err := dial(ctx)
		if err != nil {
			return err
		}
		defer c.Close()
		return f(ctx, cmd, c, args)
	}
	return cmd
}

func statusCommand() *cobra.Command {
	var asJSON bool
	cmd := tool("status", "Show an agent's pools and requests, and why each waiting one waits", noArgs,
		func(ctx context.Context, cmd *cobra.Command, c *client.Client, _ []string) error {
			text, err := c.Status(ctx)
			if err != nil {
				return err
			}
			if asJSON {
				fmt.Fprintln(cmd.OutOrStdout(), text)
				return nil
			}
			var s berth.Status
			if err := json.Unmarshal([]byte(text), &s); err != nil {
				return fmt.Errorf("the agent's answer: %w", err)
			}
			printStatus(cmd, s)
			return nil
		})
	cmd.Flags().BoolVar(&asJSON, "json", false, "the JSON of /v1/status")
	return cmd
}

func printStatus(cmd *cobra.Command, s berth.Status) {
	out := cmd.OutOrStdout()
	state := "ready"
	if !s.Ready {
		state = "not ready: " + s.NotReady
	}
	fmt.Fprintf(out, "%s rank %d, %s\n", s.Node, s.Rank, state)
	if p := s.Pool; p != nil {
		fmt.Fprintf(out, "pool     %d slots: %d free, %d reserved, %d granted, %d committed, %d claimed, %d quarantined\n",
			p.Capacity, p.Free, p.Reserved, p.Granted, p.Committed, p.Claimed, p.Quarantined)
	}
	if p := s.Staging; p != nil {
		fmt.Fprintf(out, "staging  %d slots: %d free, %d staged, %d writing, %d quarantined\n", p.Capacity, p.Free, p.Staged, p.Writing, p.Quarantined)
	}
	fmt.Fprintf(out, "sessions %d, endings kept %d, mapped of peers %d bytes\n", s.Sessions, s.Endings, s.MappedBytes)
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, p := range s.Peers {
		fmt.Fprintf(t, "peer\t%s\t%s\tlink %s\t%d live\t%s\n", p.Addr, p.State, p.Link, p.Live, p.Error)
	}
	t.Flush()
	fmt.Fprintf(out, "%d requests, %d waiting\n", len(s.Requests), s.Waiting)
	if len(s.Requests) == 0 {
		return
	}
	fmt.Fprintln(t, "SIDE\tREQUEST\tPEER\tSTATE\tCHUNKS\tAGE\tWAITS FOR")
	for _, r := range s.Requests {
		why := ""
		if w := r.Why; w != nil {
			why = fmt.Sprintf("%s: needs %d, %d free, overtaken by %d, %.0f s left", w.For, w.Need, w.Free, w.Overtaken, w.DeadlineSeconds)
			if w.Earmarked {
				why += ", earmarked"
			}
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%d/%d\t%.1f s\t%s\n", r.Side, r.ID, r.Owner, r.State, r.Committed, r.Total, r.AgeSeconds, why)
	}
	t.Flush()
}

func drainCommand() *cobra.Command {
	return tool("drain", "Tell an agent to take nothing new", noArgs,
		func(ctx context.Context, cmd *cobra.Command, c *client.Client, _ []string) error { return c.Drain(ctx) })
}

func cancelCommand() *cobra.Command {
	one := func(cmd *cobra.Command, args []string) error {
		if len(args) != 1 {
			return usageError{fmt.Errorf("cancel takes one request's id; %d are given", len(args))}
		}
		return nil
	}
	return tool("cancel REQ", "Cancel the requests of that id at an agent", one,
		func(ctx context.Context, cmd *cobra.Command, c *client.Client, args []string) error {
			e, err := c.Cancel(ctx, args[0], "", "by an operator")
			if err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), e.Ending, e.Reason, e.Text)
			return nil
		})
}
