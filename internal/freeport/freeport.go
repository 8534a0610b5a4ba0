// Package freeport gives TCP ports of the loopback address to who must know a
// port before somebody binds it: the demo, the benchmarks and tests write them
// into settings of processes that start later, and bind again after a kill.
//
// A port that the kernel chose for a listener (port 0) is no such port: once that
// listener is closed, the kernel gives it to the next connection or listener that
// asks. These are below the range that Linux takes such ports from, and each
// process takes them from a block of its own, so two do not choose the same.
package freeport

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"syscall"
)

const (
	first  = 10_000 // below are the ports of well-known services
	block  = 500    // ports; a process rarely holds more at once
	blocks = 45     // the last ends below 32,768, where the kernel's range starts
)

// own is this process's block.
var own struct {
	sync.Mutex
	lock net.Listener // held until the process ends
	base int
	next int // offset in the block
}

// Take returns n ports that nobody is bound to. None is given again by this
// process until it has given the rest of its block, and by another not while this
// one lives.
func Take(n int) ([]int, error) {
	own.Lock()
	defer own.Unlock()
	if own.lock == nil {
		if err := claim(rand.IntN(blocks)); err != nil {
			return nil, err
		}
	}
	out := make([]int, 0, n)
	for range block {
		if len(out) == n {
			return out, nil
		}
		port := own.base + own.next
		own.next = (own.next + 1) % block
		if l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port))); err == nil {
			l.Close()
			out = append(out, port)
		}
	}
	return nil, fmt.Errorf("freeport: %d ports asked for and %d of the %d from %d on are free", n, len(out), block, own.base)
}

// claim takes the first block that is free from that one on. Its lock is a name in the abstract space of unix sockets:
// that is of one network namespace, as ports are, and the kernel frees it when the
// process ends, however it ends.
func claim(at int) error {
	for i := range blocks {
		b := (at + i) % blocks
		l, err := net.Listen("unix", "@berth-ports-"+strconv.Itoa(first+b*block))
		if errors.Is(err, syscall.EADDRINUSE) {
			continue
		}
		if err != nil {
			return fmt.Errorf("freeport: %w", err)
		}
		own.lock, own.base = l, first+b*block
		return nil
	}
	return fmt.Errorf("freeport: other processes hold all %d blocks of ports", blocks)
}
