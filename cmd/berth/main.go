// Command berth carries KV cache between the machines of a disaggregated LLM
// deployment: the agents, the proxy, and the tools of whoever runs them.
//
// Exit codes: 0 done, 1 failed, 2 bad usage or configuration.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/spf13/cobra"
)

const (
	exitFailed = 1
	exitUsage  = 2
)

// usageError is bad usage or configuration: exit code 2.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:]))
}

// rootCommand is the whole command line.
func rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "berth",
		Short:         "KV-cache transfer for disaggregated LLM serving",
		SilenceErrors: true,
		SilenceUsage:  true,
		// Letters by which a mistyped command may differ from the one suggested.
		SuggestionsMinimumDistance: 2,
		RunE: func(cmd *cobra.Command, args []string) error {
			cmd.SetOut(cmd.ErrOrStderr())
			cmd.Help()
			return usageError{errors.New("a command is wanted")}
		},
		Args: noArgs,
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.AddCommand(agentCommand(), proxyCommand(), engineCommand(), demoCommand(), benchCommand(),
		configCommand(), statusCommand(), drainCommand(), cancelCommand(), versionCommand())
	return root
}

// run executes a command line and returns the exit code.
func run(ctx context.Context, args []string) int {
	root := rootCommand()
	root.SetArgs(args)
	out := &output{to: os.Stdout}
	root.SetOut(out)
	err := root.ExecuteContext(ctx)
	if err == nil && out.err != nil {
		err = fmt.Errorf("output: %w", out.err)
	}
	if err == nil {
		return 0
	}
	fmt.Fprintln(os.Stderr, "berth:", err)
	var u usageError
	if errors.As(err, &u) {
		return exitUsage
	}
	return exitFailed
}

// output notes whether all of it could be written: a disk may be full.
type output struct {
	to io.Writer

	mu  sync.Mutex
	err error // the first
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	n, err := o.to.Write(p)
	if o.err == nil {
		o.err = err
	}
	return n, err
}

// noArgs refuses arguments, and names a mistyped command.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	if cmd.HasParent() {
		return usageError{fmt.Errorf("%s takes no arguments; %q is one", cmd.CommandPath(), args[0])}
	}
	text := fmt.Sprintf("%q is no command", args[0])
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		text += fmt.Sprintf("; did you mean %q?", near[0])
	}
	return usageError{errors.New(text + "; see berth --help")}
}
