package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/berthkv/berth/client"
	"github.com/berthkv/berth/internal/admin"
	"github.com/berthkv/berth/internal/engine"
	"github.com/berthkv/berth/internal/kv"
)

func engineCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "engine",
		Short: "Run the built-in demo engine: a small real transformer beside one agent a rank",
		Args:  noArgs,
	}
	f := cmd.Flags()
	role := f.String("role", "undivided", "undivided, prefill, decode or both")
	sockets := f.StringSlice("socket", nil, "local `sockets` of the agents, one for each rank, ascending")
	addr := f.String("http", "127.0.0.1:8100", "`address` to serve")
	chunk := f.Int("chunk-size", 16, "tokens of a chunk")
	budget := f.Int("token-budget", 128, "tokens computed in a step")
	dtype := f.String("dtype", "bfloat16", "element type of the KV cache: bfloat16 or float")
	fail := f.Bool("fail-on-transfer", false, "answer a request whose transfer failed with an error instead of computing it here")
	level := levelFlag(f)
	announce := f.Bool("announce", false, "print one JSON line with the address once it is served")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		for flag, n := range map[string]int{"chunk-size": *chunk, "token-budget": *budget} {
			if n < 1 {
				return usageError{fmt.Errorf("--%s is %d; it must be at least 1", flag, n)}
			}
		}
		log := newLogger(os.Stderr, *level).With("engine", *role)
		cfg := engine.Config{Role: engine.Role(*role), ChunkSize: *chunk, TokenBudget: *budget, DType: kv.DType(*dtype), FailOnTransfer: *fail, Log: log}
		if err := dialAgents(&cfg, *sockets); err != nil {
			return usageError{err}
		}
		e, err := engine.New(cfg)
		if err != nil {
			return usageError{err}
		}
		srv, at, err := admin.Serve(cmd.Context(), *addr, nil, e.Handler(), log)
		if err != nil {
			e.Close()
			return fmt.Errorf("http: %w", err)
		}
		srv.WriteTimeout = 0 // streams end by themselves
		log.Info("serving", "http", at)
		if *announce {
			json.NewEncoder(cmd.OutOrStdout()).Encode(map[string]string{"HTTP": at})
		}
		<-cmd.Context().Done()
		return shutDown(log, 5*time.Second, e.Drain, func() error {
			err := srv.Close()
			e.Close()
			return err
		})
	}
	return cmd
}

// dialAgents makes the engine's dialers, one for each socket; all ranks share
// one engine_id, which is new with each start.
func dialAgents(cfg *engine.Config, sockets []string) error {
	if len(sockets) == 0 {
		return nil
	}
	var id [16]byte
	rand.Read(id[:])
	dialers := make([]engine.Dialer, len(sockets))
	for rank, path := range sockets {
		h, err := cfg.Hello(rank, len(sockets))
		if err != nil {
			return err
		}
		hello := client.Hello{Part: client.Worker, EngineID: hex.EncodeToString(id[:]), Rank: rank, Layout: h.Facts, Shape: h.Shape, TokensKey: h.TokenKey}
		dialers[rank] = func(ctx context.Context) (engine.Agent, error) {
			c, err := client.Dial(ctx, path, hello)
			if err != nil {
				return nil, err
			}
			return agentConn{c}, nil
		}
	}
	cfg.Agents = dialers
	return nil
}

// agentConn is a client as the engine wants its agent.
type agentConn struct{ *client.Client }

func (a agentConn) Info() engine.Info {
	i := a.Client.Info()
	return engine.Info{Incarnation: i.Incarnation, SlotBytes: i.SlotBytes, MaxStage: i.MaxStage}
}

func (a agentConn) Begin(ctx context.Context, b engine.Begin) (engine.Transfer, error) {
	t, err := a.Client.Begin(ctx, beginOf(b))
	if err != nil {
		return nil, err
	}
	return transfer{t, a.Client}, nil
}

func (a agentConn) GiveUp(ctx context.Context, b engine.Begin, lost string) error {
	return a.Client.GiveUp(ctx, beginOf(b), lost)
}

func beginOf(b engine.Begin) client.Begin {
	return client.Begin{Req: b.Req, TotalChunks: b.TotalChunks, Host: b.Host, AllocPort: b.AllocPort, InitPort: b.InitPort,
		Deadline: b.Deadline, BerthProxy: b.BerthProxy}
}

func (a agentConn) Wait(ctx context.Context, req string, deadline time.Duration) error {
	e, err := a.Client.Wait(ctx, req, deadline)
	if err != nil {
		return err
	}
	return e.Err()
}

func (a agentConn) Claim(ctx context.Context, by, req string) (engine.Claimed, error) {
	c, err := a.Client.Claim(ctx, by, req)
	if err != nil {
		return engine.Claimed{}, err
	}
	out := engine.Claimed{Chunks: make([]engine.Chunk, len(c.Chunks)), Format: c.Fmt, DType: c.DType, Shape: c.Shape}
	for i, ch := range c.Chunks {
		out.Chunks[i] = engine.Chunk{Index: int(ch.Index), Key: ch.Key, Slot: ch.Slot, Tokens: int(ch.Tokens), Bytes: ch.Bytes}
	}
	return out, nil
}

func (a agentConn) Release(ctx context.Context, by, req string) error {
	return a.Client.Release(ctx, by, req)
}

// transfer is a client's Transfer as the engine wants it.
type transfer struct {
	*client.Transfer
	c *client.Client
}

func (t transfer) Stage(ctx context.Context, n int, wait bool) ([]kv.SlotID, error) {
	if wait {
		return t.c.Stage(ctx, t.Req(), n)
	}
	return t.c.TryStage(ctx, t.Req(), n)
}

// Err waits for nothing: the engine calls it after Ended.
func (t transfer) Err() error { return t.Ending().Err() }

func (t transfer) Submit(ctx context.Context, chunks []engine.Staged, end bool) error {
	out, last := make([]client.Staged, len(chunks)), client.NoEnd
	for i, s := range chunks {
		out[i] = client.Staged{Index: int64(s.Index), Key: s.Key, Slot: s.Slot, Tokens: int64(s.Tokens)}
		if end {
			last = max(last, s.Index+1)
		}
	}
	return t.Transfer.Submit(ctx, out, last)
}

func (t transfer) Cancel(ctx context.Context) error {
	_, err := t.Transfer.Cancel(ctx, client.Cancelled, "")
	if errors.Is(err, &client.Error{Code: client.EndedCode}) {
		return nil
	}
	return err
}
