package freeport

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
)

// A second process takes ports of its own, from the first's block on, and says
// which.
func TestMain(m *testing.M) {
	if at, err := strconv.Atoi(os.Getenv("FREEPORT_TAKE")); err == nil {
		if err := claim(at); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		ports, err := Take(3)
		fmt.Println(ports, err)
		bufio.NewReader(os.Stdin).ReadString('\n') // holds them until told
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func listen(t *testing.T, port int) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", port))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func TestTake(t *testing.T) {
	var kernel [2]int
	if b, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range"); err == nil {
		fmt.Sscan(string(b), &kernel[0], &kernel[1])
	}
	seen := map[int]bool{}
	for range 10 {
		ports, err := Take(20)
		if err != nil || len(ports) != 20 {
			t.Fatal(ports, err)
		}
		for _, p := range ports {
			if seen[p] {
				t.Errorf("%d is given twice", p)
			}
			if p >= 32768 && p >= kernel[0] {
				t.Errorf("%d is one that the kernel gives", p)
			}
			seen[p] = true
			listen(t, p)
		}
	}
	// Once around: what is bound is passed over.
	ports, err := Take(block - 250)
	if err != nil {
		t.Fatal(err)
	}
	more, err := Take(100)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range append(ports, more...) {
		if seen[p] {
			t.Errorf("%d is bound and given", p)
		}
	}
	if ports, err := Take(block); err == nil || !strings.Contains(err.Error(), fmt.Sprint(block, " ports asked for")) {
		t.Errorf("more than there are: %v, %v", ports, err)
	}
}

func TestOtherProcess(t *testing.T) {
	if _, err := Take(1); err != nil {
		t.Fatal(err)
	}
	bases := map[int]bool{own.base: true}
	for range 4 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), fmt.Sprint("FREEPORT_TAKE=", (own.base-first)/block), "GORACE=atexit_sleep_ms=0")
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { in.Close(); cmd.Wait() })
		line, err := bufio.NewReader(out).ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		var p int
		if _, err := fmt.Sscanf(line, "[%d", &p); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		base := p - (p-first)%block
		if bases[base] {
			t.Errorf("two processes have the block from %d on", base)
		}
		bases[base] = true
	}
}
