package berth

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berthkv/berth/client"
	"github.com/berthkv/berth/internal/admin"
	"github.com/berthkv/berth/internal/arena"
	"github.com/berthkv/berth/internal/attach"
	"github.com/berthkv/berth/internal/config"
	"github.com/berthkv/berth/internal/intake"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
	"github.com/berthkv/berth/internal/link/nixllink"
	"github.com/berthkv/berth/internal/link/shmlink"
	"github.com/berthkv/berth/internal/link/tcplink"
	"github.com/berthkv/berth/internal/localapi"
	"github.com/berthkv/berth/internal/metrics"
	"github.com/berthkv/berth/internal/node"
	"github.com/berthkv/berth/internal/outbound"
	"github.com/berthkv/berth/internal/zmtp"
)

// Config is an agent's configuration; LoadConfig reads and checks it.
type Config = config.Agent

// Sources are where a configuration comes from.
type Sources = config.Sources

// LoadConfig reads a configuration. The error joins every fault found.
func LoadConfig(s Sources) (*Config, error) { return config.Load(s) }

// Status is an agent's state, as /v1/status has it.
type Status = node.Status

// Version of this build.
func Version() string { return config.Version }

// Agent is a running agent. Close it.
type Agent struct {
	cfg   *Config
	log   *slog.Logger
	node  *node.Node
	http  *http.Server
	local *localapi.Server

	nixl      *nixllink.Library  // loaded when first needed
	handshake node.DataHandshake // nil without a nixl link

	addrs Addrs
	undo  closers // what is open, closed in reverse
	close sync.Once
	err   error
}

// Addrs are the addresses that an agent serves; unset ones are empty.
type Addrs struct {
	HTTP  string // host:port
	Alloc string // host:port of the alloc port
	Init  string
	Local string // path of the unix socket
}

// Addrs returns where the agent listens.
func (a *Agent) Addrs() Addrs { return a.addrs }

// Status takes a snapshot.
func (a *Agent) Status(ctx context.Context) (Status, error) { return a.node.Status(ctx) }

// Engine connects an engine that runs in this process: the local API's calls and
// rules without its socket. Close the client before the agent. ctx bounds the
// call.
func (a *Agent) Engine(ctx context.Context, h client.Hello) (*client.Client, error) {
	return client.Inside(ctx, a.local, h)
}

// closers run in reverse.
type closers []func() error

func (c *closers) add(f func() error) { *c = append(*c, f) }

func (c closers) run() error {
	var errs []error
	for _, f := range slices.Backward(c) {
		errs = append(errs, f())
	}
	return errors.Join(errs...)
}

// descriptors is what an agent or a proxy may have open besides its peers' and
// clients' connections.
const descriptors = 256

// StartAgent starts an agent or returns why it cannot, with nothing left open.
// The error names the option. ctx bounds the start only.
func StartAgent(ctx context.Context, cfg *Config, log *slog.Logger) (*Agent, error) {
	a := &Agent{cfg: cfg, log: log}
	if err := a.start(ctx); err != nil {
		return nil, errors.Join(err, a.undo.run())
	}
	return a, nil
}

// The order of start is that of need; Close undoes it in reverse: HTTP, the
// loop (nobody acts any more), the local API and the ports, the links (nobody
// touches the memory any more), and the memory last.
func (a *Agent) start(ctx context.Context) error {
	cfg := a.cfg
	allow, err := allowList(ctx, cfg)
	if err != nil {
		return err
	}
	if err := arena.CheckDescriptors("agent", descriptors); err != nil {
		return err
	}
	if cfg.Role == "both" { // each pool is checked alone when it is mapped, and is only touched later
		if err := arena.CheckMemory("both pools", 2*int64(cfg.Capacity)*cfg.SlotBytes, false); err != nil {
			return named(err, "pd_buffer_size")
		}
	}
	var inc kv.Incarnation
	var secret kv.Secret
	rand.Read(inc[:])
	rand.Read(secret[:])

	a.node = node.New(node.Config{Name: cfg.Node, Rank: int(cfg.Rank), Incarnation: inc, Secret: secret,
		DialTimeout: time.Duration(cfg.DialTimeout), Log: a.log})
	cores := node.Cores{Attach: attach.Config{Facts: cfg.Facts, Shape: cfg.Shape, Rank: cfg.Rank, Quarantine: cfg.Quarantine}}
	deps := node.Deps{Receivers: map[string]link.Receiver{}, Senders: map[string]link.Sender{}}
	if err := checkBind(cfg); err != nil {
		return err
	}
	// Engines that come early wait in the mailbox. First, because a live agent
	// with the same socket is the likeliest thing in the way.
	local, err := localapi.Listen(localapi.Config{Path: cfg.LocalSocket, Handler: a.node.LocalEvents(), Log: a.log})
	if err != nil {
		return err // it names local_socket
	}
	a.undo.add(local.Close)
	a.local, deps.Local, a.addrs.Local = local, local, cfg.LocalSocket
	if cfg.Sends() {
		if cores.Outbound, err = a.sending(&deps, inc, secret); err != nil {
			return err
		}
	}
	if cfg.Receives() {
		if cores.Intake, err = a.receiving(&deps, inc, allow); err != nil {
			return err
		}
	}
	if err := a.ports(ctx, &deps, allow); err != nil {
		return err
	}
	a.node.Start(cores, deps)
	a.undo.add(func() error { a.node.Close(); return nil })
	return a.serveHTTP(ctx, allow)
}

func (a *Agent) pool(name string, writable bool) (*arena.Pool, error) {
	p, err := arena.New(arena.Config{Name: name, Slots: a.cfg.Capacity, SlotBytes: a.cfg.SlotBytes, Writable: writable, HugeTLB: a.cfg.HugePages})
	if err != nil {
		return nil, fmt.Errorf("pd_buffer_size: %w", err)
	}
	a.undo.add(p.Close)
	if a.cfg.HugePages && !p.HugeTLB() {
		a.log.Warn("huge_pages: too few are reserved (vm.nr_hugepages); the pool is on ordinary pages", "name", name)
	}
	a.log.Info("pool", "name", name, "slots", a.cfg.Capacity, "slot_bytes", a.cfg.SlotBytes, "bytes", int64(a.cfg.Capacity)*a.cfg.SlotBytes)
	return p, nil
}

func poolOf(p *arena.Pool) link.Pool {
	return link.Pool{Bytes: p.Bytes(), SlotBytes: p.SlotBytes(), FD: p.FD()}
}

// sending maps the staging pool, makes the links' sending halves and returns
// the sender's core's configuration.
func (a *Agent) sending(deps *node.Deps, inc kv.Incarnation, secret kv.Secret) (*outbound.Config, error) {
	staging, err := a.pool("staging pool", true)
	if err != nil {
		return nil, err
	}
	gens, err := arena.NewGenerations(a.cfg.Capacity)
	if err != nil {
		return nil, err
	}
	a.undo.add(gens.Close)
	deps.Generations, deps.Staging = gens, poolOf(staging)
	deps.Pools, deps.PoolNames = append(deps.Pools, staging.FD()), append(deps.PoolNames, localapi.StagingPool)
	cfg := a.cfg
	oc := &outbound.Config{
		Node: cfg.Node, Incarnation: inc, Secret: secret, Facts: cfg.Facts, Shape: cfg.Shape,
		Staging: cfg.Capacity, MaxStage: cfg.Capacity / 2, Rank: cfg.Rank,
		Dialect: outbound.Dialect(cfg.PeerDialect), Checksum: cfg.Checksum,
		RequestTimeout: cfg.RequestTimeout, AllocationTimeout: cfg.AllocTimeout, WriteTimeout: cfg.WriteTimeout, EndingTTL: cfg.EndingTTL,
		SkipNotify: cfg.SkipNotification, Window: cfg.Window, MaxWaiting: int(cfg.MaxWaiting), MaxPeers: maxPeers, MaxEndings: kv.MaxEndings,
		LegacyConns: legacyConns, LegacyNoData: cfg.LegacyData == "none",
	}
	if len(cfg.ReceiverAllow) > 0 {
		allows := config.Allows(cfg.ReceiverAllow)
		oc.ReceiverAllow = func(host string) bool {
			ip, err := netip.ParseAddr(host)
			return err == nil && allows(ip)
		}
	}
	for _, name := range cfg.Links {
		var s link.Sender
		switch name {
		case "tcp":
			s = tcplink.NewSender(tcplink.SenderConfig{Pool: poolOf(staging), Connections: int(cfg.TCPConnections),
				WriteTimeout: time.Duration(cfg.WriteTimeout), DialTimeout: time.Duration(cfg.DialTimeout)})
		case "shm":
			if s, err = a.shmSender(staging, gens); err != nil {
				return nil, fmt.Errorf("links: shm: %w", err)
			}
		case "nixl":
			if s, err = a.nixlSender(staging, inc); err != nil {
				return nil, fmt.Errorf("links: nixl: %w", err)
			}
			oc.LegacyLink = name
		}
		if cfg.Decorate != nil {
			s = cfg.Decorate(s)
		}
		a.undo.add(s.Close)
		deps.Senders[name] = s
		caps := s.Caps()
		oc.Links = append(oc.Links, outbound.Link{Name: name, Pull: caps.Mode == link.Pull, OneSided: caps.Mode == link.OneSided, ExactFence: caps.ExactFence})
	}
	d := newDialer(cfg.Node, inc, a.log)
	a.undo.add(d.Close)
	deps.Dialer = d
	if !cfg.SkipNotification {
		p, err := newPusher(net.JoinHostPort(cfg.ProxyHost, strconv.FormatInt(cfg.ProxyPort, 10)), a.log)
		if err != nil {
			return nil, fmt.Errorf("pd_proxy_host: %w", err)
		}
		a.undo.add(p.Close)
		deps.Notify = p
	}
	return oc, nil
}

// shmSender opens the descriptors that receivers get: for reading only.
func (a *Agent) shmSender(staging *arena.Pool, gens *arena.Generations) (link.Sender, error) {
	c := shmlink.SenderConfig{Slots: staging.Slots(), SlotBytes: staging.SlotBytes()}
	for _, d := range []struct {
		open func() (int, error)
		fd   *int
	}{{staging.ReadOnlyFD, &c.Staging}, {gens.ReadOnlyFD, &c.Generations}} {
		fd, err := d.open()
		if err != nil {
			return nil, err
		}
		a.undo.add(func() error { return unix.Close(fd) })
		*d.fd = fd
	}
	return shmlink.NewSender(c), nil
}

// nixlAgent names the NIXL agent of one pool; a restarted agent has another.
func (a *Agent) nixlAgent(role string, inc kv.Incarnation) string {
	return fmt.Sprintf("%s/%s/%s", a.cfg.Node, inc, role)
}

func (a *Agent) nixlLibrary() (l *nixllink.Library, err error) {
	if a.nixl == nil {
		a.nixl, err = nixllink.Load(a.cfg.NixlLib)
	}
	return a.nixl, err
}

func (a *Agent) nixlSender(staging *arena.Pool, inc kv.Incarnation) (link.Sender, error) {
	l, err := a.nixlLibrary()
	if err != nil {
		return nil, err
	}
	return nixllink.NewSender(nixllink.SenderConfig{Library: l, Agent: a.nixlAgent("sender", inc), Backends: a.cfg.NixlBackends, Pool: poolOf(staging),
		Module: a.cfg.NixlModule, DialInit: dialInit, DialTimeout: time.Duration(a.cfg.DialTimeout)})
}

func (a *Agent) nixlReceiver(receive *arena.Pool, inc kv.Incarnation, allow func(netip.Addr) bool, ev link.ReceiverEvents) (*nixllink.Receiver, error) {
	l, err := a.nixlLibrary()
	if err != nil {
		return nil, err
	}
	cfg := a.cfg
	return nixllink.NewReceiver(nixllink.ReceiverConfig{Library: l, Agent: a.nixlAgent("receiver", inc), Backends: cfg.NixlBackends, Incarnation: inc, Pool: poolOf(receive),
		Listen: net.JoinHostPort(cfg.BindAddress, strconv.FormatInt(cfg.NixlPort, 10)), Advertise: cfg.PeerHost, Permit: allow}, ev)
}

// Bounds that are no options.
const (
	maxPeers    = 4096 // receivers that a sender knows
	legacyConns = 32   // connections to one LMCache receiver
	maxConns    = 4096 // control connections to a receiver
)

// receiving maps the receive pool, makes the links' receiving halves and
// returns the receiver's core's configuration.
func (a *Agent) receiving(deps *node.Deps, inc kv.Incarnation, allow func(netip.Addr) bool) (*intake.Config, error) {
	receive, err := a.pool("receive pool", false)
	if err != nil {
		return nil, err
	}
	deps.Pools, deps.PoolNames = append(deps.Pools, receive.FD()), append(deps.PoolNames, localapi.ReceivePool)
	cfg := a.cfg
	ic := &intake.Config{
		Incarnation: inc, Facts: cfg.Facts, Capacity: cfg.Capacity,
		AllocationTimeout: cfg.AllocTimeout, RequestTimeout: cfg.RequestTimeout, Lease: cfg.Lease, UnclaimedTTL: cfg.UnclaimedTTL,
		EndingTTL: cfg.EndingTTL, Quarantine: cfg.Quarantine, SurplusGrace: cfg.SurplusGrace,
		MaxWaiting: int(cfg.MaxWaiting), Bypass: cfg.AdmissionBypass, MaxEndings: kv.MaxEndings, MaxConns: maxConns,
		LegacyData: cfg.LegacyData != "none",
	}
	for _, name := range cfg.Links {
		var r link.Receiver
		var err error
		switch name {
		case "tcp":
			r, err = tcplink.NewReceiver(tcplink.ReceiverConfig{Incarnation: inc, Pool: poolOf(receive), Checksum: cfg.Checksum, Permit: allow,
				Listen: net.JoinHostPort(cfg.BindAddress, strconv.FormatInt(cfg.TCPPort, 10)), Advertise: cfg.PeerHost}, a.node.ReceiverEvents(name))
			err = named(err, "tcp_port")
		case "shm":
			var s *shmlink.Receiver
			s, err = shmlink.NewReceiver(shmlink.ReceiverConfig{Incarnation: inc, Pool: poolOf(receive), Checksum: cfg.Checksum, Path: shmPath(cfg)}, a.node.ReceiverEvents(name))
			if err == nil {
				r, deps.Mapped = s, s.Mapped
			}
			err = named(err, "links: shm")
		case "nixl":
			var x *nixllink.Receiver
			if x, err = a.nixlReceiver(receive, inc, allow, a.node.ReceiverEvents(name)); err == nil {
				r, a.handshake = x, x
			}
			err = named(err, "links: nixl")
		}
		if err != nil {
			return nil, err
		}
		a.undo.add(r.Close)
		deps.Receivers[name] = r
		caps := r.Caps()
		ic.Links = append(ic.Links, intake.Link{Name: name, Addr: r.Offer(), Pull: caps.Mode == link.Pull, OneSided: caps.Mode == link.OneSided, ExactFence: caps.ExactFence})
	}
	return ic, nil
}

// shmPath is where senders of this host connect: beside the local socket.
func shmPath(cfg *Config) string { return strings.TrimSuffix(cfg.LocalSocket, ".sock") + ".shm" }

func named(err error, option string) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", option, err)
}

// ports opens the control ports.
func (a *Agent) ports(ctx context.Context, deps *node.Deps, allow func(netip.Addr) bool) error {
	cfg := a.cfg
	if cfg.Receives() {
		r, err := listenRouter(ctx, net.JoinHostPort(cfg.BindAddress, strconv.Itoa(cfg.AllocPort())), a.node.RouterEvents(), zmtp.Options{Allow: allow, Log: a.log, MaxConns: maxConns})
		if err != nil {
			return named(err, "pd_peer_alloc_port")
		}
		a.undo.add(r.Close)
		deps.Router, a.addrs.Alloc = r, r.router.Addr().String()
		if port := cfg.InitPort(); port != 0 {
			respond := func(b []byte) []byte { return a.node.RespondInit(a.handshake, b) }
			rep, err := listenInit(ctx, net.JoinHostPort(cfg.BindAddress, strconv.Itoa(port)), respond, zmtp.Options{Allow: allow, Log: a.log})
			if err != nil {
				return named(err, "pd_peer_init_port")
			}
			a.undo.add(rep.Close)
			a.addrs.Init = rep.Addr().String()
		}
	}
	return nil
}

// serveHTTP starts the operator's endpoints.
func (a *Agent) serveHTTP(ctx context.Context, allow func(netip.Addr) bool) error {
	h := admin.Handler(admin.Source{
		Status: func(ctx context.Context) (any, string, error) {
			s, err := a.node.Status(ctx)
			return s, s.NotReady, err
		},
		Metrics: metrics.Agent(a.node),
	})
	permit := func(ip netip.Addr) bool { return ip.IsLoopback() || allow(ip) } // this host's operator always
	srv, addr, err := admin.Serve(ctx, a.cfg.HTTPAddr, permit, h, a.log)
	if err != nil {
		return named(err, "http_addr")
	}
	a.http, a.addrs.HTTP = srv, addr
	a.undo.add(srv.Close)
	return nil
}

// Drain takes nothing new and returns when nothing is live, or with ctx's
// error.
func (a *Agent) Drain(ctx context.Context) error {
	a.node.Drain()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		s, err := a.node.Status(ctx)
		if err != nil || s.Idle() {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%d requests are live: %w", len(s.Requests), ctx.Err())
		}
	}
}

// Close stops the agent at once and frees everything. Drain first to end well.
// The second call returns the first one's error.
func (a *Agent) Close() error {
	a.close.Do(func() { a.err = a.undo.run() })
	return a.err
}

// allowList builds the check that every port makes at accept.
func allowList(ctx context.Context, cfg *Config) (func(netip.Addr) bool, error) {
	nets := slices.Clone(cfg.PeerAllow)
	if len(nets) > 0 {
		return config.Allows(nets), nil
	}
	nets = append(nets, "127.0.0.0/8", "::1")
	for option, host := range map[string]string{"pd_peer_host": cfg.PeerHost, "pd_proxy_host": cfg.ProxyHost} {
		if host == "" {
			continue
		}
		ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
		if err != nil {
			return nil, fmt.Errorf("%s: %w; peer_allow is not set, so its networks must be known", option, err)
		}
		for _, ip := range ips {
			nets = append(nets, ip.Unmap().WithZone("").String())
		}
	}
	if cfg.Receives() {
		if ip, err := netip.ParseAddr(cfg.BindAddress); err == nil && !ip.IsLoopback() {
			return nil, fmt.Errorf("peer_allow is not set: a receiver at %s would refuse every sender on another host; name their networks, or bind_address a loopback address", cfg.BindAddress)
		}
	}
	return config.Allows(nets), nil
}

// checkBind says whether the address can be bound, naming the option.
func checkBind(cfg *Config) error {
	l, err := net.Listen("tcp", net.JoinHostPort(cfg.BindAddress, "0"))
	if err == nil {
		return l.Close()
	}
	if errors.Is(err, os.ErrPermission) {
		return named(err, "bind_address")
	}
	return fmt.Errorf("bind_address: %s (from pd_peer_host, unless set) is not an address of this host: %w", cfg.BindAddress, err)
}
