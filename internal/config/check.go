package config

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/berthkv/berth/internal/kv"
)

// report takes one fault of an option.
type report func(option, format string, args ...any)

// check fills what depends on other options and finds what contradicts.
func (a *Agent) check(given map[string]bool, fault report) {
	derived := func(name, why string) { a.from[name] = why }

	if given["enable_pd"] && !a.EnablePD {
		fault("enable_pd", "is false: there is nothing to do")
	}
	if a.Role == "" {
		fault("pd_role", "is missing: sender, receiver or both")
	}
	if a.BackendMode == "sync" {
		fault("pd_backend_mode", "sync is not supported: requests would have no total_chunks to reserve; use async")
	}
	switch {
	case a.TransferChannel != "nixl" || given["links"]:
	case hasNixl:
		a.Links = []string{"nixl"}
		derived("links", "from transfer_channel")
	default:
		fault("transfer_channel", "nixl: this build has no nixl link (make build-nixl makes one that has); set links (for example [shm, tcp]) to move data over those between Berth agents")
	}
	if !hasNixl && slices.Contains(a.Links, "nixl") {
		fault("links", "has nixl: this build has no nixl link; make build-nixl makes one that has")
	}
	if a.TransferChannel == "mock_memory" {
		a.Notes = append(a.Notes, "transfer_channel mock_memory means nothing here: links are used")
	}
	if a.BufferDevice == "cuda" {
		a.Notes = append(a.Notes, "pd_buffer_device cuda means host memory here")
	}
	if given["save_unfull_chunk"] && !a.SaveUnfullChunk {
		a.Notes = append(a.Notes, "save_unfull_chunk is always true here")
	}
	if given["pd_condition_poll_interval_sec"] {
		a.Notes = append(a.Notes, "pd_condition_poll_interval_sec is not used: nothing is polled")
	}
	if a.Rank >= a.TPSize {
		if given["tp_size"] {
			fault("rank", "is %d; tp_size is %d", a.Rank, a.TPSize)
		} else {
			a.TPSize = max(a.TPSize, int64(len(a.PeerAllocPorts)), a.Rank+1)
			derived("tp_size", "from rank and pd_peer_alloc_port")
		}
	} else if !given["tp_size"] && int64(len(a.PeerAllocPorts)) > a.TPSize {
		a.TPSize = int64(len(a.PeerAllocPorts))
		derived("tp_size", "from pd_peer_alloc_port")
	}
	a.checkLayout(given, fault)
	a.checkAddresses(given, fault)
	if a.AdmissionBypass == 0 {
		a.AdmissionBypass = int64(a.Capacity)
		derived("admission_bypass_chunks", "one capacity")
	}
	if a.Lease < kv.MinLease {
		fault("lease_sec", "is %g; it must be at least %g", a.Lease.Seconds(), kv.MinLease.Seconds())
	}
	for _, d := range []struct {
		name string
		v    kv.Duration
	}{{"lease_sec", a.Lease}, {"quarantine_sec", a.Quarantine}, {"write_timeout_sec", a.WriteTimeout}, {"dial_timeout_sec", a.DialTimeout},
		{"request_timeout_sec", a.RequestTimeout}, {"pd_shutdown_timeout_sec", a.ShutdownTimeout}} {
		if d.v == kv.Forever {
			fault(d.name, "is inf; it must end")
		}
	}
	if len(a.Links) == 0 {
		fault("links", "is empty")
	}
}

// checkLayout derives a slot's bytes, the facts and the capacity.
func (a *Agent) checkLayout(given map[string]bool, fault report) {
	if a.ChunkSize < 1 {
		return // a fault of its own, reported when it was read
	}
	a.Facts = kv.Facts{ChunkTokens: a.ChunkSize, TPSize: a.TPSize, TPRank: a.Rank}
	switch {
	case given["kv_shape"] && given["slot_bytes"]:
		fault("slot_bytes", "and kv_shape are both given; one of them is wanted")
	case given["kv_shape"]:
		if len(a.KVShape) != 5 {
			fault("kv_shape", "has %d numbers; 5 are wanted: layers, 2 or 1, tokens, kv_heads, head_size", len(a.KVShape))
			return
		}
		if a.KVDType == "" {
			fault("kv_dtype", "is missing beside kv_shape")
			return
		}
		layers, two, tokens, hidden := a.KVShape[0], a.KVShape[1], a.KVShape[2], a.KVShape[3]*a.KVShape[4]
		a.Facts.DType = kv.DType(a.KVDType)
		switch two {
		case 2:
			a.Facts.Format = kv.Format2LTD
		case 1:
			a.Facts.Format = kv.FormatMLA
		default:
			fault("kv_shape", "has %d as its second number; 2 is wanted, or 1 for MLA", two)
			return
		}
		if tokens != a.ChunkSize {
			if given["chunk_size"] {
				fault("chunk_size", "is %d; kv_shape has %d tokens", a.ChunkSize, tokens)
			}
			a.ChunkSize, a.Facts.ChunkTokens = tokens, tokens
			a.from["chunk_size"] = "from kv_shape"
		}
		a.Shape = []int64{two, layers, tokens, hidden}
	case given["slot_bytes"]:
		if a.SlotBytes%a.ChunkSize != 0 {
			fault("slot_bytes", "is %d, which is no multiple of chunk_size %d", a.SlotBytes, a.ChunkSize)
			return
		}
		a.Facts.Format, a.Facts.DType = kv.Format2TD, "uint8"
		if a.KVDType != "" {
			a.Facts.DType = kv.DType(a.KVDType)
		}
		size, ok := a.Facts.DType.Size()
		if ok && a.SlotBytes%(a.ChunkSize*size) != 0 {
			fault("slot_bytes", "is %d, which is no multiple of %d tokens of %d bytes", a.SlotBytes, a.ChunkSize, size)
			return
		}
		a.Shape = []int64{a.ChunkSize, a.SlotBytes / a.ChunkSize / max(size, 1)}
	default:
		fault("kv_shape", "is missing: LMCache's five numbers with kv_dtype, or slot_bytes")
		return
	}
	n, err := kv.ChunkBytes(a.Facts.Format, a.Facts.DType, a.Shape, a.ChunkSize)
	if err != nil {
		fault("kv_shape", "(with kv_dtype): %v", err)
		return
	}
	a.SlotBytes, a.Facts.SlotBytes = n, n
	if a.from["slot_bytes"] == "" {
		a.from["slot_bytes"] = "from kv_shape"
	}
	switch {
	case !given["pd_buffer_size"]:
		fault("pd_buffer_size", "is missing")
		return
	case a.BufferSize < n:
		fault("pd_buffer_size", "is %d; one slot has %d bytes", a.BufferSize, n)
		return
	case a.BufferSize/n > kv.MaxSlots:
		fault("pd_buffer_size", "holds %d slots of %d bytes; at most %d", a.BufferSize/n, n, kv.MaxSlots)
		return
	}
	a.Capacity = int(a.BufferSize / n)
	if whole := int64(a.Capacity) * n; whole != a.BufferSize {
		a.Notes = append(a.Notes, fmt.Sprintf("pd_buffer_size %d is rounded down to %d: %d slots of %d bytes", a.BufferSize, whole, a.Capacity, n))
	}
	if held := int64(a.Capacity) * a.ChunkSize; a.MaxPrefillLen > held {
		fault("pd_max_prefill_len", "is %d; pd_buffer_size %d holds %d tokens", a.MaxPrefillLen, a.BufferSize, held)
	}
	if a.Sends() && a.Capacity < 2 {
		fault("pd_buffer_size", "is %d; a sender needs two slots of %d bytes, to fill one while the other is sent", a.BufferSize, n)
	}
}

// checkAddresses finds missing hosts and ports; whether a port is free, a host
// local or a name known is found at start.
func (a *Agent) checkAddresses(given map[string]bool, fault report) {
	if a.Receives() {
		if a.PeerHost == "" {
			fault("pd_peer_host", "is missing: the address under which senders reach this receiver")
		}
		if len(a.PeerAllocPorts) == 0 {
			fault("pd_peer_alloc_port", "is missing")
		}
		for _, p := range []struct {
			name string
			n    int
		}{{"pd_peer_alloc_port", len(a.PeerAllocPorts)}, {"pd_peer_init_port", len(a.PeerInitPorts)}} {
			if p.n > 0 && a.Rank >= int64(p.n) {
				fault(p.name, "has %d ports; rank %d needs element %d", p.n, a.Rank, a.Rank)
			}
		}
		if i, p := len(a.PeerInitPorts), len(a.PeerAllocPorts); i > 0 && p > 0 && i != p {
			fault("pd_peer_init_port", "has %d ports and pd_peer_alloc_port has %d; each rank has one of each", i, p)
		}
		if a.InitPort() != 0 && a.Rank < int64(len(a.PeerAllocPorts)) && a.InitPort() == a.AllocPort() {
			fault("pd_peer_init_port", "and pd_peer_alloc_port are both %d for rank %d", a.InitPort(), a.Rank)
		}
	}
	a.noteUnused(given)
	if a.Sends() && !a.SkipNotification && (a.ProxyHost == "" || a.ProxyPort == 0) {
		name := "pd_proxy_host"
		if a.ProxyHost != "" {
			name = "pd_proxy_port"
		}
		fault(name, "is missing: where ProxyNotif goes; or set pd_skip_proxy_notification")
	}
	if !given["bind_address"] {
		a.BindAddress = a.PeerHost
		a.from["bind_address"] = "pd_peer_host"
	}
	for _, l := range []struct {
		name string
		of   []string
	}{{"peer_allow", a.PeerAllow}, {"receiver_allow", a.ReceiverAllow}} {
		for _, s := range l.of {
			if _, err := ParseNetwork(s); err != nil {
				fault(l.name, "has %q: %v", s, err)
			}
		}
	}
	if _, port, err := net.SplitHostPort(a.HTTPAddr); err != nil {
		fault("http_addr", "is %q; host:port is wanted", a.HTTPAddr)
	} else if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		fault("http_addr", "is %q; its port must be 0 to 65535", a.HTTPAddr)
	}
	if a.Node == "" && a.Role != "" {
		host, err := os.Hostname()
		if err != nil {
			host = "host"
		}
		a.Node = fmt.Sprintf("%s-%s-%d", host, a.Role, a.Rank)
		a.from["node"] = "the host's name"
	}
	if len(a.Node) > kv.MaxNode || strings.ContainsFunc(a.Node, func(r rune) bool { return r < ' ' }) {
		fault("node", "has %d bytes; at most %d, without control characters", len(a.Node), kv.MaxNode)
	}
	if a.LocalSocket == "" {
		dir := os.Getenv("XDG_RUNTIME_DIR")
		if dir == "" {
			dir = filepath.Join(os.TempDir(), fmt.Sprintf("berth-%d", os.Getuid()))
		}
		a.LocalSocket = filepath.Join(dir, "berth", fmt.Sprintf("%s-%d.sock", a.Role, a.Rank))
		a.from["local_socket"] = "by role and rank"
	}
	const maxSocketPath = 107 // sun_path less its NUL
	if len(a.LocalSocket) > maxSocketPath {
		fault("local_socket", "has %d bytes; a unix socket's path has at most %d", len(a.LocalSocket), maxSocketPath)
	}
}

// noteUnused notes what was given and belongs to the other side.
func (a *Agent) noteUnused(given map[string]bool) {
	for _, o := range []struct {
		name string
		used bool
	}{{"pd_peer_init_port", a.Receives()}, {"pd_peer_alloc_port", a.Receives()},
		{"pd_proxy_host", a.Sends()}, {"pd_proxy_port", a.Sends()}, {"pd_skip_proxy_notification", a.Sends()}} {
		if a.Role != "" && given[o.name] && !o.used {
			a.Notes = append(a.Notes, fmt.Sprintf("%s is not used by pd_role %s", o.name, a.Role))
		}
	}
}

// ParseNetwork reads a CIDR or a single address.
func ParseNetwork(s string) (netip.Prefix, error) {
	if strings.Contains(s, "/") {
		p, err := netip.ParsePrefix(s)
		return p.Masked(), err
	}
	ip, err := netip.ParseAddr(s)
	if err != nil {
		return netip.Prefix{}, err
	}
	ip = ip.Unmap()
	return netip.PrefixFrom(ip, ip.BitLen()), nil
}

// Allows returns a function that tells whether an address is in one of the
// networks, which ParseNetwork accepts.
func Allows(networks []string) func(netip.Addr) bool {
	var ps []netip.Prefix
	for _, s := range networks {
		if p, err := ParseNetwork(s); err == nil {
			ps = append(ps, p)
		}
	}
	return func(ip netip.Addr) bool {
		ip = ip.Unmap().WithZone("")
		return slices.ContainsFunc(ps, func(p netip.Prefix) bool { return p.Contains(ip) })
	}
}
