package client

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/localapi"
	"github.com/berthkv/berth/internal/msg"
)

// late is a fake's reply that leaves calls to the test.
type late struct {
	conn kv.ConnID
	call kv.CallID
	req  localapi.Request
}

func lateAgent(t *testing.T) (*fakeAgent, chan late) {
	calls := make(chan late, localapi.MaxCalls+10)
	a := startAgent(t, 4, 4, func(a *fakeAgent, conn kv.ConnID, call kv.CallID, req localapi.Request) {
		calls <- late{conn, call, req}
	})
	return a, calls
}

func next(t *testing.T, calls chan late) late {
	t.Helper()
	select {
	case l := <-calls:
		return l
	case <-time.After(patience):
		t.Fatal("no call")
	}
	panic("unreachable")
}

// TestGivingUp: what a late answer brings is given back.
func TestGivingUp(t *testing.T) {
	ending := &localapi.Ending{Ending: msg.EndReady}
	for name, row := range map[string]struct {
		call   func(context.Context, *Client) error
		hangup bool
		answer localapi.Answer
		fail   *fault.Error // instead of answer
		back   localapi.Request
	}{
		"stage": {func(ctx context.Context, c *Client) error { _, err := c.Stage(ctx, "r", 2); return err }, true,
			&localapi.Slots{Slots: []kv.SlotID{1, 2}}, nil, &localapi.Unstage{Req: "r", Slots: []kv.SlotID{1, 2}}},
		"stage cancelled": {func(ctx context.Context, c *Client) error { _, err := c.Stage(ctx, "r", 2); return err }, true,
			nil, fault.New(fault.Cancelled, ""), nil},
		"wait": {func(ctx context.Context, c *Client) error { _, err := c.Wait(ctx, "r", time.Hour); return err }, true, ending, nil, nil},
		"cancel": {func(ctx context.Context, c *Client) error { _, err := c.Cancel(ctx, "r", "", ""); return err }, true,
			ending, nil, nil},
		"find": {func(ctx context.Context, c *Client) error { _, _, err := c.Find(ctx, "b", nil); return err }, false,
			&localapi.Found{Req: "r", Matched: 1}, nil, &localapi.Release{By: "b", Req: "r"}},
		"find nothing": {func(ctx context.Context, c *Client) error { _, _, err := c.Find(ctx, "b", nil); return err }, false,
			&localapi.Found{}, nil, nil},
		"claim": {func(ctx context.Context, c *Client) error { _, err := c.Claim(ctx, "b", "r"); return err }, false,
			&localapi.Claimed{}, nil, &localapi.Release{By: "b", Req: "r"}},
		"claim failed": {func(ctx context.Context, c *Client) error { _, err := c.Claim(ctx, "b", "r"); return err }, false,
			nil, fault.New(fault.Ended, ""), nil},
		"submit": {func(ctx context.Context, c *Client) error {
			return c.Submit(ctx, "r", []Staged{{Slot: 3, Key: "k"}}, NoEnd)
		}, false, &localapi.Done{}, nil, nil},
		"submit failed": {func(ctx context.Context, c *Client) error {
			return c.Submit(ctx, "r", []Staged{{Slot: 3, Key: "k"}}, NoEnd)
		}, false, nil, fault.New(fault.Deadline, ""), &localapi.Unstage{Req: "r", Slots: []kv.SlotID{3}}},
		"begin": {func(ctx context.Context, c *Client) error { _, err := c.Begin(ctx, Begin{Req: "r"}); return err }, false,
			&localapi.Done{}, nil, &localapi.Cancel{Req: "r"}},
		"begin failed": {func(ctx context.Context, c *Client) error { _, err := c.Begin(ctx, Begin{Req: "r"}); return err }, false,
			nil, fault.New(fault.Busy, ""), nil},
		"status": {func(ctx context.Context, c *Client) error { _, err := c.Status(ctx); return err }, false, &localapi.StatusAnswer{}, nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			a, calls := lateAgent(t)
			c := dial(t, a, engineHello)
			ctx, cancel := context.WithCancel(bounded(t))
			result := make(chan error, 1)
			go func() { result <- row.call(ctx, c) }()
			l := next(t, calls)
			cancel()
			if err := <-result; !errors.Is(err, context.Canceled) {
				t.Fatal(err)
			}
			if row.hangup {
				select {
				case call := <-a.ups:
					if call != l.call {
						t.Errorf("hangup of call %d, want %d", call, l.call)
					}
				case <-time.After(patience):
					t.Fatal("no hangup")
				}
			}
			if row.fail != nil {
				a.Fail(l.call, row.fail)
			} else {
				a.Answer(l.call, row.answer)
			}
			if row.back != nil {
				if d := cmp.Diff(row.back, next(t, calls).req); d != "" {
					t.Errorf("given back (-want +got):\n%s", d)
				}
			}
			// Nothing else comes before the next call.
			go c.Drain(bounded(t))
			if l := next(t, calls); fmt.Sprintf("%T", l.req) != "*localapi.Drain" {
				t.Errorf("%+v", l.req)
			}
		})
	}
}

// TestGivingUpBegin: of a request whose Begin was given up nothing stays, also
// when it is granted with staging slots.
func TestGivingUpBegin(t *testing.T) {
	a, calls := lateAgent(t)
	c := dial(t, a, engineHello)
	ctx, cancel := context.WithCancel(bounded(t))
	result := make(chan error, 1)
	go func() {
		_, err := c.Begin(ctx, Begin{Req: "r", Stage: 2})
		result <- err
	}()
	l := next(t, calls)
	cancel()
	<-result
	a.Answer(l.call, &localapi.Done{})
	a.Emit(l.conn, &localapi.Granted{Req: "r", Slots: []kv.SlotID{1, 2}})
	if _, ok := next(t, calls).req.(*localapi.Cancel); !ok {
		t.Error("no cancel")
	}
	if u, ok := next(t, calls).req.(*localapi.Unstage); !ok || len(u.Slots) != 2 {
		t.Errorf("no unstage: %+v", u)
	}
	a.Emit(l.conn, &localapi.Ended{Req: "r", Ending: msg.EndCancelled})
	a.Emit(l.conn, &localapi.Ended{Req: "nobody's", Ending: msg.EndCancelled})
	a.Emit(l.conn, &localapi.Granted{Req: "nobody's"})
	// Once the client has seen these, the name is free again.
	go func() {
		_, err := c.Status(bounded(t))
		result <- err
	}()
	a.Answer(next(t, calls).call, &localapi.StatusAnswer{})
	<-result
	go func() {
		_, err := c.Begin(bounded(t), Begin{Req: "r"})
		result <- err
	}()
	a.Answer(next(t, calls).call, &localapi.Done{})
	if err := <-result; err != nil {
		t.Error(err)
	}
}

func TestConnectionLost(t *testing.T) {
	a, calls := lateAgent(t)
	c := dial(t, a, engineHello)
	ctx := bounded(t)
	begun := make(chan *Transfer, 1)
	go func() {
		tr, _ := c.Begin(ctx, Begin{Req: "r"})
		begun <- tr
	}()
	a.Answer(next(t, calls).call, &localapi.Done{})
	tr := <-begun
	result := make(chan error, 1)
	go func() {
		_, err := c.Stage(ctx, "r", 1)
		result <- err
	}()
	next(t, calls)
	if c.Err() != nil {
		t.Error("lost already:", c.Err())
	}
	a.Close()
	if err := <-result; fault.CodeOf(err) != PeerLost {
		t.Error(err)
	}
	closed(t, "end of the connection", c.Done())
	closed(t, "ending", tr.Ended())
	if fault.CodeOf(tr.Ending().Err()) != PeerLost || fault.CodeOf(c.Err()) != PeerLost {
		t.Error(tr.Ending(), c.Err())
	}
	for name, err := range map[string]error{
		"begin":  func() error { _, err := c.Begin(ctx, Begin{Req: "r"}); return err }(),
		"submit": c.Submit(ctx, "r", nil, 0), "drain": c.Drain(ctx),
	} {
		if fault.CodeOf(err) != PeerLost {
			t.Errorf("%s: %v", name, err)
		}
	}
	c.Staging(0)[0] = 1 // the memory stays until Close
	for range 2 {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
	if !panics(func() { c.Staging(0) }) {
		t.Error("there is memory after Close")
	}
}

func TestCallsLimit(t *testing.T) {
	a, calls := lateAgent(t)
	c := dial(t, a, engineHello)
	ctx, cancel := context.WithCancel(bounded(t))
	defer cancel()
	for range localapi.MaxCalls {
		c.start(&localapi.Status{})
	}
	if err := c.Drain(ctx); fault.CodeOf(err) != Busy {
		t.Error(err)
	}
	a.Answer(next(t, calls).call, &localapi.StatusAnswer{})
	for i := range localapi.MaxCalls - 1 {
		if l := next(t, calls); i == 0 {
			a.Answer(l.call, &localapi.StatusAnswer{})
		}
	}
	if err := c.Submit(ctx, string(make([]byte, 513)), nil, NoEnd); fault.CodeOf(err) != BadRequest {
		t.Error("a name that is too long:", err)
	}
}

// TestBadAgent: an agent that breaks the protocol is left.
func TestBadAgent(t *testing.T) {
	hello, err := localapi.AppendAnswer(nil, 0, &localapi.HelloAnswer{Version: 1})
	if err != nil {
		t.Fatal(err)
	}
	for name, row := range map[string]struct {
		frames []string
		dials  bool
	}{
		"nothing":          {nil, false},
		"garbage":          {[]string{"\xc1"}, false},
		"event first":      {[]string{"\x82\xa5event\xa5moved\xa3req\xa1r"}, false},
		"another call":     {[]string{"\x81\xa2id\x01"}, false},
		"no hello answer":  {[]string{"\x81\xa2id\x00"}, false},
		"unknown call":     {[]string{string(hello), "\x81\xa2id\x09"}, true},
		"garbage later":    {[]string{string(hello), "\xc1"}, true},
		"neither":          {[]string{string(hello), "\x80"}, true},
		"malformed answer": {[]string{string(hello), "\x81\xa2id\x01"}, true}, // to Status
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "a.sock")
			l, err := net.Listen("unix", path)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			go func() {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				defer conn.Close()
				for _, f := range row.frames {
					if !readFrame(conn) {
						return
					}
					conn.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(f))), f...))
				}
				if len(row.frames) == 0 {
					readFrame(conn)
					return
				}
				io.Copy(io.Discard, conn)
			}()
			c, err := Dial(bounded(t), path, Hello{Part: Tool})
			if (err == nil) != row.dials {
				t.Fatal(err)
			}
			if err != nil {
				return
			}
			defer c.Close()
			if _, err := c.Status(bounded(t)); err == nil {
				t.Error("status is answered")
			}
			closed(t, "end of the connection", c.Done())
		})
	}
}

func readFrame(r io.Reader) bool {
	var n [4]byte
	if _, err := io.ReadFull(r, n[:]); err != nil {
		return false
	}
	_, err := io.CopyN(io.Discard, r, int64(binary.BigEndian.Uint32(n[:])))
	return err == nil
}

// TestSlotOutside: an agent's slot that is not in the pool is no slot.
func TestSlotOutside(t *testing.T) {
	a, calls := lateAgent(t)
	c := dial(t, a, engineHello)
	for name, ans := range map[string]localapi.Answer{
		"staging slot": &localapi.Slots{Slots: []kv.SlotID{4}},
		"receive slot": &localapi.Claimed{Chunks: []localapi.Chunk{{Slot: 4}}},
		"bytes":        &localapi.Claimed{Chunks: []localapi.Chunk{{Slot: 0, Bytes: slotBytes + 1}}},
	} {
		result := make(chan error, 1)
		go func() {
			var err error
			if _, ok := ans.(*localapi.Slots); ok {
				_, err = c.Stage(bounded(t), "r", 1)
			} else {
				_, err = c.Claim(bounded(t), "b", "r")
			}
			result <- err
		}()
		a.Answer(next(t, calls).call, ans)
		if err := <-result; fault.CodeOf(err) != fault.Internal {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestNoLeaks(t *testing.T) {
	a := startAgent(t, 2, 2, answers)
	fds := countFDs(t)
	for range 20 {
		c, err := Dial(bounded(t), a.Path(), engineHello)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Status(bounded(t)); err != nil {
			t.Error(err)
		}
		c.Close()
	}
	a.Close() // waits for its ends of them
	if n := countFDs(t); n > fds {
		t.Errorf("%d descriptors, %d before", n, fds)
	}
}

const victimEnv = "BERTH_TEST_VICTIM"

// victim is a process that has the pools, until it is killed.
func victim(path string) {
	c, err := Dial(context.Background(), path, engineHello)
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	c.Staging(0)[0] = 'v'
	fmt.Println("ready")
	io.Copy(io.Discard, os.Stdin) // ends with the test
}

// TestProcessGone: the agent learns that a process that had the pools is gone,
// also when its connection was lost long before.
func TestProcessGone(t *testing.T) {
	a := startAgent(t, 2, 2, answers)
	staging := a.staging
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), victimEnv+"="+a.Path())
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Process.Kill()
	if line, _ := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatalf("the process says %q", line)
	}
	if staging[0] != 'v' {
		t.Error("its write is not seen")
	}
	a.mu.Lock()
	pid, process := a.pid, a.process
	a.mu.Unlock()
	if pid != cmd.Process.Pid {
		t.Errorf("pid %d, want %d", pid, cmd.Process.Pid)
	}
	// A second connection of a living process tells nothing when it goes.
	c := dial(t, a, engineHello)
	c.Close()
	select {
	case pid := <-a.gone:
		t.Errorf("%d is gone, nobody was killed", pid)
	default:
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	select {
	case got := <-a.gone:
		if got != process {
			t.Errorf("process %d is gone, want %d", got, process)
		}
	case <-time.After(patience):
		t.Error("nobody hears of it")
	}
	cmd.Wait()
}
