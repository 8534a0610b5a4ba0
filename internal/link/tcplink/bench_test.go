package tcplink

import (
	"io"
	"net"
	"sync"
	"testing"

	"github.com/berthkv/berth/internal/link/linktest"
)

func BenchmarkWrite(b *testing.B) { linktest.Bench(b, "tcp", harness, "raw", rawSockets) }

// rawSockets is the best plain loop over as many connections: one write a
// chunk, read in whole into where it belongs, and nothing else.
func rawSockets(b *testing.B, dst, src [][]byte) func(n int) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	var ins, outs []net.Conn
	for range harnessConnections {
		out, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			b.Fatal(err)
		}
		in, err := l.Accept()
		if err != nil {
			b.Fatal(err)
		}
		ins, outs = append(ins, in), append(outs, out)
		b.Cleanup(func() {
			out.Close()
			in.Close()
		})
	}
	return func(n int) {
		var wg sync.WaitGroup
		for c := range harnessConnections {
			wg.Go(func() {
				for i := c; i < n; i += harnessConnections {
					if _, err := outs[c].Write(src[i%len(src)]); err != nil {
						b.Error(err)
						return
					}
				}
			})
			wg.Go(func() {
				for i := c; i < n; i += harnessConnections {
					if _, err := io.ReadFull(ins[c], dst[i%len(dst)]); err != nil {
						b.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
	}
}
