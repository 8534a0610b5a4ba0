package zmtp

import (
	"context"
	"errors"
	"testing"
	"time"
)

func startRep(t testing.TB, respond Responder) *Rep {
	t.Helper()
	r, err := ListenRep(testContext(t), "127.0.0.1:0", respond, Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	return r
}

// Every message to a REP gets exactly one answer, in order, whatever is in it.
func TestRepAnswersEverything(t *testing.T) {
	leakCheck(t)
	rep := startRep(t, func(_ context.Context, r Request) [][]byte {
		if len(r.Frames) > 0 && string(r.Frames[0]) == "nothing" {
			return nil
		}
		return append(frames("re"), r.Frames...)
	})
	d := startDealer(t, rep.Addr(), nil, Options{})
	cases := []struct{ send, want [][]byte }{
		{frames("", "q"), frames("", "re", "q")},
		{frames("", ""), frames("", "re", "")},
		{frames(""), frames("", "re")},
		{frames("no envelope"), frames("re", "no envelope")},
		{frames("via", "two", "", "q", "q2"), frames("via", "two", "", "re", "q", "q2")},
		{frames("", "nothing"), frames("", "")},
	}
	for _, tc := range cases {
		if err := d.Send(tc.send...); err != nil {
			t.Fatal(err)
		}
	}
	for _, tc := range cases {
		got, err := d.Recv(testContext(t))
		if err != nil || text(got) != text(tc.want) {
			t.Errorf("%q was answered %q, %v, want %q", tc.send, got, err, tc.want)
		}
	}
}

func TestReq(t *testing.T) {
	leakCheck(t)
	block := make(chan struct{})
	rep := startRep(t, func(ctx context.Context, r Request) [][]byte {
		if string(r.Frames[0]) == "hang" {
			select {
			case <-block:
			case <-ctx.Done():
			}
		}
		return r.Frames
	})
	req, err := DialReq(testContext(t), rep.Addr().String(), Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = req.Close() }()
	results := make(chan error, 20)
	for range cap(results) { // calls wait for each other
		go func() {
			got, err := req.Do(testContext(t), []byte("a"), []byte("b"))
			if err == nil && text(got) != `["a" "b"]` {
				err = errors.New(text(got))
			}
			results <- err
		}()
	}
	for range cap(results) {
		if err := <-results; err != nil {
			t.Error(err)
		}
	}
	// After a call was given up the connection is not used again.
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	if _, err := req.Do(ctx, []byte("hang")); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("given up: %v", err)
	}
	closed(t, "the end of the connection", req.Done())
	if _, err := req.Do(testContext(t), []byte("a")); !errors.Is(err, ErrGone) {
		t.Errorf("afterwards: %v", err)
	}
	close(block)
}
