package zmtp

import (
	"context"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"testing"
)

// benchServerEnv makes the test binary the echo server of a benchmark, in a process of its own.
const benchServerEnv = "BERTH_ZMTP_BENCH_SERVER"

var (
	benchRequest = make([]byte, 600)
	benchAnswer  = make([]byte, 100)
)

// runBenchServer prints its address, answers every request, and ends with its standard input.
func runBenchServer() {
	var router atomic.Pointer[Router]
	r, err := ListenRouter(context.Background(), "127.0.0.1:0", func(e Event) {
		if e.Kind == Message {
			_ = router.Load().Send(e.Conn, nil, benchAnswer) // a full queue shows as a stuck client
		}
	}, Options{})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	router.Store(r)
	fmt.Println(r.Addr())
	_, _ = io.Copy(io.Discard, os.Stdin)
	_ = r.Close()
}

// echo is a Router in this process that answers every request.
func echo(tb testing.TB) *Router {
	var router atomic.Pointer[Router]
	r := startRouter(tb, func(e Event) {
		if e.Kind == Message {
			_ = router.Load().Send(e.Conn, nil, benchAnswer)
		}
	}, Options{})
	router.Store(r)
	return r
}

func BenchmarkRoundTrip(b *testing.B) {
	d := startDealer(b, echo(b).Addr(), nil, Options{})
	benchOutstanding(b, d, 1)
}

func BenchmarkPipelined64(b *testing.B) {
	d := startDealer(b, echo(b).Addr(), nil, Options{})
	benchOutstanding(b, d, 64)
}

// BenchmarkLoop64 answers from one goroutine that owns all state, as the shell does.
func BenchmarkLoop64(b *testing.B) {
	requests := make(chan ConnID, 256)
	r := startRouter(b, func(e Event) {
		if e.Kind == Message {
			requests <- e.Conn
		}
	}, Options{})
	go func() {
		for id := range requests {
			_ = r.Send(id, nil, benchAnswer)
		}
	}()
	d := startDealer(b, r.Addr(), nil, Options{})
	benchOutstanding(b, d, 64)
	b.Cleanup(func() { close(requests) })
}

// BenchmarkClients16x4 has 16 connections with 4 requests outstanding each.
func BenchmarkClients16x4(b *testing.B) {
	r := echo(b)
	var wg sync.WaitGroup
	clients := make([]*Conn, 16)
	for i := range clients {
		clients[i] = startDealer(b, r.Addr(), nil, Options{})
	}
	b.ReportAllocs()
	b.ResetTimer()
	for _, d := range clients {
		wg.Go(func() {
			if err := exchange(context.Background(), d, b.N/len(clients)+1, 4); err != nil {
				b.Error(err)
			}
		})
	}
	wg.Wait()
}

// BenchmarkPush sends 60-byte messages one way.
func BenchmarkPush(b *testing.B) {
	got := make(chan struct{})
	n := 0
	pull, err := ListenPull(context.Background(), "127.0.0.1:0", func(e Event) {
		if e.Kind == Message {
			if n++; n == b.N {
				close(got)
			}
		}
	}, Options{})
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = pull.Close() }()
	d, err := DialPush(context.Background(), pull.Addr().String(), nil, Options{})
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = d.Close() }()
	body := make([]byte, 60)
	b.ReportAllocs()
	b.ResetTimer()
	for range b.N {
		if err := d.SendWait(context.Background(), body); err != nil {
			b.Fatal(err)
		}
	}
	<-got
}

func benchOutstanding(b *testing.B, d *Conn, n int) {
	ctx := context.Background()
	b.ReportAllocs()
	b.ResetTimer()
	if err := exchange(ctx, d, b.N, n); err != nil {
		b.Fatal(err)
	}
}

// exchange makes total requests, at most n of them unanswered at any time.
func exchange(ctx context.Context, d *Conn, total, n int) error {
	for i := range total + n {
		if i >= n {
			if _, err := d.Recv(ctx); err != nil {
				return err
			}
		}
		if i < total {
			if err := d.Send(nil, benchRequest); err != nil {
				return err
			}
		}
	}
	return nil
}
