package e2e

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/berthkv/berth"
	"github.com/berthkv/berth/client"
)

// r39, r59: what is in the way at start stops it, with the option's name, and
// nothing is left open.
func TestStart_fails_loudly(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	_, port, _ := net.SplitHostPort(taken.Addr().String())
	live := startAgent(t, receiving(t, 2))
	for _, c := range []struct {
		name string
		edit settings
		want string
	}{
		{"alloc port taken", settings{"pd_peer_alloc_port": port}, "pd_peer_alloc_port"},
		{"init port taken", settings{"pd_peer_init_port": port}, "pd_peer_init_port"},
		{"tcp port taken", settings{"tcp_port": port}, "tcp_port"},
		{"http port taken", settings{"http_addr": "127.0.0.1:" + port}, "http_addr"},
		{"socket of a live agent", settings{"local_socket": live.Addrs().Local}, "local_socket"},
		{"address of another host", settings{"pd_peer_host": "192.0.2.1", "peer_allow": "192.0.2.0/24"}, "bind_address"},
		{"unknown host", settings{"pd_peer_host": "no-such-host.invalid"}, "pd_peer_host"},
		{"buffer beyond the machine", settings{"pd_buffer_size": "60000000000000"}, "pd_buffer_size"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := receiving(t, 2).with(settings{"local_socket": filepath.Join(socketDir(t), "a.sock")}).with(c.edit)
			cfg, err := berth.LoadConfig(berth.Sources{Flags: s})
			if err == nil {
				var a *berth.Agent
				a, err = berth.StartAgent(t.Context(), cfg, slog.New(slog.NewTextHandler(io.Discard, nil)))
				if err == nil {
					a.Close()
				}
			}
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want one that names %s", err, c.want)
			}
		})
	}
	// A receiver on another address than loopback refuses to guess who may come.
	ip := hostAddress(t)
	s := receiving(t, 2).with(settings{"local_socket": filepath.Join(socketDir(t), "a.sock"), "pd_peer_host": ip})
	if _, err := berth.StartAgent(t.Context(), config(t, s), slog.New(slog.NewTextHandler(io.Discard, nil))); err == nil || !strings.Contains(err.Error(), "peer_allow") {
		t.Errorf("a receiver at %s without peer_allow: %v", ip, err)
	}
}

// r64, fault 20: every port is for peer_allow only, checked at accept; http_addr
// also for this host's operator.
func TestStart_ports_are_guarded(t *testing.T) {
	tcp := strconv.Itoa(freePort(t))
	a := startAgent(t, receiving(t, 2).with(settings{"peer_allow": "192.0.2.0/24", "tcp_port": tcp}))
	for name, addr := range map[string]string{"alloc": a.Addrs().Alloc, "init": a.Addrs().Init, "tcp": net.JoinHostPort("127.0.0.1", tcp)} {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(limit))
		if n, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("the %s port reads %d bytes, %v; want that it closes the connection", name, n, err)
		}
		c.Close()
	}
	if code, _ := getStatus(t, a.Addrs().HTTP, "/health"); code != 200 {
		t.Errorf("/health from this host: %d", code)
	}
}

// Huge pages that are asked for and not to be had are no error, and not silent.
func TestStart_huge_pages(t *testing.T) {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		t.Fatal(err)
	}
	had := !strings.Contains(string(b), "HugePages_Free:        0\n") && strings.Contains(string(b), "HugePages_Free:")
	a := startAgent(t, receiving(t, 2).with(settings{"huge_pages": "true"}))
	if warned := strings.Contains(a.logs.String(), "huge_pages: too few"); warned == had {
		t.Errorf("huge pages are there: %v; warned: %v", had, warned)
	}
}

// hostAddress is an address of this host that is not loopback, or a loopback
// one that the check cannot tell from others.
func hostAddress(t *testing.T) string {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok && !n.IP.IsLoopback() && n.IP.To4() != nil {
			return n.IP.String()
		}
	}
	return "0.0.0.0"
}

// r19, r56: an engine that does not fit its agent is refused at hello, with the
// fact and both values; two engines on one agent too.
func TestStart_engine_refused(t *testing.T) {
	a := startAgent(t, receiving(t, 4))
	held := a.engine(t)
	for _, c := range []struct {
		name string
		edit func(*client.Hello)
		want []string
	}{
		{"another engine", func(h *client.Hello) { h.EngineID = "second" }, []string{"busy", "second"}},
		{"slot bytes", func(h *client.Hello) { h.Layout.SlotBytes = 4096 }, []string{"layout_mismatch", "slot_bytes", "4096", "65536"}},
		{"dtype", func(h *client.Hello) { h.Layout.DType = "half" }, []string{"layout_mismatch", "dtype", "half", "uint8"}},
		{"tp size", func(h *client.Hello) { h.Layout.TPSize = 2 }, []string{"layout_mismatch", "tp_size", "2", "1"}},
		{"no engine id", func(h *client.Hello) { h.EngineID = "" }, []string{"bad_request", "engine_id"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := client.Hello{Part: client.Worker, EngineID: "second", Layout: layout, Shape: shape}
			if c.name != "another engine" {
				h.EngineID = "engine-of-this-test"
			}
			c.edit(&h)
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			got, err := client.Dial(ctx, a.Addrs().Local, h)
			if err == nil {
				got.Close()
				t.Fatal("accepted")
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%q is not in: %v", w, err)
				}
			}
		})
	}
	select {
	case <-held.Done():
		t.Error("the engine that was there has lost its connection")
	default:
	}
}

// A tool may look and steer, and nothing else.
func TestTool(t *testing.T) {
	a := startAgent(t, receiving(t, 4))
	tool, err := client.Dial(ctxFor(t), a.Addrs().Local, client.Hello{Part: client.Tool})
	if err != nil {
		t.Fatal(err)
	}
	defer tool.Close()
	text, err := tool.Status(ctxFor(t))
	if err != nil || !strings.Contains(text, `"capacity":4`) {
		t.Errorf("status %q, %v", text, err)
	}
	if _, err := tool.Claim(ctxFor(t), "me", "x"); !errors.Is(err, &client.Error{Code: "unsupported"}) {
		t.Errorf("a tool's claim: %v, want unsupported", err)
	}
	if code, body := getStatus(t, a.Addrs().HTTP, "/ready"); code != 503 || !strings.Contains(body, "no engine") {
		t.Errorf("/ready without an engine: %d %q", code, body)
	}
	a.engine(t)
	if code, body := getStatus(t, a.Addrs().HTTP, "/ready"); code != 200 {
		t.Errorf("/ready with an engine: %d %q", code, body)
	}
	if err := tool.Drain(ctxFor(t)); err != nil {
		t.Fatal(err)
	}
	if code, body := getStatus(t, a.Addrs().HTTP, "/ready"); code != 503 || !strings.Contains(body, "draining") {
		t.Errorf("/ready while draining: %d %q", code, body)
	}
	if code, _ := getStatus(t, a.Addrs().HTTP, "/health"); code != 200 {
		t.Errorf("/health: %d", code)
	}
}
