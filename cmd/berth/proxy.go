package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/berthkv/berth"
	"github.com/berthkv/berth/internal/proxy"
)

func proxyCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "proxy",
		Short: "Run the HTTP front door: prefill on one engine, decode on another",
		Long: `Runs the OpenAI-compatible front door. The flags are those of LMCache's example proxy; lists are comma-separated.
One host, one port and a number n mean the ports port .. port+n-1. With several ranks for each decoder the init and alloc lists
name one port for each rank.

Ports: --port is bound here, for clients; --proxy-port is bound here, for the senders' words; --http-addr is bound here, for the
operator. The prefillers' and decoders' ports are the engines' HTTP ports; the decoders' init and alloc ports are bound by their agents.`,
		Args: noArgs,
	}
	n, f := proxy.DefaultFlags, cmd.Flags()
	host := f.String("host", "localhost", "address to serve clients on")
	port := f.Int("port", 8000, "port to serve clients on")
	f.StringVar(&n.PrefillerHost, "prefiller-host", n.PrefillerHost, "hosts of the prefill engines")
	f.StringVar(&n.PrefillerPort, "prefiller-port", n.PrefillerPort, "HTTP ports of the prefill engines")
	f.IntVar(&n.NumPrefillers, "num-prefillers", n.NumPrefillers, "prefill engines, with one host and one port")
	f.StringVar(&n.DecoderHost, "decoder-host", n.DecoderHost, "hosts of the decode engines and of their agents")
	f.StringVar(&n.DecoderPort, "decoder-port", n.DecoderPort, "HTTP ports of the decode engines")
	f.StringVar(&n.DecoderInitPort, "decoder-init-port", n.DecoderInitPort, "init ports of the decode agents, one for each rank")
	f.StringVar(&n.DecoderAllocPort, "decoder-alloc-port", n.DecoderAllocPort, "alloc ports of the decode agents, one for each rank")
	f.IntVar(&n.NumDecoders, "num-decoders", n.NumDecoders, "decode engines, with one host and one port")
	notifyHost := f.String("proxy-host", "localhost", "address for the senders' words")
	notifyPort := f.Int("proxy-port", 8500, "port for the senders' words")
	f.String("model", "", "accepted for LMCache's sake; engines know their model")
	f.Int64("pd-buffer-size", 0, "accepted for LMCache's sake; receivers know their room")
	f.Int("chunk-size", 256, "accepted for LMCache's sake; engines know their chunks")
	httpAddr := f.String("http-addr", "127.0.0.1:9401", "the operator's endpoints: /health, /ready, /metrics, /v1/status, /admin/nodes")
	peerAllow := f.StringSlice("peer-allow", nil, "networks that may push words (default: loopback and the prefillers' hosts)")
	policy := f.String("on-transfer-failure", string(proxy.Recompute), "recompute: the decode engine computes the prompt; error: the client gets one")
	inFlight := f.Int("max-in-flight", 0, "requests at one time; more are refused with 503 (default 4096)")
	showNodes := f.Bool("show-nodes", false, "tell clients in X-Berth-Prefill and X-Berth-Decode which engines their request went to")
	var t proxy.Timeouts
	f.DurationVar(&t.Watch, "watch-timeout", 0, "until a decoder's agents have taken the watch of a transfer (default 5s); one that has not is passed over until it answers")
	f.DurationVar(&t.Prefill, "prefill-timeout", 0, "the prefill engine's answer, its queue included (default 5m)")
	f.DurationVar(&t.Transfer, "transfer-timeout", 0, "from the first token until the KV is at the decoder, the wait for room included (default 1m); then --on-transfer-failure")
	f.DurationVar(&t.DecodeStart, "decode-start-timeout", 0, "until the decode engine's first event (default 2m)")
	f.DurationVar(&t.DecodeIdle, "decode-idle-timeout", 0, "between two events of the decode engine (default 1m)")
	f.DurationVar(&t.Request, "request-timeout", 0, "all of a request (default 1h)")
	level := levelFlag(f)
	announce := f.Bool("announce", false, "print one JSON line with the addresses once everything is served")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		pre, dec, err := proxy.ParseNodes(n)
		if err != nil {
			return usageError{err}
		}
		for flag, v := range map[string]int{"port": *port, "proxy-port": *notifyPort} {
			if v < 0 || v > 65535 {
				return usageError{fmt.Errorf("--%s is %d; it must be 0 to 65535", flag, v)}
			}
		}
		for flag, d := range map[string]time.Duration{"watch-timeout": t.Watch, "prefill-timeout": t.Prefill, "transfer-timeout": t.Transfer,
			"decode-start-timeout": t.DecodeStart, "decode-idle-timeout": t.DecodeIdle, "request-timeout": t.Request} {
			if f.Changed(flag) && d <= 0 {
				return usageError{fmt.Errorf("--%s is %v; it must be above 0", flag, d)}
			}
		}
		if f.Changed("max-in-flight") && *inFlight < 1 {
			return usageError{fmt.Errorf("--max-in-flight is %d; it must be at least 1", *inFlight)}
		}
		if p := proxy.Policy(*policy); p != proxy.Recompute && p != proxy.Fail {
			return usageError{fmt.Errorf("--on-transfer-failure is %q; it must be %s or %s", *policy, proxy.Recompute, proxy.Fail)}
		}
		log := newLogger(os.Stderr, *level).With("node", "proxy")
		p, err := berth.StartProxy(cmd.Context(), berth.ProxyConfig{
			Addr:       net.JoinHostPort(*host, strconv.Itoa(*port)),
			NotifyAddr: net.JoinHostPort(*notifyHost, strconv.Itoa(*notifyPort)),
			HTTPAddr:   *httpAddr, PeerAllow: *peerAllow,
			Nodes: proxy.Config{Prefillers: pre, Decoders: dec, Policy: proxy.Policy(*policy), MaxInFlight: *inFlight, ShowNodes: *showNodes, Timeouts: t},
		}, log)
		if err != nil {
			return err
		}
		log.Info("serving", "addrs", p.Addrs(), "version", berth.Version())
		if *announce {
			json.NewEncoder(cmd.OutOrStdout()).Encode(p.Addrs())
		}
		select {
		case <-cmd.Context().Done():
		case <-p.Done():
		}
		return shutDown(log, 0, func(context.Context) error { return nil }, p.Close)
	}
	return cmd
}
