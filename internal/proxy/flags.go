package proxy

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// Flags are the options of LMCache's example proxy that name the engines; lists
// are comma-separated.
type Flags struct {
	PrefillerHost    string // --prefiller-host
	PrefillerPort    string // --prefiller-port
	NumPrefillers    int    // --num-prefillers
	DecoderHost      string // --decoder-host
	DecoderPort      string // --decoder-port
	DecoderInitPort  string // --decoder-init-port
	DecoderAllocPort string // --decoder-alloc-port
	NumDecoders      int    // --num-decoders
}

// DefaultFlags are that proxy's defaults.
var DefaultFlags = Flags{
	PrefillerHost: "localhost", PrefillerPort: "8100", NumPrefillers: 1,
	DecoderHost: "localhost", DecoderPort: "8200", DecoderInitPort: "8300", DecoderAllocPort: "8400", NumDecoders: 1,
}

// ParseNodes expands the flags as that proxy does. One host, one port and a
// number: ports from that one up, and the init and alloc ports of decoder i are
// those given plus i. One host and several ports, several hosts and one port:
// each with the one. Else equally many of both. The init and alloc lists have one
// port for each rank of a decoder. All faults are reported at once, each with the
// options' names and both numbers.
func ParseNodes(f Flags) ([]Addr, []Decoder, error) {
	var p flagParser
	pre := p.pair("--prefiller-host", f.PrefillerHost, "--prefiller-port", f.PrefillerPort, "--num-prefillers", f.NumPrefillers)
	dec := p.pair("--decoder-host", f.DecoderHost, "--decoder-port", f.DecoderPort, "--num-decoders", f.NumDecoders)
	inits := p.ports("--decoder-init-port", f.DecoderInitPort)
	allocs := p.ports("--decoder-alloc-port", f.DecoderAllocPort)
	if len(inits) != len(allocs) {
		p.bad("--decoder-init-port names %d ports and --decoder-alloc-port %d; both need one for each rank", len(inits), len(allocs))
	}
	if len(p.faults) > 0 {
		return nil, nil, errors.Join(p.faults...)
	}
	// One host, one port and a number count the init and alloc ports up too.
	counted := f.NumDecoders > 1 && !strings.Contains(f.DecoderHost, ",") && !strings.Contains(f.DecoderPort, ",")
	decoders := make([]Decoder, len(dec))
	for i, a := range dec {
		offset := 0
		if counted {
			offset = i
		}
		d := Decoder{Addr: a}
		for r := range inits {
			d.Receivers = append(d.Receivers, Receiver{
				Host:      a.Host,
				InitPort:  p.port("--decoder-init-port", inits[r]+offset),
				AllocPort: p.port("--decoder-alloc-port", allocs[r]+offset),
			})
		}
		decoders[i] = d
	}
	p.distinct("--prefiller-port", pre)
	p.distinct("--decoder-port", dec)
	var initAddrs, allocAddrs []Addr
	for _, d := range decoders {
		for _, r := range d.Receivers {
			initAddrs = append(initAddrs, Addr{r.Host, r.InitPort})
			allocAddrs = append(allocAddrs, Addr{r.Host, r.AllocPort})
		}
	}
	p.distinct("--decoder-init-port", initAddrs)
	p.distinct("--decoder-alloc-port", allocAddrs)
	if len(p.faults) > 0 {
		return nil, nil, errors.Join(p.faults...)
	}
	return pre, decoders, nil
}

// flagParser gathers faults.
type flagParser struct{ faults []error }

func (p *flagParser) bad(format string, args ...any) {
	p.faults = append(p.faults, fmt.Errorf(format, args...))
}

// pair expands hosts, ports and a number to addresses.
func (p *flagParser) pair(hostFlag, hostList, portFlag, portList, countFlag string, count int) []Addr {
	before := len(p.faults)
	hosts, ports := p.hosts(hostFlag, hostList), p.ports(portFlag, portList)
	if count < 1 {
		p.bad("%s is %d; it must be at least 1", countFlag, count)
	}
	if len(p.faults) > before {
		return nil
	}
	n := max(len(hosts), len(ports))
	if n == 1 {
		if last := ports[0] + count - 1; last > maxPort {
			p.bad("%s is %d and %s is %d: port %d would be above %d", countFlag, count, portFlag, ports[0], last, maxPort)
			return nil
		}
		out := make([]Addr, count)
		for i := range out {
			out[i] = Addr{hosts[0], ports[0] + i}
		}
		return out
	}
	if len(hosts) != 1 && len(ports) != 1 && len(hosts) != len(ports) {
		p.bad("%s names %d hosts and %s %d ports; one of them must be one, or both equal", hostFlag, len(hosts), portFlag, len(ports))
		return nil
	}
	if count != 1 && count != n {
		p.bad("%s is %d, but %s and %s name %d", countFlag, count, hostFlag, portFlag, n)
		return nil
	}
	out := make([]Addr, n)
	for i := range out {
		out[i] = Addr{hosts[min(i, len(hosts)-1)], ports[min(i, len(ports)-1)]}
	}
	return out
}

// hosts reads a list of hosts; IPv6 addresses may stand in brackets.
func (p *flagParser) hosts(flag, list string) []string {
	var out []string
	for h := range strings.SplitSeq(list, ",") {
		h = strings.TrimSpace(h)
		if inner, ok := strings.CutPrefix(h, "["); ok {
			h = strings.TrimSuffix(inner, "]")
		}
		if h == "" || strings.ContainsAny(h, "[]/ ") {
			p.bad("%s: %q is no host", flag, h)
			continue
		}
		out = append(out, h)
	}
	return out
}

const maxPort = 65_535

func (p *flagParser) ports(flag, list string) []int {
	var out []int
	for s := range strings.SplitSeq(list, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(s))
		if err != nil {
			p.bad("%s: %q is no port", flag, s)
			continue
		}
		out = append(out, p.port(flag, n))
	}
	return out
}

func (p *flagParser) port(flag string, n int) int {
	if n < 1 || n > maxPort {
		p.bad("%s: port %d is outside 1 to %d", flag, n, maxPort)
	}
	return n
}

// distinct reports an address that two nodes would share.
func (p *flagParser) distinct(flag string, addrs []Addr) {
	seen := map[Addr]bool{}
	for _, a := range addrs {
		if seen[a] {
			p.bad("%s: %s is named twice; every node and rank needs its own", flag, a)
			return
		}
		seen[a] = true
	}
}
