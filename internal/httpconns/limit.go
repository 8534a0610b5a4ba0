// Package httpconns bounds the connections of an HTTP server, so that those that
// ask for nothing keep nobody out who does: where all places are taken, the
// connection that has been without a request for the longest time goes for a
// newcomer.
package httpconns

import (
	"context"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"
)

// Grace is how long a connection may be without a request before its place may be
// another's: a client that has just come, or just been answered, is not cut off.
const Grace = time.Second

// Limit makes srv, which has not begun to serve, hold at most so many connections,
// and fewer where this process may not have twice as many descriptors: the other
// half is for what requests need. It wraps srv.Handler and sets ConnState and
// ConnContext, which must not be changed afterwards. full is called, from several
// goroutines, when a connection is closed for want of room: one that was idle, or,
// with refused, the newcomer. It returns how many there may be.
//
// Lock: a leaf.
func Limit(srv *http.Server, most int, full func(refused bool)) int {
	var files syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files) == nil {
		most = places(most, files.Cur)
	}
	limit(srv, most, Grace, full)
	return most
}

// places is how many connections a process of so many descriptors may have.
func places(most int, descriptors uint64) int {
	return int(min(uint64(most), max(descriptors/2, 1)))
}

func limit(srv *http.Server, most int, grace time.Duration, full func(refused bool)) {
	start := time.Now()
	var mu sync.Mutex
	t := newTable[net.Conn](most, grace)
	locked := func(f func()) {
		mu.Lock()
		defer mu.Unlock()
		f()
	}
	srv.ConnContext = func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) }
	srv.ConnState = func(c net.Conn, s http.ConnState) {
		switch s {
		case http.StateNew:
			var goes net.Conn
			var evicted, ok bool
			locked(func() { goes, evicted, ok = t.open(time.Since(start), c) })
			if !ok {
				goes = c
			}
			if evicted || !ok {
				goes.Close()
				full(!ok)
			}
		case http.StateClosed, http.StateHijacked:
			locked(func() { t.gone(c) })
		}
	}
	h := srv.Handler
	srv.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, _ := r.Context().Value(connKey{}).(net.Conn)
		locked(func() { t.busy(c) })
		defer locked(func() { t.quieten(time.Since(start), c) })
		h.ServeHTTP(w, r)
	})
}

type connKey struct{}
