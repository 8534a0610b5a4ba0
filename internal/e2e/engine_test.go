package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"testing"

	"github.com/berthkv/berth/client"
)

// An engine process: it reads one order a line, carries it out, and says how it
// went. It is there to be killed.
type order struct {
	Op    string // begin, stage, submit, wait, claim
	Req   string
	Total int
	Port  int
}

type reply struct {
	Err string
	N   int
}

func startEngineProcess(t testing.TB, socket string) *child {
	t.Helper()
	var r reply
	c := startChild(t, "E2E_ENGINE="+socket, &r)
	if r.Err != "" {
		t.Fatal(r.Err)
	}
	return c
}

// do sends an order and waits for the reply.
func (c *child) do(t testing.TB, o order) reply {
	t.Helper()
	if err := json.NewEncoder(c.stdin).Encode(o); err != nil {
		t.Fatal(err)
	}
	var r reply
	if err := c.out.Decode(&r); err != nil {
		t.Fatalf("%+v: %v\n%s", o, err, c.log.String())
	}
	if r.Err != "" {
		t.Fatalf("%+v: %s", o, r.Err)
	}
	return r
}

func engineMain(socket string) int {
	out, in := json.NewEncoder(os.Stdout), json.NewDecoder(os.Stdin)
	c, err := dialEngine(socket, fmt.Sprintf("child-%d", os.Getpid()), layout, 0)
	if err != nil {
		out.Encode(reply{Err: err.Error()})
		return 1
	}
	out.Encode(reply{})
	transfers := map[string]*client.Transfer{}
	staged := map[string][]client.Slot{}
	for {
		var o order
		if in.Decode(&o) != nil {
			return 0
		}
		n, err := carryOut(c, o, transfers, staged)
		r := reply{N: n}
		if err != nil {
			r.Err = err.Error()
		}
		out.Encode(r)
	}
}

func carryOut(c *client.Client, o order, transfers map[string]*client.Transfer, staged map[string][]client.Slot) (int, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	switch o.Op {
	case "begin":
		tr, err := c.Begin(ctx, client.Begin{Req: o.Req, TotalChunks: o.Total, Host: "127.0.0.1", AllocPort: o.Port, BerthProxy: true})
		if err != nil {
			return 0, err
		}
		transfers[o.Req] = tr
		select {
		case <-tr.Granted():
			return 0, nil
		case <-tr.Ended():
			return 0, tr.Ending().Err()
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	case "stage":
		slots, err := transfers[o.Req].Stage(ctx, o.Total)
		staged[o.Req] = append(staged[o.Req], slots...)
		return len(slots), err
	case "submit":
		var chunks []client.Staged
		for i, s := range staged[o.Req] {
			copy(c.Staging(s), chunkData(o.Req, i))
			chunks = append(chunks, client.Staged{Index: int64(i), Key: fmt.Sprintf("%s/%d", o.Req, i), Slot: s, Tokens: chunkTokens})
		}
		delete(staged, o.Req)
		return len(chunks), transfers[o.Req].Submit(ctx, chunks, o.Total)
	case "wait":
		e, err := c.Wait(ctx, o.Req, limit)
		if err == nil {
			err = e.Err()
		}
		return 0, err
	case "claim":
		got, err := c.Claim(ctx, "child", o.Req)
		if err != nil {
			return 0, err
		}
		return len(got.Chunks), nil
	}
	return 0, fmt.Errorf("no order %q", o.Op)
}
