package proxy

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/berthkv/berth/internal/httpconns"
)

// Serve answers clients on l until ctx ends; then it takes nothing new, gives
// what is in flight Timeouts.Shutdown to end, and ends the rest. l is closed. The
// error is why it stopped by itself, nil after ctx. The proxy is closed.
func (p *Proxy) Serve(ctx context.Context, l net.Listener) error {
	srv := p.Server(p.Handler())
	failed := make(chan error, 1)
	go func() { failed <- srv.Serve(l) }()
	var err error
	select {
	case err = <-failed:
	case <-ctx.Done():
		p.closing.Store(true)
		p.registry.close()
		grace, stop := context.WithTimeout(context.Background(), p.cfg.Timeouts.Shutdown)
		srv.Shutdown(grace) // what is left then is ended by Close
		stop()
	}
	p.Close()
	return errors.Join(err, ignoreClosed(srv.Close()))
}

func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// Server returns an HTTP server with the proxy's limits: time for a header, idle
// time, header size, and connections at one time. For one more the one goes that
// has been without a request the longest.
func (p *Proxy) Server(h http.Handler) *http.Server {
	srv := &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       120 * time.Second,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          slog.NewLogLogger(p.cfg.Log.Handler(), slog.LevelDebug),
	}
	most := p.cfg.MaxConns
	most = httpconns.Limit(srv, most, func(refused bool) {
		if refused {
			p.log.warn("connections", "a client's connection is closed: too many are busy", "limit", most)
		} else {
			p.log.warn("connections", "an idle connection of a client is closed: there are too many", "limit", most)
		}
	})
	if most < p.cfg.MaxConns {
		p.cfg.Log.Warn("fewer client connections than wanted: half of this process's file descriptors (ulimit -n)", "limit", most, "wanted", p.cfg.MaxConns)
	}
	return srv
}
