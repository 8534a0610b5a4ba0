// Package admin serves an operator's endpoints: /health, /ready, /metrics and
// /v1/status.
package admin

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"time"

	"github.com/berthkv/berth/internal/httpconns"
)

// Source is what the endpoints show.
type Source struct {
	// Status returns the body of /v1/status, and why the server is not ready,
	// "" when it is.
	Status  func(context.Context) (body any, notReady string, err error)
	Metrics http.Handler
}

// statusTimeout bounds how long an endpoint waits for the loop.
const statusTimeout = 5 * time.Second

// Handler returns the endpoints.
func Handler(s Source) http.Handler {
	mux := http.NewServeMux()
	Mount(mux, s)
	return mux
}

// Mount adds the endpoints to a server that has others.
func Mount(mux *http.ServeMux, s Source) {
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.Handle("GET /metrics", s.Metrics)
	mux.HandleFunc("GET /ready", func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), statusTimeout)
		defer cancel()
		_, reason, err := s.Status(ctx)
		switch {
		case err != nil:
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		case reason != "":
			http.Error(w, reason, http.StatusServiceUnavailable)
		default:
			fmt.Fprintln(w, "ready")
		}
	})
	mux.HandleFunc("GET /v1/status", func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), statusTimeout)
		defer cancel()
		body, _, err := s.Status(ctx)
		if err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		json.NewEncoder(w).Encode(body) // an error here is the client's hanging up
	})
}

// maxConns is how many connections a server has; for one more the one goes that
// has been without a request the longest.
const maxConns = 8192

// Serve listens on addr and serves h to whom permit says (nil: to everybody);
// Close the server. Clients that say nothing, or read nothing, are cut off.
func Serve(ctx context.Context, addr string, permit func(netip.Addr) bool, h http.Handler, log *slog.Logger) (*http.Server, string, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, "", err
	}
	if permit != nil {
		l = guarded{l, permit, log}
	}
	srv := &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       60 * time.Second,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	httpconns.Limit(srv, maxConns, func(refused bool) { log.Debug("http: a connection is closed: too many", "idle", !refused) })
	go srv.Serve(l) // returns with Close
	return srv, l.Addr().String(), nil
}

// guarded closes connections from elsewhere as they come.
type guarded struct {
	net.Listener
	permit func(netip.Addr) bool
	log    *slog.Logger
}

func (g guarded) Accept() (net.Conn, error) {
	for {
		c, err := g.Listener.Accept()
		if err != nil {
			return nil, err
		}
		from := c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap().WithZone("")
		if g.permit(from) {
			return c, nil
		}
		c.Close()
		g.log.Debug("http: connection refused", "from", from)
	}
}
