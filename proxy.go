package berth

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/berthkv/berth/internal/admin"
	"github.com/berthkv/berth/internal/arena"
	"github.com/berthkv/berth/internal/config"
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/metrics"
	"github.com/berthkv/berth/internal/node"
	"github.com/berthkv/berth/internal/proxy"
	"github.com/berthkv/berth/internal/watch"
	"github.com/berthkv/berth/internal/zmtp"
)

// ProxyConfig is a proxy's configuration.
type ProxyConfig struct {
	// Addr is where clients connect, NotifyAddr where senders push their words
	// (LMCache's proxy-host and proxy-port), HTTPAddr the operator's endpoints.
	Addr, NotifyAddr, HTTPAddr string
	Nodes                      proxy.Config  // engines and limits; Incarnation and Log are filled in
	PeerAllow                  []string      // networks that may push words; default: loopback and the engines' hosts
	DialTimeout                time.Duration // bound of a connection attempt to a receiver; 0: 5 s
}

// Proxy is a running proxy. Close it.
type Proxy struct {
	proxy *proxy.Proxy
	addrs ProxyAddrs
	stop  context.CancelFunc
	done  chan struct{}
	err   error
	undo  closers
	close sync.Once
}

// ProxyAddrs are the addresses that a proxy serves.
type ProxyAddrs struct {
	HTTP   string // clients
	Notify string
	Admin  string // the operator
}

// Addrs returns where the proxy listens.
func (p *Proxy) Addrs() ProxyAddrs { return p.addrs }

// StartProxy starts a proxy or returns why it cannot, with nothing left open.
// The error names the flag. ctx bounds the start only.
func StartProxy(ctx context.Context, cfg ProxyConfig, log *slog.Logger) (*Proxy, error) {
	p := &Proxy{done: make(chan struct{})}
	if err := p.start(ctx, cfg, log); err != nil {
		return nil, errors.Join(err, p.undo.run())
	}
	return p, nil
}

// The order of start is that of need; Close undoes it in reverse: clients
// first, then the notify port, then the watcher and its connections.
func (p *Proxy) start(ctx context.Context, cfg ProxyConfig, log *slog.Logger) error {
	if err := arena.CheckDescriptors("proxy", descriptors); err != nil {
		return err
	}
	var inc kv.Incarnation
	var secret kv.Secret
	rand.Read(inc[:])
	rand.Read(secret[:])
	allow, err := proxyAllow(ctx, cfg)
	if err != nil {
		return err
	}
	host, err := os.Hostname()
	if err != nil {
		host = "host"
	}
	name := host + "-proxy"
	if cfg.DialTimeout == 0 {
		cfg.DialTimeout = 5 * time.Second
	}
	d := newDialer(name, inc, log)
	p.undo.add(d.Close)
	w := node.NewWatcher(node.WatcherConfig{Watch: watch.Config{Node: name, Incarnation: inc, Secret: secret}, DialTimeout: cfg.DialTimeout, Dialer: d, Log: log})
	p.undo.add(func() error { w.Close(); return nil })
	pull, err := zmtp.ListenPull(ctx, cfg.NotifyAddr, func(e zmtp.Event) {
		if e.Kind == zmtp.Message {
			w.Notified(kv.ConnID(e.Conn), payload(e.Frames))
		}
	}, zmtp.Options{Allow: allow, Log: log})
	if err != nil {
		return named(err, "proxy-port")
	}
	p.undo.add(pull.Close)
	p.addrs.Notify = pull.Addr().String()

	nodes := cfg.Nodes
	nodes.Incarnation, nodes.Log = inc, log
	if p.proxy, err = proxy.New(nodes, watcher{w}); err != nil {
		return err
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", cfg.Addr)
	if err != nil {
		return named(err, "port")
	}
	p.addrs.HTTP = l.Addr().String()
	mux := p.proxy.AdminMux()
	mux.Handle("GET /metrics", metrics.Proxy(p.proxy))
	srv, addr, err := admin.Serve(ctx, cfg.HTTPAddr, nil, mux, log)
	if err != nil {
		l.Close()
		return named(err, "http-addr")
	}
	p.addrs.Admin = addr
	p.undo.add(srv.Close)

	sctx, stop := context.WithCancel(context.Background())
	p.stop = stop
	go func() {
		defer close(p.done)
		p.err = p.proxy.Serve(sctx, l)
	}()
	p.undo.add(func() error { stop(); <-p.done; return p.err })
	return nil
}

// Done is closed when the proxy has stopped serving by itself or by Close.
func (p *Proxy) Done() <-chan struct{} { return p.done }

// Close lets what is in flight end within the shutdown timeout, and frees
// everything. The second call returns the first one's error.
func (p *Proxy) Close() error {
	p.close.Do(func() { p.err = p.undo.run() })
	return p.err
}

// proxyAllow builds the check of the notify port.
func proxyAllow(ctx context.Context, cfg ProxyConfig) (func(netip.Addr) bool, error) {
	if len(cfg.PeerAllow) > 0 {
		for _, s := range cfg.PeerAllow {
			if _, err := config.ParseNetwork(s); err != nil {
				return nil, fmt.Errorf("peer-allow has %q: %w", s, err)
			}
		}
		return config.Allows(cfg.PeerAllow), nil
	}
	nets := []string{"127.0.0.0/8", "::1"}
	for _, a := range cfg.Nodes.Prefillers {
		ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", a.Host)
		if err != nil {
			return nil, fmt.Errorf("prefiller-host: %w; peer-allow is not set, so its networks must be known", err)
		}
		for _, ip := range ips {
			nets = append(nets, ip.Unmap().WithZone("").String())
		}
	}
	return config.Allows(nets), nil
}

// watcher is a node.Watcher as the proxy wants it.
type watcher struct{ w *node.Watcher }

func (w watcher) Watch(ctx context.Context, req proxy.WatchRequest) (proxy.Watch, error) {
	peers := make([]watch.Peer, len(req.Receivers))
	for i, r := range req.Receivers {
		peers[i] = watch.Peer{Host: r.Host, AllocPort: r.AllocPort}
	}
	wt, err := w.w.Watch(ctx, req.ReqID, peers, req.Deadline)
	if err != nil {
		return nil, err
	}
	return watched{wt}, nil
}

type watched struct{ *node.Watch }

func (w watched) Result(ctx context.Context) (proxy.Ending, error) {
	r, err := w.Watch.Result(ctx)
	return proxy.Ending{Ending: r.Ending, Reason: r.Reason, Text: r.Text, Rank: r.Rank}, err
}

func (w watched) Cancel(reason fault.Code, text string) { w.Watch.Cancel(reason, text) }
func (w watched) Close()                                { w.Watch.Release() }
