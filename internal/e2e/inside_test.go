package e2e

import (
	"bytes"
	"errors"
	"strconv"
	"testing"

	"github.com/berthkv/berth/client"
)

// inside connects an engine to the agent of its own process.
func inside(t testing.TB, a *agent, id string) *client.Client {
	t.Helper()
	c, err := a.Engine(ctxFor(t), client.Hello{Part: client.Worker, EngineID: id, Layout: layout, Shape: shape})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// An engine inside the agent's process sends and receives as one over the
// socket does; when it goes with slots in its hands, they are free at once,
// since nobody can touch them any more.
func TestEngineInside(t *testing.T) {
	r, s := startAgent(t, receiving(t, 4)), startAgent(t, sending(4))
	sender, receiver := inside(t, s, "prefill"), inside(t, r, "decode")
	defer receiver.Close()
	ctx := ctxFor(t)

	tr, err := sender.Begin(ctx, client.Begin{Req: "r", TotalChunks: 2, Host: "127.0.0.1", AllocPort: r.port(), Stage: 2, BerthProxy: true})
	if err != nil {
		t.Fatal(err)
	}
	select {
	case <-tr.Granted():
	case <-tr.Ended():
		t.Fatal(tr.Ending())
	}
	slots := tr.Slots()
	if len(slots) == 0 {
		if slots, err = tr.Stage(ctx, 2); err != nil {
			t.Fatal(err)
		}
	}
	var chunks []client.Staged
	for i, slot := range slots {
		for j := range sender.Staging(slot) {
			sender.Staging(slot)[j] = byte(i + j%251)
		}
		chunks = append(chunks, client.Staged{Index: int64(i), Key: "k" + strconv.Itoa(i), Slot: slot, Tokens: chunkTokens})
	}
	if err := tr.Submit(ctx, chunks, 2); err != nil {
		t.Fatal(err)
	}
	if e, err := receiver.Wait(ctx, "r", limit); err != nil || e.Err() != nil {
		t.Fatal(e, err)
	}
	got, err := receiver.Claim(ctx, "mine", "r")
	if err != nil || len(got.Chunks) != 2 {
		t.Fatal(got, err)
	}
	for i, c := range got.Chunks {
		want := make([]byte, slotBytes)
		for j := range want {
			want[j] = byte(i + j%251)
		}
		if !bytes.Equal(receiver.Receive(c.Slot), want) {
			t.Errorf("chunk %d differs", i)
		}
	}
	if err := receiver.Release(ctx, "mine", "r"); err != nil {
		t.Fatal(err)
	}
	<-tr.Ended()

	tr, err = sender.Begin(ctx, client.Begin{Req: "left", TotalChunks: 2, Host: "127.0.0.1", AllocPort: r.port(), Stage: 2, BerthProxy: true})
	if err != nil {
		t.Fatal(err)
	}
	<-tr.Granted()
	if err := sender.Close(); err != nil {
		t.Fatal(err)
	}
	<-tr.Ended()
	if !errors.Is(tr.Ending().Err(), &client.Error{Code: client.PeerLost}) {
		t.Errorf("after Close the transfer ended with %v", tr.Ending())
	}
	if _, err := sender.Stage(ctx, "left", 1); !errors.Is(err, &client.Error{Code: client.PeerLost}) {
		t.Errorf("a call after Close: %v", err)
	}
	if st := s.status(t); st.Staging.Quarantined != 0 {
		t.Errorf("%d slots are quarantined, though their mapping is gone", st.Staging.Quarantined)
	}
	inside(t, s, "another").Close()
}

// An agent that closes first ends what its engine waits for.
func TestAgentClosesBeforeItsEngineInside(t *testing.T) {
	s := startAgent(t, sending(4))
	c := inside(t, s, "prefill")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	<-c.Done()
	if _, err := c.Status(ctxFor(t)); !errors.Is(err, &client.Error{Code: client.PeerLost}) {
		t.Errorf("a call: %v", err)
	}
	c.Close()
}
